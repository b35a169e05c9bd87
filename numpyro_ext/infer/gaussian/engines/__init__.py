"""Engines on Gaussian fields, but for the variational ones."""
