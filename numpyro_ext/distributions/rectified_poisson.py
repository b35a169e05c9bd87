"""Poisson counts whose rate is a rectified (hard or soft) linear function of a real predictor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import gammaincc, gammaln
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes, validate_sample
from numpyro.util import is_prng_key

from ..potentials.families.poisson import log_softplus
from ..potentials.families.rectified_linear_poisson import RectifiedLinearPoissonPotential


class _RectifiedPoisson(Distribution):
    """Base of both distributions; subclasses define the rate at unit exposure and the log density."""

    arg_constraints = {
        "predictor": constraints.real,
        "exposure": constraints.positive,
        "offset": constraints.real,
    }
    support = constraints.nonnegative_integer

    def __init__(
        self,
        predictor: ArrayLike,
        exposure: ArrayLike = 1.0,
        offset: ArrayLike = 0.0,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.predictor, self.exposure, self.offset = promote_shapes(predictor, exposure, offset)
        batch_shape = lax.broadcast_shapes(jnp.shape(predictor), jnp.shape(exposure), jnp.shape(offset))
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    def _shifted_predictor(self) -> Array:
        """``predictor + offset`` as a floating-point array."""
        shifted = jnp.add(self.predictor, self.offset)
        return shifted.astype(jnp.result_type(shifted, float))

    @staticmethod
    def _rectify(shifted: Array) -> Array:
        raise NotImplementedError

    @property
    def rate(self) -> Array:
        """Expected count, of shape ``batch_shape``."""
        return jnp.broadcast_to(self.exposure * self._rectify(self._shifted_predictor()), self.batch_shape)

    @property
    def mean(self) -> Array:
        return self.rate

    @property
    def variance(self) -> Array:
        return self.rate

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        if key is None or not is_prng_key(key):
            raise TypeError(f"{type(self).__name__}.sample needs a random key as made by jax.random.key; got {key!r}.")
        return jax.random.poisson(key, self.rate, shape=sample_shape + self.batch_shape)

    def cdf(self, value: ArrayLike) -> Array:
        """Probability of a count of at most ``value``, which need not be an integer."""
        value = jnp.floor(value)
        count = jnp.where(value >= 0, value, 0.0)
        return jnp.where(value >= 0, gammaincc(count + 1.0, self.rate), 0.0)


class RectifiedLinearPoisson(_RectifiedPoisson):
    r"""Poisson counts whose rate is linear in a predictor and cut off at zero.

    .. math::
        y \sim \mathrm{Poisson}(\lambda), \qquad \lambda = c \max(0, f + b)

    with predictor :math:`f`, exposure :math:`c` and offset :math:`b`. The predictor acts on the scale of the
    counts: this is the model of a detector that counts what arrives and cannot count less than nothing. Where the
    rate is zero only the count zero is possible: :math:`\log p(0) = 0` and :math:`\log p(y) = -\infty` for
    :math:`y \ge 1`. The gradient with respect to the predictor is :math:`y / (f + b) - c` where the rate is
    positive and zero elsewhere.

    A sampler that starts where a positive count has rate zero sees a density of zero, so start it with
    ``init_to_value`` or ``init_to_median`` rather than at random.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import RectifiedLinearPoisson
        >>> counts = RectifiedLinearPoisson(jnp.array([-1.0, 0.5, 3.0]), exposure=2.0)
        >>> print(counts.mean)
        [0. 1. 6.]
        >>> print(counts.log_prob(jnp.array([0, 1, 6])))
        [ 0.    -1.     -1.829]

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 2.1, eqs. (2.1) and (2.17).

    :param predictor: the predictor :math:`f`, any real number.
    :param exposure: the positive exposure :math:`c` by which the rate is multiplied.
    :param offset: the real offset :math:`b` added to the predictor.
    """

    @staticmethod
    def _rectify(shifted: Array) -> Array:
        return jnp.maximum(shifted, 0.0)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        return RectifiedLinearPoissonPotential(jnp.asarray(value), self.exposure).log_density(self._shifted_predictor())


class SoftplusPoisson(_RectifiedPoisson):
    r"""Poisson counts whose rate is the softplus of a predictor.

    .. math::
        y \sim \mathrm{Poisson}(\lambda), \qquad \lambda = c \log(1 + e^{f + b})

    with predictor :math:`f`, exposure :math:`c` and offset :math:`b`. Linear in the predictor for large rates, as
    :class:`RectifiedLinearPoisson` is, and exponential for small ones, so that no count is impossible and the
    density is smooth. :math:`\log \lambda` keeps its relative accuracy where :math:`e^{f + b}` underflows.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import SoftplusPoisson
        >>> counts = SoftplusPoisson(jnp.array([-2.0, 0.0, 30.0]))
        >>> print(counts.mean)
        [ 0.127  0.693 30.   ]
        >>> print(SoftplusPoisson(-500.0).log_prob(2))
        -1000.693

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 2.1.

    :param predictor: the predictor :math:`f`, any real number.
    :param exposure: the positive exposure :math:`c` by which the rate is multiplied.
    :param offset: the real offset :math:`b` added to the predictor.
    """

    @staticmethod
    def _rectify(shifted: Array) -> Array:
        return jax.nn.softplus(shifted)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        shifted = self._shifted_predictor()
        value = jnp.asarray(value, shifted.dtype)
        log_rate = jnp.log(self.exposure) + log_softplus(shifted)
        return value * log_rate - self.exposure * jax.nn.softplus(shifted) - gammaln(value + 1.0)
