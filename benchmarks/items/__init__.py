"""Item responses: coverage, posteriors beside NUTS, and adaptive tests."""
