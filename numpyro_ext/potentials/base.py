"""The protocol of a scalar factor ``t(eta)``: what every engine may ask of one observation."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..linalg.frozen_pytree import frozen_pytree
from ..linalg.saved_names import saved_as

__all__ = ["ExpectedLogDensity", "LogisticTerms", "Potential", "TiltedMoments", "potential"]


class TiltedMoments(NamedTuple):
    r"""Moments of the tilted density :math:`t(\eta)^p\, N(\eta \mid \mu, v) / \hat Z`, one entry per factor.

    The site parameters are stored beside the moments because forming them as
    ``1 / variance - 1 / v`` loses all digits when the factor says little.
    """

    log_z: Array
    """:math:`\\log \\hat Z`; differentiable in the cavity and in the parameters of the potential."""
    mean: Array
    """Mean of the tilted density."""
    variance: Array
    """Variance of the tilted density."""
    site_precision: Array
    """:math:`1/\\hat v - 1/v`: the precision that moment matching asks of the site."""
    site_shift: Array
    """:math:`\\hat\\mu/\\hat v - \\mu/v`: the precision times mean that moment matching asks of the site."""


class ExpectedLogDensity(NamedTuple):
    r"""Gaussian expectation :math:`f(m, v) = E_{N(\eta \mid m, v)} \log t(\eta)` of a log factor, or a lower bound.

    The slopes are stored beside the value because a variational site is made of them: its precision is
    :math:`-2\, \partial f / \partial v`.
    """

    value: Array
    mean_slope: Array
    """:math:`\\partial f / \\partial m`, which is :math:`E\\, (\\log t)'` for the expectation itself."""
    variance_slope: Array
    """:math:`\\partial f / \\partial v`, which is :math:`\\tfrac12 E\\, (\\log t)''` for the expectation itself."""


class LogisticTerms(NamedTuple):
    r"""A log factor that is linear but for logistic log-partitions with weights of one sign:

    .. math:: \log t(\eta) = \text{constant} + \text{linear}\;\eta
        - \sum_j \text{weight}_j \log(1 + e^{\text{slope}_j \eta + \text{offset}_j}), \quad \text{weight}_j \ge 0.

    An upper bound of the Gaussian expectation of :math:`\log(1 + e^x)` gives a lower bound of that of the factor. The
    weights, slopes and offsets have the terms on their first axis; the axes after it, and those of ``constant`` and
    ``linear``, broadcast against ``eta``.
    """

    constant: Array
    linear: Array
    weights: Array
    """Non-negative, shape ``(num_terms, ...)``."""
    slopes: Array
    """Shape ``(num_terms, ...)``."""
    offsets: Array
    """Shape ``(num_terms, ...)``."""

    def log_density(self, eta: ArrayLike) -> Array:
        """The log factor that the terms describe, elementwise."""
        eta = jnp.asarray(eta)
        parts = jax.vmap(lambda n, a, b: n * jax.nn.softplus(a * eta + b))(self.weights, self.slopes, self.offsets)
        return self.constant + self.linear * eta - jnp.sum(parts, axis=0)


class Potential:
    """A family of factors ``t_i(eta_i)``, one per element of its parameter arrays.

    Concrete potentials are frozen dataclasses registered as pytrees with :func:`potential`. Their array fields
    broadcast against ``eta``, so one object holds the factors of a whole observed site. A subclass must define
    :meth:`log_density`; the others have defaults that work for any elementwise function.
    """

    is_log_concave: ClassVar[bool] = False
    is_smooth: ClassVar[bool] = True
    """Whether second derivatives exist and carry the curvature (false for kinks): Laplace's method needs it."""

    def log_density(self, eta: ArrayLike) -> Array:
        r"""Elementwise :math:`\log t_i(\eta_i)`, with every normalising constant of the observation."""
        raise NotImplementedError

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, v)`, by quadrature unless there is a closed form.

        :param ArrayLike mean: cavity means :math:`\mu`.
        :param ArrayLike variance: cavity variances :math:`v`.
        :param ArrayLike power: exponent :math:`p`. Closed forms that hold for ``p = 1`` only are used for a Python
            number, not for an array (which may be traced).
        """
        from .integrals.tilted_moments import tilted_moments

        return tilted_moments(self, mean, variance, power)

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        r"""Gaussian expectation of the log factor and its slopes, by quadrature unless there is a closed form.

        :param ArrayLike mean: means :math:`m` of the predictor.
        :param ArrayLike variance: variances :math:`v` of the predictor.
        """
        from .integrals.expectation import expected_log_density

        return expected_log_density(self, mean, variance)

    def has_finite_expectation(self) -> Array:
        """Which factors have a finite Gaussian expectation of their logarithm, as booleans that broadcast.

        A factor that is zero on part of the line has none, and no variational Gaussian posterior. Functions that are
        not known are assumed to have one.
        """
        return jnp.asarray(True)

    def logistic_terms(self) -> LogisticTerms | None:
        """The factor as a linear function minus logistic log-partitions, or ``None`` if the family is not of that form.

        What has such terms can be served by a local variational bound: see :class:`BoundedPotential`.
        """
        return None

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike) -> Array:
        r"""Elementwise :math:`\log \int t_i(\eta) N(\eta \mid m, v)\, d\eta`: the log predictive density."""
        return self.tilted_moments(mean, variance).log_z

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        r"""Value, first and second derivative of :math:`\log t_i` at ``eta``, elementwise."""
        eta = jnp.asarray(eta)
        ones = jnp.ones_like(eta)

        def first(x: Array) -> tuple[Array, Array]:
            return jax.jvp(self.log_density, (x,), (ones,))

        (value, slope), (_, curvature) = jax.jvp(first, (eta,), (ones,))
        return value, slope, curvature


@dataclass_transform(frozen_default=True)
def potential(cls: type) -> type:
    """Class decorator of potentials: a frozen dataclass, registered as a pytree; see :func:`frozen_pytree`."""
    made: type = frozen_pytree(cls)
    return saved_as(cls.__name__)(made) if cls.__module__.startswith("numpyro_ext.") else made
