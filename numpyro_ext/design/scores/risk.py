"""Expected loss of predictions after an observation."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.front.options import check_one_of, wrong_kind
from ...infer.gaussian.engine import Engine
from ...infer.gaussian.runs.run import GaussianRun
from ...linalg.padding import rounded_up
from ...potentials import Potential
from ...potentials.outcomes import log_predictive_probabilities, num_outcomes, of_column, with_outcome
from ..outcomes.outlooks import GaussianOutlook
from ..outcomes.pool import Pool

Loss = Literal["zero-one", "gini", "labelled", "labelled-and-gini"]
Refit = Literal["one-step", "full"]


def expected_risk(
    source: object,
    *,
    loss: Loss = "zero-one",
    refit: Refit = "one-step",
    reference: Any = None,
    rng_key: Array | None = None,
) -> dict[str, np.ndarray]:
    r"""Minus the expected risk of predictions after each candidate, :math:`-\sum_y p(y \mid x) R(x, y)`.

    The risk is summed over reference observations, whose inputs are known and whose outcomes are not used: of
    ``"zero-one"`` loss :math:`\sum_i (1 - \max_y p_i(y))` (Zhu, Lafferty and Ghahramani 2003), of ``"gini"``
    :math:`\sum_i (1 - \sum_y p_i(y)^2)`. ``"labelled"`` is the probability of another label than the one seen, summed
    over the observations that have one, the candidate among them; ``"labelled-and-gini"`` is both (Kapoor, Horvitz and
    Basu 2007).

    Cost: ``"full"`` fits once for each candidate and outcome, hundreds of times more than
    :func:`~numpyro_ext.design.expected_information_gain`; ``"one-step"`` updates all predictors by the covariance with
    the candidate's, ``O(candidates * outcomes * rows)``, and ranks much the same.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from jax.scipy.stats import norm
    >>> from numpyro_ext.design import expected_risk
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, seen=True):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(slope * x)), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([0.5, 1.0, 3.0]), jnp.array([1, 0, 0]), jnp.array([True, False, False]))
    >>> risk = expected_risk(engine)["y"]
    >>> bool(risk[2] > risk[1])
    True

    :param source: an engine on a Gaussian field after its run, with one observed site whose outcomes can be counted; or
        what :attr:`~numpyro_ext.design.SequentialDesign.source` is of one.
    :param str loss: see above.
    :param str refit: see above.
    :param reference: booleans in the shape of the observations, true for those whose predictions matter; by default
        those that are masked.
    :param rng_key: not used; every score takes one.
    :return: for the observed site an array in the shape of its observations.
    :raises ValueError: for other sources, sites and options.
    """
    check_one_of(Loss, loss=loss)
    check_one_of(Refit, refit=refit)
    pool = _pool_of(source)
    name, outlook = _one_site(pool)
    candidates = np.flatnonzero(outlook.is_candidate)
    if not candidates.size:
        raise ValueError("Every observation is in use: mask those that could be observed.")
    number = num_outcomes(outlook.potential, outlook.mean, outlook.variance, outlook.weights)
    if number is None:
        raise ValueError(f"The observations of {name!r} are real numbers: a risk is one of counted outcomes.")
    shape = outlook.shape
    at = np.zeros(outlook.is_candidate.size, bool)
    at[candidates] = True
    if reference is not None:
        at = np.asarray(reference, bool).reshape(-1)
        if at.size != outlook.is_candidate.size:
            raise ValueError(f"reference has the shape {np.shape(reference)}, and the observations {shape}.")
    places, told = pool.seen_values(name)
    is_seen, values = np.zeros(at.size, bool), np.zeros(at.size, int)
    is_seen[places], values[places] = True, told
    risk = partial(_risk, loss=loss, number=number)
    seen = jnp.asarray(at), jnp.asarray(is_seen), jnp.asarray(values)
    if refit == "full":
        # as many for a while, so that little is compiled as they become fewer
        padded = np.resize(candidates, rounded_up(len(candidates)))
        gains, means, variances = pool.fits_after(name, padded, number)
        log_after = jnp.log(outlook.weights) + jnp.asarray(gains)
        found = np.asarray(risk(outlook.potential, *seen, jnp.asarray(padded), log_after, means, variances))
        found = found[: len(candidates)]
    else:  # of all, so that nothing is compiled as they become fewer
        inputs = outlook.potential, outlook.mean, outlook.variance, outlook.weights, pool.covariances()
        found = np.asarray(_one_step(*inputs, *seen, loss=loss, number=number))[candidates]
    # Fits of each outcome weigh as the prediction has it.
    probabilities = np.exp(np.asarray(outlook.log_mixture))[candidates]
    scores = np.full(outlook.is_candidate.size, -np.inf)
    scores[candidates] = -np.sum(probabilities * found, axis=1)
    return {name: outlook.shaped(np.where(outlook.is_candidate.reshape(-1), scores, 0.0))}


def site_entropy_reduction(source: object, labels: object, *, rng_key: Array | None = None) -> dict[str, np.ndarray]:
    r"""Fall of the entropy of a predictor once its label is taken in, :math:`\tfrac12 \log(v / \hat v)`.

    The informative vector machine (Lawrence, Seeger and Herbrich 2003). It knows the labels of the candidates, and so
    chooses which data to keep, not which to ask for.

    :param source: as for :func:`expected_risk`; outcomes may be real numbers.
    :param labels: of all observations, in their shape; those of observations that are seen do not matter.
    :param rng_key: not used; every score takes one.
    :return: for the observed site an array in the shape of its observations.
    :raises ValueError: as :func:`expected_risk`, and for labels of another shape.
    """
    pool = _pool_of(source)
    name, outlook = _one_site(pool)
    labels = np.asarray(labels, float)
    if labels.shape != outlook.shape:
        raise ValueError(f"labels have the shape {labels.shape}, and the observations of {name!r} {outlook.shape}.")
    if len(outlook.weights) > 1:
        raise ValueError("Entropies of mixtures over hyperparameters have no such form: fit with integrate='none'.")
    told = with_outcome(outlook.potential, jnp.asarray(labels.reshape(-1), outlook.mean.dtype))
    moments = told.tilted_moments(outlook.mean, outlook.variance)
    return {name: outlook.shaped(0.5 * jnp.log(outlook.variance / moments.variance)[0])}


def _pool_of(source: object) -> Pool:
    if isinstance(source, Pool):
        return source
    run = source._finished() if isinstance(source, Engine) else None
    if not isinstance(run, GaussianRun) or not isinstance(source, Engine):
        wanted = "an engine on a Gaussian field after its run, such as EP"
        raise wrong_kind("A score by the fits after each observation", source, wanted)
    return Pool(run, source.num_steps)


def _one_site(pool: Pool) -> tuple[str, GaussianOutlook]:
    found = pool.outlooks()
    if len(found) != 1:
        raise ValueError(f"This score is one of models with one observed site; this one has {sorted(found)}.")
    ((name, outlook),) = found.items()
    assert isinstance(outlook, GaussianOutlook)  # as of all pools
    return name, outlook


@partial(jax.jit, static_argnames=("loss", "number"))
def _risk(
    potential: Potential,
    is_reference: Array,
    is_seen: Array,
    values: Array,
    candidates: Array,
    log_after: Array,
    means: Array,
    variances: Array,
    *,
    loss: Loss,
    number: int,
) -> Array:
    """Risk of each candidate and outcome, from the predictors after it.

    :param log_after: log weights of the points, unnormalised, shape ``(candidates, outcomes, points)``.
    :param means: shape ``(candidates, outcomes, points, rows)``.
    """

    def one(outcome: Array, candidate: Array, log_weights: Array, mean: Array, variance: Array) -> Array:
        weights = jax.nn.softmax(log_weights)
        p = jnp.exp(log_predictive_probabilities(potential, mean, variance, weights, number))
        at_reference = 1.0 - (jnp.max(p, axis=0) if loss == "zero-one" else jnp.sum(p**2, axis=0))
        total = jnp.zeros((), p.dtype)
        if loss != "labelled":
            total = total + jnp.sum(jnp.where(is_reference, at_reference, 0.0))
        if loss.startswith("labelled"):
            wrong = 1.0 - jnp.take_along_axis(p, values[None], axis=0)[0]
            total = total + jnp.sum(jnp.where(is_seen, wrong, 0.0)) + 1.0 - p[outcome, candidate]
        return total

    def at(inputs: tuple[Array, ...]) -> Array:
        candidate, *parts = inputs
        return jax.lax.map(lambda x: one(x[0], candidate, *x[1:]), (jnp.arange(number), *parts))

    return jax.lax.map(at, (candidates, log_after, means, variances))


@partial(jax.jit, static_argnames=("loss", "number"))
def _one_step(
    potential: Potential,
    mean: Array,
    variance: Array,
    weights: Array,
    covariances: Array,
    is_reference: Array,
    is_seen: Array,
    values: Array,
    *,
    loss: Loss,
    number: int,
) -> Array:
    """Risks after each observation of the pool: moments matched once, at its predictor, and carried to the others by
    their covariance."""

    def at(candidate: Array) -> Array:
        def told(outcome: Array) -> tuple[Array, Array, Array]:
            factor = of_column(with_outcome(potential, outcome), candidate, mean.shape[1])
            moments = factor.tilted_moments(mean[:, candidate], variance[:, candidate])
            slope = covariances[:, :, candidate] / variance[:, candidate, None]
            moved = mean + slope * (moments.mean - mean[:, candidate])[:, None]
            left = variance - slope**2 * (variance[:, candidate] - moments.variance)[:, None]
            return jnp.log(weights) + moments.log_z, moved, jnp.maximum(left, 0.0)

        after = [x[None] for x in jax.lax.map(told, jnp.arange(number))]
        seen = is_reference, is_seen, values
        return _risk(potential, *seen, candidate[None], *after, loss=loss, number=number)[0]

    return jax.lax.map(at, jnp.arange(mean.shape[1]))
