"""Priors of latent sites outside the two sides of a bilinear form, read from derivatives of their log density."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ...errors import ModelStructureError
from ..form import Bilinear
from ..reading import BilinearReading

_TOLERANCE = {64: 1e-8, 32: 2e-3}
"""Relative errors of numbers of a form, by the bits of its numbers."""

GAMMA_FAMILIES = frozenset({"InverseGamma", "Gamma"})
"""Families of variances, and of precisions, that stay what they are where these are noise of Gaussians."""

FormAt = Callable[[Mapping[str, Any]], Bilinear]
"""Form at values of all sites outside the two sides."""


class PriorSearch:
    """Search for the part that latent sites have in a form.

    :param BilinearReading reading: of the model.
    :param form_at: from values of all hyperparameters to the form.
    :param free: hyperparameters that are looked at.
    :param fixed: values of all others.
    """

    taken: ClassVar[str]
    """Sites that are integrated over, as a sentence."""

    def __init__(
        self, reading: BilinearReading, form_at: FormAt, free: tuple[str, ...], fixed: Mapping[str, object]
    ) -> None:
        self.reading, self.form_at, self.free = reading, form_at, free
        start = {**reading.initial_hyper(), **fixed}
        self.start = {n: np.asarray(v, float) if n in free else v for n, v in start.items()}
        self.rng = np.random.default_rng(0)
        self.form = form_at(start)
        self.tolerance = _TOLERANCE[jnp.finfo(self.form.offset.dtype).bits]

    def refusal(self, name: str, reason: str) -> ModelStructureError:
        """Error that says why a site is not integrated over."""
        return ModelStructureError(
            f"latent site '{name}' ({self.reading.sites[name].family}, shape {self.reading.hyper[name].shape}) is not "
            f"integrated over: {reason}. {self.taken}",
            site=name,
        )

    def is_gaussian(self, name: str) -> bool:
        """True for sites of normal distributions."""
        return self.reading.sites[name].family == "Normal"

    def check_root(self, name: str) -> None:
        """Refuse a site whose prior depends on other latent sites."""
        latent = [n for n in self.reading.sites_behind(name) if n in self.free]
        if latent:
            raise self.refusal(name, f"its prior depends on {latent}")

    def slope(self, name: str, value: np.ndarray, hyper: Mapping[str, object]) -> np.ndarray:
        """Derivative of the log prior of a site in its elements, at a value of all of them."""
        values = {n: jnp.asarray(v) for n, v in hyper.items()}
        at = jnp.broadcast_to(jnp.asarray(value, self.form.offset.dtype), self.start[name].shape)
        return np.asarray(shared(_prior_slope, self.reading, name)(at, values, self.reading.data)).reshape(-1)

    def gamma_prior(self, name: str) -> tuple[np.ndarray, np.ndarray, bool]:
        """Shape and rate of the prior of each precision, and whether the site is these precisions.

        They are read from the derivative of the log density in the log of the site, and compared at a third point.
        """
        family = self.reading.sites[name].family
        if family not in GAMMA_FAMILIES:
            raise self.refusal(name, f"its prior is {family}")
        self.check_root(name)
        at_one, at_two, at_five = (x * self.slope(name, np.asarray(x), self.start) for x in (1.0, 2.0, 5.0))
        if family == "Gamma":
            rate = at_one - at_two
            shape, third = at_one + 1.0 + rate, at_one - 4.0 * rate
        else:
            rate = 2.0 * (at_one - at_two)
            shape, third = rate - at_one - 1.0, at_one - 0.8 * rate
        if not np.allclose(third, at_five, rtol=100 * self.tolerance, atol=100 * self.tolerance):
            raise self.refusal(name, "its density is none of independent gamma precisions")
        return shape, rate, family == "Gamma"

    def normal_prior(self, name: str, hyper: Mapping[str, Array]) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances of independent Gaussian elements given the other sites."""
        at_zero, at_one = (self.slope(name, np.asarray(x), hyper) for x in (0.0, 1.0))
        precision = at_zero - at_one
        return at_zero / precision, 1.0 / precision


def _prior_slope(reading: BilinearReading, name: str) -> Callable[..., Array]:
    def density(x: Array, values: dict[str, Array], data: Sequence[object]) -> Array:
        return reading.log_prior_of(name, {**values, name: x}, data)

    return quick_jit(jax.grad(density))
