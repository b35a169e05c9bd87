"""Read a NumPyro model as a bilinear model of counts, or of other observations with log-concave factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpyro.distributions as dist
from jax import Array

from ..conflict import Conflict
from ..errors import ModelStructureError
from ..model.priors import is_gaussian, unwrap
from ..model.search import check_hyper, field_names, find_candidates, inspect_model
from ..model.tracing import inspect_sites, mark_candidates
from ..model.validation import check_data
from ..model.verification import check_form
from .factors import Unlisted
from .reading import BilinearReading

__all__ = ["read_bilinear", "read_like"]

_NO_GAUSSIAN_SITE = (
    "the model has no Gaussian latent site (latent sites: {}). This engine needs two blocks of Normal or "
    "MultivariateNormal sites; use NUTS."
)


def read_bilinear(
    model: Callable[..., Any],
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    field: Sequence[str] | None = None,
    init_values: Mapping[str, Any] | None = None,
    rng_key: Array | None = None,
    check: bool = True,
    unlisted_cells: Unlisted = "missing",
) -> BilinearReading:
    """Read a model as bilinear: the predictors of its observations are affine in each of two Gaussian blocks.

    Observations are Poisson counts with the rate ``exp(predictor)`` or ``softplus(predictor)``, negative binomial
    counts, Bernoulli or binomial outcomes, or ordered categories, of one kind in a model.

    Products between Gaussian sites are found and two-coloured; sites that enter linearly (biases) join the block with
    which they share their index. What belongs to neither block becomes a hyperparameter: a common intercept, scales,
    the means of hierarchical priors.

    :param model: a NumPyro model.
    :param tuple args: its arguments, which stay concrete.
    :param dict kwargs: its keyword arguments.
    :param field: names of the sites of both blocks, instead of searching.
    :param dict init_values: starting values of hyperparameters (constrained), instead of the centres of their priors;
        the model need not have a density elsewhere.
    :param rng_key: for models that draw random numbers themselves.
    :param bool check: compare the form with NumPyro's log density at random points.
    :param str unlisted_cells: ``"zero"`` adds counts of zero in all pairs of a row and a column that the model does not
        list, which it then knows nothing of.
    :return: the reading.
    :raises ModelStructureError: naming the site that does not fit, what was found there and what to do.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro_ext.structure import read_bilinear
    >>> def model(rows, cols, y):
    ...     with numpyro.plate("rows", 3):
    ...         w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("cols", 2):
    ...         z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp((w[rows] * z[cols]).sum(-1))), obs=y)
    >>> rows, cols = jnp.array([0, 1, 2, 2]), jnp.array([0, 0, 0, 1])
    >>> reading = read_bilinear(model, (rows, cols, jnp.array([1, 0, 4, 2])))
    >>> reading.sides, [e.shape for e in reading.elements]
    ((('w',), ('z',)), [(3, 2), (2, 2)])

    Cost: a few abstract traces of the model and three compilations, reused for data of the same shapes.
    """
    kwargs, field = dict(kwargs or {}), field_names(field)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    sites = inspect_model(model, args, kwargs, rng_key, init_values)
    sites, names = find_candidates(sites, _is_candidate, _NO_GAUSSIAN_SITE, field=field)
    reasons: list[str] = []
    while True:
        try:
            reading = BilinearReading(model, args, kwargs, sites, names, rng_key, unlisted_cells=unlisted_cells)
            break
        except Conflict as conflict:
            reasons.append(str(conflict))
            remaining = [n for n in names if n not in conflict.sites]
            if field is not None or not remaining or len(remaining) == len(names):
                prefix = "" if field is None else f"With field={list(field)}: "
                raise ModelStructureError(prefix + " ".join(reasons)) from conflict
            names = remaining
    check_hyper(reading, sites)
    if check:
        check_form(reading, rng_key)
    return reading


def read_like(
    reading: BilinearReading,
    args: tuple,
    kwargs: Mapping[str, Any],
    rng_key: Array,
    *,
    is_held_out: bool = False,
    unlisted_cells: Unlisted = "missing",
) -> BilinearReading:
    """Read the model of a reading on other arguments, with the same split, sides and order of components.

    :param BilinearReading reading: of the fit.
    :param bool is_held_out: take the masked observations instead of the others.
    :param str unlisted_cells: as for :func:`read_bilinear`.
    :raises ModelStructureError: if the model has other sites on these arguments.
    """
    sites = mark_candidates(
        inspect_sites(reading.model, args, dict(kwargs), rng_key, reading.initial_hyper()), _is_candidate
    )
    missing = [n for n in reading.field if n not in sites]
    if missing:
        raise ModelStructureError(
            f"on these arguments the model has no site '{missing[0]}', which was fitted.", site=missing[0]
        )
    if not is_held_out:
        check_data(sites)
    return BilinearReading(
        reading.model,
        args,
        dict(kwargs),
        sites,
        reading.field,
        rng_key,
        like=reading,
        is_held_out=is_held_out,
        unlisted_cells=unlisted_cells,
    )


def _is_candidate(fn: Any) -> bool:
    # the values of a random walk are sums of many innovations
    return is_gaussian(fn) and not isinstance(unwrap(fn), dist.GaussianRandomWalk)
