"""Which potential stands behind a cut: by family of the distribution and by the function from predictor to parameter.

The function is not matched by its text but by its values: whatever composition of operations leads from the predictor
to, say, a Poisson rate, it is the exponential link if the rate behaves as one on a grid of predictors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...potentials import (
    BinomialLogitPotential,
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    PoissonSoftplusPotential,
    ProbitPotential,
    RectifiedLinearPoissonPotential,
    StudentTPotential,
)
from ...potentials.base import Potential
from ...potentials.families.categorical import MultinomialProbitPotential, SoftmaxPotential
from ...potentials.families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeLogitPotential,
    CumulativeProbitPotential,
)
from ...potentials.families.stick_breaking import stick_breaking_labels
from ...potentials.vector_rows import VectorRows, row_directions
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees, affine_cuts
from ..program.dependence import dependence
from ..program.program import Atom, Program

__all__ = ["Built", "Recognised", "recognise"]

Env = Mapping[int, Any]
_GRID = np.array([0.0, 1.0, -1.0, -2.5, 0.4, 3.1])


class Built(NamedTuple):
    """A potential of ``sign * predictor + shift``."""

    potential: Potential
    sign: float = 1.0
    shift: Any = 0.0
    observed: Any = True
    """Which rows have a factor at all, besides what the mask of the model says."""


class Recognised(NamedTuple):
    """A named potential, and where its predictor is."""

    predictor: int
    rows: np.ndarray
    """Flat indices of the elements that are predictors; pairs of them where rows are differences."""
    build: Callable[[Env, Array], Built]
    """From hyperparameters, data and the observed mask."""
    label: str


class _Link(NamedTuple):
    name: str
    sign: float
    """The parameter is ``scale * function(sign * predictor)``."""
    scale_at: float
    """Grid point at which the scale is read off, with the value of the function there."""
    value_at: float


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "rectified linear": lambda x: np.maximum(x, 0.0),
    "logistic": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "probit": lambda x: np.asarray(jax.scipy.stats.norm.cdf(x)),
}
_SCALE_AT = {"exp": 0.0, "softplus": 0.0, "rectified linear": 1.0, "logistic": 0.0, "probit": 0.0}

# per distribution: the parameter that may carry the field, and the links known for it
_FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "normal": {"loc": ("identity",)},
    "student_t": {"loc": ("identity",)},
    "laplace": {"loc": ("identity",)},
    "poisson": {"rate": ("exp", "softplus", "rectified linear")},
    "bernoulli_logits": {"logits": ("identity",)},
    "bernoulli_probs": {"probs": ("logistic", "probit")},
    "binomial_logits": {"logits": ("identity",)},
    "binomial_probs": {"probs": ("logistic",)},
    "gamma_poisson": {"rate": ("exp",)},
    "rectified_linear_poisson": {"predictor": ("identity",)},
    "softplus_poisson": {"predictor": ("identity",)},
    "categorical_logits": {"logits": ("identity",)},
    "multinomial_probit": {"predictor": ("identity",)},
    "stick_breaking": {"logits": ("identity",)},
    "ordered_logistic": {"predictor": ("identity",)},
    "ordered_probit": {"predictor": ("identity",)},
    "continuation_ratio": {"predictor": ("identity",)},
    "adjacent_category": {"predictor": ("identity",)},
}


def recognise(program: Program, degrees: Degrees, traced: FactorTrace, probe: Env) -> Recognised | None:
    """The named potential of a site, or None if it has to be treated by quadrature."""
    family = traced.family.value
    if family not in _FAMILIES or degrees.of(traced.value) != Degree.CONSTANT:
        return None
    varying = [n for n, atom in traced.parameters.items() if degrees.of(atom) != Degree.CONSTANT]
    if len(varying) != 1 or varying[0] not in _FAMILIES[family]:
        return None
    parameter = varying[0]
    leaf = traced.parameters[parameter]
    links = _FAMILIES[family][parameter]
    if (degrees.of(leaf) == Degree.AFFINE) != ("identity" in links):
        return None
    if degrees.of(leaf) == Degree.AFFINE:
        build = _builder(program, family, traced, leaf, leaf, _Link("identity", 1.0, 0.0, 0.0))
        return Recognised(leaf, _rows(family, program.shape(leaf)), build, f"{family.replace('_', ' ')}")
    return _behind_a_link(program, degrees, family, traced, leaf, links, probe)


def _rows(family: str, shape: tuple[int, ...]) -> np.ndarray:
    index = np.arange(int(np.prod(shape)))
    if family not in ("categorical_logits", "multinomial_probit"):
        return index
    plus, minus = row_directions(shape[-1]).T
    groups = index.reshape(-1, shape[-1])
    return np.stack([groups[:, plus], np.where(minus < 0, -1, groups[:, minus])], axis=-1).reshape(-1, 2)


def _behind_a_link(
    program: Program,
    degrees: Degrees,
    family: str,
    traced: FactorTrace,
    leaf: Atom,
    links: tuple[str, ...],
    probe: Env,
) -> Recognised | None:
    candidates = _single_passages(program, degrees, leaf)
    for predictor in candidates:
        # one after the other: for large data each is large, and the first is mostly the right one
        link = _match_link(_responses(program, traced, predictor, leaf, probe), links)
        if link is None:
            continue
        shape = program.shape(predictor)
        seeds = {predictor: np.arange(int(np.prod(shape)), dtype=np.int64).reshape(*shape, 1)}
        pattern = dependence(program, seeds, {}, [leaf])[leaf]  # type: ignore[index]
        if isinstance(pattern, np.ndarray) and pattern.shape[-1] == 1 and np.all(pattern >= 0):
            build = _builder(program, family, traced, predictor, leaf, link)
            label = f"{family.split('_', maxsplit=1)[0]}, {link.name} link"
            return Recognised(predictor, pattern.reshape(-1), build, label)
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

    def respond(point: Array, env: Env) -> Array:
        return program.evaluate([leaf], {**env, predictor: jnp.full(program.shape(predictor), point, dtype)})[0]

    found = jax.jit(jax.vmap(respond, in_axes=(0, None)))(jnp.asarray(_GRID, dtype), dict(probe))
    values = np.asarray(found, float)
    mask = np.broadcast_to(np.asarray(program.evaluate([traced.mask], probe)[0]), values.shape[1:])
    used = values[:, mask] if mask.any() and not mask.all() else values.reshape(len(_GRID), -1)
    is_finite = np.isfinite(used).all(axis=0)
    return used if is_finite.all() else used[:, is_finite]


def _match_link(values: np.ndarray, links: tuple[str, ...]) -> _Link | None:
    if not values.size:
        return None
    tolerance = 1e-9 if jnp.result_type(float) == np.float64 else 2e-5
    for name in links:
        for sign in (1.0, -1.0):
            function = _FUNCTIONS[name](sign * _GRID)
            at = int(np.nonzero(sign * _GRID == _SCALE_AT[name])[0][0])
            scale = np.ones(values.shape[1]) if name in ("logistic", "probit") else values[at] / function[at]
            if all(
                np.all(np.abs(row - f * scale) <= tolerance * (abs(f) + 1e-3) * np.abs(scale))
                for row, f in zip(values, function, strict=True)
            ):
                return _Link(name, sign, float(_GRID[at]), float(function[at]))
    return None


def _builder(
    program: Program, family: str, traced: FactorTrace, predictor: int, leaf: Atom, link: _Link
) -> Callable[[Env, Array], Built]:
    names = [n for n in traced.parameters if traced.parameters[n] != leaf]
    dtype = jnp.result_type(float)

    def build(env: Env, mask: Array) -> Built:
        atoms = [traced.value, *(traced.parameters[n] for n in names)]
        value, *others = program.evaluate(atoms, env)
        # a vector parameter keeps its last axis
        others = [jnp.reshape(v, (-1, *jnp.shape(v)[jnp.ndim(value) :])) for v in others]
        value = jnp.reshape(value, -1)
        given = dict(zip(names, others, strict=True))
        # what is missing may be coded as anything: give masked rows a harmless value unless theirs is usable
        is_usable = jnp.isfinite(value) & ((value >= 0) | (not _is_count(family)))
        value = jnp.where(mask | is_usable, value, 0).astype(dtype)
        scale = jnp.ones(())
        if link.name in ("exp", "softplus", "rectified linear"):
            at = jnp.full(program.shape(predictor), link.scale_at, dtype)
            scale = jnp.reshape(program.evaluate([leaf], {**env, predictor: at})[0], -1) / link.value_at
        if family in _CATEGORICAL:
            return _make_categorical(family, value, given, program.shape(leaf)[-1])
        return _make(family, link, value, given, scale)

    return build


_CATEGORICAL = (
    "categorical_logits",
    "multinomial_probit",
    "stick_breaking",
    "ordered_logistic",
    "ordered_probit",
    "continuation_ratio",
    "adjacent_category",
)


def _make_categorical(family: str, value: Array, given: dict[str, Array], num_predictors: int) -> Built:
    """:param int num_predictors: length of the vector of predictors, if the family has one."""
    if family == "stick_breaking":
        labels, observed = stick_breaking_labels(value, num_predictors)
        # A stick that was never looked at is no trial, and so does not count in the prediction of a held-out value.
        labels, observed = jnp.reshape(labels, -1), jnp.reshape(observed, -1)
        return Built(BinomialLogitPotential(labels, observed.astype(int)), observed=observed)
    label = value.astype(int)
    if family == "categorical_logits":
        return Built(VectorRows(SoftmaxPotential(label, num_predictors)))
    if family == "multinomial_probit":
        return Built(VectorRows(MultinomialProbitPotential(label, num_predictors)))
    if family == "ordered_logistic":
        return Built(CumulativeLogitPotential(label, given["cutpoints"]))
    if family == "ordered_probit":
        return Built(CumulativeProbitPotential(label, given["cutpoints"]))
    if family == "continuation_ratio":
        return Built(ContinuationRatioPotential(label, given["thresholds"]))
    return Built(AdjacentCategoryPotential(label, given["thresholds"], given["scores"]))


def _is_count(family: str) -> bool:
    return family not in ("normal", "student_t", "laplace")


def _make(family: str, link: _Link, value: Array, given: dict[str, Array], scale: Array) -> Built:
    sign = link.sign
    if family == "normal":
        return Built(GaussianPotential(value, given["scale"]))
    if family == "student_t":
        return Built(StudentTPotential(value, given["scale"], given["df"]))
    if family == "laplace":
        return Built(LaplacePotential(value, given["scale"]))
    if family == "poisson":
        if link.name == "exp":
            return Built(PoissonExpPotential(value, scale), sign)
        if link.name == "softplus":
            return Built(PoissonSoftplusPotential(value, scale), sign)
        return Built(RectifiedLinearPoissonPotential(value, scale, jnp.zeros_like(scale)), sign)
    if family == "rectified_linear_poisson":
        return Built(RectifiedLinearPoissonPotential(value, given["exposure"], given["offset"]))
    if family == "softplus_poisson":
        return Built(PoissonSoftplusPotential(value, given["exposure"]), shift=given["offset"])
    if family == "gamma_poisson":
        # rate = scale * exp(sign z), and the mean is concentration / rate
        concentration = given["concentration"]
        return Built(NegativeBinomialExpPotential(value, concentration, concentration / scale), -sign)
    if family.startswith("binomial"):
        return Built(BinomialLogitPotential(value, given["total_count"]), sign)
    return Built(ProbitPotential(value) if link.name == "probit" else LogitPotential(value), sign)
