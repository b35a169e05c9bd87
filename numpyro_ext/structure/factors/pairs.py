"""Factors of two predictors, such as location and log scale: where to cut, and which predictors belong together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import Conflict
from ..program.degrees import Degree, Degrees, affine_cuts
from ..program.dependence import dependence
from ..program.equations import Atom
from ..program.patterns import Pattern, as_array, deduplicate
from ..program.program import Program
from ..program.questions import Questions

Ranges = Sequence[tuple[int, int, int]]
"""Values cut at, and the first and the last but one of the numbers of their elements."""

Pairs = tuple[list[int], list[np.ndarray]]


def patterns_from(
    questions: Questions, cut: Sequence[int], atoms: Sequence[Atom]
) -> tuple[Ranges, list[tuple[Atom, Pattern]]]:
    """The elements of the values ``cut``, numbered through, and which of them the elements of ``atoms`` depend on."""
    program = questions.program
    starts = np.concatenate([[0], np.cumsum([np.prod(program.shape(c)) for c in cut])]).astype(int)
    ranges = list(zip(cut, starts[:-1], starts[1:], strict=True))
    seeds: dict[int, Pattern] = {c: np.arange(lo, hi).reshape(*program.shape(c), 1) for c, lo, hi in ranges}
    patterns = dependence(questions, seeds, atoms)
    return ranges, [(atom, patterns[atom]) for atom in atoms]  # type: ignore[index]


def find_pairs(questions: Questions, degrees: Degrees, name: str, atoms: Sequence[Atom]) -> Pairs | None:
    """Affine values to cut at, and the numbers of the two elements of them that each element of ``atoms`` sees.

    The values that mix unknowns are tried first, where observations that share both predictors are one factor. Where
    they share one of the two, values are needed that have an element for each observation.

    :return: the values, and for each of ``atoms`` an array ``(size, 2)``, ``-1`` where an element sees nothing; or
        ``None`` if elements are no functions of two predictors, or of the product of two, which has a form of its own.
    :raises Conflict: if there are no such values; or one predictor is the same for all observations: it is a
        hyperparameter, of which all of them together know much.
    """
    program = questions.program
    cuts = affine_cuts(program, degrees, atoms)
    roots = sorted({degrees.source[c].root for c in cuts})
    maps = _pairs(questions, roots, atoms)
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
            late = _pairs(questions, cut, atoms)
            own = None if late is None else np.unique(np.concatenate(late), axis=0)
            if late is not None and own is not None and np.all(own >= 0) and np.unique(own).size == own.size:
                return cut, late
    raise Conflict(
        f"{through}, of which observations share one but not the other. Give each observation predictors of its own "
        "before any function of them (jnp.exp(log_scale[group]) instead of jnp.exp(log_scale)[group]), keep one of "
        "these sites in the field (field=[...]), or use NUTS.",
        sites,
        name,
    )


def _pairs(questions: Questions, cut: Sequence[int], atoms: Sequence[Atom]) -> list[np.ndarray] | None:
    """The two elements that each element sees, or ``None`` if some see more, or one that is in no pair.

    An element that sees one of a pair, as the Jacobian of a scale in a sum of its own, is a part of that pair's factor.
    """
    found = []
    for _, pattern in patterns_from(questions, cut, atoms)[1]:
        if not isinstance(pattern, np.ndarray) or not pattern.shape[-1]:
            return None
        seen = deduplicate(as_array(pattern))
        if seen.shape[-1] > 2:
            return None
        seen = seen.reshape(-1, seen.shape[-1])
        found.append(np.sort(np.pad(seen, ((0, 0), (2 - seen.shape[-1], 0)), constant_values=-1), axis=-1))
    whole = np.concatenate(found)
    whole = whole[whole[:, 0] >= 0]
    pair_of = np.full((int(max(each.max(initial=0) for each in found)) + 1, 2), -1)
    for side in whole.T:
        pair_of[side] = whole
    for each in found:
        is_single = (each[:, 0] < 0) & (each[:, 1] >= 0)
        each[is_single] = pair_of[each[is_single, 1]]
        if np.any(each[is_single] < 0):
            return None
    return found


def _multiplies(program: Program, degrees: Degrees, atoms: Sequence[Atom]) -> bool:
    """True if predictors are multiplied by one another: these models have a form of their own."""
    return any(
        program.equations[index].primitive.name in ("mul", "dot_general")
        and sum(degrees.of(a) == Degree.AFFINE for a in program.equations[index].inputs) > 1
        and len(set(program.equations[index].inputs)) > 1
        for index in program.needed(atoms, ())
    )
