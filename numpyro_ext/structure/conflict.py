"""Conflict of a set of sites that cannot form the field, inside the search for one."""


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
