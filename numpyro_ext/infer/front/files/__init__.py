"""Runs and checkpoints in files."""
