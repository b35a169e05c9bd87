"""Choice of an engine to start with, and the reasons of those that cannot treat a model; nothing is fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ...display import Shown, Table
from ...potentials import GaussianPotential
from ...structure import (
    BilinearReading,
    LatentGaussianReading,
    ModelReading,
    ModelStructureError,
    Reason,
    SparseLinearReading,
)
from ...structure.model.running.execution import is_key
from ..bilinear.engines.engine import BilinearVG
from ..bilinear.engines.families import check_points
from ..ep import EP
from ..front.engine import AnyEngine, BaseEngine
from ..gaussian.engine import Engine
from ..gaussian.engines.laplace_approximation import LaplaceApproximation
from ..gaussian.integration.exploration import check_design
from ..hyper.space import UnconstrainedSpace
from ..sparse.mean_field_engine import StructuredMeanField
from .contestants import BY_NAME, ENGINES, USAGE
from .forecasts import MANY_ROWS, caution, gaussian_cost

_ORDER = (
    "recommend fits nothing, so it takes no random key and no engines: the model comes first, then its arguments, "
    f"as in recommend(model, x, y). To run engines, {USAGE}."
)


class Candidate(NamedTuple):
    """Treatment of a model by one engine."""

    engine: str
    takes: bool
    reason: str
    """Reason for which it does not take the model; empty where it does."""
    cost: str
    """Cost of one of its steps, in words."""
    hyperparameters: str
    """Treatment of the hyperparameters, in words."""
    caution: str = ""
    """Reasons to expect a slow or a biased fit on this model; empty where none is known."""


class Recommendation(Shown):
    """The outcome of :func:`recommend`: printed it is a table.

    :ivar start: the name of the engine to start with, one of ``numpyro_ext.infer`` or ``"NUTS"``.
    :ivar why: the rule that led to it.
    :ivar candidates: a :class:`Candidate` for each engine.
    :ivar sites: for each site its name, shape, family and what becomes of it in the engine to start with.
    """

    def __init__(self, start: str, why: str, candidates: list[Candidate], sites: list[tuple[str, str, str, str]]):
        self.start, self.why = start, why
        self.candidates, self.sites = candidates, sites

    def __getitem__(self, engine: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.engine == engine)

    def _shown(self) -> list[str | Table]:
        out: list[str | Table] = [f"Start with {self.start}: {self.why}"]
        if self.sites:
            out.append(Table(["site", "shape", "family", f"in {self.start}"], self.sites))
        takes = [c for c in self.candidates if c.takes]
        if takes:
            alike = _grouped(takes, lambda c: (c.cost, c.hyperparameters))
            rows = [[names, *key] for key, names in alike.items()]
            out.append(Table(["engines", "cost of a step", "hyperparameters"], rows))
        cautions = _grouped([c for c in takes if c.caution], lambda c: c.caution)
        out += [f"{names}: {caution}" for caution, names in cautions.items()]
        refusals = _grouped([c for c in self.candidates if not c.takes], lambda c: c.reason)
        return out + [f"not {names}: {reason}" for reason, names in refusals.items()]


def _grouped(candidates: list[Candidate], key: Callable[[Candidate], object]) -> dict[Any, str]:
    """The names of the engines that have the same key."""
    out: dict[Any, list[str]] = {}
    for candidate in candidates:
        out.setdefault(key(candidate), []).append(candidate.engine)
    return {found: ", ".join(names) for found, names in out.items()}


def recommend(model: Callable[..., object], *args: object, **kwargs: object) -> Recommendation:
    """Read a model, and say which engines can treat it, at what cost, and which one to start with.

    Nothing is fitted. The rules, of which the first that holds decides:

    1. sparse coefficients alone, behind a linear map with Gaussian noise (images): StructuredMeanField, or EP where
       that one refuses;
    2. two Gaussian blocks whose product makes the predictor: BilinearVG;
    3. no engine takes the model: NUTS;
    4. all factors Gaussian: LaplaceApproximation, which is exact and needs one factorisation;
    5. a likelihood that vanishes somewhere, or has a kink: EP, which integrates over it;
    6. several predictors per observation, of which EP takes two: VariationalGaussian;
    7. log-concave, smooth, and ten rows or more per unknown: LaplaceApproximation, as there is little skewness;
    8. else EP, whose moments are nearest to the exact ones.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import recommend
    >>> def model(y):
    ...     level = numpyro.sample("level", dist.Normal(0, 2))
    ...     numpyro.sample("y", dist.Poisson(jnp.maximum(level, 0.0)), obs=y)
    >>> found = recommend(model, jnp.array([3, 5, 2]))
    >>> found.start, found["LaplaceApproximation"].takes
    ('EP', False)

    Cost: a few abstract traces of the model, one or two compilations for the check of each form that it has.

    :param model: a NumPyro model.
    :param args: its arguments, with data.
    :param kwargs: its keyword arguments.
    :return: the recommendation: ``print`` it, or ask for ``start``, ``why``, ``candidates`` and ``sites``.
    :raises ModelStructureError: if the model does not run on these arguments, or its data are missing or impossible.
    :raises TypeError: if the model is not callable, such as a fitted engine, whose items :func:`shortlist` chooses; or
        if a random key or engines come with it.
    """
    if is_key(model):
        raise TypeError(_ORDER)
    if not callable(model):
        raise TypeError(
            f"recommend says which engine to start with, for a model with its data; got {type(model).__name__}. For "
            "items to show to users by their utilities take shortlist(engine, users=..., k=..., exclude=...)."
        )
    readings: dict[str, ModelReading] = {}
    engines: dict[str, BaseEngine[Any]] = {}
    candidates = []
    for kind in ENGINES:
        engine, name = kind(model, progress_bar=False), kind.__name__
        try:
            reading = _shared(engine, readings) or engine._read(jax.random.key(0), args, kwargs)
            _check(engine, reading)
        except ModelStructureError as error:
            if error.reason in (Reason.EXECUTION, Reason.DATA):
                if any(map(_is_no_data, (*args[:1], kwargs.get("rng_key")))):
                    raise TypeError(_ORDER) from error
                raise
            candidates.append(Candidate(name, False, str(error), "", ""))
        except ValueError as error:
            candidates.append(Candidate(name, False, str(error), "", ""))
        else:
            readings[name], engines[name] = reading, engine
            treatment = _cost(engine, reading), _fate(engine, reading), caution(engine, reading)
            candidates.append(Candidate(name, True, "", *treatment))
    start, why = _choose(readings)
    if start == "NUTS":
        why += f" ({candidates[0].reason})"
        return Recommendation(start, why, candidates, [])
    return Recommendation(start, why, candidates, _sites(engines[start], readings[start]))


def _is_no_data(argument: object) -> bool:
    """True for a random key, and for engines and their names."""
    several = argument if isinstance(argument, list | tuple) else [argument]
    engines = (isinstance(one, BaseEngine | type) or (isinstance(one, str) and one in BY_NAME) for one in several)
    return is_key(argument) or any(engines)


def _shared(engine: AnyEngine, readings: dict[str, ModelReading]) -> ModelReading | None:
    """Reading of another engine, where this one would read the same."""
    found = readings.get("EP") or readings.get("VariationalGaussian")
    if isinstance(found, LatentGaussianReading) and isinstance(engine, Engine):
        if found.half_lines:  # which are hyperparameters to others
            return None
        # Sites whose prior is a factor may be points to the engines that need curvature.
        is_gaussian = not set(found.field) & set(found.factor_names)
        return found if is_gaussian or not isinstance(engine, LaplaceApproximation) else None
    if isinstance(found, SparseLinearReading) and isinstance(engine, StructuredMeanField):
        return found
    return None


def _check(engine: AnyEngine, reading: ModelReading) -> None:
    """Check whether an engine takes a form that it reads.

    :raises ModelStructureError: if it cannot run on it, or
    :raises ValueError: if it cannot learn what is not given.
    """
    space = UnconstrainedSpace(reading.hyper, engine.hyper_values)
    if isinstance(reading, LatentGaussianReading) and isinstance(engine, Engine):
        engine.algorithm(reading)
        check_design(engine.integrate, space)
    elif isinstance(reading, SparseLinearReading) and isinstance(engine, StructuredMeanField):
        engine._options(reading, space)
    elif isinstance(reading, BilinearReading) and isinstance(engine, BilinearVG):
        check_points(reading, space, engine._families(reading))


def _cost(engine: AnyEngine, reading: ModelReading) -> str:
    if isinstance(reading, LatentGaussianReading):
        return gaussian_cost(reading)
    if isinstance(reading, BilinearReading):
        (rows, rank), (cols, other) = (elements.shape for elements in reading.elements)
        cells = sum(found.size for found in reading.cells)
        return (
            f"{cells} cells, {rows} rows of {rank} and {cols} columns of {other} components: two passes over the "
            "cells, linear in cells and components"
        )
    assert isinstance(reading, SparseLinearReading)  # there is no other form
    size = sum(found.size for found in reading.rows)
    if isinstance(engine, EP):
        return (
            f"{size} observations, {reading.num_columns} unknowns: one pass through the trees, linear in them; a "
            "single step where the transform is orthonormal"
        )
    return (
        f"{size} observations, {reading.num_columns} unknowns: a few dozen products with the operator and one pass "
        "through the trees, linear in them for fast operators"
    )


def _fate(engine: AnyEngine, reading: ModelReading) -> str:
    """Treatment of a model's hyperparameters by an engine, in words."""
    space = UnconstrainedSpace(reading.hyper, engine.hyper_values)
    if not space.size:
        return "none"
    if isinstance(engine, Engine) and isinstance(reading, LatentGaussianReading):
        number = len(space.integrable)
        if number:
            design = engine._integration.design(number, reading.abstract_form.num_rows)
            return f"{number}, integrated over ({design})"
    return f"{space.size}, learned (set to a point)"


