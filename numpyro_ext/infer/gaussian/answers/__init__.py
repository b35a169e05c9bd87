"""Answers of a Gaussian posterior besides its marginals."""
