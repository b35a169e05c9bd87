"""How a model is run to be read: its call, its values, and its sites as plain ones."""
