"""The one exception of the reading layer."""

__all__ = ["ModelStructureError"]


class ModelStructureError(ValueError):
    """A model cannot be read into the form that an engine needs.

    The message names the site, says what was found there and what to do instead.
    """
