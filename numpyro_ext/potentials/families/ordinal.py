r"""Ordered categories :math:`0, \dots, K-1` driven by one scalar predictor.

Thresholds have their index on the last axis, of length :math:`K - 1`; the axes before it broadcast against the
predictor. Categories rise with the predictor. Labels outside the range give ``nan``.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.normal_interval import NormalInterval, normal_interval
from ..integrals.tilted.logistic_tilting import LogisticView, Sigmoid, log_sigmoid, logistic_tilted_moments, sigmoid
from ..moments import LogisticTerms, Outcomes, TiltedMoments
from .stick_breaking import stick_breaking_labels


def _take(table: Array, label: Array) -> Array:
    """``table[..., label]`` for labels of the shape of the factors, nan for those out of range."""
    label = jnp.asarray(label).astype(int)
    shape = jnp.broadcast_shapes(table.shape[:-1], label.shape)
    table = jnp.broadcast_to(table, (*shape, table.shape[-1]))
    # A negative index would count from the end.
    label = jnp.where(label < 0, table.shape[-1], jnp.broadcast_to(label, shape))
    return jnp.take_along_axis(table, label[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]


def _bracket(label: Array, thresholds: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The thresholds below and above each label, infinite at the ends of the scale."""
    thresholds = jnp.asarray(thresholds, dtype)
    end = jnp.full((*thresholds.shape[:-1], 1), jnp.inf, dtype)
    lower = _take(jnp.concatenate([-end, thresholds], axis=-1), label)
    upper = _take(jnp.concatenate([thresholds, end], axis=-1), label)
    return lower, upper


@potential
class _Ordinal(Potential):
    """Factors of labels on a scale of ordered categories."""

    label: Array
    thresholds: Array

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def outcomes(self) -> Outcomes:
        return Outcomes("label", self.thresholds.shape[-1] + 1)


@potential
class _LogisticInterval(Potential):
    """The factors of :class:`CumulativeLogitPotential` with the thresholds of each label looked up."""

    lower: Array
    upper: Array
    has_lower: Array
    has_upper: Array
    constant: Array

    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        under = jnp.where(self.has_upper, log_sigmoid(self.upper - eta), 0.0)
        return self.constant + under + jnp.where(self.has_lower, log_sigmoid(eta - self.lower), 0.0)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        under, above = self._sides(jnp.asarray(eta))
        curvature = -under.value * under.complement - above.value * above.complement
        return self.constant + under.log + above.log, above.complement - under.complement, curvature

    def seen_from(self, eta: Array) -> LogisticView:
        return LogisticView.of(self.constant, *self._sides(eta))

    def _sides(self, eta: Array) -> tuple[Sigmoid, Sigmoid]:
        """Probabilities to fall below the upper and to rise above the lower threshold: one where there is none."""
        certain = 1.0, 0.0, 0.0, -jnp.inf  # a sigmoid of infinity
        under, above = sigmoid(self.upper - eta), sigmoid(eta - self.lower)
        return (
            Sigmoid(*(jnp.where(self.has_upper, x, y) for x, y in zip(under, certain, strict=True))),
            Sigmoid(*(jnp.where(self.has_lower, x, y) for x, y in zip(above, certain, strict=True))),
        )


