"""What a Gaussian posterior answers besides its marginals."""
