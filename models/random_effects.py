"""Multilevel regressions: intercepts that vary by one grouping, or by two that cross."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from .indices import checked_indices

__all__ = ["crossed_random_effects", "random_intercepts"]


def random_intercepts(
    group: ArrayLike,
    y: ArrayLike | None = None,
    X: ArrayLike | None = None,
    *,
    family: str = "gaussian",
    num_groups: int | None = None,
) -> None:
    r"""Regression with an intercept for each group, drawn from a population of intercepts.

    .. math::
        \eta_i = \alpha + x_i^\top \beta + u_{g(i)}, \qquad u_g \sim N(0, \tau^2)

    Sites: ``intercept`` (:math:`\alpha`), ``coefficients`` (:math:`\beta`, if there are columns), ``group_scale``
    (:math:`\tau`), ``group_effect`` (:math:`u`), ``noise_scale`` (Gaussian responses only) and ``y``. The effects
    are centred; samplers like ``handlers.reparam(config={"group_effect": LocScaleReparam(0)})`` around the model
    when the groups are small.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_ext.models import random_intercepts
        >>> group = np.repeat([0, 1, 2], 4)
        >>> y = np.array([0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1])
        >>> mcmc = MCMC(NUTS(random_intercepts), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(random.key(1), group, y, family="bernoulli")
        >>> print(mcmc.get_samples()["group_effect"].shape)
        (50, 3)

    :param group: group of each observation as integers from 0, shape ``(n,)``.
    :param y: responses, shape ``(n,)``; ``None`` samples them.
    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param str family: ``"gaussian"``, ``"bernoulli"`` (logit) or ``"poisson"`` (log).
    :param num_groups: number of groups; by default one more than the largest index.
    :raises ValueError: if the family is unknown, or an index or the design matrix does not fit.
    """
    group, num_groups = _grouping("group", group, num_groups)
    predictor = _fixed_effects(X, group.shape[0]) + _random_effect("group", num_groups)[group]
    _observe(family, predictor, y)


def crossed_random_effects(
    row: ArrayLike,
    column: ArrayLike,
    y: ArrayLike | None = None,
    X: ArrayLike | None = None,
    *,
    family: str = "gaussian",
    num_rows: int | None = None,
    num_columns: int | None = None,
) -> None:
    r"""Regression with two crossed sets of random intercepts, for example persons and items.

    .. math::
        \eta_i = \alpha + x_i^\top \beta + u_{r(i)} + v_{c(i)}, \qquad
        u_r \sim N(0, \tau_u^2), \quad v_c \sim N(0, \tau_v^2)

    Sites: ``intercept``, ``coefficients`` (if there are columns), ``row_scale``, ``row_effect``, ``column_scale``,
    ``column_effect``, ``noise_scale`` (Gaussian responses only) and ``y``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import crossed_random_effects
        >>> row, column = np.divmod(np.arange(12), 4)
        >>> predictive = Predictive(crossed_random_effects, num_samples=5)
        >>> draws = predictive(random.key(0), row, column, family="bernoulli")
        >>> print(draws["row_effect"].shape, draws["column_effect"].shape, draws["y"].shape)
        (5, 3) (5, 4) (5, 12)

    :param row: first group of each observation as integers from 0, shape ``(n,)``.
    :param column: second group of each observation as integers from 0, shape ``(n,)``.
    :param y: responses, shape ``(n,)``; ``None`` samples them.
    :param X: design matrix without a column of ones, shape ``(n, d)``.
    :param str family: ``"gaussian"``, ``"bernoulli"`` (logit) or ``"poisson"`` (log).
    :param num_rows: number of first groups; by default one more than the largest index.
    :param num_columns: number of second groups; by default one more than the largest index.
    :raises ValueError: if the family is unknown, or an index or the design matrix does not fit.
    """
    row, num_rows = _grouping("row", row, num_rows)
    column, num_columns = _grouping("column", column, num_columns)
    if row.shape != column.shape:
        raise ValueError(f"row and column must have the same length; got {row.shape} and {column.shape}.")
    predictor = (
        _fixed_effects(X, row.shape[0])
        + _random_effect("row", num_rows)[row]
        + _random_effect("column", num_columns)[column]
    )
    _observe(family, predictor, y)


def _grouping(name: str, index: ArrayLike, size: int | None) -> tuple[np.ndarray, int]:
    """The indices as a concrete array and the number of groups, which fixes shapes and must not be traced."""
    (index,) = checked_indices(**{name: (index, size)})
    return index, int(index.max(initial=-1)) + 1 if size is None else size


def _fixed_effects(X: ArrayLike | None, num_observations: int) -> jax.Array:
    intercept: jax.Array = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    if X is None:
        return intercept
    X = jnp.asarray(X)
    if X.ndim != 2 or X.shape[0] != num_observations:
        raise ValueError(f"X must have shape ({num_observations}, columns); got {X.shape}.")
    coefficients = numpyro.sample("coefficients", dist.Normal(0.0, 2.5).expand([X.shape[1]]).to_event(1))
    return intercept + X @ coefficients


def _random_effect(name: str, size: int) -> jax.Array:
    scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(2.0))
    with numpyro.plate(f"{name}s", size):
        effect: jax.Array = numpyro.sample(f"{name}_effect", dist.Normal(0.0, scale))
    return effect


def _observe(family: str, predictor: jax.Array, y: ArrayLike | None) -> None:
    likelihood: dist.Distribution
    if family == "gaussian":
        likelihood = dist.Normal(predictor, numpyro.sample("noise_scale", dist.HalfNormal(5.0)))
    elif family == "bernoulli":
        likelihood = dist.Bernoulli(logits=predictor)
    elif family == "poisson":
        likelihood = dist.Poisson(jnp.exp(predictor))
    else:
        raise ValueError(f"family must be 'gaussian', 'bernoulli' or 'poisson'; got {family!r}.")
    with numpyro.plate("observations", predictor.shape[0]):
        numpyro.sample("y", likelihood, obs=y)
