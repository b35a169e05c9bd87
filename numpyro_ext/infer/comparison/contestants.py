"""Contestants of a comparison: engines, NumPyro's samplers and its guides, each run and asked in the same words."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import numpyro
from jax import Array
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel

from ..bilinear.engines.engine import BilinearVG
from ..ep import EP
from ..exact.gaps import Moments
from ..front.engine import BaseEngine
from ..front.results import LogEvidence
from ..gaussian.engine import Engine
from ..gaussian.engines.inla import INLA
from ..gaussian.engines.laplace_approximation import LaplaceApproximation
from ..gaussian.variational.engine import VariationalGaussian
from ..monte_carlo.smc import SMC
from ..sparse.mean_field_engine import StructuredMeanField

NUM_WARMUP, NUM_SAMPLES = 1000, 2000
"""Length of a chain that a person leaves to us."""
_SVI_STEPS, _SVI_RATE = 5000, 0.01
_MOST_RHAT = 1.05

ENGINES: tuple[type[BaseEngine[Any]], ...] = (
    EP,
    VariationalGaussian,
    LaplaceApproximation,
    INLA,
    StructuredMeanField,
    BilinearVG,
)
BY_NAME: dict[str, Any] = {**{engine.__name__: engine for engine in ENGINES}, "SMC": SMC, "NUTS": NUTS}
"""The engines that can be asked for by name."""
USAGE = "compare_engines(model, ['EP', 'NUTS'], jax.random.key(0), x, y)"
"""The order of arguments, for messages."""


class Contestant(ABC):
    """One way to a posterior: run it, then ask."""

    has_converged: bool | None = None
    log_evidence: LogEvidence | None = None
    k_hat: float = np.nan
    notes: tuple[str, ...] = ()
    has_params: bool = False
    """True if it has learned ``param`` sites, which have no prior."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.engine = name, engine

    def run(self, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run until draws are there."""
        self.engine.run(rng_key, *args, **kwargs)
        jax.block_until_ready(self.engine.get_samples())

    def draws(self) -> dict[str, Array]:
        """Draws of the sites, ``(num_samples, ...)`` each."""
        found: dict[str, Array] = self.engine.get_samples()
        return found

    @abstractmethod
    def judge(self, rng_key: Array) -> None:
        """Fill in convergence, evidence, k-hat and notes; not a part of the time."""

    def moments(self) -> Moments:
        """From draws, unless they are known without."""
        return moments_of(self.draws())


def moments_of(draws: Mapping[str, object]) -> Moments:
    """Moments of draws with the samples as first axis; sites that are not of real numbers are left out."""
    arrays = {name: np.asarray(value) for name, value in draws.items()}
    return {n: (a.mean(0), a.std(0)) for n, a in arrays.items() if np.issubdtype(a.dtype, np.floating)}


class Fitted(Contestant):
    """An engine of this package."""

    def judge(self, rng_key: Array) -> None:
        found, value = self.engine.diagnostics, self.engine.log_evidence
        self.has_converged = bool(found.converged)
        self.has_params = any(site.is_param for site in self.engine._run.reading.hyper.values())
        self.log_evidence = value
        self.notes = found.messages
        if isinstance(self.engine, Engine) and not (isinstance(self.engine, EP) and self.engine.tree is not None):
            self.k_hat = self.engine.psis_diagnostic(rng_key)

    def moments(self) -> Moments:
        exact = {n: (np.asarray(p.mean), np.asarray(p.sd)) for n, p in self.engine.posterior.items()}
        return super().moments() | exact


class Particles(Contestant):
    """Sequential Monte Carlo."""

    engine: SMC

    def judge(self, rng_key: Array) -> None:
        found = self.engine.diagnostics
        self.has_converged, self.notes = found.converged, found.messages
        self.log_evidence = self.engine.log_evidence


class Chain(Contestant):
    """NumPyro's MCMC; one that has been run already is not run again."""

    engine: MCMC

    def run(self, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.engine.run(rng_key, *args, extra_fields=("diverging",), **kwargs)
        jax.block_until_ready(self.engine.get_samples())

    def judge(self, rng_key: Array) -> None:
        chains = _real_chains(self.engine)
        worst = max((float(np.nanmax(split_gelman_rubin(x))) for x in chains if np.any(np.var(x, (0, 1)))), default=1.0)
        diverging = self.engine.get_extra_fields().get("diverging")
        self.has_converged = worst < _MOST_RHAT
        self.notes = (f"largest r-hat {worst:.2f}",)
        if diverging is not None and int(diverging.sum()):
            self.notes += (f"{int(diverging.sum())} of {diverging.size} transitions diverged",)


def _real_chains(mcmc: MCMC) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        found = [np.asarray(x) for x in mcmc.get_samples(group_by_chain=True).values()]
    return [x for x in found if np.issubdtype(x.dtype, np.floating)]


class Guided(Contestant):
    """One of NumPyro's automatic guides, fitted by SVI."""

    def run(self, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        svi = SVI(self.engine.model, self.engine, numpyro.optim.Adam(_SVI_RATE), Trace_ELBO())
        key, draw_key = jax.random.split(rng_key)
        self._fit = svi.run(key, _SVI_STEPS, *args, progress_bar=False, **kwargs)
        self._sites = jax.block_until_ready(
            self.engine.sample_posterior(draw_key, self._fit.params, sample_shape=(NUM_SAMPLES,))
        )

    def draws(self) -> dict[str, Array]:
        return self._sites

    def judge(self, rng_key: Array) -> None:
        losses = np.asarray(self._fit.losses)
        early, late = losses[-_SVI_STEPS // 5 : -_SVI_STEPS // 10], losses[-_SVI_STEPS // 10 :]
        error = np.sqrt(early.var() / early.size + late.var() / late.size)
        self.log_evidence = LogEvidence(-float(late.mean()), True, "integrated")
        self.has_converged = bool(np.isfinite(late).all() and abs(early.mean() - late.mean()) < 3.0 * error + 1e-3)
        self.notes = (f"{_SVI_STEPS} steps of Adam({_SVI_RATE})",)


def as_contestants(model: Callable[..., Any], engines: Any) -> list[Contestant]:
    """Contestants that a person has named, in the order given, under names that differ.

    :raises ValueError: if there are none, a name is unknown, or an engine has been made for another model.
    :raises TypeError: for anything else that is no engine.
    """
    if not callable(model):
        raise TypeError(f"model must be a callable with NumPyro primitives, got {type(model).__name__}.")
    if isinstance(engines, Mapping):
        given = list(engines.items())
    else:
        several = engines if isinstance(engines, Sequence) and not isinstance(engines, str) else [engines]
        given = [(None, engine) for engine in several]
    if not given:
        raise ValueError(f"There are no engines to compare: give some of {', '.join(BY_NAME)}, or their classes.")
    out: list[Contestant] = []
    for name, engine in given:
        found = _make(model, engine)
        found.name = str(name or found.name)
        same = sum(other.name == found.name or other.name.startswith(f"{found.name} #") for other in out)
        found.name += f" #{same + 1}" if same else ""
        out.append(found)
    return out


def _make(model: Callable[..., Any], engine: Any) -> Contestant:
    if isinstance(engine, str):
        if engine not in BY_NAME:
            raise ValueError(f"There is no engine named {engine!r}; there are {', '.join(BY_NAME)}.")
        engine = BY_NAME[engine]
    if isinstance(engine, type | partial):
        name, kind = _named(engine), engine.func if isinstance(engine, partial) else engine
        if isinstance(kind, type) and issubclass(kind, MCMCKernel):
            options = {} if isinstance(engine, partial) else {"init_strategy": init_to_median}
            if not issubclass(kind, NUTS):
                options = {}
            engine = engine(model, **options)
        elif isinstance(kind, type) and issubclass(kind, BaseEngine | SMC | AutoGuide):
            engine = engine(model)
        else:
            raise _not_an_engine(engine)
    else:
        name = type(engine).__name__
        if isinstance(engine, BaseEngine | SMC):
            engine = copy.copy(engine)  # its own run stays
    if isinstance(engine, MCMCKernel):
        engine = MCMC(engine, num_warmup=NUM_WARMUP, num_samples=NUM_SAMPLES, progress_bar=False)
    own = engine.sampler.model if isinstance(engine, MCMC) else getattr(engine, "model", None)
    if own is not None and own is not model:
        raise ValueError(
            f"{name} has been made for another model ({getattr(own, '__name__', own)}). Give the class, or a "
            "functools.partial of it with its options, and it is made for this one."
        )
    if isinstance(engine, BaseEngine):
        engine.progress_bar = False  # one bar for all
        return Fitted(name, engine)
    if isinstance(engine, SMC):
        engine.progress_bar = False
        return Particles(name, engine)
    if isinstance(engine, MCMC):
        return Chain(type(engine.sampler).__name__ if name == "MCMC" else name, engine)
    if isinstance(engine, AutoGuide):
        return Guided(name, engine)
    raise _not_an_engine(engine)


def _named(engine: Any) -> str:
    if not isinstance(engine, partial):
        return str(engine.__name__)
    options = ", ".join(f"{name}={value!r}" for name, value in engine.keywords.items())
    return f"{getattr(engine.func, '__name__', engine.func)}({options})"


def _not_an_engine(engine: Any) -> TypeError:
    return TypeError(
        f"{engine!r} is no engine. Give names ({', '.join(BY_NAME)}), classes of engines, functools.partial of these, "
        "numpyro.infer.NUTS or MCMC, or automatic guides of numpyro.infer.autoguide."
    )
