"""Expectations of factors whose predictor is a product of two Gaussian vectors."""
