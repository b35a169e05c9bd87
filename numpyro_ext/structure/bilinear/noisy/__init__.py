"""Ordered cells with latent noise variances and cut points: the form and how it is read."""
