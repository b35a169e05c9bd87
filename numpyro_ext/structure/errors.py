"""The refusal of the reading layer with its reasons, and conflicts of sites inside the search for a field."""

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


class Conflict(Exception):
    """A set of field sites that cannot stay together: the reason, and the sites of which one must leave the field.

    :param str site: the site at which it was found, as the message names it.
    """

    def __init__(self, message: str, sites: frozenset[str], site: str | None = None):
        super().__init__(message)
        self.sites = sites
        self.site = site


def names_of(sites: frozenset[str], own: str) -> str:
    """Names of the sites on which a site depends, itself included if it is carried through a scan."""
    others = sorted(sites - {own})
    carried = ["its own values at earlier steps of the scan"] if own in sites else []
    return " and ".join(([str(others)] if others else []) + carried)
