"""Expectation propagation: sweeps over the factors, their cavities and moments, and the evidence of their sites."""
