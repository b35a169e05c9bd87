"""Predictive distributions of outcomes that are still to be seen, from any source."""
