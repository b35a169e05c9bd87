"""Factors with two modes, of which a Gaussian posterior covers one, or the valley between them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....potentials.elementwise import ElementwisePotential
from ....potentials.pairs import PairPotential
from ....structure import LatentGaussian, LatentGaussianReading, ModelStructureError
from ..algorithms.posterior import prior_range

_BY_COLUMNS = (
    "If columns of zeros and ones among the data decide which, choose by jnp.where(column == 1, one, other): then each "
    "observation sees one regression, and there is one mode."
)
_DEEPEST = 0.5
_GRID = np.linspace(-4.0, 4.0, 129)


def valley_depths(form: LatentGaussian, first: int) -> Array:
    """Depth of the deepest valley of each factor times the prior of its predictor, in nats, over four deviations.

    Zero for log-concave factors; for others at most the drop from the lower of two maxima to the minimum in between.

    Cost: the prior variances of all predictors, and 129 evaluations of the family.

    :param LatentGaussian form: the model.
    :param int first: number of the family of factors.
    :return: shape ``(num_rows,)`` of the family; nan where the prior of a predictor is flat.
    """
    return shared(_depths)(form, first=first)


def _depths() -> Callable[..., Array]:
    return quick_jit(_valley_depths, is_small=True, static_argnames="first")


def _valley_depths(form: LatentGaussian, first: int) -> Array:
    potential, (mean, scale) = form.potentials[first], prior_range(form, first)
    grid = jnp.asarray(_GRID, mean.dtype)
    values = lax.map(lambda z: potential.log_density(mean + z * scale) - 0.5 * z**2, grid)
    low = lax.cummax(values)
    high = lax.cummax(values, reverse=True)
    depth = jnp.max(jnp.where(jnp.isfinite(values), jnp.minimum(low, high) - values, 0.0), axis=0)
    return jnp.where(form.observed[first], depth, 0.0)


def _mixtures(reading: LatentGaussianReading) -> list[str]:
    """Names of the sites whose observations belong to one of two regressions."""
    bases = [getattr(potential, "base", None) for potential in reading.abstract_form.potentials]
    return [
        name
        for name, base in zip(reading.factor_names, bases, strict=True)
        if isinstance(base, PairPotential) and base.is_mixture
    ]


def check_mixtures(reading: LatentGaussianReading, method: str) -> None:
    """Refuse mixtures of two regressions, whose posterior has a mode for each way to name them.

    :param LatentGaussianReading reading: of the model.
    :param str method: what a Gaussian is fitted by, in words.
    :raises ModelStructureError: naming the site.
    """
    for name in _mixtures(reading):
        raise ModelStructureError(
            f"Each observation of site {name!r} belongs to one of two regressions, both of which are in the field "
            f"{list(reading.field)}: the posterior has several modes, and {method} fits one Gaussian, which covers "
            "one of them or what lies between. LaplaceApproximation describes the mode that it finds; with "
            "field=[...] the coefficients of one regression stay, and those of the other are set to a point; NUTS "
            f"draws from all modes. {_BY_COLUMNS}",
            site=name,
        )


def explain_two_modes(reading: LatentGaussianReading, hyper: dict[str, Array]) -> list[str]:
    """A message for each observed site whose factors have two modes under the prior; families that are known have one.

    :param LatentGaussianReading reading: of the model.
    :param dict hyper: all hyperparameters, as they were found.
    """
    potentials = reading.abstract_form.potentials
    numbers = [number for number, potential in enumerate(potentials) if isinstance(potential, ElementwisePotential)]
    messages = [
        f"Each observation of {name!r} belongs to one of two regressions, so that the posterior has several modes: "
        f"this is one of them. NUTS draws from all. {_BY_COLUMNS}"
        for name in _mixtures(reading)
    ]
    if not numbers:
        return messages
    form = reading.compiled_form(hyper)
    for number in numbers:
        depth = np.asarray(valley_depths(form, number))
        count = int(np.sum(depth > _DEEPEST))
        if count:
            name, have = reading.factor_names[number], "has" if count == 1 else "have"
            messages.append(
                f"{count} of {depth.size} factors of {name!r} {have} two modes in their predictor, with valleys of up "
                f"to {np.nanmax(depth):.1f} nats between them: a Gaussian posterior covers one of the two, or what "
                "lies between. NUTS draws from both; where only one is of interest, give the field a prior that leaves "
                "out the other."
            )
    return messages
