"""The one exception of the reading layer, and the reasons it knows."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """Reason of a refusal. Code asks for the reason; the words of a message are for readers."""

    STRUCTURE = "structure"
    """Sites are used in a way that the form does not have."""
    NO_FIELD = "no field"
    """No latent site, or none of those asked for, is of a family that the form takes."""
    DATA = "data"
    """The observations are missing, of another shape, or outside the support of their site."""
    EXECUTION = "execution"
    """The model itself does not run on its arguments."""
    MISREAD = "misread"
    """The form has another density than NumPyro computes."""


class ModelStructureError(ValueError):
    """A model cannot be read into the form that an engine needs.

    The message names the site, says what was found there and what to do instead.

    :param str message: for the reader.
    :param Reason reason: for code that goes on with another form.
    :param str site: the site that is to blame, if it is one.
    """

    def __init__(self, message: str, *, reason: Reason = Reason.STRUCTURE, site: str | None = None):
        super().__init__(message)
        self.reason = reason
        self.site = site
