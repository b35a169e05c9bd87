"""Item responses: first and next fits, many people, and adaptive tests."""
