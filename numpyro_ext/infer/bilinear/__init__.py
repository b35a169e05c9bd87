"""The engine on :class:`~numpyro_ext.structure.Bilinear`."""
