"""Scores of observations by what they tell of predictors at reference inputs."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.front.options import check_one_of
from ...potentials import GaussianPotential, Potential
from ...potentials.outcomes import num_outcomes, of_column, with_outcome
from ..outcomes.outlooks import GaussianOutlook
from ..selection.joint import JointPredictors, joint_predictors

About = Literal["predictors", "outcomes"]
_NUM_REAL = 120
"""Values of a real observation at each point of the hyperparameters, by Gauss and Hermite."""
_SINGULAR = {8: 1e-10, 4: 1e-5}
"""Noise of references that determine each other, as a share of the largest eigenvalue, by bytes of a number."""


def expected_variance_reduction(
    source: object, *args: object, reference: object = None, rng_key: Array | None = None, **kwargs: object
) -> dict[str, np.ndarray]:
    r"""Expected decrease of the variance of the predictors at reference inputs, for each observation.

    Summed over the references :math:`*`, with Gaussian noise it is :math:`\sum_* c_*^2 / (v + \sigma^2)` for the
    covariance :math:`c_*` of the observation's predictor with the one there (Cohn, Ghahramani and Jordan 1996).
    Outcomes that can be counted are summed over: by the law of total variance the fall is the variance, over the
    outcomes, of the mean that each would lead to. That is exact for the Gaussian posterior of the engine, and for the
    mixture of them where it integrates over hyperparameters (Gaussian noise to five digits then); an engine that fits
    again after the observation would change its approximation as well, as :func:`~numpyro_ext.design.expected_risk`
    with ``refit="full"`` does.

    Cost: ``O(candidates * references)`` for each outcome, and the joint covariance of both.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import expected_variance_reduction
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, seen=True):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([1.0, 1.0, 2.0]), jnp.zeros(3), jnp.array([True, False, False]))
    >>> print(expected_variance_reduction(engine)["y"].round(3))
    [ -inf 0.833 1.667]

    :param source: an engine on a Gaussian field after its run, draws of such a field at arguments that have further
        elements of it, or what :attr:`~numpyro_ext.design.SequentialDesign.source` is of one.
    :param args: arguments of the model at which to look; without, the candidates are the masked observations.
    :param reference: booleans in the shape of the observations (of several sites a dictionary), true for those at which
        the predictors matter; by default all candidates.
    :param rng_key: for predictions at new arguments.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site an array in the shape of its observations, minus infinity where there is no
        candidate.
    :raises ValueError: for other sources, for observations of several predictors or with real noise that is not
        Gaussian, and if no reference is left.
    """
    joint = joint_predictors(source, args, kwargs, rng_key, "expected_variance_reduction")
    candidates, places = _candidates_and_references(joint, reference)
    every = np.union1d(candidates, places)
    covariance, _ = joint.covariances(every)
    at, to = np.searchsorted(every, candidates), np.searchsorted(every, places)
    cross = covariance[:, at[:, None], to]
    centred = joint.mean[:, places] - joint.weights @ joint.mean[:, places]
    scores = np.empty(len(candidates))
    for outlook, here in joint.parts(candidates):
        scores[here] = _falls(outlook, jnp.asarray(cross[:, here]), jnp.asarray(centred))
    return joint.by_site(scores, candidates)


def mutual_information(
    source: object,
    *args: object,
    about: About = "predictors",
    reference: object = None,
    rng_key: Array | None = None,
    **kwargs: object,
) -> dict[str, np.ndarray]:
    r"""Information of each observation about the rest of the pool, in nats (Krause, Singh and Guestrin 2008).

    Information about the predictors at all references but the observation's own, its own being a nuisance. So
    observations at the edge, whose surroundings nobody asks about, are worth less than to
    :func:`~numpyro_ext.design.expected_information_gain`. Where hyperparameters are integrated over, what is told of
    them counts as well. ``about="outcomes"`` is the rule of the source, :math:`\tfrac12 \log(\sigma^2_{y \mid A} /
    \sigma^2_{y \mid \bar A})`, with the noise of the others left in, for Gaussian noise at fixed hyperparameters.

    Cost: eigenvectors of the joint covariance of the references, and ``O(candidates * references^2)``.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import mutual_information
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, seen=True):
    ...     kernel = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(len(x))
    ...     f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([0.0, 3.0, 4.0, 9.0]), jnp.zeros(4), jnp.arange(4) < 1)
    >>> print(mutual_information(engine)["y"].round(3))  # nobody asks about what is near the last one
    [ -inf 0.174 0.174 0.   ]

    :param str about: see above; the others as for :func:`expected_variance_reduction`.
    :raises ValueError: as there.
    """
    check_one_of(About, about=about)
    joint = joint_predictors(source, args, kwargs, rng_key, "mutual_information")
    candidates, places = _candidates_and_references(joint, reference)
    every = np.union1d(candidates, places)
    covariances, _ = joint.covariances(every)
    at, to = np.searchsorted(every, candidates), np.searchsorted(every, places)
    noise = np.zeros((len(joint.weights), len(every)))
    if about == "outcomes":
        for outlook, here in joint.parts(every):
            if not isinstance(outlook.potential, GaussianPotential) or len(joint.weights) > 1:
                raise ValueError(
                    f"about='outcomes' needs Gaussian noise at fixed hyperparameters (integrate='none'), which "
                    f"{outlook.name!r} does not have: take about='predictors'."
                )
            noise[:, here] = np.square(outlook.potential.scale)
    least = _SINGULAR[jnp.result_type(float).itemsize]
    left = np.stack([_left(*point, at, to, least) for point in zip(covariances, noise, strict=True)])
    scores = np.empty(len(candidates))
    for outlook, here in joint.parts(candidates):
        if about == "outcomes":
            own = np.asarray(outlook.variance, float)[0] + noise[0, at[here]]
            scores[here] = 0.5 * np.log(own / (left[0, here] + noise[0, at[here]]))
        else:
            outlook.left = jnp.asarray(np.minimum(left[:, here], outlook.variance), outlook.mean.dtype)
            scores[here] = outlook.information("quadrature", "none")
    return joint.by_site(scores, candidates)


def _candidates_and_references(joint: JointPredictors, reference: object) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the candidates and of the references."""
    there = joint.is_candidate if reference is None else joint.marked(reference, "reference")
    if not there.any():
        raise ValueError("reference marks no observation: which predictions matter?")
    return np.flatnonzero(joint.is_candidate), np.flatnonzero(there)


