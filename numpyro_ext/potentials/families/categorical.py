"""Unordered categories with one predictor for each of them, and counts of such: multinomial logit and probit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ...linalg.short_axes import times_vector
from ..base import potential
from ..bounds.log_sum_exp import log_sum_exp_bound
from ..integrals.multinomial_probit import multinomial_probit_derivatives
from ..integrals.several_predictors.lattice_around_mode import LARGEST_LATTICE_DIMENSION, LatticeMoments
from ..integrals.several_predictors.softmax_nodes import LARGEST_SOFTMAX_DIMENSION, softmax_moments
from ..integrals.several_predictors.vector_quadrature import (
    LARGEST_TENSOR_DIMENSION,
    difference_expectation,
    log_concave_normaliser,
)
from ..vector import VectorExpectedLogDensity, VectorPotential, VectorTiltedMoments
from ..vector_tilting import log_concave_moments, moments_as_seen


class _CategoricalPotential(VectorPotential):
    """Factors of ``num_categories`` predictors, one of which may be pinned to zero and left out."""

    num_categories: int
    pinned: int | None

    strip: ClassVar[float] = math.pi
    """Distance from the real line, in differences of predictors, within which the probabilities have no singularity."""
    most_differences: ClassVar[int] = LARGEST_LATTICE_DIMENSION
    """Differences of predictors up to which there are nodes for tilted moments."""

    @property
    def has_tilted_moments(self) -> bool:  # type: ignore[override]
        """True if the differences of the predictors are few enough for the nodes."""
        return self.num_categories - 1 <= self.most_differences

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the observations."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if self.num_categories < 2:
            raise ValueError(f"{type(self).__name__} needs at least two categories; got {self.num_categories}.")
        if self.pinned is not None and not -self.num_categories <= self.pinned < self.num_categories:
            raise ValueError(
                f"The pinned category of {type(self).__name__} must be one of the {self.num_categories} categories "
                f"or None; got {self.pinned}."
            )

    @property
    def dimension(self) -> int:
        return self.num_categories - (self.pinned is not None)

    def tilted_moments(self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike = 1.0) -> VectorTiltedMoments:
        r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, C)`, to eight digits, and the site that has them.

        The cavity may be singular, as where a predictor is known. Of the results ``log_z`` alone has derivatives.

        :raises NotImplementedError: for more than four categories.
        """
        if not self.has_tilted_moments:
            return super().tilted_moments(mean, covariance, power)
        return log_concave_moments(
            self, self.batch_shape, mean, covariance, power, sees_differences=self.pinned is None, strip=self.strip
        )

    def derivatives_as_seen(self, seen: Sequence[Array]) -> tuple[Array, Sequence[Array], Sequence[Array]]:
        """Value, slopes and curvatures at predictors that are arrays of their own, the last of them zero and left out
        where none is pinned: see :class:`~numpyro_ext.potentials.vector_tilting.SeenFactors`."""
        size = len(seen)
        predictors = jnp.stack([*seen, *[jnp.zeros_like(seen[0])] * (self.dimension - size)], axis=-1)
        value, gradient, hessian = self.derivatives(predictors)
        pairs = itertools.combinations_with_replacement(range(size), 2)
        return value, [gradient[..., k] for k in range(size)], [hessian[..., i, j] for i, j in pairs]

    def log_normaliser(self, mean: ArrayLike, covariance: ArrayLike) -> Array:
        r"""Log predictive density :math:`\log \int t_i(\eta) N(\eta \mid m, V) d\eta`, shape ``(...)``."""
        mean, covariance = self._complete_moments(mean, covariance)
        pinned = -1 if self.pinned is None else self.pinned

        def likelihood(eta: Array) -> Array:
            shifted = eta - eta[..., pinned, None]
            return jnp.exp(self.log_density(shifted[..., self._free()]))

        return jnp.log(difference_expectation(likelihood, mean, covariance))

    def _free(self) -> np.ndarray:
        """The categories that have a predictor."""
        categories = np.arange(self.num_categories)
        return categories if self.pinned is None else np.delete(categories, self.pinned)

    def _complete(self, eta: ArrayLike) -> Array:
        """Predictors of all categories: the pinned one is zero."""
        eta = jnp.asarray(eta)
        eta = eta.astype(jnp.result_type(eta, float))
        if eta.shape[-1:] != (self.dimension,):
            pinned = "" if self.pinned is None else ", one of them pinned,"
            raise ValueError(
                f"{type(self).__name__} with {self.num_categories} categories{pinned} takes {self.dimension} "
                f"predictors on the last axis; got shape {eta.shape}."
            )
        full = jnp.zeros((*eta.shape[:-1], self.num_categories), eta.dtype)
        return full.at[..., self._free()].set(eta)

    def _complete_moments(self, mean: ArrayLike, covariance: ArrayLike) -> tuple[Array, Array]:
        dtype = jnp.result_type(mean, covariance, float)
        mean, covariance = self._complete(jnp.asarray(mean, dtype)), jnp.asarray(covariance, dtype)
        free = self._free()
        shape = jnp.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2], self.batch_shape)
        full = jnp.zeros((*covariance.shape[:-2], self.num_categories, self.num_categories), dtype)
        full = full.at[..., free[:, None], free].set(covariance)
        mean = jnp.broadcast_to(mean, (*shape, self.num_categories))
        return mean, jnp.broadcast_to(full, (*mean.shape, self.num_categories))

    def _restrict(self, value: Array, slope: Array, matrix: Array) -> tuple[Array, Array, Array]:
        """Derivatives in the free predictors only."""
        free = self._free()
        return value, slope[..., free], matrix[..., free[:, None], free]


