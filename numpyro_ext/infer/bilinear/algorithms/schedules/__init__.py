"""Orders in which cells are visited: one after another, in sweeps, on several devices, in visits of minibatches."""
