"""Search for the potential behind a cut: by family of the distribution and by the function from predictor to parameter.

The function is not matched by its text but by its values: whatever composition of operations leads from the predictor
to, say, a Poisson rate, it is the exponential link if the rate behaves as one on a grid of predictors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...compilation.content import ByContent
from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.store import shared
from ...potentials.vector_rows import row_directions
from ..families import IDENTITY, Built, Family, Link, Observations
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees, affine_cuts
from ..program.dependence import dependence
from ..program.equations import Atom, apply_to_known
from ..program.patterns import Pattern
from ..program.program import Program
from ..program.questions import Questions

Env = Mapping[int, Any]
_GRID = np.array([0.0, 1.0, -1.0, -2.5, 0.4, 3.1])


@dataclass(frozen=True, eq=False)
class Recognised(ByContent):
    """A named potential, and where its predictor is."""

    predictor: int
    rows: np.ndarray
    """Flat indices of the elements that are predictors; pairs of them where rows are differences."""
    build: Callable[[Env, Array], Built]
    """Makes the factors from hyperparameters, data and the observed mask; compared by all that it is made of."""
    label: str
    holds: Callable[[Program, Env], bool] | None = field(default=None, compare=False)
    """True if the same is recognised at other values of data; ``None`` where these have no say."""


class _Match(NamedTuple):
    """The parameter is ``scale * link(sign * predictor)``, and the scale what it is at one point over a known value."""

    link: Link
    sign: float = 1.0
    point: float = 0.0
    value: float = 1.0


def recognise(questions: Questions, degrees: Degrees, traced: FactorTrace, probe: Env) -> Recognised | None:
    """The named potential of a site, or None if it has to be treated by quadrature."""
    family, program = traced.family, questions.program
    if family is None:
        return None
    if degrees.of(traced.value) == Degree.AFFINE:
        return _residual(program, degrees, family, traced, probe)
    if degrees.of(traced.value) != Degree.CONSTANT:
        return None
    if [n for n, atom in traced.parameters.items() if degrees.of(atom) != Degree.CONSTANT] != [family.predictor]:
        return None
    leaf = traced.parameters[family.predictor]
    if degrees.of(leaf) != Degree.AFFINE:
        return _behind_a_link(questions, degrees, family, traced, leaf, probe)
    if IDENTITY not in family.links:
        return None
    match = _Match(IDENTITY)
    build = _Builder(program, family, traced, leaf, leaf, match)
    shape = program.shape(leaf)
    rows = _rows(family, np.arange(int(np.prod(shape))).reshape(shape))
    return Recognised(leaf, rows, build, family.label)


def _residual(program: Program, degrees: Degrees, family: Family, traced: FactorTrace, probe: Env) -> Recognised | None:
    """A location family whose values are of the field, as those that are imputed: zeros are seen of the difference."""
    shape = program.shape(traced.log_prob)
    others = {n: degrees.of(atom) for n, atom in traced.parameters.items() if n != family.predictor}
    if family.is_joint or IDENTITY not in family.links or set(others.values()) - {Degree.CONSTANT}:
        return None
    for predictor in _single_passages(program, degrees, traced.log_prob):
        if program.shape(predictor) != shape:
            continue
        values, is_used = _responses(program, traced, predictor, traced.log_prob, probe, _GRID)
        for sign in (1.0, -1.0):
            match = _Match(IDENTITY, sign)
            build = _Builder(program, family, traced, predictor, traced.log_prob, match, is_residual=True)
            built = build(probe, jnp.ones(is_used.size, bool))
            grid = jnp.asarray(built.sign * _GRID[:, None] + built.shift) * jnp.ones(is_used.size)
            expected = np.asarray(jax.vmap(built.potential.log_density)(grid))[:, is_used.reshape(-1)]
            if np.allclose(values, expected, rtol=_tolerance(), atol=_tolerance()):
                rows, label = np.arange(is_used.size), f"{family.label}, imputed"
                return Recognised(predictor, rows, build, label, lambda *other: False)
    return None


def _rows(family: Family, index: np.ndarray) -> np.ndarray:
    """Rows of the predictors with these flat indices, which have the axes of the parameter that carries them."""
    if not family.is_joint:
        return index.reshape(-1)
    plus, minus = row_directions(index.shape[-1]).T
    groups = index.reshape(-1, index.shape[-1])
    return np.stack([groups[:, plus], np.where(minus < 0, -1, groups[:, minus])], axis=-1).reshape(-1, 2)


def _behind_a_link(
    questions: Questions,
    degrees: Degrees,
    family: Family,
    traced: FactorTrace,
    leaf: Atom,
    probe: Env,
) -> Recognised | None:
    program = questions.program
    for predictor in _single_passages(program, degrees, leaf):
        # one after the other: for large data each is large, and the first is mostly the right one
        index = _indices(questions, predictor, leaf, program.shape(leaf)[-1]) if family.is_joint else None
        if family.is_joint and index is None:
            continue
        matched = partial(_matched, family=family, traced=traced, predictor=predictor, leaf=leaf, index=index)
        match = matched(program, probe)
        index = index if match is None or index is not None else _indices(questions, predictor, leaf, None)
        if match is not None and index is not None:
            build = _Builder(program, family, traced, predictor, leaf, match)
            label, rows = f"{family.label}, {match.link.name} link", _rows(family, index)
            holds = partial(_is_matched, matched, match)
            return Recognised(predictor, rows, build, label, holds)
    return None


def _matched(
    program: Program,
    probe: Env,
    *,
    family: Family,
    traced: FactorTrace,
    predictor: int,
    leaf: Atom,
    index: np.ndarray | None,
) -> _Match | None:
    """The link from a predictor to the parameter; for vectors of predictors with their indices."""
    if index is not None:
        return _match_joint(program, family, traced, predictor, leaf, probe, index)
    return _match_link(_responses(program, traced, predictor, leaf, probe, _GRID)[0], family.links)


def _is_matched(matched: Callable[[Program, Env], _Match | None], match: _Match, program: Program, probe: Env) -> bool:
    return matched(program, probe) == match


def _indices(questions: Questions, predictor: int, leaf: Atom, dimension: int | None) -> np.ndarray | None:
    """Flat indices of the predictors of each element of the parameter, or of each of its vectors of this length.

    ``None`` where their number is another one.
    """
    shape = questions.program.shape(predictor)
    seeds: dict[int, Pattern] = {predictor: np.arange(int(np.prod(shape)), dtype=np.int64).reshape(*shape, 1)}
    pattern = dependence(questions, seeds, [leaf])[leaf]  # type: ignore[index]
    if not isinstance(pattern, np.ndarray) or pattern.shape[-1] != (dimension or 1) or np.any(pattern < 0):
        return None
    if dimension is None:
        return pattern[..., 0]
    # Categories stand in the order of the predictors, or the values of the parameter are not those of the link.
    vectors = np.sort(pattern, axis=-1)
    return vectors[..., 0, :] if np.all(vectors == vectors[..., :1, :]) else None


def _single_passages(program: Program, degrees: Degrees, leaf: Atom) -> list[int]:
    """Affine values, last first, through which everything passes that ``leaf`` knows of the field."""
    free = {n for n in degrees.degree if n in program.inputs}
    cuts = affine_cuts(program, degrees, [leaf])
    affine = [n for n in program.ancestors(list(cuts)) if degrees.of(n) == Degree.AFFINE]
    return [n for n in sorted(affine, reverse=True) if not program.ancestors([leaf], [n]) & free - {n}]


def _on_grid(program: Program, predictor: int, leaf: Atom, is_small: bool) -> Callable[..., Array]:
    """The function of values of the predictor, and of all that is known, to the parameter."""

    def respond(point: ArrayLike, env: Env) -> Any:
        value = jnp.broadcast_to(point, program.shape(predictor))
        return program.evaluate([leaf], {**env, predictor: value})[0]

    return quick_jit(jax.vmap(respond, in_axes=(0, None)), is_small=is_small)


def _responses(
    program: Program, traced: FactorTrace, predictor: int, leaf: Atom, probe: Env, grid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The parameter at values of the predictor, shape ``(grid, elements in use)``, and which elements these are."""
    dtype = jnp.result_type(float)
    on_grid = shared(_on_grid, program, predictor, leaf, holds_little(dict(probe)))
    values = np.asarray(on_grid(np.asarray(grid, dtype), dict(probe)), float)
    mask = np.ones((), bool)
    if not program.ancestors([traced.mask]) & program.changing:
        mask = np.asarray(program.evaluate([traced.mask], probe, apply_to_known)[0])
    mask = np.broadcast_to(mask.reshape(mask.shape + (1,) * (values.ndim - 1 - mask.ndim)), values.shape[1:])
    is_used = np.isfinite(values).all(axis=0) & (mask if mask.any() else True)
    return values[:, is_used], is_used


