"""Counts and classes driven by a Gaussian process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro import handlers

from numpyro_ext.distributions import RectifiedLinearPoisson, SoftplusPoisson

__all__ = ["cox_process", "gp_classification"]

_INTENSITIES = {
    "rectified": RectifiedLinearPoisson,
    "softplus": SoftplusPoisson,
    "exponential": lambda f, exposure: dist.Poisson(exposure * jnp.exp(f)),
}


def cox_process(
    t: ArrayLike,
    counts: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    nonlinearity: str = "rectified",
    exposure: ArrayLike = 1.0,
    centered: bool = True,
    priors: bool = True,
    jitter: float = 1e-6,
) -> None:
    r"""Cox process on a grid: Poisson counts whose intensity is a function of a Gaussian process.

    .. math::
        f \sim \mathcal{GP}(m, k), \qquad y_i \sim \mathrm{Poisson}(c_i\, g(f(t_i)))

    with a constant mean :math:`m`, the squared-exponential kernel
    :math:`k(t, t') = s^2 \exp(-|t - t'|^2 / 2 \ell^2)` and :math:`g` one of :math:`\max(0, f)`,
    :math:`\log(1 + e^f)` and :math:`e^f` (Ko, 2017, section 2.1). Sites: ``scale`` (:math:`s`), ``length``
    (:math:`\ell`), ``mean`` (:math:`m`), ``f``, the deterministic ``intensity`` (:math:`c\, g(f)`) and ``counts``.
    The priors suit intensities of order one to ten per unit of exposure that change over three to twenty units of
    ``t``. ``mean`` is Gaussian, so an engine may treat it as part of the field; ``field=["f"]`` keeps it a
    hyperparameter.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import MCMC, NUTS, init_to_median
        >>> from numpyro_ext.models import cox_process
        >>> t, counts = jnp.arange(8.0), jnp.array([0, 1, 0, 2, 5, 3, 2, 1])
        >>> kernel = NUTS(cox_process, init_strategy=init_to_median)
        >>> mcmc = MCMC(kernel, num_warmup=20, num_samples=20, progress_bar=False)
        >>> mcmc.run(random.key(0), t, counts, centered=False)
        >>> print(mcmc.get_samples()["intensity"].shape)
        (20, 8)

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL.

    :param t: inputs, shape ``(n,)``, or ``(n, d)`` in several dimensions.
    :param counts: counts, shape ``(n,)``; ``None`` samples them.
    :param mask: false where a count is missing or held out; broadcasts against ``counts``.
    :param str nonlinearity: ``"rectified"``, ``"softplus"`` or ``"exponential"``.
    :param exposure: the positive exposure :math:`c_i`, for example the width of a bin.
    :param bool centered: whether ``f`` is a sample site. If not, it is the deterministic function
        ``mean + cholesky(covariance) @ f_base`` of standard normals ``f_base``: the same model, whose geometry
        suits samplers.
    :param bool priors: whether ``scale``, ``length`` and ``mean`` are sample sites. If not, they are ``param`` sites
        without priors, for maximum likelihood.
    :param float jitter: share of :math:`s^2` added to the variances of ``f``.
    :raises ValueError: if the non-linearity is unknown.
    """
    if nonlinearity not in _INTENSITIES:
        raise ValueError(f"nonlinearity must be 'rectified', 'softplus' or 'exponential'; got {nonlinearity!r}.")
    t = jnp.asarray(t)
    if priors:
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        length = numpyro.sample("length", dist.LogNormal(2.0, 0.5))
        mean = numpyro.sample("mean", dist.Normal(1.0, 2.0))
    else:
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        length = numpyro.param("length", 8.0, constraint=dist.constraints.positive)
        mean = numpyro.param("mean", 1.0)
    covariance = squared_exponential(t, scale, length, jitter)
    if centered:
        f = numpyro.sample("f", dist.MultivariateNormal(mean, covariance))
    else:
        base = numpyro.sample("f_base", dist.Normal().expand([t.shape[0]]).to_event(1))
        f = numpyro.deterministic("f", mean + jnp.linalg.cholesky(covariance) @ base)

    likelihood = _INTENSITIES[nonlinearity](f, exposure)
    numpyro.deterministic("intensity", likelihood.mean)
    with handlers.mask(mask=mask):
        numpyro.sample("counts", likelihood, obs=counts)


def gp_classification(
    X: ArrayLike,
    y: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    link: str = "logit",
    jitter: float = 1e-6,
) -> None:
    r"""Binary classification with a Gaussian process.

    .. math::
        f \sim \mathcal{GP}(0, k), \qquad y_i \sim \mathrm{Bernoulli}(\sigma(f(x_i)))

    with the isotropic squared-exponential kernel of :func:`cox_process` and :math:`\sigma` the logistic function or
    the standard normal cdf. Sites: ``scale``, ``length``, ``f`` and ``y``. The priors suit standardised inputs.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import gp_classification
        >>> X = random.normal(random.key(0), (10, 2))
        >>> draws = Predictive(gp_classification, num_samples=5)(random.key(1), X, link="probit")
        >>> print(draws["f"].shape, draws["y"].shape)
        (5, 10) (5, 10)

    :param X: inputs, shape ``(n, d)`` or ``(n,)``.
    :param y: classes 0 and 1, shape ``(n,)``; ``None`` samples them.
    :param mask: false where a class is missing or held out; broadcasts against ``y``.
    :param str link: ``"logit"`` or ``"probit"``.
    :param float jitter: share of the squared scale added to the variances of ``f``.
    :raises ValueError: if the link is unknown.
    """
    if link not in ("logit", "probit"):
        raise ValueError(f"link must be 'logit' or 'probit'; got {link!r}.")
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    length = numpyro.sample("length", dist.LogNormal(0.5, 0.75))
    covariance = squared_exponential(jnp.asarray(X), scale, length, jitter)
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance))
    likelihood = dist.Bernoulli(logits=f) if link == "logit" else dist.Bernoulli(probs=norm.cdf(f))
    with handlers.mask(mask=mask):
        numpyro.sample("y", likelihood, obs=y)


def squared_exponential(x: jax.Array, scale: jax.Array, length: jax.Array, jitter: float) -> jax.Array:
    """Covariance matrix of the squared-exponential kernel, shape ``(n, n)``.

    The share ``jitter`` of the variance is added to the diagonal, and no less than ``4 n`` rounding errors, without
    which the smallest eigenvalue comes out negative in float32.

    :param x: inputs, shape ``(n,)`` or ``(n, d)``.
    """
    square = jnp.square(x[:, None] - x)
    correlation = jnp.exp(-0.5 * (square if x.ndim == 1 else jnp.sum(square, axis=-1)) / jnp.square(length))
    share = max(jitter, 4 * x.shape[0] * float(jnp.finfo(correlation.dtype).eps))
    return scale**2 * (correlation + share * jnp.eye(x.shape[0]))
