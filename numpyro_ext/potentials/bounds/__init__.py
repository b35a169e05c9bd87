"""What stands in for a Gaussian expectation: bounds in closed form."""
