"""Probability integral transforms: where observations fall in their predictive distributions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike
from numpyro import handlers

from ....structure.program.run_compiled import run_compiled
from ..options import wrong_kind


class PitHistogram(NamedTuple):
    """Histogram of predictive distribution functions at the observations: flat where the model is right."""

    edges: np.ndarray
    """Ends of the bins from zero to one, shape ``(num_bins + 1,)``."""
    density: np.ndarray
    """Mean one: higher in the middle where predictions are too wide, at the ends where they are too narrow."""
    kl: float
    """Divergence of the uniform density from this one; infinite if a bin is empty."""


def pit_histogram(lower: ArrayLike, upper: ArrayLike, num_bins: int = 20) -> PitHistogram:
    """Histogram of distribution functions that jump: each observation is spread evenly over its jump.

    The density of the transform is uniform between the values of the distribution function below and at the
    observation, which makes the average uniform for discrete data as well (Czado, Gneiting and Held, 2009).

    **Example:**

    >>> from numpyro_ext.infer import pit_histogram
    >>> print(pit_histogram([0.0, 0.5], [0.5, 0.75], num_bins=4).density)
    [1. 1. 2. 0.]

    :param lower: distribution functions just below the observations, any shape; ``nan`` is left out.
    :param upper: distribution functions at the observations, the same as ``lower`` for continuous ones.
    :param int num_bins: number of bins of equal width.
    :return: the histogram.
    :raises ValueError: if nothing is left, shapes differ or values are not between zero and one in order.
    """
    low, high = np.broadcast_arrays(np.asarray(lower, float), np.asarray(upper, float))
    known = ~(np.isnan(low) | np.isnan(high))
    if num_bins < 1 or not known.any():
        raise ValueError(f"A histogram needs observations and bins; got {int(known.sum())} and {num_bins}.")
    low, high = low[known], high[known]
    slack = 1e-5  # of sums in single precision
    if (low < -slack).any() or (high > 1.0 + slack).any() or (high < low - slack).any():
        raise ValueError("Distribution functions must be between zero and one, and not fall at an observation.")
    below = np.array([_share_below(edge, low, high) for edge in np.linspace(0.0, 1.0, num_bins + 1)])
    return _histogram(np.diff(below))


def _share_below(edge: float, low: np.ndarray, high: np.ndarray) -> float:
    """Mean mass below the edge of a bin."""
    if edge in (0.0, 1.0):
        return edge
    width = high - low
    jump = width > 0.0
    inside = (edge - low) / np.where(jump, width, 1.0)
    return float(np.mean(np.where(jump, np.clip(inside, 0.0, 1.0), high < edge)))


def _histogram(masses: np.ndarray) -> PitHistogram:
    number = len(masses)
    with np.errstate(divide="ignore"):
        kl = float(-np.mean(np.log(np.maximum(masses, 0.0) * number)))
    return PitHistogram(np.linspace(0.0, 1.0, number + 1), masses * number, kl)


def predictive_pit(
    source: object, num_bins: int = 20, num_samples: int = 10, *, rng_key: Array | None = None
) -> dict[str, PitHistogram]:
    """Histograms of the predictive distribution functions at what was observed, under draws from the posterior.

    The average over draws and observations is uniform if the model is right and the draws were those given other data.
    With the data of the fit it bows a little in the middle. A flat histogram does not show that a model is right: noise
    that is learned may stand for what is missing (Houlsby, 2014, section 8.2.6, with intervals for discrete data).

    **Example:**

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import LaplaceApproximation, predictive_pit
    >>> def model(y):
    ...     level = numpyro.sample("level", dist.Normal(0, 5))
    ...     numpyro.sample("y", dist.Normal(level, 1.0), obs=y)
    >>> engine = LaplaceApproximation(model)
    >>> engine.run(jax.random.key(0), jax.random.normal(jax.random.key(1), (1000,)))
    >>> bool(predictive_pit(engine)["y"].kl < 0.05)
    True

    :param source: an engine or ``MCMC`` after its run, or draws with ``samples``, ``model``, ``args`` and ``kwargs``.
    :param int num_bins: number of bins of equal width.
    :param int num_samples: number of draws.
    :param rng_key: chooses among draws; a fixed key if left out.
    :return: a histogram for each observed site; masked observations are left out.
    :raises TypeError: if a site has no distribution function, such as a multivariate one, or the source no draws.
    """
    model, args, kwargs, samples = _draws(source, num_samples, rng_key)
    kinds = _sites(model, args, kwargs)

    def limits(draw: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        replayed = handlers.substitute(handlers.seed(model, 0), data=dict(draw))
        with handlers.block():
            sites = handlers.trace(replayed).get_trace(*args, **kwargs)
        return {name: _limits(name, sites[name]) for name in kinds}

    below: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
    number = len(next(iter(samples.values()))) if samples else 1
    for place in range(number):
        found = run_compiled(limits, {name: value[place] for name, value in samples.items()})
        for name, (low, high) in found.items():
            masses = pit_histogram(np.asarray(low), np.asarray(high), num_bins).density / num_bins
            below[name].append(masses)
    return {name: _histogram(np.mean(masses, 0)) for name, masses in below.items()}


def _draws(source: Any, number: int, rng_key: Array | None) -> tuple[Callable[..., Any], Any, Any, dict[str, Array]]:
    """Model, its arguments, and as many draws of its sites."""
    model = getattr(source, "model", None) or getattr(getattr(source, "sampler", None), "model", None)
    has_draws = hasattr(source, "get_samples") or hasattr(source, "samples")
    if model is None or not has_draws or isinstance(source, type):
        raise wrong_kind(
            "predictive_pit", source, "an engine or MCMC after its run, or numpyro_ext.design.draws_of(...)"
        )
    key = jax.random.key(0) if rng_key is None else rng_key
    if hasattr(source, "get_samples"):
        samples = dict(source.get_samples())
        args, kwargs = getattr(source, "_args", ()), getattr(source, "_kwargs", {})
    else:
        samples, args, kwargs = dict(source.samples), source.args, source.kwargs
    total = len(next(iter(samples.values()))) if samples else 1
    places = np.asarray(jax.random.choice(key, total, (min(number, total),), replace=False))
    return model, args, kwargs, {name: jnp.asarray(value)[places] for name, value in samples.items()}


def _sites(model: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    """Names of the observed sites."""
    names: list[str] = []

    def run(key: Array) -> None:
        for name, site in handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs).items():
            if site["type"] == "sample" and site["is_observed"] and not isinstance(site["fn"], dist.Unit):
                names.append(name)

    with handlers.block(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a model has to say was said when it was fitted
        jax.eval_shape(run, jax.random.key(0))
    return names


def _limits(name: str, site: Mapping[str, Any]) -> tuple[Array, Array]:
    """Distribution functions just below and at the observations of a site, ``nan`` where they are masked."""
    fn, mask = site["fn"], jnp.asarray(True)
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            mask = mask & jnp.asarray(fn._mask)
        fn = fn.base_dist
    value = jnp.asarray(site["value"])
    if fn.event_shape:
        raise TypeError(
            f"Site {name!r} is {type(fn).__name__}, whose values are vectors and have no single distribution."
        )
    if fn.has_enumerate_support:
        support = fn.enumerate_support(expand=False)
        masses = jnp.exp(jnp.broadcast_to(fn.log_prob(support), (len(support), *value.shape)))
        high = jnp.sum(jnp.where(support <= value, masses, 0.0), 0)
        low = jnp.sum(jnp.where(support < value, masses, 0.0), 0)
    else:
        try:
            high = jnp.asarray(fn.cdf(value))
            low = high
            if fn.support.is_discrete:
                low = jnp.where(value > 0, fn.cdf(jnp.maximum(value - 1, 0)), 0.0)
        except NotImplementedError as error:
            raise TypeError(f"Site {name!r}: {type(fn).__name__} has no distribution function in NumPyro.") from error
    mask = jnp.broadcast_to(_aligned(mask, value.ndim), value.shape)
    low, high = (jnp.where(mask, jnp.clip(side, 0.0, 1.0), jnp.nan) for side in (low, high))
    return low, high


def _aligned(mask: Array, ndim: int) -> Array:
    """A mask of the batch of a distribution that was declared an event, with the axes of the event behind."""
    return mask.reshape(*mask.shape, *(1,) * (ndim - mask.ndim)) if 0 < mask.ndim < ndim else mask
