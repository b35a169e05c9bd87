"""Choice of the next observation: one candidate, several together, or designs on arrays."""
