r"""Variational EM for rows of data: factor analysis and Gaussian graphical models of discrete and mixed columns.

**References**

1. *Variational Learning for Latent Gaussian Models of Discrete Data*, M. E. Khan, PhD thesis, UBC 2012, chapters
   3 to 5.
2. *Sparse Inverse Covariance Estimation with the Graphical Lasso*, J. Friedman, T. Hastie, R. Tibshirani, 2008.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...display import counted, shown
from ...optional import optional
from ...potentials import GaussianPotential
from ..front.running.progress import progress_bar as progress
from .expectation import expectation_step, initial_modes, initial_posteriors, shared_posteriors
from .maximisation import Parameter, loading_penalty, maximisation_step, scatter
from .minibatches import fit_in_batches
from .posteriors import LatentGaussianRows, RowPosteriors
from .table import checked_rows, runaway_columns

Method = Literal["variational", "map"]

# E-steps after which the bound of a fit in batches is reported.
_LAST_STEPS = 100


@shown
class EMResult(NamedTuple):
    """Outcome of :func:`variational_em`."""

    rows: LatentGaussianRows
    """The data with the fitted parameters."""
    posteriors: RowPosteriors
    """Gaussians for the latent variables of the rows."""
    objective_trace: np.ndarray
    """The objective after every step: E, then M and E for every iteration; shape ``(2 num_steps + 1,)``. With batches
    at the end only, shape ``(1,)``."""
    converged: bool
    """Never with batches, which have no test, and never where a column leaves the objective without a maximum."""
    num_steps: int
    """Iterations that were made."""
    precision: np.ndarray | None
    """With ``sparsity``, the inverse of the covariance with exact zeros, shape ``(L, L)``."""

    def _shown(self) -> list[str]:
        ending = "converged" if self.converged else "NOT converged"
        lines = [
            f"variational_em: {ending} after {counted(self.num_steps, 'iteration')}",
            f"objective {float(self.objective_trace[-1]):.6g}",
            repr(self.rows),
        ]
        if self.precision is not None:
            pairs = int(np.count_nonzero(np.triu(self.precision, 1)))
            lines.append(f"{pairs} pairs of latent variables depend on each other given the rest")
        return lines


def variational_em(
    rows: LatentGaussianRows,
    *,
    learn: Collection[Parameter],
    method: Method = "variational",
    num_steps: int = 100,
    tol: float = 1e-6,
    num_expectation_steps: int = 20,
    expectation_tol: float = 1e-10,
    sparsity: float | None = None,
    loading_scale: float | None = None,
    batch_size: int | None = None,
    rng_key: Array | None = None,
    chunk_size: int = 4096,
    progress_bar: bool = True,
) -> EMResult:
    r"""Maximise the bound of the log likelihood of the rows over Gaussians and parameters in turn.

    The E-step is :func:`~numpyro_ext.infer.rows.expectation.expectation_step`, the M-step
    :func:`~numpyro_ext.infer.rows.maximisation.maximisation_step`. Neither lowers the weighted sum of the bounds of the
    rows. For real columns the Gaussians are exact and this is the EM algorithm, with the log likelihood itself as
    bound. Where the best covariance does not depend on the data (Böhning's bound, real columns), rows with the same
    observed cells share it, and an E-step factorises once for each pattern of observed cells instead of each row.

    On a model function with ``param`` sites, such as :func:`numpyro_ext.models.factor_analysis`, the engine
    :class:`~numpyro_ext.infer.VariationalGaussian` maximises the same bound by L-BFGS, with the best Gaussian at every
    evaluation. That serves any model. This function serves one family of models, for which an iteration has a cost and
    memory linear in the number of rows, with small constants.

    With ``batch_size`` statistics of minibatches are averaged with decreasing weights (Cappé and Moulines 2009), which
    comes near the optimum in a few passes over many rows but not to it; the bound on all rows is computed at the end.

    ``method="map"`` is the baseline that maximises the joint density over latent variables and parameters, which
    overfits: the posteriors have no variance, and the objective bounds nothing.

    :param LatentGaussianRows rows: data, and parameters to start from; :func:`table_rows` makes them of a table.
        Loadings that are learned start with their full rank: from one that is lower, as from zero, EM does not get
        away.
    :param learn: which of ``"mean"``, ``"covariance"``, ``"loadings"``, ``"intercept"`` and ``"noise"`` (the ``scale``
        of Gaussian columns: one number if it has no axes, else one per column) to maximise over.
    :param str method: ``"variational"`` or ``"map"``.
    :param int num_steps: the largest number of iterations; with batches the number of passes over the rows.
    :param float tol: stop when an iteration raises the objective by less than this times the sum of the weights.
    :param int num_expectation_steps: the largest number of steps in an E-step. A few suffice: they go on from where the
        last E-step ended.
    :param float expectation_tol: see ``tol`` of the E-step. The error of the Gaussians is about its square root.
    :param float sparsity: penalty of the graphical lasso on the absolute values of the elements of
        :math:`\Sigma^{-1}` off the diagonal. The objective is the bound less half of it times the sum of the weights.
    :param float loading_scale: standard deviation of a Gaussian prior on the loadings, whose exponent is added to the
        objective. Without it the loadings of separable columns may run away; ``"map"`` needs it.
    :param int batch_size: rows of a minibatch; ``None`` for all rows at once.
    :param Array rng_key: random key of the order of the rows in minibatches.
    :param int chunk_size: how many rows are worked on together; memory beyond the result is proportional to it.
    :param bool progress_bar: whether a run longer than a second shows a bar.
    :return: the fit, see :class:`EMResult`.
    :raises ValueError: for data that their potentials do not allow, NaN in an observed cell, shapes that do not fit, no
        rows, more latent variables than predictors or loadings of a lower rank to start from; for an unknown parameter
        or method, for noise to be learned without real columns or that differs
        between rows, for ``sparsity`` without learning the covariance, or for options that do not go together.

    **Example:**

    >>> from numpyro_ext.potentials import GaussianPotential
    >>> table = jnp.array([[1.0, 2.0, 0.5], [-1.0, -1.5, 0.0], [0.5, 1.0, 1.5], [0.0, -0.5, -1.0], [1.5, 0.0, 1.0]])
    >>> rows = LatentGaussianRows(
    ...     mean=jnp.zeros(1), covariance=jnp.eye(1), loadings=jnp.ones((3, 1)), intercept=jnp.zeros(3),
    ...     potentials=(GaussianPotential(table, jnp.ones(3)),), observed=(jnp.ones((5, 3), bool),),
    ...     weights=jnp.ones(5))
    >>> found = variational_em(rows, learn=("loadings", "intercept", "noise"), num_steps=30)
    >>> bool(np.all(np.diff(found.objective_trace) > -1e-4)), found.rows.loadings.shape
    (True, (3, 1))
    """
    rows = checked_rows(rows, learns_loadings="loadings" in learn)
    learn = _checked(rows, learn, sparsity)
    _check_method(rows, learn, method, sparsity, loading_scale, batch_size, rng_key)
    runaways = runaway_columns(rows, learn)
    if runaways:
        warnings.warn(
            "The objective has no finite maximum, and the fit is not reported as converged: "
            + "; ".join(runaways)
            + ". Leave such columns or categories out, or do not learn what runs away.",
            UserWarning,
            stacklevel=2,
        )
    if batch_size is not None:
        assert rng_key is not None  # checked above
        rows = fit_in_batches(
            rows,
            rng_key=rng_key,
            learn=learn,
            num_passes=num_steps,
            batch_size=batch_size,
            num_expectation_steps=num_expectation_steps,
            loading_scale=loading_scale,
            show_progress=progress_bar,
        )
        start = _start(rows, method)
        posteriors = expectation_step(rows, start, num_steps=_LAST_STEPS, tol=expectation_tol, chunk_size=chunk_size)
        bound = jnp.sum(rows.weights * posteriors.bound) - _loading_penalty(rows, loading_scale)
        return EMResult(rows, posteriors, np.array([float(bound)]), False, num_steps, None)

    expect = partial(expectation_step, num_steps=num_expectation_steps, tol=expectation_tol, chunk_size=chunk_size)
    posteriors = expect(rows, _start(rows, method))
    total_weight = float(jnp.sum(rows.weights))
    precision, penalty = None, _loading_penalty(rows, loading_scale)
    if sparsity is not None:
        precision = np.linalg.inv(np.asarray(rows.covariance, float))
        penalty += _penalty(precision, sparsity * total_weight)
    trace = [float(jnp.sum(rows.weights * posteriors.bound)) - penalty]
    converged, count = False, 0
    with progress(None, "variational_em", unit="steps", enabled=progress_bar) as bar:
        while count < num_steps and not converged:
            rows = maximisation_step(rows, posteriors, learn=learn, loading_scale=loading_scale, chunk_size=chunk_size)
            penalty = _loading_penalty(rows, loading_scale)
            if sparsity is not None and precision is not None:
                rows, precision = _sparse_covariance(rows, posteriors, sparsity, precision)
                penalty += _penalty(precision, sparsity * total_weight)
            posteriors = expect(rows, posteriors)
            sums = jnp.stack([posteriors.start_bound, posteriors.bound]) @ rows.weights
            trace.extend(np.asarray(sums, float) - penalty)
            count += 1
            bar.set_postfix_str(f"objective {trace[-1]:.6g}", refresh=False)
            bar.update()
            if not np.isfinite(trace[-1]):
                break
            converged = bool(trace[-1] - trace[-3] < tol * total_weight)
    return EMResult(rows, posteriors, np.array(trace), converged and not runaways, count, precision)


def _start(rows: LatentGaussianRows, method: Method) -> RowPosteriors:
    """Gaussians from which the first E-step starts; they say of which kind all others are."""
    if method == "map":
        return initial_modes(rows)
    shared = shared_posteriors(rows)
    return initial_posteriors(rows) if shared is None else shared


def _check_method(
    rows: LatentGaussianRows,
    learn: tuple[Parameter, ...],
    method: object,
    sparsity: float | None,
    loading_scale: float | None,
    batch_size: int | None,
    rng_key: Array | None,
) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method must be 'variational' or 'map', got {method!r}.")
    if loading_scale is not None and not loading_scale > 0.0:
        raise ValueError(f"loading_scale must be positive, got {loading_scale!r}.")
    if method == "map":
        if "covariance" in learn:
            raise ValueError("method='map' cannot learn the covariance: the joint density grows as it shrinks to zero.")
        if "loadings" in learn and loading_scale is None:
            raise ValueError(
                "method='map' needs a loading_scale to learn loadings: without one the joint density grows as they "
                "grow and the latent variables shrink."
            )
        if batch_size is not None:
            raise ValueError("method='map' works on all rows at once: leave batch_size at None.")
    if batch_size is not None:
        if not 1 <= batch_size <= rows.num_rows:
            raise ValueError(f"batch_size must be between 1 and the number of rows {rows.num_rows}, got {batch_size}.")
        if rng_key is None or sparsity is not None:
            raise ValueError("batch_size needs an rng_key, and goes without sparsity.")


def _loading_penalty(rows: LatentGaussianRows, loading_scale: float | None) -> float:
    return float(sum(jnp.sum(loading_penalty(family, loading_scale)) for family in rows.families()))


def _checked(rows: LatentGaussianRows, learn: Collection[Parameter], sparsity: float | None) -> tuple[Parameter, ...]:
    names = get_args(Parameter)
    unknown = [name for name in learn if name not in names]
    if unknown or isinstance(learn, str):
        raise ValueError(f"learn must hold some of {', '.join(map(repr, names))}, got {learn!r}.")
    real = [potential for potential in rows.potentials if isinstance(potential, GaussianPotential)]
    if "noise" in learn and not real:
        raise ValueError("learn has 'noise', but no potential is a GaussianPotential.")
    if "noise" in learn and any(jnp.ndim(potential.scale) > 1 for potential in real):
        raise ValueError("To learn 'noise', the scale of a GaussianPotential must be a number or one per column.")
    if sparsity is not None and ("covariance" not in learn or not sparsity >= 0.0):
        raise ValueError("sparsity must not be negative, and 'covariance' must be among what is learned.")
    return tuple(name for name in names if name in learn)


def _sparse_covariance(
    rows: LatentGaussianRows, posteriors: RowPosteriors, sparsity: float, precision: np.ndarray
) -> tuple[LatentGaussianRows, np.ndarray]:
    """The graphical lasso in place of the covariance that maximises the bound; kept as it was if that is better."""
    moment = np.asarray(scatter(rows, posteriors), float)
    graphical_lasso = optional("sklearn.covariance", "rows").graphical_lasso
    _, found = graphical_lasso(moment, sparsity, tol=1e-8, enet_tol=1e-8, max_iter=500)

    def objective(matrix: np.ndarray) -> float:
        return 0.5 * float(np.linalg.slogdet(matrix)[1] - np.sum(moment * matrix)) - _penalty(matrix, sparsity)

    best = max((precision, found), key=objective)
    return rows._replace(covariance=jnp.asarray(np.linalg.inv(best), rows.mean.dtype)), best


def _penalty(precision: np.ndarray, weight: float) -> float:
    return 0.5 * weight * float(np.sum(np.abs(precision)) - np.sum(np.abs(np.diag(precision))))
