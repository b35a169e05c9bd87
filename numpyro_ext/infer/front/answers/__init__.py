"""What a finished run answers: marginals, draws, summaries, ArviZ."""
