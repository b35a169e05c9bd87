"""Why a set of sites cannot form the field, inside the search for one."""

__all__ = ["Conflict"]


class Conflict(Exception):
    """A set of field sites that cannot stay together: the reason, and the sites of which one must leave the field.

    :param str site: the site at which it was found, as the message names it.
    """

    def __init__(self, message: str, sites: frozenset[str], site: str | None = None):
        super().__init__(message)
        self.sites = sites
        self.site = site
