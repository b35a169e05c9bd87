"""Item responses: first and next fits, many people, adaptive tests, and numbers of traits."""