def _indicator(label: ArrayLike, num_categories: int, dtype: jnp.dtype) -> Array:
    """One at the label and zero elsewhere; nan for labels out of range."""
    label = jnp.asarray(label)[..., None]
    is_category = (label >= 0) & (label < num_categories)
    return jnp.where(is_category, (label == jnp.arange(num_categories)).astype(dtype), jnp.nan)


class LogSumExpPotential(_CategoricalPotential):
    r"""Products of probabilities :math:`e^{\eta_k} / \sum_j e^{\eta_j}`, times a constant.

    The expectation :math:`\sum_k y_k m_k - n\, U(m, V)` takes the place of the unknown one of
    :math:`n\, \mathrm{lse}(\eta)` by one of the functions of :func:`~numpyro_ext.potentials.log_sum_exp_bound`.
    """

    bound: str

    is_log_concave: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        log_sum_exp_bound(self.bound)

    def with_bound(self, bound: str) -> Self:
        """The same factors with another bound of log-sum-exp."""
        dataclass: Any = self
        return dataclasses.replace(dataclass, bound=bound)

    def _counts(self, dtype: jnp.dtype) -> Array:
        """Count of each category, :math:`y`, with the categories on the last axis."""
        raise NotImplementedError

    def _log_arrangements(self, counts: Array) -> Array:
        """The constant: the logarithm of in how many orders these counts can be observed."""
        return jnp.zeros(counts.shape[:-1], counts.dtype)

    @property
    def is_lower_bound(self) -> bool:
        if self.bound == "quadrature":
            return self.num_categories - 1 <= LARGEST_TENSOR_DIMENSION
        return log_sum_exp_bound(self.bound).is_bound

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        complete = self._complete(eta)
        complete, counts = jnp.broadcast_arrays(complete, self._counts(complete.dtype))
        total = jnp.sum(counts, axis=-1, keepdims=True)
        probs = jax.nn.softmax(complete)
        value = self._log_arrangements(counts) + jnp.sum(counts * jax.nn.log_softmax(complete), axis=-1)
        identity = jnp.eye(self.num_categories, dtype=probs.dtype)
        hessian = total[..., None] * probs[..., None] * (probs[..., None, :] - identity)
        return self._restrict(value, counts - total * probs, hessian)

    def derivatives_as_seen(self, seen: Sequence[Array]) -> tuple[Array, Sequence[Array], Sequence[Array]]:
        free = (self._free() if self.pinned is not None else np.arange(len(seen))).tolist()
        counts = self._counts(seen[0].dtype)
        total = jnp.sum(counts, axis=-1)
        largest = functools.reduce(jnp.maximum, seen, jnp.zeros_like(seen[0]))
        masses = [jnp.exp(part - largest) for part in seen]
        mass = sum(masses, start=jnp.exp(-largest))
        probs = [part / mass for part in masses]
        linear = sum(counts[..., k] * part for k, part in zip(free, seen, strict=True))
        value = self._log_arrangements(counts) + linear - total * (largest + jnp.log(mass))
        slopes = [counts[..., k] - total * part for k, part in zip(free, probs, strict=True)]
        pairs = itertools.combinations_with_replacement(range(len(seen)), 2)
        return value, slopes, [total * probs[i] * (probs[j] - (1.0 if i == j else 0.0)) for i, j in pairs]

    def expected_log_density(self, mean: ArrayLike, covariance: ArrayLike) -> VectorExpectedLogDensity:
        mean, covariance = self._complete_moments(mean, covariance)
        counts = self._counts(mean.dtype)
        total = jnp.sum(counts, axis=-1)
        # lse(eta) - eta_y is lse of the differences, but the bounds are equivariant under a shift of all predictors.
        upper = log_sum_exp_bound(self.bound)(mean, covariance)
        value = self._log_arrangements(counts) + jnp.sum(counts * mean, axis=-1) - total * upper.value
        slope = counts - total[..., None] * upper.mean_slope
        matrix = -total[..., None, None] * upper.covariance_slope
        return VectorExpectedLogDensity(*self._restrict(value, slope, matrix))


