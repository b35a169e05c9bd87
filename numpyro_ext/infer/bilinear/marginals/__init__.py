"""Marginals and predictions at the end of a bilinear fit."""
