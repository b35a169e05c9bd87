"""Predictors of the next event: counts, recurrent networks, and people of few events."""
