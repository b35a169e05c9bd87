"""A traced function as values that can be asked what they depend on."""
