"""What a NumPyro model shows when it is traced, and the search for its field."""
