"""Answers of a finished run: marginals, draws, summaries, ArviZ."""
