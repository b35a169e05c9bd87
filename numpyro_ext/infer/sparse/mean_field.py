r"""Structured mean field for sparse linear models: a Gaussian over the coefficients times a tree over their states.

With second moments :math:`x_j`, state probabilities :math:`q_j(d)` and the widths :math:`\gamma_{d,j} =
\gamma^\star_d(x_j)` at which the component :math:`t_d` is touched by a Gaussian (see
:mod:`~numpyro_ext.potentials.bounds.super_gaussian`), the evidence has the lower bound (Ko 2017, eq. (2.99), with
constants)

.. math:: \log Z \ge \log \int N(y \mid X s, N)\, e^{-\frac12 s^T \operatorname{diag}(\pi) s}\, ds
    + \tfrac12 \pi^T x + \log \sum_\delta P(\delta) \prod_j t_{\delta_j}(\sqrt{x_j}),
    \qquad \pi_j = \sum_d q_j(d) / \gamma_{d,j},

where the :math:`q_j` are the marginals of the tree that is summed over. A round computes the Gaussian of precision
:math:`A = X^T N^{-1} X + \operatorname{diag}(\pi)` and sets :math:`x = z + m^2` from its variances and means; no
round lowers the bound. Variances that are costly are refreshed in the first round of each step only, as
:math:`\log |A| \le z^T \pi + \text{const}` allows (Seeger and Nickisch 2011): what stands between is a penalised least
squares problem, solved by reweighting. With :math:`z = 0` this is the search for the mode.

Where the prior is that of coefficients :math:`B s` in a tight frame, to a power :math:`w`, the precision is
:math:`X^T N^{-1} X + B^T \operatorname{diag}(\pi) B` with :math:`\pi_j = w \sum_d q_j(d) / \gamma_{d,j}`, and :math:`x`
are the second moments of :math:`B s`; all else stays.

>>> import jax
>>> import jax.numpy as jnp
>>> from numpyro_ext.linalg import identity
>>> from numpyro_ext.potentials import LaplacePotential
>>> from numpyro_ext.potentials.trees.forest import Forest
>>> from numpyro_ext.potentials.trees.mixture import TreeParameters
>>> from numpyro_ext.structure.sparse_linear import SparseLinear
>>> tree = TreeParameters(
...     LaplacePotential(0.0, jnp.full(1, 0.1)), LaplacePotential(0.0, jnp.full(1, 1.0)),
...     jnp.full(1, 0.5), jnp.array([[0.1, 0.9]]),
... )
>>> form = SparseLinear(
...     identity(3), jnp.array([1.0, 1.2, 0.02]), jnp.asarray(0.04), Forest.from_parents([-1, 0, 0]), tree
... )
>>> options = choose_options(form)
>>> workspace = make_workspace(form, jax.random.key(0), options)
>>> state, info = solve(form, workspace, init(form, workspace, options), options, num_steps=100, tol=1e-6)
>>> print(bool(info.converged), state.mean.round(2))
True [0.96 1.16 0.01]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ...linalg.solvers.posterior_precision import PosteriorPrecision
from ...potentials.bounds.super_gaussian import SuperGaussianPotential
from ...potentials.trees.forest import SumProduct
from ...potentials.trees.mixture import components_of_nodes, state_posterior
from ...structure.sparse_linear import SparseLinear
from ..front.running.extrapolation import extrapolate
from .gaussian_solver import (
    Options,
    Solved,
    State,
    Workspace,
    choose_options,
    gaussian_round,
    gram_of,
    make_workspace,
    precision_with,
)
from .trees.learning import FLOOR, states_given

__all__ = [
    "Info",
    "Options",
    "SolveInfo",
    "State",
    "Workspace",
    "bound",
    "choose_options",
    "init",
    "make_workspace",
    "posterior_precision",
    "solve",
    "step",
]

_LOG_2PI = math.log(2.0 * math.pi)


class Info(NamedTuple):
    """Outcome of one step."""

    objective: Array
    """The bound *before* the step; without variances, the log joint density after its first round."""
    max_change: Array
    """Largest change of :math:`\\sqrt{x_j}`, in standard deviations of the noise of one coefficient."""
    num_iterations: Array
    """Iterations of conjugate gradients, all rounds together."""
    residual: Array
    """The largest relative residual that conjugate gradients left, in units of their tolerance."""


class SolveInfo(NamedTuple):
    """End of the iteration."""

    converged: Array
    num_steps: Array
    objective: Array
    """The bound at the end; without variances, the log joint density."""
    objective_trace: Array
    """:attr:`Info.objective` of each step, shape ``(num_steps,)`` as requested, padded with nan."""
    max_change: Array
    num_iterations: Array
    residual: Array


def posterior_precision(form: SparseLinear, workspace: Workspace, state: State) -> PosteriorPrecision:
    """The precision of the Gaussian at ``state``, to solve with and draw from."""
    states = states_given(form, state.second_moment)
    weight = _gaussian_precision(form, states, state.second_moment)
    return precision_with(form, workspace, weight)


def init(form: SparseLinear, workspace: Workspace, options: Options, coefficients: Array | None = None) -> State:
    """Start of the iteration: one round from the marginals of the prior.

    :param SparseLinear form: the model.
    :param Workspace workspace: of it.
    :param Options options: static choices.
    :param coefficients: those of the raw data, of shape ``(n,)``. By default where the columns of the operator are
        orthogonal the least squares solution, and elsewhere that of Gaussian components with the scales of the prior.
    """
    gram = gram_of(form, options)
    n, p = form.num_columns, form.num_coefficients
    prior_states = state_posterior(form.forest, form.prior, jnp.zeros((p, 2), gram.dtype))
    zeros = jnp.zeros((n,), gram.dtype)
    shift = precision_with(form, workspace, zeros).project(form.observed)
    if coefficients is None and options.solver != "diagonal":
        components = _super_gaussian(form)
        typical = [jnp.broadcast_to(_typical_square(component, gram.dtype), (p,)) for component in components]
        q = prior_states.marginals
        second_moment = 1.0 / ((1.0 - q) / typical[0] + q / typical[1])
        weight = form.weight / second_moment
    else:
        if coefficients is None:
            coefficients = shift / jnp.where(gram > 0.0, gram, 1.0)
        # Where data are silent, the noise of a coefficient is infinite; it starts at the average of the others.
        noise = 1.0 / jnp.where(gram > 0.0, gram, jnp.mean(gram))
        if form.analysis is not None:
            noise = jnp.mean(noise)
        squares = jnp.square(form.coefficients(coefficients))
        second_moment = squares + (0.0 if options.variances == "none" else noise)
        second_moment = jnp.maximum(second_moment, FLOOR * jnp.mean(second_moment))
        weight = _gaussian_precision(form, prior_states, second_moment)
        zeros = jnp.asarray(coefficients, gram.dtype)
    floor = FLOOR * jnp.mean(second_moment)
    draws = jnp.zeros((0 if workspace.perturbations is None else options.num_samples, n), gram.dtype)
    start = State(second_moment, zeros, jnp.zeros_like(second_moment), jnp.zeros_like(form.observed), draws, floor)
    state, _, _ = gaussian_round(form, workspace, gram, shift, weight, start, options, refresh=True)
    return state


def step(form: SparseLinear, workspace: Workspace, state: State, options: Options) -> tuple[State, Info]:
    """Some rounds of Gaussian and tree, the first with fresh variances.

    Cost: with a diagonal solver linear, besides two products with the operator; densely ``O(n^3)`` per round; else
    one solution per round and one per draw, of as many products as conjugate gradients take.

    :param SparseLinear form: the model.
    :param Workspace workspace: of it.
    :param State state: from :func:`init`, or from another form of the same shapes.
    :param Options options: static choices.
    :return: the next state, and what was found.
    """
    return _advance(form, workspace, state, options, jnp.asarray(False))


def _advance(
    form: SparseLinear, workspace: Workspace, state: State, options: Options, judges_only: Array
) -> tuple[State, Info]:
    """A step; or with ``judges_only`` its first round alone, which finds the bound."""
    gram = gram_of(form, options)
    shift = precision_with(form, workspace, gram).project(form.observed)
    reference = [c.width(state.second_moment) for c in _super_gaussian(form)] if options.is_convexified else None

    # One body for all rounds: a second copy would double the time of compilation.
    def round_of(number: Array, carry: tuple[State, Array, Solved]) -> tuple[State, Array, Solved]:
        now, objective, solved = carry
        is_first = number == 0
        states = states_given(form, now.second_moment)
        weight = _gaussian_precision(form, states, now.second_moment, reference)
        new, half_log_determinant, more = gaussian_round(
            form, workspace, gram, shift, weight, now, options, refresh=is_first
        )
        objective = lax.cond(
            is_first,
            lambda: _objective(form, states, weight, now, new, half_log_determinant, options),
            lambda: objective,
        )
        return new, objective, solved.add(more)

    def advance(number: Array, carry: tuple[State, Array, Solved]) -> tuple[State, Array, Solved]:
        return lax.cond(judges_only & (number > 0), lambda _, carry: carry, round_of, number, carry)

    zero = jnp.zeros((), gram.dtype)
    start = state, zero, Solved(jnp.zeros((), jnp.int32), zero)
    new, objective, solved = lax.fori_loop(0, options.num_rounds, advance, start)
    change = jnp.abs(jnp.sqrt(new.second_moment) - jnp.sqrt(state.second_moment)) * jnp.sqrt(jnp.mean(gram))
    return new, Info(objective, jnp.max(change), solved.num_iterations, solved.residual)


def bound(form: SparseLinear, workspace: Workspace, state: State, options: Options) -> Array:
    """The lower bound of the log evidence at ``state``, exact with exact solvers and else an estimate of it; without
    variances, the log joint density of means and data. With constants."""
    return _advance(form, workspace, state, options, jnp.asarray(True))[1].objective


def solve(
    form: Any,
    workspace: Workspace,
    state: State,
    options: Options,
    *,
    num_steps: int | Array = 100,
    tol: float = 1e-4,
    trace_length: int | None = None,
    learn: Callable[[Any, State], Any] | None = None,
    make_form: Callable[[Any], SparseLinear] = lambda form: form,
    accelerates: bool = False,
) -> tuple[Any, ...]:
    """Steps until the largest change is below ``tol``, in one compiled loop that ends where something is not finite.

    :param form: the model; or, with ``make_form``, what it is made from.
    :param Workspace workspace: of it.
    :param State state: where to start.
    :param Options options: static choices.
    :param num_steps: steps at most, a number or a traced scalar.
    :param float tol: bound on :attr:`Info.max_change`.
    :param int trace_length: of the trace, at least ``num_steps``; needed where that is traced.
    :param learn: called after each step with ``form`` and state, returns the new ``form``.
    :param make_form: from what is learned to the model.
    :param bool accelerates: whether every third step starts where the two before it point at
        (:func:`~numpyro_ext.infer.sparse.extrapolation.extrapolate`), and is refused if the bound is lower there. For a
        ``form`` of floating-point arrays, where variances are exact: an estimated bound may refuse at random.
    :return: the state and how the iteration ended; with ``learn``, the learned form before these.
    """
    trace = jnp.full((num_steps if trace_length is None else trace_length,), jnp.nan, state.mean.dtype)
    infinity = jnp.asarray(jnp.inf, state.mean.dtype)
    nothing = Info(jnp.zeros_like(infinity), infinity, jnp.zeros((), jnp.int32), jnp.zeros_like(infinity))

    def goes_on(info: Info, number: Array) -> Array:
        return (number < num_steps) & (info.max_change > tol) & jnp.isfinite(info.objective)

    def leap(carry: _Carry, point: _Point, info: Info) -> tuple[_Point, Info, _Point, _Point]:
        """Start of the next step, what is known there, and what carries on as ``first`` and ``kept``."""
        assert carry.first is not None
        turn = carry.number % 3
        start = _Point(carry.form, carry.state)
        is_refused = (turn == 2) & ~(info.objective >= carry.info.objective)
        before = carry.info._replace(num_iterations=info.num_iterations)
        point, info = jax.tree.map(partial(jnp.where, is_refused), (carry.kept, before), (point, info))
        logs = [(form, jnp.log(state.second_moment)) for form, state in (carry.first, start, point)]
        form, log_second_moment = extrapolate(*logs)
        further = _Point(form, point.state._replace(second_moment=jnp.exp(log_second_moment)))
        # After the last step nothing would judge it.
        leaps = (turn == 1) & goes_on(info, carry.number + 1)
        following, first = (
            jax.tree.map(partial(jnp.where, is_so), new, old)
            for is_so, new, old in ((leaps, further, point), (turn == 0, start, carry.first))
        )
        return following, info, first, point

    # The last turn of the loop only finds the bound where the iteration has ended, so that this is compiled once.
    def advance(carry: _Carry) -> _Carry:
        is_over = ~goes_on(carry.info, carry.number)
        state, info = _advance(make_form(carry.form), workspace, carry.state, options, is_over)
        found = info.objective
        if learn is not None:
            # What is learned belongs to the coefficients from the first step on: that one alone says nothing of it.
            info = info._replace(max_change=jnp.where(carry.number == 0, jnp.inf, info.max_change))
        form = carry.form if learn is None else lax.cond(is_over, lambda f, _: f, learn, carry.form, state)
        point = _Point(form, state)
        point, info, first, kept = leap(carry, point, info) if accelerates else (point, info, None, None)
        trace = carry.trace.at[carry.number].set(info.objective, mode="drop")
        total = info._replace(num_iterations=info.num_iterations + carry.info.num_iterations)
        point, last, number, trace = jax.tree.map(
            lambda old, new: jnp.where(is_over, old, new),
            (_Point(carry.form, carry.state), carry.info, carry.number, carry.trace),
            (point, total, carry.number + 1, trace),
        )
        return _Carry(point.form, point.state, last, number, trace, found, is_over, first, kept)

    nowhere = _Point(form, state) if accelerates else None
    start = _Carry(
        form, state, nothing, jnp.zeros((), jnp.int32), trace, infinity, jnp.asarray(False), nowhere, nowhere
    )
    end = lax.while_loop(lambda carry: ~carry.is_over, advance, start)
    converged = (end.info.max_change <= tol) & jnp.isfinite(end.objective)
    summary = SolveInfo(
        converged, end.number, end.objective, end.trace, end.info.max_change, end.info.num_iterations, end.info.residual
    )
    return (end.state, summary) if learn is None else (end.form, end.state, summary)


class _Point(NamedTuple):
    form: Any
    state: State


class _Carry(NamedTuple):
    form: Any
    state: State
    info: Info
    number: Array
    trace: Array
    objective: Array
    is_over: Array
    first: _Point | None
    """Start of the last step but one, for extrapolation; ``None`` without."""
    kept: _Point | None
    """End of the last step, to go back to."""


def _super_gaussian(form: SparseLinear) -> tuple[SuperGaussianPotential, SuperGaussianPotential]:
    low, high = components_of_nodes(form.forest, form.prior)
    for component in (low, high):
        if not isinstance(component, SuperGaussianPotential):
            raise TypeError(f"{type(component).__name__} is not known to be super-Gaussian: it has no widths.")
    return low, high  # type: ignore[return-value]


def _gaussian_precision(
    form: SparseLinear, states: SumProduct, second_moment: Array, reference: list[Array] | None = None
) -> Array:
    r""":math:`\pi`: expected inverse widths, of the convex penalty at the reference widths if these are given."""
    q = states.marginals
    components = _super_gaussian(form)
    if reference is None:
        low, high = (component.width(second_moment) for component in components)
    else:
        pairs = zip(components, reference, strict=True)
        low, high = (component.convexified_penalty(second_moment, width).width for component, width in pairs)
    return form.weight * ((1.0 - q) / low + q / high)


def _typical_square(component: SuperGaussianPotential, dtype: DTypeLike) -> Array:
    """The square at which the width equals it: the squared scale of all families here."""
    start = jnp.ones(jnp.broadcast_shapes(*(jnp.shape(leaf) for leaf in jax.tree.leaves(component))), dtype)
    return lax.fori_loop(0, 60, lambda _, x: component.width(x), start)


def _objective(
    form: SparseLinear,
    states: SumProduct,
    weight: Array,
    old: State,
    new: State,
    half_log_determinant: Array,
    options: Options,
) -> Array:
    """The bound at the second moments of ``old``, with the Gaussian of ``new`` that belongs to them."""
    log_likelihood = form.log_likelihood(new.mean)
    if options.variances == "none":
        return log_likelihood + form.weight * states_given(form, new.second_moment).log_partition
    # The mean minimises the quadratic, so that one which is not solved for exactly gives a smaller bound.
    log_integral = (
        log_likelihood
        - 0.5 * jnp.sum(weight * jnp.square(form.coefficients(new.mean)))
        + 0.5 * form.num_columns * _LOG_2PI
    ) - half_log_determinant
    return log_integral + 0.5 * jnp.sum(weight * old.second_moment) + form.weight * states.log_partition
