"""Preferences of many people with shared tastes, on arrays of pairs."""
