"""What to observe next: labels, hyperparameters, and axes of an apparatus."""
