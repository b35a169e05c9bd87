"""Search for the potential behind an observed site."""
