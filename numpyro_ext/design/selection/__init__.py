"""What is observed next: one candidate, several together, or designs on arrays."""