def _choose(readings: dict[str, ModelReading]) -> tuple[str, str]:
    """The engine to start with, and the rule behind it."""
    gaussian = next((r for r in readings.values() if isinstance(r, LatentGaussianReading)), None)
    if "StructuredMeanField" in readings and not isinstance(readings.get("EP"), LatentGaussianReading):
        return "StructuredMeanField", "sparse coefficients behind a linear map with Gaussian noise, at any size."
    if isinstance(readings.get("EP"), SparseLinearReading):
        return "EP", "sparse coefficients behind a linear map with Gaussian noise."
    if "BilinearVG" in readings:
        return "BilinearVG", "the predictor is a product of two Gaussian blocks, and this engine integrates over both."
    if gaussian is None:
        return "NUTS", "no engine takes this model."
    form = gaussian.abstract_form
    potentials = form.potentials
    if "LaplaceApproximation" in readings and all(isinstance(p, GaussianPotential) for p in potentials):
        return "LaplaceApproximation", "all factors are Gaussian: it is exact, and needs one factorisation per fit."
    if "EP" in readings and not {"VariationalGaussian", "LaplaceApproximation"} <= set(readings):
        refused = [n for n in ("VariationalGaussian", "LaplaceApproximation") if n not in readings]
        are = "do not take a factor" if len(refused) > 1 else "does not take a factor"
        return "EP", f"{' and '.join(refused)} {are} of this model (why is said below), and EP integrates over it."
    if "EP" not in readings:
        name = "VariationalGaussian" if "VariationalGaussian" in readings else "LaplaceApproximation"
        return name, "EP does not take these factors."
    is_easy = all(p.is_log_concave and p.is_smooth for p in potentials)
    if "LaplaceApproximation" in readings and is_easy and form.num_rows >= MANY_ROWS * form.num_columns:
        return "LaplaceApproximation", (
            f"log-concave, smooth factors and {form.num_rows} rows for {form.num_columns} unknowns: little skewness, "
            "so that the fastest engine is good enough. EP is the check."
        )
    return "EP", (
        f"{form.num_rows} rows for {form.num_columns} unknowns: posteriors may be skewed, and the moments of EP are "
        "nearest to the exact ones."
    )


def _sites(engine: AnyEngine, reading: ModelReading) -> list[tuple[str, str, str, str]]:
    """Name, shape, family and fate of each site."""
    fate = _fate(engine, reading).partition(", ")[2]
    out = []
    for name, site in reading.sites.items():
        if site.kind == "plate" or site.family == "plate":
            continue
        if name in reading.field:
            role = "field: integrated out" if not isinstance(reading, BilinearReading) else "field: a Gaussian side"
        elif name in reading.hyper:
            given = "param: set to its optimum" if reading.hyper[name].is_param else f"hyperparameter: {fate}"
            size = int(np.prod(reading.hyper[name].shape))
            role = given if size == 1 else f"{given}; {size} values"
        elif name in reading.predictive:
            role = "left out of the fit, drawn given the rest"
        else:
            role = "observed" if name in reading.observed_names else "computed"
        out.append((name, str(tuple(site.shape)), site.family or site.kind, role))
    return out
