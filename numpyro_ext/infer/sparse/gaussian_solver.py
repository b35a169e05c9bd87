"""The Gaussian of structured mean field: how its moments are found, and what is kept between rounds."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...linalg.cholesky import LARGEST_DENSE
from ...linalg.operators.operator import LinearOperator, from_matrix
from ...linalg.solvers.perturb_and_map import Perturbations, draw_perturbations, perturb_and_map
from ...linalg.solvers.posterior_precision import (
    PosteriorPrecision,
    dense_moments,
    gram_diagonal,
    has_diagonal_gram,
    lanczos_log_determinant,
    lanczos_variance,
)
from ...structure.sparse_linear.form import SparseLinear

Variances = Literal["exact", "perturb-and-map", "lanczos", "none"]
Solver = Literal["diagonal", "dense", "conjugate-gradient"]

_NUM_PROBES = 4


class SolverCosts(NamedTuple):
    """Numbers of coefficients by which a way to solve is chosen."""

    largest_dense_step: int = 1024
    """Up to which every step factorises a matrix: beyond, some products with the operator cost less."""
    largest_dense: int = LARGEST_DENSE
    """Up to which answers are found by a dense matrix."""


SOLVER_COSTS = SolverCosts()
"""Numbers of all engines."""


class Options(NamedTuple):
    """Static choices: what :func:`choose_options` returns."""

    solver: Solver
    variances: Variances
    num_rounds: int = 3
    """Rounds of Gaussian and tree per step."""
    is_convexified: bool = False
    """True if rounds after the first use the convex bound of components that are not log-concave."""
    num_samples: int = 30
    """Draws of perturb-and-MAP."""
    num_products: int = 100
    """Dimension of the Krylov space for Lanczos variances."""
    num_determinant_products: int = 30
    """Dimension of the Krylov spaces for the log determinant, where there is no exact one."""
    mean_tol: float = 1e-6
    """Relative residual of conjugate gradients for means."""
    draw_tol: float = 1e-2
    """Relative residual of conjugate gradients for the draws that variances are estimated from."""
    reported_draw_tol: float = 1e-3
    """The same for draws that are reported."""
    max_iterations: int = 500
    """Iterations of conjugate gradients at most."""
    costs: SolverCosts = SOLVER_COSTS


class Workspace(NamedTuple):
    """Arrays that no step changes."""

    matrix: LinearOperator | None
    """The operator as a dense matrix, for the dense solver."""
    perturbations: Perturbations | None
    """The same in every step: the iteration is deterministic, and each solve starts from the last one."""
    signs: Array | None
    """Probes for the log determinant, of shape ``(num_probes, n)``."""


class State(NamedTuple):
    """A point of the iteration; the first field alone determines the bound, the others are where solvers start."""

    second_moment: Array
    """:math:`x`, of shape ``(n,)``; with a frame, of its coefficients, ``(p,)``."""
    mean: Array
    """:math:`m`, of shape ``(n,)``."""
    variance: Array
    """:math:`z`, of the shape of :math:`x`."""
    fitted_variance: Array
    """Variance of each row of :math:`X s`, of shape ``(m,)``."""
    draws: Array
    """Centered draws of perturb-and-MAP, of shape ``(num_samples, n)``; ``(0, n)`` elsewhere."""
    floor: Array
    """The least second moment, a scalar."""


class Solved(NamedTuple):
    """Iterations of conjugate gradients and the residual that they left."""

    num_iterations: Array
    residual: Array

    def add(self, other: Solved) -> Solved:
        return Solved(self.num_iterations + other.num_iterations, jnp.maximum(self.residual, other.residual))


def choose_options(
    form: SparseLinear,
    *,
    variances: Literal["auto", "exact", "perturb-and-map", "lanczos", "none"] = "auto",
    is_diagonal: bool | None = None,
    costs: SolverCosts = SOLVER_COSTS,
    **options: Any,
) -> Options:
    r"""Choose how to solve with :math:`A`: elementwise where :math:`X^T N^{-1} X` is diagonal, densely up to 1024
    coefficients, else with conjugate gradients. Not for traced values.

    :param SparseLinear form: the model.
    :param str variances: ``"exact"``; ``"perturb-and-map"``, unbiased; ``"lanczos"``, too small; ``"none"`` for the
        search for the mode; ``"auto"`` for exact ones where possible, else perturb-and-MAP.
    :param bool is_diagonal: whether :math:`X^T N^{-1} X` is diagonal, if known.
    :param SolverCosts costs: by which the matrix is taken for small.
    :param options: other fields of :class:`Options`.
    :raises ValueError: if exact variances are asked for where they are not to be had.
    """
    if is_diagonal is None:
        is_diagonal = has_diagonal_gram(form.operator, form.noise_variance)
    is_diagonal = is_diagonal and form.analysis is None
    is_dense = form.num_columns <= costs.largest_dense_step
    solver: Solver = "diagonal" if is_diagonal else "dense" if is_dense else "conjugate-gradient"
    if variances == "auto":
        variances = "perturb-and-map" if solver == "conjugate-gradient" else "exact"
    if variances == "exact" and solver == "conjugate-gradient":
        raise ValueError(
            f"Exact variances need an operator whose columns are orthogonal, or at most {costs.largest_dense_step} "
            f"coefficients; there are {form.num_columns}. Use variances='perturb-and-map'."
        )
    return Options(solver, variances, costs=costs, **options)


def make_workspace(form: SparseLinear, rng_key: Array, options: Options) -> Workspace:
    """Draw the random numbers, and make the matrix where it is used.

    :param SparseLinear form: the model.
    :param rng_key: random number generator key.
    :param Options options: static choices.
    """
    shape = form.operator.shape
    draw_key, sign_key = jax.random.split(rng_key)
    perturbations = signs = None
    if options.variances == "perturb-and-map":
        perturbations = draw_perturbations(draw_key, options.num_samples, (shape[0], form.num_coefficients))
    if options.solver == "conjugate-gradient" and options.variances != "none":
        signs = jax.random.rademacher(sign_key, (_NUM_PROBES, shape[1]), form.observed.dtype)
    matrix = from_matrix(form.operator.materialise()) if options.solver == "dense" else None
    return Workspace(matrix, perturbations, signs)


def gram_of(form: SparseLinear, options: Options) -> Array:
    """The diagonal of the precision that the data give the coefficients."""
    return gram_diagonal(form.operator, form.noise_variance, options.solver == "diagonal")


def precision_with(form: SparseLinear, workspace: Workspace, weight: Array) -> PosteriorPrecision:
    """The posterior's precision where the prior is a Gaussian with these precisions of the coefficients."""
    return PosteriorPrecision(workspace.matrix or form.operator, form.noise_variance, weight, form.analysis)