@potential
class SoftmaxPotential(LogSumExpPotential):
    r"""Multinomial logit: category :math:`k` with probability :math:`e^{\eta_k} / \sum_j e^{\eta_j}`.

    The expectation :math:`m_y - U(m, V)` takes the place of the unknown :math:`E\,\mathrm{lse}(\eta)` by one of the
    functions of :func:`~numpyro_ext.potentials.log_sum_exp_bound`.

    :param Array label: categories ``0, ..., num_categories - 1``.
    :param int num_categories: number of categories, at least two.
    :param int pinned: a category whose predictor is zero and left out of ``eta``, or ``None`` for one predictor each.
    :param str bound: name of the bound of log-sum-exp.
    :raises ValueError: for one category, an unknown bound, or a pinned category that does not exist.

    **Example:**

    >>> potential = SoftmaxPotential(jnp.array([0, 2]), num_categories=3)
    >>> print(potential.log_density(jnp.array([1.0, 0.0, 2.0])))
    [-1.4076 -0.4076]
    >>> print(potential.expected_log_density(jnp.array([1.0, 0.0, 2.0]), jnp.eye(3)).value.round(4))
    [-1.6716 -0.6716]
    """

    label: Array
    num_categories: int = dataclasses.field(metadata={"static": True})
    pinned: int | None = dataclasses.field(default=None, metadata={"static": True})
    bound: str = dataclasses.field(default="tilted", metadata={"static": True})

    most_differences: ClassVar[int] = LARGEST_SOFTMAX_DIMENSION

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return jnp.shape(self.label)

    def tilted_moments(self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike = 1.0) -> VectorTiltedMoments:
        r"""Moments of :math:`t(\eta)^p N(\eta \mid \mu, C)`, and the site that has them: see
        :func:`~.integrals.several_predictors.softmax_nodes.softmax_moments`.

        The cavity may be singular, as where a predictor is known. Of the results ``log_z`` alone has derivatives.

        :raises NotImplementedError: for more than six categories.
        """
        return self.tilted_moments_near(mean, covariance, power, mean, covariance)

    def tilted_moments_near(
        self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike, near: ArrayLike, spread: ArrayLike
    ) -> VectorTiltedMoments:
        if not self.has_tilted_moments:
            return VectorPotential.tilted_moments(self, mean, covariance, power)
        shape = jnp.broadcast_shapes(
            jnp.shape(mean)[:-1], jnp.shape(covariance)[:-2], jnp.shape(power), self.batch_shape
        )
        label = jnp.broadcast_to(jnp.asarray(self.label), shape).reshape(-1)
        is_category = (label >= 0) & (label < self.num_categories)
        # differences of the other categories from the one that was observed, by that category
        identity = np.eye(self.num_categories)
        others = [np.delete(identity - identity[k], k, axis=0)[:, self._free()] for k in range(self.num_categories)]
        dtype = jnp.result_type(mean, covariance, float)
        contrast = jnp.asarray(np.stack(others), dtype)[jnp.where(is_category, label, 0).astype(int)]
        around = jnp.broadcast_to(jnp.asarray(near, dtype), (*shape, self.dimension)).reshape(-1, self.dimension)

        def rule(mean: Array, covariance: Array, power: ArrayLike) -> LatticeMoments:
            mean = jnp.where(is_category[:, None], mean, jnp.nan)
            return softmax_moments(mean, covariance, power, times_vector(contrast, lax.stop_gradient(around)))

        return moments_as_seen(rule, shape, mean, covariance, power, contrast)

    def _counts(self, dtype: jnp.dtype) -> Array:
        return _indicator(self.label, self.num_categories, dtype)


