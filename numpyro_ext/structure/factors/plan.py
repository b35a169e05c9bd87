"""The way from the log probability of a site to a family of factors, one per predictor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.content import ByContent
from ...potentials import ElementwisePotential, PairPotential
from ...potentials.elementwise import TemperedPotential
from ...potentials.pairs import PairKind, kind_of_pair
from ...potentials.vector_rows import VectorRows, row_directions
from ..errors import Conflict
from ..families import Built
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees
from ..program.equations import Constant
from ..program.program import Program
from ..program.questions import Questions
from ..program.run_compiled import run_compiled
from ..program.sums import Term, sum_terms
from .elementwise import ElementwiseFactor
from .pairs import find_pairs
from .recognise import Recognised, recognise

Env = Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class FactorPlan(ByContent):
    """Plan by which one family of factors is built from hyperparameters and data."""

    name: str
    parts: tuple[tuple[tuple[int, ...], np.ndarray], ...]
    """Affine values and the flat indices of their elements that are the predictors, row by row."""
    shape: tuple[int, ...]
    """Shape of the observations in the model."""
    rows_per_observation: int
    """One, or more for observations of several predictors; the rows of an observation follow each other."""
    build: Callable[[Env], tuple[Built, Array]]
    """Makes the potential and the observed mask from the values of hyperparameters and data."""
    label: str
    """Name of the likelihood that was recognised."""
    is_closed_form: bool
    is_recognised: bool = False
    """True if it has a family."""
    holds: Callable[[Program, Env], bool] | None = field(default=None, compare=False)
    """True if the same is recognised at other values of the data; ``None`` where these have no say."""


def plan_factor(questions: Questions, degrees: Degrees, name: str, traced: FactorTrace, probe: Env) -> FactorPlan:
    """Read one site whose log probability depends on the field.

    :param questions: the program and its data.
    :param traced: the site, with atoms of the program as leaves.
    :param probe: values of all hyperparameters and data at one point, to test what was recognised.
    :raises Conflict: if an observation depends on the field through more predictors than engines treat.
    """
    for part, atom in (("mask", traced.mask), ("scale", traced.scale), ("covariance", traced.constant)):
        if atom is not None and degrees.of(atom) != Degree.CONSTANT:
            sites = degrees.sites_of(atom)
            raise Conflict(
                f"the {part} of site '{name}' depends on {sorted(sites)}, so the site is no factor of one predictor, "
                "affine in the Gaussian sites, per observation. Choose the field with field=[...], or use NUTS.",
                sites,
                name,
            )
    found = recognise(questions, degrees, traced, probe)
    if found is not None:
        return _recognised_plan(questions.program, name, traced, found)
    return _elementwise_plan(questions, degrees, name, traced, probe)


@dataclass(frozen=True, eq=False)
class _FromFamily(ByContent):
    """Makes the factors of a site of a known family."""

    program: Program
    traced: FactorTrace
    found: Recognised
    rows_per_observation: int

    def __call__(self, env: Env) -> tuple[Built, Array]:
        scale_atom = Constant(1.0) if self.traced.scale is None else self.traced.scale
        mask, scale = self.program.evaluate([self.traced.mask, scale_atom], env)
        mask = jnp.reshape(mask, -1)
        built = self.found.build(env, mask)
        if self.traced.scale is not None:
            weight = jnp.repeat(jnp.reshape(scale, -1), self.rows_per_observation)
            built = built._replace(potential=TemperedPotential(built.potential, weight))
        return built, jnp.repeat(mask, self.rows_per_observation) & built.observed


@dataclass(frozen=True, eq=False)
class _Elementwise(ByContent):
    """Makes factors of one predictor without a family."""

    factor: ElementwiseFactor

    def __call__(self, env: Env) -> tuple[Built, Array]:
        factor = self.factor
        return Built(ElementwisePotential(factor.log_density, factor.arguments(env))), factor.observed(env)


@dataclass(frozen=True, eq=False)
class _OfPairs(ByContent):
    """Makes factors of two predictors without a family."""

    factor: ElementwiseFactor
    kind: PairKind

    def __call__(self, env: Env) -> tuple[Built, Array]:
        factor = self.factor
        given = (factor.log_density, factor.arguments(env), *self.kind)
        potential = PairPotential(*given, factor.has_own_arguments, factor.log_density_of_columns)
        return Built(VectorRows(potential)), jnp.repeat(factor.observed(env), len(row_directions(2)))


def _recognised_plan(program: Program, name: str, traced: FactorTrace, found: Recognised) -> FactorPlan:
    label = found.label if traced.scale is None else f"{found.label}, weighted"
    parts = (((found.predictor,), found.rows),)
    shape = program.shape(traced.log_prob)
    each = len(found.rows) // max(int(np.prod(shape)), 1)
    build = _FromFamily(program, traced, found, each)
    is_closed_form = traced.scale is None
    return FactorPlan(name, parts, shape, each, build, label, is_closed_form, is_recognised=True, holds=found.holds)


def _elementwise_plan(questions: Questions, degrees: Degrees, name: str, traced: FactorTrace, probe: Env) -> FactorPlan:
    program = questions.program
    whole = [Term(traced.log_prob)]
    attempts = [whole] if program.shape(traced.log_prob) else [sum_terms(program, degrees, traced.log_prob), whole]
    error: Conflict | None = None
    for terms in attempts:
        try:
            factor = ElementwiseFactor(questions, degrees, name, traced, terms)
        except Conflict as conflict:
            error = error or conflict
            continue
        label = "elementwise factor, by quadrature"
        parts = ((tuple(factor.cut), factor.predictors),)
        return FactorPlan(name, parts, factor.shape, 1, _Elementwise(factor), label, False)
    for terms in attempts:
        atoms = [t.atom for t in terms if degrees.of(t.atom) != Degree.CONSTANT]
        pairs = find_pairs(questions, degrees, name, atoms)
        if pairs is not None:
            factor = ElementwiseFactor(questions, degrees, name, traced, terms, pairs=pairs)
            return _pair_plan(name, factor, {**probe, **questions.values})
    raise error or ValueError("no term to read")


def _pair_plan(name: str, factor: ElementwiseFactor, probe: Env) -> FactorPlan:
    kind = kind_of_pair(PairPotential(factor.log_density, factor.arguments(probe)), factor.num_factors, run_compiled)
    plus, minus = row_directions(2).T
    rows = np.stack([factor.predictors[:, plus], np.where(minus < 0, -1, factor.predictors[:, minus])], axis=-1)
    label = "mixture of functions of two predictors" if kind.is_mixture else "factor of two predictors"
    label += ", Gaussian in one" if kind.is_gaussian else ", by quadrature"
    parts = ((tuple(factor.cut), rows.reshape(-1, 2)),)
    return FactorPlan(name, parts, factor.shape, len(plus), _OfPairs(factor, kind), label, kind.is_gaussian)


def factor_of_rows(plans: Sequence[FactorPlan]) -> np.ndarray:
    """Number of the factor that each row of some plans belongs to, shape ``(num_rows,)``."""
    runs = [(sum(len(rows) for _, rows in plan.parts), plan.rows_per_observation) for plan in plans]
    counts = np.concatenate([np.full(size // each, each) for size, each in runs] or [np.zeros(0, int)])
    return np.repeat(np.arange(len(counts)), counts)
