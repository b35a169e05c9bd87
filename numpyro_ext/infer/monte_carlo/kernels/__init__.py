"""Steps of sequential Monte Carlo: how far the next goes, weights, and the kernels that move particles."""
