"""Rows of a table as noisy views of a few latent numbers each: factor analysis and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers

__all__ = ["correlated_topic_model", "factor_analysis", "latent_gaussian_graphical_model"]

_KINDS = ("real", "binary", "count")
_POSITIVE = dist.constraints.positive


def _widths(kinds: str | int | Sequence[str | int], num_columns: int) -> tuple[list[str | int], list[int]]:
    """The kind of every column, and how many predictors it has."""
    every = [kinds] * num_columns if isinstance(kinds, str | int) else list(kinds)
    wrong = [kind for kind in every if kind not in _KINDS and (isinstance(kind, str) or kind < 2)]
    if wrong or len(every) != num_columns:
        raise ValueError(
            f"kinds must be one of {_KINDS} or a number of categories (two or more), or one of these for each of the "
            f"{num_columns} columns; got {every}."
        )
    return every, [1 if isinstance(kind, str) else int(kind) - 1 for kind in every]


def _table_shape(table: ArrayLike | None, shape: tuple[int, int] | None, model: str) -> tuple[int, int]:
    if shape is not None:
        return shape
    if table is None or jnp.ndim(table) != 2:
        found = "" if table is None else f"; got a table of shape {jnp.shape(table)}"
        raise ValueError(f"{model} needs a table with rows and columns, or its shape to sample one{found}.")
    return jnp.shape(table)  # type: ignore[return-value]


def _parameter(name: str, start: ArrayLike, prior: dist.Distribution | None, **constraint: Any) -> jax.Array:
    return numpyro.sample(name, prior) if prior else numpyro.param(name, jnp.asarray(start), **constraint)


def _observe(
    predictor: jax.Array,
    table: ArrayLike | None,
    mask: ArrayLike | None,
    kinds: Sequence[str | int],
    widths: Sequence[int],
    noise: Callable[[int], ArrayLike],
) -> None:
    """One observed site for each kind of column; ``noise`` is asked for the scale of so many real columns."""
    first = np.cumsum([0, *widths])
    shape = (predictor.shape[0], len(kinds))
    if mask is None:
        mask = True if table is None else ~jnp.isnan(jnp.asarray(table, float))
    mask = jnp.broadcast_to(jnp.asarray(mask, bool), shape)
    # Not even a masked cell may be NaN: it would be in the gradient. Other masked values stay: predictions are of them.
    cells = None if table is None else jnp.where(mask | jnp.isfinite(jnp.asarray(table, float)), jnp.asarray(table), 0)
    for kind in sorted(set(kinds), key=str):
        columns = np.flatnonzero([k == kind for k in kinds])
        observed = None if cells is None else cells[:, columns]
        distribution: dist.Distribution
        if isinstance(kind, str):
            name, eta = kind, predictor[:, first[columns]]
            if kind == "real":
                distribution = dist.Normal(eta, noise(len(columns)))
            else:
                distribution = dist.Bernoulli(logits=eta) if kind == "binary" else dist.Poisson(jnp.exp(eta))
        else:
            name = f"categorical_{kind}"
            eta = predictor[:, first[columns][:, None] + np.arange(kind - 1)]
            distribution = dist.Categorical(logits=jnp.pad(eta, ((0, 0), (0, 0), (1, 0))))
            if observed is not None:
                # A number between two categories is out of range, like one beyond them.
                observed = jnp.where(observed == jnp.round(observed), observed, -1).astype(int)
        with handlers.mask(mask=mask[:, columns]):
            numpyro.sample(name, distribution, obs=observed)


def factor_analysis(
    table: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    num_factors: int,
    kinds: str | int | Sequence[str | int] = "real",
    shape: tuple[int, int] | None = None,
    shared_noise: bool = False,
    loading_scale: float | None = None,
    priors: bool = False,
) -> None:
    r"""Factor analysis of real, binary, count and categorical columns, any of them with missing cells.

    .. math:: z_n \sim N(0, I), \qquad \eta_{nd} = w_d^T z_n + b_d

    with a Gaussian of standard deviation ``noise`` around :math:`\eta` in a real column, a Bernoulli variable with
    logit :math:`\eta` in a binary one, a Poisson count with log rate :math:`\eta` in a count one, and in one of ``K``
    categories a softmax of ``K - 1`` predictors, those of the categories after the first, whose predictor is zero
    (Khan, 2012, sections 1.2.5, 5.7 and 6.2). With ``shared_noise`` and real columns only this is probabilistic
    principal component analysis (Tipping and Bishop, 1999). Sites: ``loadings`` (:math:`W`, ``(predictors, factors)``),
    ``intercept`` (:math:`b`), ``noise`` if there are real columns, ``factors`` (:math:`z`, ``(n, factors)``), and the
    observed ``real``, ``binary``, ``count`` and ``categorical_K``, each with its columns. Loadings, intercepts and
    noise are ``param`` sites, for maximum likelihood, or have ``priors``, for samplers.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import factor_analysis
        >>> draws = Predictive(factor_analysis, num_samples=5)(
        ...     random.key(0), shape=(10, 4), num_factors=2, kinds=["binary", "binary", 3, "real"])
        >>> print(draws["factors"].shape, draws["binary"].shape, draws["categorical_3"].shape)
        (5, 10, 2) (5, 10, 2) (5, 10, 1)

    :param table: observations, shape ``(n, d)``; ``None`` samples them. What stands in missing cells does not matter.
    :param mask: false where a cell is missing or held out, shape ``(n, d)``. Without one, cells that are NaN are
        missing.
    :param int num_factors: length of :math:`z_n`, at most the number of predictors.
    :param kinds: ``"real"``, ``"binary"``, ``"count"`` or a number of categories, for all columns or for each.
    :param tuple shape: ``(n, d)``, needed without a table.
    :param bool shared_noise: one noise level for all real columns.
    :param float loading_scale: if given, loadings are sample sites with this prior standard deviation.
    :param bool priors: whether loadings, intercepts (standard deviation 5) and noise (half-normal) are sample sites.
    :raises ValueError: for an unknown kind, for more factors than predictors, and if neither a table nor its shape is
        given.
    """
    num_rows, num_columns = _table_shape(table, shape, "factor_analysis")
    every, widths = _widths(kinds, num_columns)
    size = sum(widths)
    if num_factors > size:
        raise ValueError(
            f"factor_analysis with {num_factors} factors needs as many predictors; the columns have {size}."
        )
    if priors and loading_scale is None:
        loading_scale = 1.0
    normal = dist.Normal(0.0, 1.0 if loading_scale is None else loading_scale)
    # Orthogonal waves: from loadings of a rank that is too low no gradient leads away.
    start = 0.5 * np.cos(np.pi / size * np.outer(0.5 + np.arange(size), 0.5 + np.arange(num_factors)))
    prior = None if loading_scale is None else normal.expand([size, num_factors]).to_event(2)
    loadings = _parameter("loadings", start, prior)
    wide = dist.Normal(0.0, 5.0).expand([size]).to_event(1)
    intercept = _parameter("intercept", np.zeros(size), wide if priors else None)
    with numpyro.plate("rows", num_rows):
        factors = numpyro.sample("factors", dist.Normal(0.0, 1.0).expand([num_factors]).to_event(1))

    def noise(num_real: int) -> jax.Array:
        levels = () if shared_noise else (num_real,)
        half_normal = dist.HalfNormal(1.0).expand(levels).to_event(len(levels))
        return _parameter("noise", jnp.ones(levels), half_normal if priors else None, constraint=_POSITIVE)

    _observe(factors @ loadings.T + intercept, table, mask, every, widths, noise)


def latent_gaussian_graphical_model(
    table: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    kinds: str | int | Sequence[str | int] = "binary",
    shape: tuple[int, int] | None = None,
    noise: float = 0.1,
    priors: bool = False,
) -> None:
    r"""Columns with a latent Gaussian variable behind each predictor: a covariance model for discrete and mixed data.

    .. math:: z_n \sim N(\mu, \Sigma), \qquad y_{nd} \sim p(\,\cdot \mid z_{nd})

    (Khan, 2012, sections 1.2.6 and 5.7), with the likelihoods and the order of predictors of :func:`factor_analysis`.
    Sites: ``mean`` (:math:`\mu`) and ``scale_tril`` (the Cholesky factor of :math:`\Sigma`), both ``param`` sites, or
    with ``priors`` ``mean``, ``scale`` and ``correlation``; ``z``, and the observed ``real``, ``binary``, ``count`` and
    ``categorical_K``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import latent_gaussian_graphical_model
        >>> draws = Predictive(latent_gaussian_graphical_model, num_samples=5)(
        ...     random.key(0), shape=(10, 3), kinds=["binary", 4, "count"])
        >>> print(draws["z"].shape, draws["categorical_4"].shape)
        (5, 10, 5) (5, 10, 1)

    :param table: observations, shape ``(n, d)``; ``None`` samples them.
    :param mask: false where a cell is missing or held out, shape ``(n, d)``. Without one, cells that are NaN are
        missing.
    :param kinds: ``"real"``, ``"binary"``, ``"count"`` or a number of categories, for all columns or for each.
    :param tuple shape: ``(n, d)``, needed without a table.
    :param float noise: standard deviation of real cells around their latent variable, whose own variance could not be
        told from one that is learned.
    :param bool priors: whether mean (standard deviation 5), scales (half-normal, 2) and correlation (LKJ, 1) are sample
        sites.
    :raises ValueError: for an unknown kind, and if neither a table nor its shape is given.
    """
    num_rows, num_columns = _table_shape(table, shape, "latent_gaussian_graphical_model")
    every, widths = _widths(kinds, num_columns)
    size = sum(widths)
    mean = _parameter("mean", np.zeros(size), dist.Normal(0.0, 5.0).expand([size]).to_event(1) if priors else None)
    if priors:
        scale = numpyro.sample("scale", dist.HalfNormal(2.0).expand([size]).to_event(1))
        scale_tril = scale[:, None] * numpyro.sample("correlation", dist.LKJCholesky(size, 1.0))
    else:
        start = jnp.sqrt(2.0) * jnp.eye(size)
        scale_tril = numpyro.param("scale_tril", start, constraint=dist.constraints.lower_cholesky)
    with numpyro.plate("rows", num_rows):
        z = numpyro.sample("z", dist.MultivariateNormal(mean, scale_tril=scale_tril))
    _observe(z, table, mask, every, widths, lambda num_real: noise)


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
