"""Samplers that need no algebra: sequential Monte Carlo, for any model with proper priors."""
