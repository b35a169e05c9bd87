"""Moments that integrals of a log factor give, and the questions that they ask of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


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


class Outcomes(NamedTuple):
    """Possible outcomes of an observation: categories, counts or real numbers."""

    field: str
    """Field of the potential that holds the values that were observed."""
    number: int | None = None
    """Number of categories ``0, ..., number - 1``."""
    limit: Array | None = None
    """The largest count; none, and no width, for counts without end."""
    width: Array | float | None = None
    """Scale on which the density of real outcomes varies at a given predictor."""


class LogFactor(Protocol):
    """Questions that integrals ask of a factor: every :class:`~numpyro_ext.potentials.Potential` has it, and says
    more of it."""

    @property
    def is_log_concave(self) -> bool:
        """True if the log density is concave."""

    @property
    def is_smooth(self) -> bool:
        """True if second derivatives exist and carry the curvature."""

    @property
    def has_closed_derivatives(self) -> bool:
        """True if :meth:`derivatives` is cheaper than to differentiate :meth:`log_density`."""

    def log_density(self, eta: ArrayLike) -> Array:
        """Elementwise log density."""

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        """Log density, slope and curvature."""

    def logistic_terms(self) -> LogisticTerms | None:
        """The factor as logistic log-partitions, if it is of that form."""
