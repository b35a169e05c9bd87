"""Categorical distributions that NumPyro lacks: ordered scales, broken sticks and multinomial probit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from ..potentials.families.categorical import MultinomialProbitPotential
from ..potentials.families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeProbitPotential,
)
from ..potentials.families.stick_breaking import stick_breaking_labels


class _Categories(Distribution):
    """Categories ``0, ..., num_categories - 1``; subclasses define their number and log probabilities."""

    has_enumerate_support = True

    @property
    def num_categories(self) -> int:
        """Number of categories."""
        raise NotImplementedError

    def _log_mass(self, value: Array) -> Array:
        """Log probability of integer categories of any shape that broadcasts against the batch shape."""
        raise NotImplementedError

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log probability of a category; ``nan`` for a value out of range unless arguments are validated."""
        value = jnp.asarray(value)
        is_category = (value >= 0) & (value < self.num_categories) & (value == jnp.floor(value))
        log_mass = self._log_mass(jnp.where(is_category, value, 0).astype(int))
        return jnp.where(is_category, log_mass, jnp.nan)

    @property
    def log_probs(self) -> Array:
        """Log probabilities of all categories, shape ``batch_shape + (num_categories,)``."""
        log_mass = self._log_mass(self.enumerate_support(expand=True))
        return jnp.moveaxis(log_mass, 0, -1)

    @property
    def probs(self) -> Array:
        """Probabilities of all categories, shape ``batch_shape + (num_categories,)``."""
        return jnp.exp(self.log_probs)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        return random.categorical(checked_key(self, key), self.log_probs, shape=sample_shape + self.batch_shape)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.num_categories - 1)

    def enumerate_support(self, expand: bool = True) -> Array:
        """All categories on a new first axis."""
        values = jnp.arange(self.num_categories).reshape(-1, *(1,) * len(self.batch_shape))
        return jnp.broadcast_to(values, values.shape[:1] + self.batch_shape) if expand else values


def checked_key(distribution: Distribution, key: jax.Array | None) -> Array:
    if key is None or not is_prng_key(key):
        raise TypeError(
            f"{type(distribution).__name__}.sample needs a random key as made by jax.random.key; got {key!r}."
        )
    return key


def _check_vector(distribution: Distribution, name: str, value: ArrayLike, at_least: int = 1) -> None:
    if jnp.ndim(value) == 0 or jnp.shape(value)[-1] < at_least:
        raise ValueError(
            f"{type(distribution).__name__} needs {name} with at least {at_least} "
            f"{'entry' if at_least == 1 else 'entries'} on the last axis, for at least two categories; "
            f"got shape {jnp.shape(value)}."
        )


class StickBreakingCategorical(_Categories):
    r"""Categories drawn by breaking sticks: one logit for every category but the last.

    .. math:: P(y = k) = \sigma(\eta_k) \prod_{j < k} (1 - \sigma(\eta_j)), \quad k < K, \qquad
        P(y = K) = \prod_{j < K} (1 - \sigma(\eta_j))

    With :math:`K` logits there are :math:`K + 1` categories. Unlike a softmax, the likelihood is a product of at most
    :math:`K` binary logistic ones (:func:`~numpyro_ext.potentials.families.stick_breaking.stick_breaking_labels`),
    and it depends on the order of the categories.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import StickBreakingCategorical
        >>> print(StickBreakingCategorical(jnp.zeros(2)).probs)
        [0.5  0.25 0.25]

    **References**

    1. Khan, M. E. (2012), *Variational Learning for Latent Gaussian Models of Discrete Data*, University of British
       Columbia, section 5.6, eq. (5.34) with the product from the first stick.

    :param logits: the sticks' logits :math:`\eta_0, \dots, \eta_{K-1}` on the last axis.
    """

    arg_constraints = {"logits": constraints.real_vector}

    def __init__(self, logits: ArrayLike, *, validate_args: bool | None = None) -> None:
        _check_vector(self, "logits", logits)
        self.logits = logits
        super().__init__(batch_shape=jnp.shape(logits)[:-1], validate_args=validate_args)

    @property
    def num_categories(self) -> int:
        return jnp.shape(self.logits)[-1] + 1

    def _log_mass(self, value: Array) -> Array:
        labels, observed = stick_breaking_labels(value, self.num_categories - 1)
        log_sigmoids = jax.nn.log_sigmoid((2 * labels - 1) * jnp.asarray(self.logits))
        return jnp.sum(jnp.where(observed, log_sigmoids, 0.0), axis=-1)


class _OrderedCategories(_Categories):
    """One predictor and thresholds on the last axis of an argument of the given name."""

    _thresholds_name = "thresholds"

    def __init__(self, predictor: ArrayLike, thresholds: ArrayLike, *, validate_args: bool | None = None) -> None:
        _check_vector(self, self._thresholds_name, thresholds)
        self.predictor = jnp.asarray(predictor)
        setattr(self, self._thresholds_name, jnp.asarray(thresholds))
        batch_shape = lax.broadcast_shapes(jnp.shape(predictor), jnp.shape(thresholds)[:-1])
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def num_categories(self) -> int:
        return jnp.shape(getattr(self, self._thresholds_name))[-1] + 1

    def _eta(self) -> Array:
        predictor = jnp.asarray(self.predictor)
        return predictor.astype(jnp.result_type(predictor, float))


