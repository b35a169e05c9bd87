"""Engines side by side on one model: what each found in which time, and which of them to start with."""
