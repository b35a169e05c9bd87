r"""Expectation maximisation for the preferences of many people with shared tastes (Ko 2017, section 3.2, Algorithm 6).

The E-step infers each user by the algorithms that the engines run on, the M-step is one of
:mod:`~.component_analysis`. It differs from the printed algorithm where that is in error: statistics start at zero in
every iteration, hold the outer product of the mean shift, and all is updated from the old variance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...linalg.cholesky import cholesky, solve_lower
from ...structure.model.running.execution import check_key
from ..front.running.averages import Averages
from ..front.running.chunks import Interruption
from ..front.running.extrapolation import extrapolate
from ..front.running.progress import progress_bar as progress
from .component_analysis import (
    aligned_loadings,
    factor_step,
    free_step,
    parts_of_batches,
    prior_after_pass,
    prior_gradient,
)
from .fit import CollaborativeFit
from .options import Accelerator, Covariance, check_options, checked_kernel, continued_prior, first_prior
from .pairs import Pairs, UserBatch, batches_of_users, checked_pairs, warn_of_self_comparisons
from .user_inference import Method, SharedPrior, infer_users, initial_state


class _Expected(NamedTuple):
    """Sums over all users under a prior."""

    prior: SharedPrior
    objective: float
    shift: Array
    curvature: Array
    batches: list[UserBatch]
    sites: tuple[tuple[Array, Array], ...]
    converged: bool
    skipped: int


def collaborative_em(
    pairs: object,
    kernel: ArrayLike,
    rank: int,
    *,
    method: Method = "ep",
    covariance: Covariance = "factor",
    num_users: int | None = None,
    accelerator: Accelerator | None = None,
    learn_mean: bool = True,
    old_mean: bool = False,
    num_pairs_per_user: int | None = None,
    batch_size: int | None = None,
    init_values: Mapping[str, object] | None = None,
    init: CollaborativeFit | None = None,
    rng_key: Array | None = None,
    num_steps: int = 100,
    tol: float = 1e-5,
    num_inference_steps: int = 200,
    inference_tol: float = 1e-9,
    progress_bar: bool = True,
) -> CollaborativeFit:
    r"""Learn from comparisons of many users what their utilities share.

    .. math:: f_u \sim N(b, V V^T + \sigma^2 K), \qquad P(i \succ_u j) = \Phi(f_{ui} - f_{uj})

    The same model as :func:`numpyro_ext.models.collaborative_preferences`, which any engine fits: here a user costs the
    cube of the items or pairs that it has, an iteration is linear in the number of users, and the covariance of the
    items is held once.

    :param pairs: a table with the columns user, winner and loser, or user, first, second and won (1 or 0); or a tuple
        of such arrays. Integers from zero. Repeats and contradictions are data.
    :param kernel: positive definite covariance :math:`K` of the items, shape ``(items, items)``; the identity where
        nothing is known of them. Something on its diagonal keeps it from being singular.
    :param int rank: number of shared tastes, the columns of :math:`V`; zero for none.
    :param str method: how users are inferred: ``"ep"``, ``"vg"`` (variational Gaussian), ``"jaakkola"`` (a bound, of a
        logistic likelihood) or ``"laplace"``.
    :param str covariance: ``"factor"`` as above, or ``"free"`` for any covariance of the items (Yu et al. 2009), which
        starts at that of ``rank`` tastes.
    :param int num_users: ``None`` for one more than the largest; users without pairs keep the prior.
    :param str accelerator: ``"lbfgs"`` maximises the objective by its gradient, in far fewer fits where users have few
        pairs each, and is the default where there is one (not by Laplace's method); ``"squarem"`` (Varadhan and Roland
        2008) extrapolates EM and takes back what lowers the objective; ``"none"`` is plain EM. Of a free covariance,
        random pairs and minibatches there is plain EM only.
    :param bool learn_mean: whether the mean utilities ``b`` are learned, or stay as ``init_values`` or ``init`` have
        them: zero by default, so that nothing is common to all users but tastes.
    :param bool old_mean: see :func:`~.component_analysis.factor_step`.
    :param int num_pairs_per_user: take at most as many pairs of a user, others at random in each iteration.
    :param int batch_size: users of a minibatch, after each of which there is an M-step to running averages of the
        moments of utilities (Cappé and Moulines 2009), as in :func:`~numpyro_ext.infer.variational_em`: for more users
        than are looked at before parameters should move. ``num_steps`` counts passes over all users, in random orders,
        in minibatches with as many users of few and of many pairs each. ``None`` for all users at once.
    :param init_values: values of ``"V"``, ``"b"`` and ``"sigma"`` to start from; by default whitened loadings of size
        0.3 at random, zero and one.
    :param CollaborativeFit init: a fit to go on from, also of a free covariance and also one that was interrupted or
        loaded, in the place of ``init_values``. EM takes the steps that it would have taken next; L-BFGS and
        extrapolations start anew from there.
    :param Array rng_key: of the start, of random pairs and of minibatches; ``None`` for the key of the number zero.
    :param int num_steps: the largest number of M-steps, or of fits by L-BFGS.
    :param float tol: stop when an iteration raises the objective by less than this times its size.
    :param int num_inference_steps: the largest number of steps in the inference of users.
    :param float inference_tol: their tolerance, as the algorithms have it.
    :param bool progress_bar: whether a run longer than a second shows a bar.
    :return: the fit; see :class:`~.fit.CollaborativeFit`. Interrupted (Ctrl-C), that of the last finished step with a
        warning.
    :raises ValueError: for pairs that are none, a kernel that is no covariance, a rank that is not below the number of
        items, options that do not go together, or an ``init`` of other items, kernel or rank.
    :raises KeyboardInterrupt: if interrupted before all users were inferred once.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.infer import collaborative_em
    >>> rng = np.random.default_rng(0)
    >>> user, first, second = np.arange(60) % 20, rng.integers(5, size=60), rng.integers(5, size=60)
    >>> pairs = np.stack([user, np.minimum(first, second), np.maximum(first, second)], axis=1)[first != second]
    >>> fit = collaborative_em(pairs, np.eye(5), 1, progress_bar=False)
    >>> fit.prior.mean.argmax().item(), bool(fit.predict([0], [0], [4]).probability[0] > 0.9)
    (0, True)

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 3.2.
    2. Yu, K., Lafferty, J., Zhu, S. and Gong, Y. (2009), Large-scale collaborative prediction using a nonparametric
       random effects model, *ICML*.
    """
    K = checked_kernel(kernel)
    is_stochastic = num_pairs_per_user is not None or batch_size is not None
    is_plain = covariance == "free" or is_stochastic
    if accelerator is None:
        accelerator = "none" if is_plain else "squarem" if method == "laplace" else "lbfgs"
    check_options(K, rank, method, covariance, accelerator, num_pairs_per_user, batch_size, num_steps)
    if rng_key is not None:
        check_key(rng_key, "collaborative_em(pairs, kernel, 2, rng_key=jax.random.key(0))", "is asked for")
    found, num_users, num_constant = checked_pairs(pairs, num_users, K.shape[0])
    warn_of_self_comparisons(num_constant)
    if not found.user.size:
        raise ValueError("All pairs compare an item with itself: nothing to learn from.")
    start_key, pair_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    if init is None:
        prior = first_prior(K, rank, init_values or {}, start_key)
    else:
        if init_values is not None:
            raise ValueError("Give init or init_values, not both: a fit to go on from has values.")
        prior = continued_prior(init.prior, K, rank, covariance)
    if covariance == "free":
        prior = SharedPrior(prior.mean, jnp.zeros((K.shape[0], 0)), jnp.ones(()), prior.covariance())
    problem = _Problem(found, method, num_inference_steps, inference_tol, num_pairs_per_user, pair_key, K.shape[0])

    def improve(expected: _Expected) -> SharedPrior:
        means = expected.shift / num_users, expected.curvature / num_users
        step: Callable[..., SharedPrior] = free_step if covariance == "free" else factor_step
        found = step(expected.prior, *means, old_mean=old_mean or not learn_mean)
        return found if learn_mean else found._replace(mean=expected.prior.mean)

    with progress(None, "collaborative_em", unit="steps", enabled=progress_bar) as bar, problem.interruption:
        if accelerator == "lbfgs" and num_steps:
            expected, trace, converged, count = _climb(problem, prior, learn_mean, num_steps, tol, bar)
        elif batch_size is not None:
            parts, options = -(-num_users // batch_size), {"free": covariance == "free", "learn_mean": learn_mean}
            expected, trace, count = _wander(problem, prior, parts, num_users, options, num_steps, bar)
            converged = False
        else:
            squared = accelerator == "squarem" and not is_plain
            expected, trace, converged, count = _alternate(problem, prior, improve, squared, num_steps, tol, bar)
    has_converged = converged and expected.converged
    if problem.is_interrupted or not (has_converged or is_stochastic or not num_steps):
        warnings.warn(_end_in_words(problem, expected, count), UserWarning, stacklevel=2)
    return CollaborativeFit(
        expected.prior,
        method,
        tuple(expected.batches),
        expected.sites,
        num_users,
        np.array(trace),
        has_converged and not is_stochastic,
        count,
        expected.skipped,
        num_constant,
    )


def _end_in_words(problem: _Problem, expected: _Expected, count: int) -> str:
    """Words on a run of so many steps that was interrupted, or did not converge."""
    if problem.is_interrupted:
        return f"collaborative_em was interrupted after {count} steps, of which this is the fit. Go on by init=fit."
    what = "the objective still rose" if expected.converged else "not all users were inferred to the end"
    return (
        f"collaborative_em did not converge: {what} in the last of {count} steps. Give more (num_steps, or "
        "num_inference_steps for the users), or go on by init=fit."
    )


class _Problem:
    """The users, and the states from which their next inference starts."""

    def __init__(
        self, pairs: Pairs, method: Method, num_steps: int, tol: float, limit: int | None, key: Array, num_items: int
    ) -> None:
        self.pairs, self.method, self.num_steps, self.tol, self.limit = pairs, method, num_steps, tol, limit
        self.rng, self.num_items = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel()), num_items
        self.states: list[Any] | None = None
        self.sizes: list[tuple[int, int]] | None = None
        if limit is not None:
            counts = np.unique(pairs.user, return_counts=True)[1]
            sizes = np.unique(np.ceil(np.geomspace(1, min(limit, counts.max()), 4)).astype(int))
            self.sizes = [(int(size), int(min(2 * size, num_items))) for size in sizes]
        self.batches: list[UserBatch] = [] if limit is not None else batches_of_users(pairs, num_items)
        self.interruption = Interruption()
        self.is_interrupted = False

    def expect(self, prior: SharedPrior) -> _Expected:
        """Infer all users.

        :raises KeyboardInterrupt: between batches, where one was asked for.
        """
        self.draw()
        expected, states = self.infer(self.batches, prior, self.states)
        if np.isfinite(expected.objective):
            self.states = states
        return expected

    def draw(self) -> None:
        """Other pairs, where they are random."""
        if self.limit is not None:
            self.batches, self.states = batches_of_users(self._some(self.limit), self.num_items, self.sizes), None

    def infer(
        self, batches: list[UserBatch], prior: SharedPrior, given: list[Any] | None = None
    ) -> tuple[_Expected, list[Any]]:
        """The users of some batches, from given states, which are for all of these, or from the start."""
        total, skipped, converged, states, sites = 0.0, 0, True, [], []
        shift, curvature = jnp.zeros_like(prior.mean), jnp.zeros_like(prior.kernel)
        for k, batch in enumerate(batches):
            if self.interruption:
                raise KeyboardInterrupt
            state = initial_state(batch, prior, self.method) if given is None else given[k]
            state, found = infer_users(batch, prior, state, method=self.method, num_steps=self.num_steps, tol=self.tol)
            states.append(state)
            sites.append((found.precision, found.site_shift))
            shift, curvature = shift + found.shift, curvature + found.curvature
            total, skipped = total + float(found.objective), skipped + int(found.skipped)
            converged &= bool(found.converged)
        return _Expected(prior, total, shift, curvature, batches, tuple(sites), converged, skipped), states

    def _some(self, limit: int) -> Pairs:
        """At most so many pairs of each user, at random."""
        order = np.lexsort((self.rng.random(self.pairs.user.size), self.pairs.user))
        user = self.pairs.user[order]
        starts = np.searchsorted(user, user)
        return self.pairs.take(order[np.arange(user.size) - starts < limit])


def _alternate(
    problem: _Problem, prior: SharedPrior, improve: Any, squared: bool, num_steps: int, tol: float, bar: Any
) -> tuple[_Expected, list[float], bool, int]:
    """EM, where each third step may go where the last two point at."""
    expected = problem.expect(prior)
    trace, count, converged, was_small = [expected.objective], 0, False, not squared
    try:
        while count < num_steps and not converged:
            before, first = expected, problem.expect(improve(expected))
            count += 1
            expected = first
            if squared and count < num_steps and first.objective > before.objective:
                third = improve(first)
                jump = problem.expect(_extrapolated(before.prior, first.prior, third))
                expected = jump if jump.objective >= first.objective else problem.expect(third)
                count += 1
            bar.update(count - bar.n)
            bar.set_postfix_str(f"objective {expected.objective:.6g}", refresh=False)
            if not np.isfinite(expected.objective):
                return before, trace, False, count
            trace.append(expected.objective)
            # a plain step after a jump may gain little and the next jump much
            is_small = trace[-1] - trace[-2] < tol * abs(trace[-1])
            converged = problem.limit is None and is_small and was_small
            was_small = is_small or not squared
    except KeyboardInterrupt:
        problem.is_interrupted = True
        if expected.objective != trace[-1]:  # of a step whose extrapolation was cut off
            trace.append(expected.objective)
    return expected, trace, converged, count


def _wander(
    problem: _Problem, prior: SharedPrior, num_parts: int, num_users: int, options: Any, num_steps: int, bar: Any
) -> tuple[_Expected, list[float], int]:
    """Passes over minibatches of users, and then all users once."""
    averages: Averages | None = None
    trace: list[float] = []
    present = np.unique(problem.pairs.user).size
    try:
        while len(trace) < num_steps and np.all(np.isfinite(trace[-1:])):
            problem.draw()
            prior, averages, total = prior_after_pass(
                lambda batches, prior: problem.infer(batches, prior)[0],
                parts_of_batches(problem.batches, num_parts, problem.num_items, problem.rng),
                prior,
                averages,
                num_absent=(num_users - present) / num_parts,
                **options,
            )
            trace.append(total)
            bar.update()
            bar.set_postfix_str(f"objective {total:.6g}", refresh=False)
    except KeyboardInterrupt:
        problem.is_interrupted = True
    # Another Ctrl-C ends the run.
    problem.interruption.is_asked = False
    expected = problem.expect(prior)
    return expected, [*trace, expected.objective], len(trace)


def _extrapolated(first: SharedPrior, second: SharedPrior, third: SharedPrior) -> SharedPrior:
    factor = cholesky(first.kernel)
    points = []
    for prior in (first, second, third):
        white = aligned_loadings(solve_lower(factor, prior.loadings), solve_lower(factor, first.loadings))
        points.append((prior.mean, white, jnp.log(prior.variance)))
    mean, white, log_variance = extrapolate(*points)
    return SharedPrior(mean, factor @ white, jnp.exp(log_variance), first.kernel)


def _climb(
    problem: _Problem, prior: SharedPrior, learn_mean: bool, num_steps: int, tol: float, bar: Any
) -> tuple[_Expected, list[float], bool, int]:
    """L-BFGS on the objective, by the gradient that the statistics are."""
    size, rank = prior.loadings.shape
    best = problem.expect(prior)
    trace = [best.objective]

    def unpack(x: np.ndarray) -> SharedPrior:
        b, V, log_variance = jnp.asarray(x[:size]), jnp.asarray(x[size:-1].reshape(size, rank)), jnp.asarray(x[-1])
        dtype = prior.mean.dtype
        return SharedPrior(b.astype(dtype), V.astype(dtype), jnp.exp(log_variance).astype(dtype), prior.kernel)

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        expected = best if len(trace) == 1 and bar.n == 0 else problem.expect(unpack(x))
        bar.update()
        trace.append(expected.objective)
        if not np.isfinite(expected.objective):
            return np.inf, np.zeros_like(x)
        if expected.objective >= best.objective:
            best = expected
        of_mean, of_loadings, of_variance = prior_gradient(expected.prior, expected.shift, expected.curvature)
        of_mean = of_mean if learn_mean else jnp.zeros_like(of_mean)
        parts = of_mean, of_loadings.reshape(-1), (of_variance * expected.prior.variance)[None]
        return -expected.objective, -np.concatenate([np.asarray(part, float) for part in parts])

    from scipy.optimize import minimize  # not needed by those who only import the room

    start = np.concatenate([prior.mean, np.ravel(prior.loadings), [np.log(prior.variance)]]).astype(float)
    options = {"maxfun": num_steps, "ftol": tol, "maxcor": 20}
    try:
        succeeded = bool(minimize(evaluate, start, jac=True, method="L-BFGS-B", options=options).success)
    except KeyboardInterrupt:
        problem.is_interrupted, succeeded = True, False
    fits = len(trace) - 1
    return best, list(np.fmax.accumulate(trace[1:] or trace)), succeeded, fits
