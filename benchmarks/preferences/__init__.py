"""Preferences of people: held-out comparisons, models of many people, and which pair to ask next."""
