"""Exact integration over small independent blocks, on nodes of each or on nodes that all share."""
