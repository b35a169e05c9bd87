"""The Gaussian with the largest lower bound of the log evidence."""
