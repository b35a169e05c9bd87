"""The personal part of a model of sequences: the Gaussian of a person at its mode, and as the loss of a training."""
