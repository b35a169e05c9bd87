"""Read a NumPyro model as latent Gaussian."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array

from ..model.priors import is_gaussian
from ..model.search import Form, read_first
from .reading import LatentGaussianReading

__all__ = ["LATENT_GAUSSIAN", "read_latent_gaussian"]

LATENT_GAUSSIAN = Form(
    LatentGaussianReading,
    is_gaussian,
    "the model has no Gaussian latent site (latent sites: {}). This engine needs a field of Normal, "
    "MultivariateNormal, LowRankMultivariateNormal, GaussianRandomWalk, CAR or flat real sites; use NUTS.",
)


def read_latent_gaussian(
    model: Callable[..., Any],
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    field: Sequence[str] | None = None,
    init_values: Mapping[str, Any] | None = None,
    rng_key: Array | None = None,
    check: bool = True,
) -> LatentGaussianReading:
    """Read a model as latent Gaussian: the largest jointly Gaussian field, affine predictors, one factor each.

    The field is the largest set of latent sites that is jointly Gaussian, and in which every predictor is jointly
    affine, given all other sites; among sets of equal size the one whose factors have closed forms. Everything else
    becomes a hyperparameter.

    :param model: a NumPyro model.
    :param tuple args: its arguments, which stay concrete.
    :param dict kwargs: its keyword arguments.
    :param field: names of the sites to use as field, instead of searching.
    :param dict init_values: starting values of hyperparameters (constrained), instead of the centres of their priors;
        the model need not have a density elsewhere.
    :param rng_key: for models that draw random numbers themselves.
    :param bool check: compare the form with NumPyro's log density at random points.
    :return: the reading.
    :raises ModelStructureError: naming the site that does not fit, what was found there and what to do.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro_ext.structure import read_latent_gaussian
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     f = numpyro.sample("f", dist.Normal(0.0, scale).expand([3]).to_event(1))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)
    >>> reading = read_latent_gaussian(model, (jnp.array([1, 0, 4]),))
    >>> reading.field, tuple(reading.hyper)
    (('f',), ('scale',))

    Cost: a few abstract traces of the model; with ``check`` one compilation, reused for data of the same shapes.
    """
    return read_first(
        [LATENT_GAUSSIAN], model, args, kwargs, field=field, init_values=init_values, rng_key=rng_key, check=check
    )
