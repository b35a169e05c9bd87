"""One-dimensional integrals, whatever the factor."""