@potential
class MultinomialLogitPotential(LogSumExpPotential):
    r"""Counts by category of observations with probabilities :math:`e^{\eta_k} / \sum_j e^{\eta_j}`.

    .. math:: p(y \mid \eta) = \frac{n!}{\prod_k y_k!} \prod_k \Big(\frac{e^{\eta_k}}{\sum_j e^{\eta_j}}\Big)^{y_k},
        \quad n = \sum_k y_k

    :param Array counts: :math:`y`, shape ``(..., num_categories)``.
    :param str bound: name of the bound of log-sum-exp, as in :class:`SoftmaxPotential`.
    :raises ValueError: for one category, or an unknown bound.

    **Example:**

    >>> potential = MultinomialLogitPotential(jnp.array([[2.0, 0.0, 1.0], [0.0, 0.0, 1.0]]))
    >>> print(potential.log_density(jnp.array([1.0, 0.0, 2.0])))
    [-2.1242 -0.4076]
    """

    counts: Array
    bound: str = dataclasses.field(default="tilted", metadata={"static": True})

    pinned = None
    # Powers of probabilities grow faster off the real line.
    strip: ClassVar[float] = 0.6 * math.pi

    @property
    def num_categories(self) -> int:  # type: ignore[override]
        return jnp.shape(self.counts)[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return jnp.shape(self.counts)[:-1]

    def log_normaliser(self, mean: ArrayLike, covariance: ArrayLike) -> Array:
        # Many counts say much more than the prior: nodes that are laid for this would miss the peak.
        return log_concave_normaliser(self.derivatives, *self._complete_moments(mean, covariance))

    def _counts(self, dtype: jnp.dtype) -> Array:
        return jnp.asarray(self.counts, dtype)

    def _log_arrangements(self, counts: Array) -> Array:
        log_factorial = jax.lax.lgamma
        return log_factorial(jnp.sum(counts, axis=-1) + 1.0) - jnp.sum(log_factorial(counts + 1.0), axis=-1)


@potential
class MultinomialProbitPotential(_CategoricalPotential):
    r"""Multinomial probit: the category whose predictor plus standard normal noise is largest.

    .. math:: p(y \mid \eta) = \int N(u \mid 0, 1) \prod_{j \ne y} \Phi(u + \eta_y - \eta_j)\, du

    (Girolami and Rogers 2006, eq. 5; Khan 2012, eq. 1.56 lacks the first factor.) The integrand is log-concave with a
    curvature between one and the number of categories, and entire, so that equidistant nodes around its mode give
    nearly all digits: 10 to 20 times the square root of the number of categories of them.

    :param Array label: categories ``0, ..., num_categories - 1``.
    :param int num_categories: number of categories, at least two.
    :param int pinned: a category whose predictor is zero and left out of ``eta``, or ``None`` for one predictor each.
    :raises ValueError: for one category, or a pinned category that does not exist.

    **Example:**

    >>> potential = MultinomialProbitPotential(jnp.arange(3), num_categories=3)
    >>> jnp.exp(potential.log_density(jnp.array([1.0, 0.0, 0.0]))).sum().item()
    1.0
    """

    label: Array
    num_categories: int = dataclasses.field(metadata={"static": True})
    pinned: int | None = dataclasses.field(default=None, metadata={"static": True})

    # Entire, but growing as fast as a Gaussian off the real line.
    strip: ClassVar[float] = 0.6 * math.pi

    is_log_concave: ClassVar[bool] = True

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return jnp.shape(self.label)

    @property
    def is_lower_bound(self) -> bool:
        return self.num_categories - 1 <= LARGEST_TENSOR_DIMENSION

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        complete = self._complete(eta)
        return self._restrict(*self._complete_derivatives(complete))

    def _complete_derivatives(self, eta: Array) -> tuple[Array, Array, Array]:
        return multinomial_probit_derivatives(
            *jnp.broadcast_arrays(eta, _indicator(self.label, self.num_categories, eta.dtype))
        )

    def expected_log_density(self, mean: ArrayLike, covariance: ArrayLike) -> VectorExpectedLogDensity:
        """Expectation by a product of Gauss-Hermite rules in one dimension less, for up to four categories.

        :raises NotImplementedError: for more categories.
        """
        if not self.is_lower_bound:
            raise NotImplementedError(
                f"The Gaussian expectation of a multinomial probit log density is computed for up to "
                f"{LARGEST_TENSOR_DIMENSION + 1} categories; got {self.num_categories}. Use the multinomial logit "
                "(SoftmaxPotential), which has bounds for any number, or stick-breaking."
            )
        mean, covariance = self._complete_moments(mean, covariance)
        value, slope, hessian = difference_expectation(self._complete_derivatives, mean, covariance)
        return VectorExpectedLogDensity(*self._restrict(value, slope, 0.5 * hessian))
