"""Engines on :class:`~numpyro_ext.structure.SparseLinear`."""