def _left(covariance: np.ndarray, noise: np.ndarray, at: np.ndarray, to: np.ndarray, least: float) -> np.ndarray:
    """Variance of each predictor given the references but itself, which are seen with noise."""
    known = covariance[to[:, None], to] + np.diag(noise[to])
    values, vectors = np.linalg.eigh(known)
    # Predictors that determine each other are told apart by a noise that matters to nothing else; eigenvectors keep
    # what does not depend on it free of its rounding.
    least = least * max(values.max(), np.finfo(float).tiny)
    weight = 1.0 / (np.maximum(values, 0.0) + least)
    explained = np.square(covariance[at[:, None], to] @ vectors) @ weight
    left = np.diag(covariance)[at] - explained
    own = np.searchsorted(to, at)
    is_reference = to[np.minimum(own, len(to) - 1)] == at
    inverse = np.square(vectors[own[is_reference]]) @ weight
    left[is_reference] = 1.0 / inverse - least - noise[at[is_reference]]
    return np.maximum(left, 0.0)


def _falls(outlook: GaussianOutlook, cross: Array, centred: Array) -> np.ndarray:
    """Variance of the means at the references over the outcomes of each observation, summed over references.

    :param cross: covariance with the predictors there, shape ``(points, observations, references)``.
    :param centred: means there less that of the mixture, shape ``(points, references)``.
    """
    potential, mean, variance, weights = outlook.potential, outlook.mean, outlook.variance, outlook.weights
    number = num_outcomes(potential, mean, variance, weights)
    if number is None and not isinstance(potential, GaussianPotential):
        raise ValueError(
            f"The observations of {outlook.name!r} are real numbers with a noise that is not Gaussian: what they would "
            "leave of the variance has no rule here. expected_information_gain knows them."
        )
    rule = _rule(2 if len(weights) == 1 else _NUM_REAL)
    return np.asarray(_falls_of(potential, mean, variance, weights, cross, centred, rule, number=number), float)


@functools.partial(jax.jit, static_argnames="number")
def _falls_of(
    potential: Potential,
    mean: Array,
    variance: Array,
    weights: Array,
    cross: Array,
    centred: Array,
    rule: tuple[np.ndarray, np.ndarray],
    number: int | None,
) -> Array:
    log_weights = jnp.log(weights)
    nodes, masses = (jnp.asarray(x, mean.dtype) for x in rule)

    def outcomes(factors: Potential, mean: Array, variance: Array) -> tuple[Array, Array, Array]:
        """Mass of each outcome, its log density at each point, and the slope of the predictor's mean in it."""
        if isinstance(factors, GaussianPotential):
            total = variance + jnp.square(factors.scale)
            y = (mean[:, None] + jnp.sqrt(total)[:, None] * nodes).reshape(-1, 1)
            log_joint = log_weights - 0.5 * (jnp.square(y - mean) / total + jnp.log(total))
            return (weights[:, None] * masses).reshape(-1), log_joint, (y - mean) / total

        known = factors.outcomes()
        assert known is not None  # as of all outlooks

        def of(y: Array) -> tuple[Array, Array]:
            moments = with_outcome(factors, y).tilted_moments(mean, variance)
            is_fixed = variance <= jnp.finfo(variance.dtype).tiny
            slope = jnp.where(is_fixed, 0.0, (moments.mean - mean) / jnp.where(is_fixed, 1.0, variance))
            is_one = True if known.limit is None else y <= known.limit
            return jnp.where(is_one, log_weights + moments.log_z, -jnp.inf), jnp.where(is_one, slope, 0.0)

        log_joint, slope = jax.lax.map(of, jnp.arange(number or 0))
        return jnp.exp(jax.nn.logsumexp(log_joint, axis=1)), log_joint, slope

    def at(inputs: tuple[Array, ...]) -> Array:
        k, mean_at, variance_at, cross_at = inputs
        mass, log_joint, slope = outcomes(of_column(potential, k, mean.shape[1]), mean_at, variance_at)
        log_total = jax.nn.logsumexp(log_joint, axis=1, keepdims=True)
        share = jnp.exp(log_joint - jnp.where(jnp.isfinite(log_total), log_total, 0.0))
        features = jnp.sqrt(mass)[:, None] * jnp.concatenate([share, share * slope], axis=1)
        parts = jnp.concatenate([centred, cross_at])
        return jnp.sum(parts * (features.T @ features @ parts))

    return jax.lax.map(at, (jnp.arange(mean.shape[1]), mean.T, variance.T, jnp.moveaxis(cross, 1, 0)))


def _rule(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Values of a standard normal number and their masses; of a linear function two are exact."""
    nodes, masses = np.polynomial.hermite_e.hermegauss(number)
    return nodes, masses / masses.sum()
