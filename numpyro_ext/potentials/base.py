"""The protocol of a scalar factor ``t(eta)``: what every engine may ask of one observation."""

from __future__ import annotations

from typing import ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..linalg.frozen_pytree import frozen_pytree
from ..linalg.saved_names import saved_as
from .integrals.expectation import expected_log_density
from .integrals.tilted.tilted_moments import tilted_moments
from .moments import ExpectedLogDensity, LogisticTerms, Outcomes, TiltedMoments

_Class = TypeVar("_Class", bound=type)


class Potential:
    """A family of factors ``t_i(eta_i)``, one per element of its parameter arrays.

    Concrete potentials are frozen dataclasses registered as pytrees with :func:`potential`. Their array fields
    broadcast against ``eta``, so one object holds the factors of a whole observed site. A subclass must define
    :meth:`log_density` or :meth:`derivatives`; the others have defaults that work for any elementwise function.
    """

    is_log_concave: ClassVar[bool] = False
    """True if the log density is concave, for every observation and all parameters."""
    is_smooth: ClassVar[bool] = True
    """True if second derivatives exist and carry the curvature (false for kinks): Laplace's method needs it."""
    is_analytic: ClassVar[bool] = False
    """True if the log density, for all parameters, is analytic at least 2.5 to either side of the real line (as that
    of logistic, probit and Gaussian factors), and grows no faster than a polynomial along it. Expectations under
    products of Gaussian vectors need it: see
    :func:`~numpyro_ext.potentials.integrals.products.bilinear_expectation.expected_bilinear_log_density`."""
    has_exponential_mean: ClassVar[bool] = False
    """True if :meth:`mean` is proportional to the exponential of the predictor: its expectation is then taken in
    closed form, and may be infinite. Other means must not grow faster than a polynomial where a bilinear model uses
    them."""
    is_elementwise: ClassVar[bool] = False
    """True if every field is a number for each factor or one for all, so that the fields of several objects, one
    after the other, are those of one."""
    has_fixed_shape: ClassVar[bool] = False
    """True if the log density takes all predictors together only, so that parts of them are no factors of their own."""
    has_closed_derivatives: ClassVar[bool]
    """True if the class has :meth:`derivatives` of its own."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.has_closed_derivatives = cls.derivatives is not Potential.derivatives

    def log_density(self, eta: ArrayLike) -> Array:
        r"""Elementwise :math:`\log t_i(\eta_i)`, with every normalising constant of the observation; by default what
        :meth:`derivatives` of the class has first."""
        if not self.has_closed_derivatives:
            raise NotImplementedError
        return self.derivatives(eta)[0]

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, v)`, by quadrature unless there is a closed form.

        :param ArrayLike mean: cavity means :math:`\mu`.
        :param ArrayLike variance: cavity variances :math:`v`.
        :param ArrayLike power: exponent :math:`p`. Closed forms that hold for ``p = 1`` only are used for a Python
            number, not for an array (which may be traced).
        """
        return self._tilted_moments(mean, variance, power, only_log_z=False)

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """The rule behind both methods; with ``only_log_z`` derivatives are asked of ``log_z`` alone."""
        return tilted_moments(self, mean, variance, power, only_log_z=only_log_z)

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        r"""Gaussian expectation of the log factor and its slopes, by quadrature unless there is a closed form.

        :param ArrayLike mean: means :math:`m` of the predictor.
        :param ArrayLike variance: variances :math:`v` of the predictor.
        """
        return expected_log_density(self, mean, variance)

    def mean(self, eta: ArrayLike) -> Array | None:
        """Elementwise mean of the observations at a predictor, or ``None`` where they have none that is known."""
        return None

    def outcomes(self) -> Outcomes | None:
        """Outcomes that could have been observed, or ``None`` where that is not known.

        Where the factor is the density of an observation, of which one field holds the value: the information that an
        observation would give is asked of it (:mod:`~numpyro_ext.potentials.information`).
        """
        return None

    def has_finite_expectation(self) -> Array:
        """Mask of the factors whose logarithm has a finite Gaussian expectation, as booleans that broadcast.

        A factor that is zero on part of the line has none, and no variational Gaussian posterior. Functions that are
        not known are assumed to have one.
        """
        return jnp.asarray(True)

    def has_finite_variance(self) -> Array:
        """Mask of the factors that, as functions of the predictor, are densities with a variance, as booleans that
        broadcast.

        These say where a predictor is without anything else: coefficients of which the data know nothing have no more.
        Functions that are not known are assumed to have none.
        """
        return jnp.asarray(False)

    def logistic_terms(self) -> LogisticTerms | None:
        """The factor as a linear function minus logistic log-partitions, or ``None`` if the family is not of that form.

        What has such terms can be served by a local variational bound: see :class:`BoundedPotential`.
        """
        return None

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> Array:
        r"""Elementwise :math:`\log \int t_i(\eta)^p N(\eta \mid m, v)\, d\eta`: with ``p = 1`` the log predictive
        density.

        It is what :meth:`tilted_moments` has in ``log_z``, with derivatives that cost less.
        """
        if type(self).tilted_moments is Potential.tilted_moments:
            return self._tilted_moments(mean, variance, power, only_log_z=True).log_z
        return self.tilted_moments(mean, variance, power).log_z

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        r"""Value, first and second derivative of :math:`\log t_i` at ``eta``, elementwise."""
        eta = jnp.asarray(eta)
        ones = jnp.ones_like(eta)

        def first(x: Array) -> tuple[Array, Array]:
            return jax.jvp(self.log_density, (x,), (ones,))

        (value, slope), (_, curvature) = jax.jvp(first, (eta,), (ones,))
        return value, slope, curvature


@dataclass_transform(frozen_default=True)
def potential(cls: _Class) -> _Class:
    """Class decorator of potentials: a frozen dataclass, registered as a pytree; see :func:`frozen_pytree`."""
    made = frozen_pytree(cls)
    return saved_as(cls.__name__)(made) if cls.__module__.startswith("numpyro_ext.") else made
