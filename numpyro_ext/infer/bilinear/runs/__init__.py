"""Runs: what a fit of a bilinear model answers."""