@potential
class CumulativeLogitPotential(_Ordinal):
    r"""Ordered categories with :math:`P(y \le k) = \sigma(\phi_k - \eta)`, proportional odds, as ``OrderedLogistic``.

    With the thresholds :math:`a < b` around the label, :math:`\sigma(b - \eta) - \sigma(a - \eta) =
    \sigma(b - \eta)\, \sigma(\eta - a)\, (1 - e^{a - b})` (Khan 2012, section 6.1, with the sign of the last factor
    corrected), a product in which nothing cancels.

    :param Array label: categories ``0, ..., K - 1``.
    :param Array thresholds: increasing :math:`\phi_0, \dots, \phi_{K-2}` on the last axis.

    **Example:**

    >>> CumulativeLogitPotential(jnp.array([0, 1, 2]), jnp.array([-1.0, 1.0])).log_density(1e4)[1].item()
    -9999.145
    """

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return _LogisticInterval(*self._ends(eta.dtype)).log_density(eta)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        return _LogisticInterval(*self._ends(eta.dtype)).derivatives(eta)

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity variance exceeds 16 and the power is the Python number one, else quadrature."""
        return logistic_tilted_moments(self._interval(mean, variance), mean, variance, power, only_log_z)

    def _interval(self, mean: ArrayLike, variance: ArrayLike) -> _LogisticInterval:
        return _LogisticInterval(*self._ends(jnp.result_type(mean, variance, float)))

    def logistic_terms(self) -> LogisticTerms:
        dtype = jnp.result_type(self.thresholds, float)
        lower, upper, has_lower, has_upper, constant = self._ends(dtype)
        ones = jnp.ones_like(constant)
        return LogisticTerms(
            constant=constant,
            linear=jnp.zeros_like(constant),
            weights=jnp.stack([has_upper, has_lower]).astype(dtype),
            slopes=jnp.stack([ones, -ones]),
            offsets=jnp.stack([-upper, lower]),
        )

    def _ends(self, dtype: jnp.dtype) -> tuple[Array, Array, Array, Array, Array]:
        """Thresholds around each label (zero at the ends of the scale), which of them exist, and the constant term."""
        lower, upper = _bracket(self.label, self.thresholds, dtype)
        has_lower, has_upper = lower != -jnp.inf, upper != jnp.inf
        lower, upper = jnp.where(has_lower, lower, 0.0), jnp.where(has_upper, upper, 0.0)
        has_both = has_lower & has_upper
        gap = jnp.where(has_both, upper - lower, 1.0)
        return lower, upper, has_lower, has_upper, jnp.where(has_both, jnp.log(-jnp.expm1(-gap)), 0.0)


def cumulative_logit_table(eta: Array, thresholds: Array) -> Array:
    """Log probability of every category, the values of :class:`CumulativeLogitPotential` at all labels.

    A threshold ends one category and begins the next, so that one sigmoid serves both: half the time of label by label.

    :param eta: predictor, shape ``(...)``.
    :param thresholds: shape ``(..., K - 1)``; infinite ones leave categories without probability.
    :return: shape ``(..., K)``.
    """
    eta, thresholds = jnp.asarray(eta), jnp.asarray(thresholds)
    lower, upper = thresholds[..., :-1], thresholds[..., 1:]
    is_inner = (lower != -jnp.inf) & (upper != jnp.inf)
    gap = jnp.where(is_inner, upper - lower, 1.0)
    constant = jnp.where(is_inner, jnp.log(-jnp.expm1(-gap)), 0.0)
    sides = sigmoid(thresholds - eta[..., None])
    # Joined rather than padded, which would have the compiler compute each sigmoid twice.
    end = jnp.zeros((*sides.log.shape[:-1], 1), sides.log.dtype)
    below, above = jnp.concatenate([sides.log, end], -1), jnp.concatenate([end, sides.log_complement], -1)
    end = jnp.zeros((*constant.shape[:-1], 1), constant.dtype)
    return jnp.concatenate([end, constant, end], -1) + below + above


@potential
class CumulativeProbitPotential(_Ordinal):
    r"""Ordered categories with :math:`P(y \le k) = \Phi(\phi_k - \eta)` (ordered probit).

    :param Array label: categories ``0, ..., K - 1``.
    :param Array thresholds: increasing :math:`\phi_0, \dots, \phi_{K-2}` on the last axis.

    **Example:**

    >>> CumulativeProbitPotential(jnp.array([0, 1, 2]), jnp.array([-1.0, 1.0])).log_density(0.0)[1].item()
    -0.3817
    """

    def _interval(self, eta: Array) -> NormalInterval:
        lower, upper = _bracket(self.label, self.thresholds, eta.dtype)
        return normal_interval(lower - eta, upper - eta)

    def log_density(self, eta: ArrayLike) -> Array:
        return self._interval(jnp.asarray(eta)).log_mass

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        interval = self._interval(jnp.asarray(eta))
        return interval.log_mass, interval.mean, interval.variance - 1.0

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """Closed form for the Python number one, else quadrature: the value that falls between two thresholds is a
        Gaussian number, and the predictor is affine in it but for noise."""
        if not (isinstance(power, int | float) and power == 1):
            return super().tilted_moments(mean, variance, power)
        dtype = jnp.result_type(mean, variance, float)
        mean, variance = jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)
        lower, upper = _bracket(self.label, self.thresholds, dtype)
        total = 1.0 + variance
        scale = jnp.sqrt(total)
        inside = normal_interval((lower - mean) / scale, (upper - mean) / scale)
        slope, curvature = inside.mean / scale, inside.shrinkage / total
        # 1 - variance * curvature as a sum of positive terms.
        ratio = (1.0 + variance * inside.variance) / total
        return TiltedMoments(
            log_z=inside.log_mass,
            mean=mean + variance * slope,
            variance=variance * ratio,
            site_precision=curvature / ratio,
            site_shift=(slope + curvature * mean) / ratio,
        )


@potential
class ContinuationRatioPotential(_Ordinal):
    r"""Categories passed one after the other: :math:`P(y = k \mid y \ge k) = \sigma(\phi_k - \eta)`.

    The stick-breaking construction with sticks :math:`\phi_k - \eta`, so a sum of binary logistic factors (Khan 2012,
    section 6.1, normalised).

    :param Array label: categories ``0, ..., K - 1``.
    :param Array thresholds: :math:`\phi_0, \dots, \phi_{K-2}` on the last axis, in any order.

    **Example:**

    >>> print(ContinuationRatioPotential(jnp.array([0, 1, 2]), jnp.zeros(2)).log_density(0.0))
    [-0.693 -1.386 -1.386]
    """

    def _sticks(self, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
        """Thresholds, with sign -1 where the label stops and +1 where it passes, and weight zero after it."""
        thresholds = jnp.asarray(self.thresholds, dtype)
        num_sticks = thresholds.shape[-1]
        label = jnp.asarray(self.label)
        stops, observed = stick_breaking_labels(label, num_sticks)
        sign = 1.0 - 2.0 * stops.astype(dtype)
        is_category = (label >= 0) & (label <= num_sticks)
        weight = jnp.where(is_category[..., None], observed.astype(dtype), jnp.nan)
        thresholds, sign, weight = jnp.broadcast_arrays(thresholds, sign, weight)
        return thresholds, sign, weight

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        thresholds, sign, weight = self._sticks(eta.dtype)
        step = sign * (eta[..., None] - thresholds)
        wrong = jax.nn.sigmoid(-step)
        terms = jax.nn.log_sigmoid(step), sign * wrong, -wrong * jax.nn.sigmoid(step)
        value, slope, curvature = (jnp.sum(weight * term, axis=-1) for term in terms)
        return value, slope, curvature

    def logistic_terms(self) -> LogisticTerms:
        thresholds, sign, weight = self._sticks(jnp.result_type(self.thresholds, float))
        zeros = jnp.zeros_like(thresholds[..., 0])
        slopes = jnp.moveaxis(-sign, -1, 0)
        offsets = jnp.moveaxis(sign * thresholds, -1, 0)
        return LogisticTerms(zeros, zeros, jnp.moveaxis(weight, -1, 0), slopes, offsets)


@potential
class AdjacentCategoryPotential(_Ordinal):
    r"""Categories with :math:`\log p_k / p_{k-1} = (s_k - s_{k-1})\, \eta - \phi_{k-1}`.

    Scores :math:`s_k = k` give the adjacent-category (partial credit) model, any others Anderson's stereotype model:
    a softmax of predictors :math:`s_k \eta - \sum_{j < k} \phi_j` that are linear in one number. Khan (2012) writes
    :math:`\phi_k - \alpha_k \eta` with scores :math:`\alpha_k` that fall from one to zero: :math:`s_k = -\alpha_k`.

    :param Array label: categories ``0, ..., K - 1``.
    :param Array thresholds: :math:`\phi_0, \dots, \phi_{K-2}` on the last axis, in any order: where two categories are
        equally probable if the scores are a unit apart.
    :param Array scores: :math:`s_0, \dots, s_{K-1}` on the last axis.

    **Example:**

    >>> scale = AdjacentCategoryPotential(jnp.array([0, 1, 2]), jnp.array([0.0, 1.0]), jnp.arange(3.0))
    >>> jnp.exp(scale.log_density(0.5)).sum().item()
    1.0
    """

    scores: Array

    is_analytic: ClassVar[bool] = False

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        thresholds, scores = jnp.asarray(self.thresholds, eta.dtype), jnp.asarray(self.scores, eta.dtype)
        start = jnp.zeros((*thresholds.shape[:-1], 1), eta.dtype)
        offsets = -jnp.concatenate([start, jnp.cumsum(thresholds, axis=-1)], axis=-1)
        log_probs = jax.nn.log_softmax(scores * eta[..., None] + offsets, axis=-1)
        probs = jnp.exp(log_probs)
        # Distances from the score of the label and from the mean score, without cancellation.
        distance = _take(scores, self.label)[..., None] - scores
        slope = jnp.sum(probs * distance, axis=-1)
        variance = jnp.sum(probs * jnp.square(distance - slope[..., None]), axis=-1)
        return _take(log_probs, self.label), slope, -variance
