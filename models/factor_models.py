"""Rows of a table as noisy views of a few latent numbers each: factor analysis and its relatives."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers

__all__ = ["correlated_topic_model", "factor_analysis", "latent_gaussian_graphical_model"]

_KINDS = ("real", "binary", "count")


def _table_shape(table: ArrayLike | None, shape: tuple[int, int] | None, model: str) -> tuple[int, int]:
    if shape is not None:
        return shape
    if table is None or jnp.ndim(table) != 2:
        found = "" if table is None else f"; got a table of shape {jnp.shape(table)}"
        raise ValueError(f"{model} needs a table with rows and columns, or its shape to sample one{found}.")
    return jnp.shape(table)  # type: ignore[return-value]


def factor_analysis(
    table: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    num_factors: int,
    kinds: str | Sequence[str] = "real",
    shape: tuple[int, int] | None = None,
    shared_noise: bool = False,
    loading_scale: float | None = None,
) -> None:
    r"""Factor analysis of real, binary and count columns, any of them with missing cells.

    .. math:: z_n \sim N(0, I), \qquad \eta_{nd} = w_d^T z_n + b_d

    with a Gaussian of standard deviation ``noise`` around :math:`\eta` in a real column, a Bernoulli variable with
    logit :math:`\eta` in a binary one and a Poisson count with log rate :math:`\eta` in a count one (Khan, 2012,
    sections 1.2.5 and 6.2). With ``shared_noise`` and real columns only this is probabilistic principal component
    analysis (Tipping and Bishop, 1999). Sites: ``loadings`` (:math:`W`, ``(d, factors)``), ``intercept``
    (:math:`b`), ``noise`` if there are real columns, ``factors`` (:math:`z`, ``(n, factors)``), and the observed
    ``real``, ``binary`` and ``count``, each with its columns. Loadings, intercepts and noise are ``param`` sites, for
    maximum likelihood.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import factor_analysis
        >>> draws = Predictive(factor_analysis, num_samples=5)(
        ...     random.key(0), shape=(10, 4), num_factors=2, kinds="binary")
        >>> print(draws["factors"].shape, draws["binary"].shape)
        (5, 10, 2) (5, 10, 4)

    :param table: observations, shape ``(n, d)``; ``None`` samples them. What stands in missing cells does not matter.
    :param mask: false where a cell is missing or held out, shape ``(n, d)``.
    :param int num_factors: length of :math:`z_n`.
    :param kinds: ``"real"``, ``"binary"`` or ``"count"``, for all columns or for each.
    :param tuple shape: ``(n, d)``, needed without a table.
    :param bool shared_noise: one noise level for all real columns.
    :param float loading_scale: if given, loadings are sample sites with this prior standard deviation.
    :raises ValueError: for an unknown kind, and if neither a table nor its shape is given.
    """
    num_rows, num_columns = _table_shape(table, shape, "factor_analysis")
    kinds = [kinds] * num_columns if isinstance(kinds, str) else list(kinds)
    unknown = sorted({kind for kind in kinds if kind not in _KINDS})
    if unknown or len(kinds) != num_columns:
        raise ValueError(f"kinds must be one of {_KINDS}, or one for each of the {num_columns} columns; got {kinds}.")
    if loading_scale is None:
        # Small and distinct: with equal loadings the factors could not be told apart, and would stay so.
        start = 0.5 * np.cos(1.0 + np.arange(num_columns)[:, None] + 2.0 * np.arange(num_factors))
        loadings = numpyro.param("loadings", jnp.asarray(start))
    else:
        prior = dist.Normal(0.0, loading_scale).expand([num_columns, num_factors]).to_event(2)
        loadings = numpyro.sample("loadings", prior)
    intercept = numpyro.param("intercept", jnp.zeros(num_columns))
    with numpyro.plate("rows", num_rows):
        factors = numpyro.sample("factors", dist.Normal(0.0, 1.0).expand([num_factors]).to_event(1))
    predictor = factors @ loadings.T + intercept
    mask = jnp.broadcast_to(mask, (num_rows, num_columns))
    for kind in sorted(set(kinds)):
        columns = np.flatnonzero([k == kind for k in kinds])
        eta = predictor[:, columns]
        distribution: dist.Distribution
        if kind == "real":
            levels = () if shared_noise else (len(columns),)
            noise = numpyro.param("noise", jnp.ones(levels), constraint=dist.constraints.positive)
            distribution = dist.Normal(eta, noise)
        else:
            distribution = dist.Bernoulli(logits=eta) if kind == "binary" else dist.Poisson(jnp.exp(eta))
        observed = None if table is None else jnp.asarray(table)[:, columns]
        with handlers.mask(mask=mask[:, columns]):
            numpyro.sample(kind, distribution, obs=observed)


def latent_gaussian_graphical_model(
    table: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    shape: tuple[int, int] | None = None,
) -> None:
    r"""Binary columns with a latent Gaussian variable behind each: a covariance model for binary data.

    .. math:: z_n \sim N(\mu, \Sigma), \qquad y_{nd} \sim \mathrm{Bernoulli}(\sigma(z_{nd}))

    (Khan, 2012, section 1.2.6). Sites: ``mean`` (:math:`\mu`) and ``scale_tril`` (the Cholesky factor of
    :math:`\Sigma`), both ``param`` sites, ``z`` and ``binary``.

    :param table: zeros and ones, shape ``(n, d)``; ``None`` samples them.
    :param mask: false where a cell is missing or held out, shape ``(n, d)``.
    :param tuple shape: ``(n, d)``, needed without a table.
    :raises ValueError: if neither a table nor its shape is given.
    """
    num_rows, num_columns = _table_shape(table, shape, "latent_gaussian_graphical_model")
    mean = numpyro.param("mean", jnp.zeros(num_columns))
    start = jnp.sqrt(2.0) * jnp.eye(num_columns)
    scale_tril = numpyro.param("scale_tril", start, constraint=dist.constraints.lower_cholesky)
    with numpyro.plate("rows", num_rows):
        z = numpyro.sample("z", dist.MultivariateNormal(mean, scale_tril=scale_tril))
    with handlers.mask(mask=jnp.broadcast_to(mask, (num_rows, num_columns))):
        numpyro.sample("binary", dist.Bernoulli(logits=z), obs=table)


def correlated_topic_model(counts: ArrayLike, *, num_topics: int) -> None:
    r"""Word counts of documents whose topic proportions are correlated.

    .. math:: z_n \sim N(\mu, L L^T), \qquad y_n \sim \mathrm{Multinomial}\bigl(B^T \mathrm{softmax}(z_n)\bigr)

    (Blei and Lafferty, 2007; Khan, 2012, section 1.2.7). The log likelihood is not a function of few predictors, so
    the engines of this package refuse it; it is here for NUTS and SVI. Sites: ``mean``, ``scale`` and ``correlation``
    (of :math:`L`), ``topics`` (:math:`B`), ``z`` and ``counts``.

    :param counts: word counts, shape ``(documents, words)``.
    :param int num_topics: number of topics.
    """
    counts = jnp.asarray(counts)
    num_documents, num_words = counts.shape
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([num_topics]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([num_topics]).to_event(1))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(num_topics, 2.0))
    with numpyro.plate("topic", num_topics):
        topics = numpyro.sample("topics", dist.Dirichlet(jnp.full(num_words, 0.5)))
    with numpyro.plate("documents", num_documents):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([num_topics]).to_event(1))
        logits = mean + z @ (scale[:, None] * correlation).T
        proportions = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        proportions = proportions / proportions.sum(-1, keepdims=True)
        total = counts.sum(-1).astype(int)
        numpyro.sample("counts", dist.Multinomial(total, probs=proportions @ topics), obs=counts)
