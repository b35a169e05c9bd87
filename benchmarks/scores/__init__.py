"""The scoreboard: engines beside reference draws, the truth of simulated data, and NUTS."""
