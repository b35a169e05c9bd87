r"""Variational Bayes for noise variances of Normal cells (Houlsby 2014, section 7.4.1, robust matrix factorisation).

The posterior of a precision is a gamma distribution whose shape :math:`a` is that of the prior and half the number of
cells. So it is known by one number, its mean :math:`a / b`, and expectations of the log factors are those of Normal
cells with the inverse of that mean as variance, up to a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import digamma, gammaln

from .....structure.bilinear.noisy.normal import NormalNoise

Values = Mapping[str, Array]
"""Values of all sites outside the two sides: of noise the inverse mean precision, or the mean of a precision itself."""


def noise_terms(noise: NormalNoise, hyper: Values, log_prior: Callable[[str, Values], Array]) -> Array:
    """What the bound has beside the expected log factors of Normal cells at these values.

    :param log_prior: log prior density of a site at the values.
    """
    total = jnp.zeros(())
    for name, rule in noise.rules.items():
        shape = rule.shape
        constant = gammaln(shape) - shape * jnp.log(shape) + shape
        total += log_prior(name, hyper) + jnp.sum(jnp.log(hyper[name].reshape(-1)) + constant)
    return total


def held_terms(fitted: NormalNoise, new: NormalNoise) -> Array:
    """What the bound of new cells has beside their expected log factors, where noise is that of a fit.

    :param NormalNoise fitted: of the fit.
    :param NormalNoise new: the same sites, with the numbers of new cells.
    """
    rules = fitted.rules
    shapes = {name: rules[name].shape for name in new.names}
    return sum(
        (jnp.sum(rule.half_count * (digamma(shapes[n]) - jnp.log(shapes[n]))) for n, rule in new.rules.items()),
        jnp.zeros(()),
    )


def best_noise(noise: NormalNoise, hyper: Values, bound: Callable[[dict[str, Array]], Array]) -> dict[str, Array]:
    """Values after one update of each site in turn, which is the best while all else is held.

    :param bound: expected log factors as a function of the values, up to a constant. Its slope in the log of a variance
        says what the squares of the residuals are.

    Cost: one gradient of the bound for each site.
    """
    values = dict(hyper)
    for name, rule in noise.rules.items():
        power = -1.0 if name in noise.precisions else 1.0
        old = values[name]

        def moved(log_factor: Array, name: str = name, power: float = power) -> Array:
            return bound({**values, name: values[name] * jnp.exp(power * log_factor).reshape(values[name].shape)})

        variance = (old**power).reshape(-1)
        half_square = jnp.maximum(variance * (jax.grad(moved)(jnp.zeros_like(variance)) + rule.half_count), 0.0)
        new = (rule.prior_rate + half_square) / rule.shape
        values[name] = (new**power).reshape(old.shape)
    return values


def draw_noise(noise: NormalNoise, hyper: Values, rng_key: Array) -> dict[str, Array]:
    """Values with a draw from the posterior of each site of noise."""
    values = dict(hyper)
    for number, (name, rule) in enumerate(noise.rules.items()):
        drawn = jax.random.gamma(jax.random.fold_in(rng_key, number), rule.shape) / rule.shape
        power = 1.0 if name in noise.precisions else -1.0
        values[name] = values[name] * (drawn**power).reshape(values[name].shape)
    return values
