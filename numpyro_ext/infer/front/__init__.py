"""Parts that all engines have in common for their user; they know no form and no algorithm."""
