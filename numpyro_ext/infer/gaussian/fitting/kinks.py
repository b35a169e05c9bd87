"""Factors whose slope jumps, as an absolute value or a quantile loss that is written out by hand."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....potentials.elementwise import ElementwisePotential
from ....structure import LatentGaussian, LatentGaussianReading
from ..algorithms.posterior import prior_range

_GRID = np.linspace(-4.0, 4.0, 129)
_NUM_HALVINGS = 24
_SMALLEST = 1e-3


@partial(jax.jit, static_argnames="first")
def slope_jumps(form: LatentGaussian, first: int) -> Array:
    """The largest jump of each factor's slope over four prior deviations of its predictor, as a part of how much the
    slope changes there in all; next to nothing for smooth factors.

    Cost: the prior variances of all predictors, and 153 slopes of the family.

    :param LatentGaussian form: the model.
    :param int first: number of the family of factors.
    :return: shape ``(num_rows,)`` of the family; nan where the prior of a predictor is flat.
    """
    potential, (mean, scale) = form.potentials[first], prior_range(form, first)

    def slope(z: Array) -> Array:
        return jax.jvp(potential.log_density, (mean + z * scale,), (scale,))[1]

    grid = jnp.asarray(_GRID, mean.dtype)
    slopes = lax.map(lambda z: slope(jnp.full_like(mean, z)), grid)
    changes = jnp.abs(jnp.diff(slopes, axis=0))
    steepest = jnp.argmax(jnp.where(jnp.isfinite(changes), changes, -1.0), axis=0)
    ends = [(grid[at], jnp.take_along_axis(slopes, at[None], axis=0)[0]) for at in (steepest, steepest + 1)]

    def halve(_: int, ends: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
        (low, below), (high, above) = ends
        middle = 0.5 * (low + high)
        between = slope(middle)
        is_below = jnp.abs(between - below) > jnp.abs(above - between)
        low, below = (jnp.where(is_below, x, y) for x, y in ((low, middle), (below, between)))
        high, above = (jnp.where(is_below, x, y) for x, y in ((middle, high), (between, above)))
        return [(low, below), (high, above)]

    (_, below), (_, above) = lax.fori_loop(0, _NUM_HALVINGS, halve, ends)
    jump = jnp.abs(above - below) / jnp.maximum(jnp.sum(changes, axis=0), 1.0)
    return jnp.where(form.observed[first], jump, 0.0)


def explain_kinks(reading: LatentGaussianReading, hyper: dict[str, Array]) -> list[str]:
    """A message for each observed site whose factors have kinks; of families that are known it is known before.

    :param LatentGaussianReading reading: of the model.
    :param dict hyper: all hyperparameters, as they were found.
    """
    form, messages = None, []
    for number, potential in enumerate(reading.abstract_form.potentials):
        if isinstance(potential, ElementwisePotential):
            form = reading.compiled_form(hyper) if form is None else form
            jumps = np.asarray(slope_jumps(form, number))
            count = int(np.sum(jumps > _SMALLEST))
            if count:
                messages.append(
                    f"{count} of {jumps.size} factors of {reading.factor_names[number]!r} have a kink, at which their "
                    "slope jumps (an absolute value, a maximum, a comparison with the predictor): Laplace's method "
                    "needs their curvature, of which there is none, and more steps do not help. Use EP, which "
                    "integrates over kinks, or write a smooth function."
                )
    return messages