def gaussian_round(
    form: SparseLinear,
    workspace: Workspace,
    gram: Array,
    shift: Array,
    weight: Array,
    state: State,
    options: Options,
    *,
    refresh: Array | bool,
) -> tuple[State, Array, Solved]:
    """The Gaussian with precision ``weight`` on the coefficients: moments, half its log determinant, iterations.

    Exact variances are always fresh; others only where ``refresh`` is set, and so is the log determinant.
    """
    precision = precision_with(form, workspace, weight)
    zero = jnp.zeros((), weight.dtype)
    solved = Solved(jnp.zeros((), jnp.int32), zero)
    half_log_determinant = zero
    variance, fitted, draws = state.variance, state.fitted_variance, state.draws
    if options.solver == "diagonal":
        exact_variance = 1.0 / (gram + weight)
        mean = exact_variance * shift
        half_log_determinant = 0.5 * jnp.sum(jnp.log(gram + weight))
        # Only the sum matters where all rows share one noise variance, and that is shared among them.
        share = jnp.sum(gram * exact_variance) / form.num_rows
        exact_fitted = jnp.broadcast_to(share * form.noise_variance, fitted.shape)
    elif options.solver == "dense":
        mean, exact_variance, half_log_determinant, exact_fitted = dense_moments(precision, shift)
    else:
        result = precision.solve(
            shift, gram, initial=state.mean, tol=options.mean_tol, max_iterations=options.max_iterations
        )
        mean = result.solution
        solved = Solved(result.num_iterations, result.residual / options.mean_tol)
    if options.variances == "exact":
        variance, fitted = exact_variance, exact_fitted

    def perturbed() -> tuple[Array, Array, Array, Solved]:
        assert workspace.perturbations is not None
        result = perturb_and_map(
            precision,
            workspace.perturbations,
            gram,
            initial=draws,
            tol=options.draw_tol,
            max_iterations=options.max_iterations,
        )
        found = result.solution
        fitted = jnp.mean(jnp.square(jax.vmap(precision.operator.matvec)(found)), axis=0)
        more = Solved(result.num_iterations, jnp.max(result.residual) / options.draw_tol)
        variance = jnp.mean(jnp.square(jax.vmap(precision.coefficients)(found)), axis=0)
        return variance, fitted, found, solved.add(more)

    def in_krylov_space() -> tuple[Array, Array, Array, Solved]:
        found = lanczos_variance(precision, shift, min(options.num_products, form.num_columns))
        return found, jnp.zeros_like(fitted), draws, solved

    estimates = {"perturb-and-map": perturbed, "lanczos": in_krylov_space}
    if options.variances in estimates:
        old = variance, fitted, draws, solved
        variance, fitted, draws, solved = lax.cond(refresh, estimates[options.variances], lambda: old)
    signs = workspace.signs
    if signs is not None:
        num_products = min(options.num_determinant_products, form.num_columns)
        half_log_determinant = lax.cond(
            refresh,
            lambda: lanczos_log_determinant(precision, gram, signs, num_products),
            lambda: zero,
        )
    second_moment = jnp.maximum(variance + jnp.square(precision.coefficients(mean)), state.floor)
    return State(second_moment, mean, variance, fitted, draws, state.floor), half_log_determinant, solved
