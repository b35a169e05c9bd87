"""Log evidences, intervals and draws, held against exact ones."""
