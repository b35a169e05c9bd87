"""Queries for the next observation: labels, hyperparameters, and axes of an apparatus."""
