"""The engines for bilinear models, and their random starts."""
