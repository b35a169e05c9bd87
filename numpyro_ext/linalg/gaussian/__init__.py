"""A Gaussian prior conditioned on one Gaussian factor per row, in the cheapest space."""
