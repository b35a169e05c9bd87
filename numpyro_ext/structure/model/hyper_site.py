"""Facts about a site that is not in the field."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ..program.captured import array_key


class HyperSite(NamedTuple):
    """A latent or ``param`` site outside the field, to be maximised over or given."""

    shape: tuple[int, ...]
    transform: Any
    """NumPyro transform from unconstrained values."""
    is_param: bool
    """True for ``numpyro.param``: no prior."""
    init: Any
    """Starting value, constrained."""
    bounded_by: tuple[str, ...] = ()
    """Latent and ``param`` sites on which its support depends, where the transform is that at their starting values."""
    bounded_alone: tuple[str, ...] = ()
    """Sites that move the bound where all others stay where they start."""
    family: str = ""
    """Name of its distribution."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for sites that are constrained in the same way, to the last digit of their bounds."""
        leaves, structure = jax.tree.flatten(self.transform)
        bounds = tuple(map(array_key, leaves))
        return self.shape, type(self.transform).__name__, str(structure), bounds, self.is_param
