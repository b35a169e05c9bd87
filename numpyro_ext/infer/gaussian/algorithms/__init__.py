"""The algorithms on a latent Gaussian form, and what they are made of; pure functions of arrays."""
