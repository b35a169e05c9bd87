"""Item responses: coverage, posteriors beside NUTS, adaptive tests, and numbers of traits."""
