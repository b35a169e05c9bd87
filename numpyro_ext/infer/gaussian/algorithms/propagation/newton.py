r"""Sites of expectation propagation by Newton's method, from where a fit of almost the same data ended.

Parallel sweeps gain a constant share of a digit each, twenty of them after one datum more on a Gaussian process. Here
the residual of a sweep is linearised: each factor sees the mean and the variance of its own predictor, and these answer
to changes of all sites through the covariance :math:`V` of the predictors, by :math:`dm = V (d\nu - m\, d\tau)` and
:math:`dv = -(V \circ V)\, d\tau`. Products with the derivative cost two with matrices of that size, so GMRES solves for
the step in less than a sweep takes, and four steps do. They are a place to start from and no more: sweeps go on from
there and say whether it is the end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....linalg.gaussian.marginals import Marginals
from .....linalg.gaussian.spaces.observation_space import ObservationSpace
from .....potentials.vector_rows import vector_factors
from .....structure.latent_gaussian import LatentGaussian
from ..posterior import gaussian_prior
from .tilting import propose, tilt

_MOST_STEPS = 6
_NUM_PRODUCTS = 10
"""Products of GMRES for each step: two digits, as many as the next step can use."""
_SMALL = 1e-7
"""Residual, in deviations of the predictors, after which one step more leaves rounding."""


class _Sites(NamedTuple):
    number: Array
    precision: Array
    shift: Array
    residual: Array
    """Before the last step."""
    is_nearer: Array
    """True if each residual has been less than the one before."""


def newton_sites(
    form: LatentGaussian, precision: Array, shift: Array, *, power: float = 1.0, where: Array | bool = True
) -> tuple[Array, Array]:
    """Sites nearer to a fixed point, or the same ones where the steps do not come nearer.

    They stay the same, too, where this has nothing to offer: for factors that are not log-concave or have several
    predictors, and where the algebra is not that of one block of observations.

    :param LatentGaussian form: the model.
    :param jax.Array precision: of the sites, shape ``(num_rows,)``.
    :param jax.Array shift: precision times mean of the sites.
    :param float power: see :func:`~.expectation_propagation.step`.
    :param where: false for sites that are no place to start from.
    :return: precisions and shifts.
    """
    prior = gaussian_prior(form)
    is_one_block = isinstance(prior, ObservationSpace) and prior.rows.shape[0] == 1
    is_plain = all(p.is_log_concave and vector_factors(p) is None for p in form.potentials)
    if not (is_one_block and is_plain):
        return precision, shift

    def matched(mean: Array, variance: Array, precision: Array, shift: Array) -> tuple[Array, Array]:
        here = Marginals(mean, variance, 1.0 - precision * variance, jnp.zeros((), mean.dtype))
        return propose(form, precision, shift, tilt(form, here, precision, shift, power), power)[:2]

    def proceed(sites: _Sites) -> Array:
        return (sites.number < _MOST_STEPS) & (sites.residual > small) & sites.is_nearer

    def step(sites: _Sites) -> _Sites:
        _, precision, shift, before, _ = sites
        means, covariances = prior.condition(precision, shift - precision * form.offset).sequential_moments()
        mean, covariance = means[0], covariances[0]
        variance = jnp.diagonal(covariance)
        eta, deviation = mean + form.offset, jnp.sqrt(variance)

        def scaled(precision: Array, shift: Array) -> Array:
            return jnp.stack([precision * variance, (shift - eta * precision) * deviation])

        def unscaled(change: Array) -> tuple[Array, Array]:
            precision = change[0] / variance
            return precision, change[1] / deviation + eta * precision

        # elementwise functions, so four derivatives are all there are
        at = mean, variance, precision, shift
        basis = [jnp.zeros((4, *mean.shape), mean.dtype).at[i].set(1.0) for i in range(4)]
        new, slopes = jax.vmap(lambda *t: jax.jvp(matched, at, t), out_axes=(None, 0))(*basis)
        squares = jnp.square(covariance)

        def derivative(change: Array) -> Array:
            d_precision, d_shift = unscaled(change)
            moved = covariance @ (change[1] / deviation), -(squares @ d_precision), d_precision, d_shift
            answers = [sum(slope[i] * moved[i] for i in range(4)) for slope in slopes]
            return change - scaled(answers[0], answers[1])

        residual = scaled(new[0] - precision, new[1] - shift)
        change, _ = jax.scipy.sparse.linalg.gmres(
            derivative, residual, restart=_NUM_PRODUCTS, maxiter=1, tol=0.0, solve_method="batched"
        )
        size = jnp.max(jnp.abs(residual))
        d_precision, d_shift = unscaled(change)
        is_nearer = (size < before) & jnp.all(jnp.isfinite(change))
        return _Sites(sites.number + 1, jnp.maximum(precision + d_precision, 0.0), shift + d_shift, size, is_nearer)

    small = max(_SMALL, 100.0 * float(jnp.finfo(precision.dtype).eps))
    infinity = jnp.full((), jnp.inf, precision.dtype)
    found = lax.while_loop(proceed, step, _Sites(jnp.asarray(0), precision, shift, infinity, jnp.asarray(where)))
    is_nearer = found.is_nearer & jnp.asarray(where)
    return jnp.where(is_nearer, found.precision, precision), jnp.where(is_nearer, found.shift, shift)