class OrderedProbit(_OrderedCategories):
    r"""Ordered categories with a normal latent variable: :math:`P(y \le k) = \Phi(c_k - \eta)`.

    The probit sister of NumPyro's ``OrderedLogistic``, with the same arguments.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import OrderedProbit
        >>> print(OrderedProbit(0.5, jnp.array([-1.0, 1.0])).probs)
        [0.067 0.625 0.309]

    **References**

    1. McCullagh, P. (1980), Regression models for ordinal data, *Journal of the Royal Statistical Society* B 42.

    :param predictor: the predictor :math:`\eta`, any real number.
    :param cutpoints: increasing :math:`c_0, \dots, c_{K-2}` on the last axis, for :math:`K` categories.
    """

    arg_constraints = {"predictor": constraints.real, "cutpoints": constraints.ordered_vector}
    _thresholds_name = "cutpoints"

    def __init__(self, predictor: ArrayLike, cutpoints: ArrayLike, *, validate_args: bool | None = None) -> None:
        super().__init__(predictor, cutpoints, validate_args=validate_args)

    def _log_mass(self, value: Array) -> Array:
        return CumulativeProbitPotential(value, self.cutpoints).log_density(self._eta())


class ContinuationRatio(_OrderedCategories):
    r"""Categories passed one after the other: :math:`P(y = k \mid y \ge k) = \sigma(\phi_k - \eta)`.

    Stages of schooling or of a disease: to be in a category one must have passed all those before it. The
    stick-breaking construction with logits :math:`\phi_k - \eta`.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import ContinuationRatio
        >>> print(ContinuationRatio(0.0, jnp.zeros(2)).probs)
        [0.5  0.25 0.25]

    **References**

    1. Khan, M. E. (2012), *Variational Learning for Latent Gaussian Models of Discrete Data*, University of British
       Columbia, section 6.1, normalised.

    :param predictor: the predictor :math:`\eta`, any real number.
    :param thresholds: :math:`\phi_0, \dots, \phi_{K-2}` on the last axis, in any order, for :math:`K` categories.
    """

    arg_constraints = {"predictor": constraints.real, "thresholds": constraints.real_vector}

    def _log_mass(self, value: Array) -> Array:
        return ContinuationRatioPotential(value, self.thresholds).log_density(self._eta())


class AdjacentCategory(_OrderedCategories):
    r"""Categories with :math:`\log p_k / p_{k-1} = (s_k - s_{k-1})\, \eta - \phi_{k-1}`.

    The adjacent-category or partial credit model with the default scores 0, 1, ..., and Anderson's stereotype model
    with others.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import AdjacentCategory
        >>> print(AdjacentCategory(0.5, jnp.array([0.5, 0.5])).probs)
        [0.333 0.333 0.333]

    **References**

    1. Masters, G. N. (1982), A Rasch model for partial credit scoring, *Psychometrika* 47.
    2. Anderson, J. A. (1984), Regression and ordered categorical variables, *Journal of the Royal Statistical Society*
       B 46.

    :param predictor: the predictor :math:`\eta`, any real number.
    :param thresholds: :math:`\phi_0, \dots, \phi_{K-2}` on the last axis, in any order, for :math:`K` categories.
    :param scores: :math:`s_0, \dots, s_{K-1}` on the last axis; ``None`` for ``0, ..., K - 1``.
    """

    arg_constraints = {
        "predictor": constraints.real,
        "thresholds": constraints.real_vector,
        "scores": constraints.real_vector,
    }

    def __init__(
        self,
        predictor: ArrayLike,
        thresholds: ArrayLike,
        scores: ArrayLike | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        _check_vector(self, "thresholds", thresholds)
        num_categories = jnp.shape(thresholds)[-1] + 1
        self.scores = (
            jnp.arange(num_categories, dtype=jnp.result_type(float)) if scores is None else jnp.asarray(scores)
        )
        if self.scores.shape[-1:] != (num_categories,):
            raise ValueError(
                f"AdjacentCategory needs one score more than thresholds, {num_categories} on the last axis; "
                f"got shape {self.scores.shape}."
            )
        shape = lax.broadcast_shapes(jnp.shape(predictor), self.scores.shape[:-1])
        super().__init__(jnp.broadcast_to(predictor, shape), thresholds, validate_args=validate_args)

    def _log_mass(self, value: Array) -> Array:
        return AdjacentCategoryPotential(value, self.thresholds, self.scores).log_density(self._eta())


class MultinomialProbit(_Categories):
    r"""The category whose predictor plus independent standard normal noise is the largest.

    .. math:: P(y = k) = \int N(u \mid 0, 1) \prod_{j \ne k} \Phi(u + \eta_k - \eta_j)\, du

    The integral is computed to nearly all digits by equidistant nodes around the mode of the integrand.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import MultinomialProbit
        >>> print(MultinomialProbit(jnp.zeros(2)).probs)
        [0.5 0.5]

    **References**

    1. Girolami, M. and Rogers, S. (2006), Variational Bayesian multinomial probit regression with Gaussian process
       priors, *Neural Computation* 18, eq. (5).

    :param predictor: the predictors :math:`\eta_0, \dots, \eta_{K-1}` on the last axis.
    """

    arg_constraints = {"predictor": constraints.real_vector}

    def __init__(self, predictor: ArrayLike, *, validate_args: bool | None = None) -> None:
        _check_vector(self, "a predictor", predictor, at_least=2)
        self.predictor = predictor
        super().__init__(batch_shape=jnp.shape(predictor)[:-1], validate_args=validate_args)

    @property
    def num_categories(self) -> int:
        return jnp.shape(self.predictor)[-1]

    def _log_mass(self, value: Array) -> Array:
        return MultinomialProbitPotential(value, self.num_categories).log_density(self.predictor)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        predictor = jnp.asarray(self.predictor)
        predictor = predictor.astype(jnp.result_type(predictor, float))
        noise = random.normal(checked_key(self, key), sample_shape + predictor.shape, predictor.dtype)
        return jnp.argmax(predictor + noise, axis=-1)
