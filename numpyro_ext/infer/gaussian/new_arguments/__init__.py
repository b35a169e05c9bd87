"""Predictions at new arguments, by the posterior of a fit."""
