"""The spaces in which a Gaussian is conditioned, one module for each."""
