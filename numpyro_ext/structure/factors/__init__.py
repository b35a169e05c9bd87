"""Which potential stands behind an observed site."""
