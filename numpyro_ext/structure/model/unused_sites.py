"""Latent sites that nothing depends on, such as those that ``obs_mask`` makes: they integrate to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from ..program.equations import Atom
from ..program.program import Program
from .running.inspection import SiteInfo
from .tracing import ModelTrace


def unused_sites(
    program: Program, trace: ModelTrace, given: Mapping[str, object], free: Sequence[SiteInfo]
) -> tuple[str, ...]:
    """Names of the sites among ``free`` that can be left out of a fit and drawn by the model afterwards.

    :param given: the atoms of each site.
    """
    out = []
    for site in free:
        if site.kind == "latent" and not is_used(program, trace, site.name, jax.tree.leaves(given[site.name])):
            out.append(site.name)
    return tuple(out)


def is_used(program: Program, trace: ModelTrace, name: str, atoms: Sequence[Atom]) -> bool:
    """True if anything but the prior of a site depends on its values."""
    priors = [p for n, p in trace.priors.items() if n != name]
    locations = [a for n, a in trace.locations.items() if n != name]
    others = [f for n, f in trace.factors.items() if n != name]
    return bool(program.ancestors(jax.tree.leaves((locations, priors, others))) & set(atoms))
