"""Traces of a NumPyro model, and the search for its field."""
