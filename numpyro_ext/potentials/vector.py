"""The protocol of a factor ``t(eta)`` of a small vector of predictors: categories, or a location and a log scale."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from jax import Array
from jax.typing import ArrayLike


class VectorTiltedMoments(NamedTuple):
    r"""Moments of the tilted density :math:`t(\eta)^p\, N(\eta \mid \mu, C) / \hat Z`, one entry per factor."""

    log_z: Array
    """:math:`\\log \\hat Z`, shape ``(...)``."""
    mean: Array
    """Shape ``(..., K)``."""
    covariance: Array
    """Shape ``(..., K, K)``."""
    site_precision: Array | None = None
    """Precision of the site that has these moments under the same cavity, shape ``(..., K, K)``, where the rule
    knows it better than by the difference of two inverses, which loses digits where the factor says little."""
    site_shift: Array | None = None
    """Precision times mean of that site, shape ``(..., K)``."""


class VectorExpectedLogDensity(NamedTuple):
    r"""Gaussian expectation :math:`f(m, V) = E_{N(\eta \mid m, V)} \log t(\eta)` of log factors, or a lower bound.

    The slopes are stored beside the value because a variational site is made of them: its precision is
    :math:`-2\, \partial f / \partial V`.
    """

    value: Array
    """Shape ``(...)``."""
    mean_slope: Array
    """:math:`\\partial f / \\partial m`, shape ``(..., K)``."""
    covariance_slope: Array
    """:math:`\\partial f / \\partial V`, symmetric, with :math:`df = tr(G\\, dV)`; shape ``(..., K, K)``."""


class VectorPotential:
    """A family of factors ``t_i(eta_i)``, ``eta_i`` a vector of ``dimension`` predictors on the last axis.

    Concrete potentials are frozen dataclasses registered as pytrees with :func:`~numpyro_ext.potentials.potential`.
    Their array fields broadcast against ``eta`` without its last axis, so one object holds the factors of a whole
    observed site. Subclasses define all of the members but :meth:`tilted_moments` and :meth:`log_density`.
    """

    is_log_concave: ClassVar[bool] = False
    has_tilted_moments: ClassVar[bool] = False
    """True if :meth:`tilted_moments` is there: expectation propagation needs it."""

    @property
    def dimension(self) -> int:
        """Number of predictors of one factor."""
        raise NotImplementedError

    @property
    def is_lower_bound(self) -> bool:
        """True if :meth:`expected_log_density` is the expectation, to many digits, or below it; not merely near it."""
        raise NotImplementedError

    def log_density(self, eta: ArrayLike) -> Array:
        r""":math:`\log t_i(\eta_i)` of shape ``(...)`` for ``eta`` of shape ``(..., K)``, with all constants."""
        return self.derivatives(eta)[0]

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        r"""Value ``(...)``, gradient ``(..., K)`` and Hessian ``(..., K, K)`` of :math:`\log t_i` at ``eta``."""
        raise NotImplementedError

    def expected_log_density(self, mean: ArrayLike, covariance: ArrayLike) -> VectorExpectedLogDensity:
        r"""Gaussian expectation of the log factors, or a bound of it, and its slopes.

        :param ArrayLike mean: means :math:`m` of the predictors, shape ``(..., K)``.
        :param ArrayLike covariance: covariances :math:`V`, shape ``(..., K, K)``, symmetric and positive semidefinite.
        """
        raise NotImplementedError

    def tilted_moments(self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike = 1.0) -> VectorTiltedMoments:
        r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, C)`, for families that say that they have them.

        :param ArrayLike mean: cavity means :math:`\mu`, shape ``(..., K)``.
        :param ArrayLike covariance: cavity covariances :math:`C`, shape ``(..., K, K)``, positive definite.
        :param ArrayLike power: exponent :math:`p`.
        """
        raise NotImplementedError(f"{type(self).__name__} has {self.dimension} predictors: no tilted moments.")

    def tilted_moments_near(
        self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike, near: ArrayLike, spread: ArrayLike
    ) -> VectorTiltedMoments:
        r"""The same, where it is known about where the tilted densities are: the nearer, the less work for some rules.

        :param ArrayLike near: guesses of their means, shape ``(..., K)``. Results do not depend on them.
        :param ArrayLike spread: guesses of their covariances, shape ``(..., K, K)``.
        """
        return self.tilted_moments(mean, covariance, power)

    def in_brief(self) -> VectorPotential:
        """The same factors with moments by quick rules alone, whose ``log_z`` is nan where these do not serve; itself
        where it has no others."""
        return self

    def log_normaliser(self, mean: ArrayLike, covariance: ArrayLike) -> Array:
        r"""Log predictive density :math:`\log \int t_i(\eta) N(\eta \mid m, V)\, d\eta` of shape ``(...)``."""
        raise NotImplementedError