def _match_link(values: np.ndarray, links: Iterable[Link]) -> _Match | None:
    if not values.size:
        return None
    tolerance = _tolerance()
    for link in links:
        if link.is_joint:
            continue
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


def _match_joint(
    program: Program, family: Family, traced: FactorTrace, predictor: int, leaf: Atom, probe: Env, index: np.ndarray
) -> _Match | None:
    """Match a link, as :func:`_match_link` does, for functions of the vectors of predictors with these indices."""
    shape = program.shape(predictor)
    grid = 3.0 * np.cos(np.outer(np.arange(1, 5), 1.0 + np.arange(int(np.prod(shape))) ** 2))
    values, is_used = _responses(program, traced, predictor, leaf, probe, grid.reshape(-1, *shape))
    for link in family.links if values.size else ():
        if link.is_joint and np.all(np.abs(values - link.function(grid[:, index])[:, is_used]) <= _tolerance()):
            return _Match(link)
    return None


def _tolerance() -> float:
    return 1e-9 if jnp.result_type(float) == np.float64 else 2e-5


@dataclass(frozen=True, eq=False)
class _Builder(ByContent):
    """Makes the factors of a site from hyperparameters, data and the observed mask.

    What was decided by values, such as the sign of the predictor, is in the match: numbers of a model are data, so it
    may differ between readings of one program.
    """

    program: Program
    family: Family
    traced: FactorTrace
    predictor: int
    leaf: Atom
    match: _Match
    is_residual: bool = False

    def __call__(self, env: Env, mask: Array) -> Built:
        family, match, program, traced = self.family, self.match, self.program, self.traced
        dtype = jnp.result_type(float)
        shape = program.shape(traced.log_prob)
        others = program.evaluate([traced.parameters[n] for n in family.parameters], env)
        value = jnp.zeros(shape) if self.is_residual else program.evaluate([traced.value], env)[0]
        # a vector parameter keeps its last axis
        others = [jnp.reshape(v, (-1, *jnp.shape(v)[len(shape) :])) for v in others]
        # as does a value that is a vector
        value = jnp.reshape(value, (-1, *jnp.shape(value)[len(shape) :])).astype(dtype)
        if value.ndim > 1:
            mask = jnp.reshape(mask, (-1, 1))  # which may be one for all
        # what is missing may be coded as anything: give masked rows a harmless value unless theirs is usable
        harmless = family.support.feasible_like(value)
        value = jnp.where(mask | (jnp.isfinite(value) & family.support(value)), value, harmless)
        scale = jnp.ones(())
        if match.link.has_scale:
            at = jnp.full(program.shape(self.predictor), match.point, dtype)
            scale = jnp.reshape(program.evaluate([self.leaf], {**env, self.predictor: at})[0], -1) / match.value
        dimension = program.shape(self.leaf)[-1] if family.predictor in family.vectors else 1
        parameters = dict(zip(family.parameters, others, strict=True))
        built = family.build(match.link, Observations(value, parameters, scale, dimension))
        return built._replace(sign=match.sign * built.sign)
