"""Models over hyperparameters alone, from which a Gaussian field has been integrated."""
