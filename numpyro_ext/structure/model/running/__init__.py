"""Runs of a model for its reading: its call, its values, and its sites as plain ones."""
