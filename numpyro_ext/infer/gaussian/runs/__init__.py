"""Runs: what a fit answers, by the way in which hyperparameters were treated."""
