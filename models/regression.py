"""Linear predictors with one likelihood each.

All share the prior ``intercept ~ Normal(0, intercept_scale)``, ``coefficients ~ Normal(0, coefficient_scale)``,
whose scales are fixed and suit standardised columns, and observe ``y`` given ``intercept + X @ coefficients``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from jax.typing import ArrayLike

__all__ = [
    "linear_regression",
    "logistic_regression",
    "negative_binomial_regression",
    "poisson_regression",
    "probit_regression",
    "robust_regression",
]


def linear_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    coefficient_scale: float = 2.5,
    intercept_scale: float = 10.0,
) -> None:
    """Regression with Gaussian noise: sites ``intercept``, ``coefficients``, ``noise_scale`` and ``y``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import linear_regression
        >>> X = random.normal(random.key(0), (20, 3))
        >>> draws = Predictive(linear_regression, num_samples=5)(random.key(1), X)
        >>> print(draws["coefficients"].shape, draws["y"].shape)
        (5, 3) (5, 20)

    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param y: real responses, shape ``(n,)``; ``None`` samples them.
    :param float coefficient_scale: prior standard deviation of the coefficients.
    :param float intercept_scale: prior standard deviation of the intercept.
    :raises ValueError: if the design matrix is not two-dimensional.
    """
    predictor = _linear_predictor(X, coefficient_scale, intercept_scale)
    noise_scale = numpyro.sample("noise_scale", dist.HalfNormal(5.0))
    _observe(dist.Normal(predictor, noise_scale), y)


def robust_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    degrees_of_freedom: float | None = 4.0,
    coefficient_scale: float = 2.5,
    intercept_scale: float = 10.0,
) -> None:
    """Regression with Student-t noise: sites ``intercept``, ``coefficients``, ``noise_scale`` and ``y``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import robust_regression
        >>> X = random.normal(random.key(0), (20, 3))
        >>> draws = Predictive(robust_regression, num_samples=5)(random.key(1), X, degrees_of_freedom=None)
        >>> print(draws["degrees_of_freedom"].shape, draws["y"].shape)
        (5,) (5, 20)

    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param y: real responses, shape ``(n,)``; ``None`` samples them.
    :param degrees_of_freedom: of the Student-t distribution; ``None`` learns them, as a site of this name with the
        prior ``Gamma(2, 0.1)`` of Juarez and Steel (2010).
    :param float coefficient_scale: prior standard deviation of the coefficients.
    :param float intercept_scale: prior standard deviation of the intercept.
    :raises ValueError: if the design matrix is not two-dimensional.
    """
    predictor = _linear_predictor(X, coefficient_scale, intercept_scale)
    noise_scale = numpyro.sample("noise_scale", dist.HalfNormal(5.0))
    if degrees_of_freedom is None:
        degrees_of_freedom = numpyro.sample("degrees_of_freedom", dist.Gamma(2.0, 0.1))
    _observe(dist.StudentT(degrees_of_freedom, predictor, noise_scale), y)


def logistic_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    coefficient_scale: float = 2.5,
    intercept_scale: float = 10.0,
) -> None:
    """Binary regression with the logistic function: sites ``intercept``, ``coefficients`` and ``y``.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_ext.models import logistic_regression
        >>> X = random.normal(random.key(0), (20, 3))
        >>> y = (X[:, 0] > 0.2).astype(int)
        >>> mcmc = MCMC(NUTS(logistic_regression), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(random.key(1), X, y)
        >>> print(mcmc.get_samples()["coefficients"].shape)
        (50, 3)

    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param y: classes 0 and 1, shape ``(n,)``; ``None`` samples them.
    :param float coefficient_scale: prior standard deviation of the coefficients.
    :param float intercept_scale: prior standard deviation of the intercept.
    :raises ValueError: if the design matrix is not two-dimensional.
    """
    _observe(dist.Bernoulli(logits=_linear_predictor(X, coefficient_scale, intercept_scale)), y)


def probit_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    coefficient_scale: float = 2.5,
    intercept_scale: float = 10.0,
) -> None:
    """Binary regression with the standard normal cdf: sites ``intercept``, ``coefficients`` and ``y``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import probit_regression
        >>> X = random.normal(random.key(0), (20, 3))
        >>> print(Predictive(probit_regression, num_samples=5)(random.key(1), X)["y"].shape)
        (5, 20)

    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param y: classes 0 and 1, shape ``(n,)``; ``None`` samples them.
    :param float coefficient_scale: prior standard deviation of the coefficients.
    :param float intercept_scale: prior standard deviation of the intercept.
    :raises ValueError: if the design matrix is not two-dimensional.
    """
    _observe(dist.Bernoulli(probs=norm.cdf(_linear_predictor(X, coefficient_scale, intercept_scale))), y)


def poisson_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    exposure: ArrayLike = 1.0,
    coefficient_scale: float = 2.5,
    intercept_scale: float = 10.0,
) -> None:
    """Regression of counts with a log-linear rate: sites ``intercept``, ``coefficients`` and ``y``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import poisson_regression
        >>> X = random.normal(random.key(0), (20, 3))
        >>> predictive = Predictive(poisson_regression, num_samples=5)
        >>> print(predictive(random.key(1), X, coefficient_scale=0.5, intercept_scale=1.0)["y"].shape)
        (5, 20)

    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param y: counts, shape ``(n,)``; ``None`` samples them.
    :param exposure: the positive factor of the rate, broadcasts against ``y``.
    :param float coefficient_scale: prior standard deviation of the coefficients.
    :param float intercept_scale: prior standard deviation of the intercept.
    :raises ValueError: if the design matrix is not two-dimensional.
    """
    predictor = _linear_predictor(X, coefficient_scale, intercept_scale)
    _observe(dist.Poisson(exposure * jnp.exp(predictor)), y)


def negative_binomial_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    exposure: ArrayLike = 1.0,
    coefficient_scale: float = 2.5,
    intercept_scale: float = 10.0,
) -> None:
    r"""Regression of counts with log-linear mean :math:`\mu` and variance :math:`\mu + \mu^2 / \kappa`.

    Sites: ``intercept``, ``coefficients``, ``concentration`` (:math:`\kappa`) and ``y``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import negative_binomial_regression
        >>> X = random.normal(random.key(0), (20, 3))
        >>> predictive = Predictive(negative_binomial_regression, num_samples=5)
        >>> print(predictive(random.key(1), X, coefficient_scale=0.5, intercept_scale=1.0)["y"].shape)
        (5, 20)

    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param y: counts, shape ``(n,)``; ``None`` samples them.
    :param exposure: the positive factor of the mean, broadcasts against ``y``.
    :param float coefficient_scale: prior standard deviation of the coefficients.
    :param float intercept_scale: prior standard deviation of the intercept.
    :raises ValueError: if the design matrix is not two-dimensional.
    """
    predictor = _linear_predictor(X, coefficient_scale, intercept_scale)
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    _observe(dist.NegativeBinomial2(exposure * jnp.exp(predictor), concentration), y)


def _linear_predictor(X: ArrayLike, coefficient_scale: float, intercept_scale: float) -> jax.Array:
    X = jnp.asarray(X)
    if X.ndim != 2:
        raise ValueError(f"X must have shape (observations, columns); got {X.shape}. Use X[:, None] for one column.")
    intercept = numpyro.sample("intercept", dist.Normal(0.0, intercept_scale))
    coefficients = numpyro.sample("coefficients", dist.Normal(0.0, coefficient_scale).expand([X.shape[1]]).to_event(1))
    return intercept + X @ coefficients


def _observe(likelihood: dist.Distribution, y: ArrayLike | None) -> None:
    with numpyro.plate("observations", likelihood.batch_shape[0]):
        numpyro.sample("y", likelihood, obs=y)
