"""Which potential stands behind a cut: by family of the distribution and by the function from predictor to parameter.

The function is not matched by its text but by its values: whatever composition of operations leads from the predictor
to, say, a Poisson rate, it is the exponential link if the rate behaves as one on a grid of predictors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.recent import Recent
from ...potentials.vector_rows import row_directions
from ..families import IDENTITY, Built, Family, Link, Observations
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees, affine_cuts
from ..program.dependence import dependence
from ..program.program import Atom, Program, apply_to_known

__all__ = ["Recognised", "recognise"]

Env = Mapping[int, Any]
_GRID = np.array([0.0, 1.0, -1.0, -2.5, 0.4, 3.1])
_COMPILED = Recent(64)


class Recognised(NamedTuple):
    """A named potential, and where its predictor is."""

    predictor: int
    rows: np.ndarray
    """Flat indices of the elements that are predictors; pairs of them where rows are differences."""
    build: Callable[[Env, Array], Built]
    """Makes the factors from hyperparameters, data and the observed mask."""
    label: str


class _Match(NamedTuple):
    """The parameter is ``scale * link(sign * predictor)``, and the scale what it is at one point over a known value."""

    link: Link
    sign: float = 1.0
    point: float = 0.0
    value: float = 1.0


def recognise(program: Program, degrees: Degrees, traced: FactorTrace, probe: Env) -> Recognised | None:
    """The named potential of a site, or None if it has to be treated by quadrature."""
    family = traced.family
    if family is None or degrees.of(traced.value) != Degree.CONSTANT:
        return None
    if [n for n, atom in traced.parameters.items() if degrees.of(atom) != Degree.CONSTANT] != [family.predictor]:
        return None
    leaf = traced.parameters[family.predictor]
    if degrees.of(leaf) != Degree.AFFINE:
        return _behind_a_link(program, degrees, family, traced, leaf, probe)
    if IDENTITY not in family.links:
        return None
    build = _builder(program, family, traced, leaf, leaf, _Match(IDENTITY))
    return Recognised(leaf, _rows(family, program.shape(leaf)), build, family.label)


def _rows(family: Family, shape: tuple[int, ...]) -> np.ndarray:
    index = np.arange(int(np.prod(shape)))
    if not family.is_joint:
        return index
    plus, minus = row_directions(shape[-1]).T
    groups = index.reshape(-1, shape[-1])
    return np.stack([groups[:, plus], np.where(minus < 0, -1, groups[:, minus])], axis=-1).reshape(-1, 2)


def _behind_a_link(
    program: Program,
    degrees: Degrees,
    family: Family,
    traced: FactorTrace,
    leaf: Atom,
    probe: Env,
) -> Recognised | None:
    candidates = _single_passages(program, degrees, leaf)
    for predictor in candidates:
        # one after the other: for large data each is large, and the first is mostly the right one
        match = _match_link(_responses(program, traced, predictor, leaf, probe), family.links)
        if match is None:
            continue
        shape = program.shape(predictor)
        seeds = {predictor: np.arange(int(np.prod(shape)), dtype=np.int64).reshape(*shape, 1)}
        pattern = dependence(program, seeds, {}, [leaf])[leaf]  # type: ignore[index]
        if isinstance(pattern, np.ndarray) and pattern.shape[-1] == 1 and np.all(pattern >= 0):
            build = _builder(program, family, traced, predictor, leaf, match)
            return Recognised(predictor, pattern.reshape(-1), build, f"{family.label}, {match.link.name} link")
    return None


def _single_passages(program: Program, degrees: Degrees, leaf: Atom) -> list[int]:
    """Affine values, last first, through which everything passes that ``leaf`` knows of the field."""
    free = {n for n in degrees.degree if n in program.inputs}
    cuts = affine_cuts(program, degrees, [leaf])
    affine = [n for n in program.ancestors(list(cuts)) if degrees.of(n) == Degree.AFFINE]
    return [n for n in sorted(affine, reverse=True) if not program.ancestors([leaf], [n]) & free - {n}]


def _responses(program: Program, traced: FactorTrace, predictor: int, leaf: Atom, probe: Env) -> np.ndarray:
    """The parameter on a grid of values of the predictor, shape ``(grid, elements in use)``."""
    dtype = jnp.result_type(float)
    bare = copy.copy(program)
    bare.release()

    def respond(point: Array, env: Env) -> Any:
        return bare.evaluate([leaf], {**env, predictor: jnp.full(bare.shape(predictor), point, dtype)})[0]

    key = (program.fingerprint(), predictor, leaf, str(dtype))
    on_grid = _COMPILED.get(
        key, lambda: quick_jit(jax.vmap(respond, in_axes=(0, None)), is_small=holds_little(program.data))
    )
    found = on_grid(np.asarray(_GRID, dtype), dict(probe))
    values = np.asarray(found, float)
    mask = np.broadcast_to(np.asarray(program.evaluate([traced.mask], probe, apply_to_known)[0]), values.shape[1:])
    used = values[:, mask] if mask.any() and not mask.all() else values.reshape(len(_GRID), -1)
    is_finite = np.isfinite(used).all(axis=0)
    return used if is_finite.all() else used[:, is_finite]


def _match_link(values: np.ndarray, links: Iterable[Link]) -> _Match | None:
    if not values.size:
        return None
    tolerance = 1e-9 if jnp.result_type(float) == np.float64 else 2e-5
    for link in links:
        for sign in (1.0, -1.0):
            function = link.function(sign * _GRID)
            at = int(np.argmax(function != 0.0))
            scale = values[at] / function[at] if link.has_scale else np.ones(values.shape[1])
            if all(
                np.all(np.abs(row - f * scale) <= tolerance * (abs(f) + 1e-3) * np.abs(scale))
                for row, f in zip(values, function, strict=True)
            ):
                return _Match(link, sign, float(_GRID[at]), float(function[at]))
    return None


def _builder(
    program: Program, family: Family, traced: FactorTrace, predictor: int, leaf: Atom, match: _Match
) -> Callable[[Env, Array], Built]:
    dtype = jnp.result_type(float)

    def build(env: Env, mask: Array) -> Built:
        atoms = [traced.value, *(traced.parameters[n] for n in family.parameters)]
        value, *others = program.evaluate(atoms, env)
        # a vector parameter keeps its last axis
        others = [jnp.reshape(v, (-1, *jnp.shape(v)[jnp.ndim(value) :])) for v in others]
        value = jnp.reshape(value, -1).astype(dtype)
        # what is missing may be coded as anything: give masked rows a harmless value unless theirs is usable
        harmless = family.support.feasible_like(value)
        value = jnp.where(mask | (jnp.isfinite(value) & family.support(value)), value, harmless)
        scale = jnp.ones(())
        if match.link.has_scale:
            at = jnp.full(program.shape(predictor), match.point, dtype)
            scale = jnp.reshape(program.evaluate([leaf], {**env, predictor: at})[0], -1) / match.value
        dimension = program.shape(leaf)[-1] if family.predictor in family.vectors else 1
        parameters = dict(zip(family.parameters, others, strict=True))
        built = family.build(match.link, Observations(value, parameters, scale, dimension))
        return built._replace(sign=match.sign * built.sign)

    return build
