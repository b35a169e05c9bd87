"""Factors of two predictors, such as location and log scale: where to cut, and which predictors belong together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..conflict import Conflict
from ..program.degrees import Degree, Degrees, affine_cuts
from ..program.dependence import dependence
from ..program.equations import Atom
from ..program.patterns import Pattern, as_array, deduplicate
from ..program.program import Program

__all__ = ["Pairs", "Ranges", "find_pairs", "patterns_from"]

Ranges = Sequence[tuple[int, int, int]]
"""Values cut at, and the first and the last but one of the numbers of their elements."""

Pairs = tuple[list[int], list[np.ndarray]]


def patterns_from(
    program: Program, cut: Sequence[int], atoms: Sequence[Atom]
) -> tuple[Ranges, list[tuple[Atom, Pattern]]]:
    """The elements of the values ``cut``, numbered through, and which of them the elements of ``atoms`` depend on."""
    starts = np.concatenate([[0], np.cumsum([np.prod(program.shape(c)) for c in cut])]).astype(int)
    ranges = list(zip(cut, starts[:-1], starts[1:], strict=True))
    seeds: dict[int, Pattern] = {c: np.arange(lo, hi).reshape(*program.shape(c), 1) for c, lo, hi in ranges}
    patterns = dependence(program, seeds, {}, atoms)
    return ranges, [(atom, patterns[atom]) for atom in atoms]  # type: ignore[index]


def find_pairs(program: Program, degrees: Degrees, name: str, atoms: Sequence[Atom]) -> Pairs | None:
    """Affine values to cut at, and the numbers of the two elements of them that each element of ``atoms`` sees.

    The values that mix unknowns are tried first, where observations that share both predictors are one factor. Where
    they share one of the two, values are needed that have an element for each observation.

    :return: the values, and for each of ``atoms`` an array ``(size, 2)``, ``-1`` where an element sees nothing; or
        ``None`` if elements are no functions of two predictors, or of the product of two, which has a form of its own.
    :raises Conflict: if there are no such values; or one predictor is the same for all observations: it is a
        hyperparameter, of which all of them together know much.
    """
    cuts = affine_cuts(program, degrees, atoms)
    roots = sorted({degrees.source[c].root for c in cuts})
    maps = _pairs(program, roots, atoms)
    if maps is None or _multiplies(program, degrees, atoms):
        return None
    pairs = np.concatenate(maps)
    pairs = np.unique(pairs[pairs[:, 0] >= 0], axis=0)
    sites = frozenset().union(*(degrees.sites_of(c) for c in cuts))
    through = (
        f"site '{name}': its log density depends on 2 predictors, through {' and '.join(map(repr, sorted(sites)))}"
    )
    if any(np.unique(side).size == 1 for side in pairs.T):
        raise Conflict(
            f"{through}, and one of them is the same for all observations: choose one of these sites as the field "
            "(field=[...]), and the other is learned as a hyperparameter; or use NUTS.",
            sites,
            name,
        )
    if np.unique(pairs).size == pairs.size:
        return roots, maps
    affine = [n for n in program.ancestors(list(cuts)) if degrees.of(n) == Degree.AFFINE]
    free = {n for n in degrees.degree if n in program.inputs}
    sides = [sorted((n for n in affine if degrees.source[n].root == root), reverse=True) for root in roots]
    for cut in ([a, b] for a in sides[0] for b in sides[1]) if len(sides) == 2 else ():
        if not program.ancestors(atoms, cut) & free - set(cut):
            late = _pairs(program, cut, atoms)
            if late is not None and len(late) == 1 and np.all(late[0] >= 0) and np.unique(late[0]).size == late[0].size:
                return cut, late
    raise Conflict(
        f"{through}, of which observations share one but not the other. Give each observation predictors of its own "
        "before any function of them (jnp.exp(log_scale[group]) instead of jnp.exp(log_scale)[group]), keep one of "
        "these sites in the field (field=[...]), or use NUTS.",
        sites,
        name,
    )


def _pairs(program: Program, cut: Sequence[int], atoms: Sequence[Atom]) -> list[np.ndarray] | None:
    """The two elements that each element sees, or ``None`` if some see another number of them than two or none."""
    found = []
    for _, pattern in patterns_from(program, cut, atoms)[1]:
        if not isinstance(pattern, np.ndarray) or not pattern.shape[-1]:
            return None
        pairs = deduplicate(as_array(pattern)).reshape(-1, pattern.shape[-1])
        if pairs.shape[-1] != 2 or np.any((pairs[:, 0] >= 0) != (pairs[:, 1] >= 0)):
            return None
        found.append(np.sort(pairs, axis=-1))
    return found


def _multiplies(program: Program, degrees: Degrees, atoms: Sequence[Atom]) -> bool:
    """True if predictors are multiplied by one another: these models have a form of their own."""
    return any(
        program.equations[index].primitive.name in ("mul", "dot_general")
        and sum(degrees.of(a) == Degree.AFFINE for a in program.equations[index].inputs) > 1
        and len(set(program.equations[index].inputs)) > 1
        for index in program.needed(atoms, ())
    )
