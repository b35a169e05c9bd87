"""Tilted moments of elementwise factors: the window of a density, nodes in it, and the site that matches them."""
