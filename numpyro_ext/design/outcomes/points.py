"""Outcomes whose predictors are Gaussian at each of several points of the hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.gaussian.algorithms.posterior import GaussianPosterior
from ...infer.gaussian.answers.prediction import Slices, are_coordinates_joint, observed_parts
from ...infer.gaussian.new_arguments.outcome_probabilities import chosen_factors
from ...infer.gaussian.runs.run import GaussianRun
from ...potentials import Potential
from ...structure import LatentGaussianReading
from .focus import EVERYTHING, Interest, joint_covariance
from .outlooks import GaussianOutlook, JointField


class Points(NamedTuple):
    """Moments of all predictors at points of the hyperparameters, which are the first axis of all arrays."""

    weights: Array
    potentials: tuple[Potential, ...]
    """Potentials of the families of factors."""
    mean: Array
    """Mean of the predictors, shape ``(points, rows)``."""
    variance: Array
    left: Callable[[np.ndarray], Array | None]
    """Variances of given rows once the elements of interest are known; ``None`` if there are none."""
    covariance: Callable[[np.ndarray], Any]
    """Joint covariance of given rows at each point, with the elements of interest behind them."""


def gaussian_outlooks(
    run: GaussianRun, interest: Interest = EVERYTHING, slices: Slices | None = None
) -> tuple[dict[str, GaussianOutlook], set[str]]:
    """The observations of a fit whose predictor is one Gaussian number, and the names of the other sites.

    :param GaussianRun run: of an engine.
    :param Interest interest: what is to be learned.
    :param slices: the part of each site that is looked at: candidates, all of them. Without, the candidates are the
        masked observations.
    """
    return outlooks_at(run.reading, _points_of(run, interest), interest, slices)


def _points_of(run: GaussianRun, interest: Interest) -> Points:
    reading, found, forms = run.reading, [], []
    for weight, inputs in run.weighted_points():
        posterior, mean, variance, _ = run.programs.rows(*inputs)
        forms.append(getattr(posterior, "form", None) or reading.compiled_form(inputs[1]))
        found.append((weight, inputs[1], posterior, mean, variance))
    weights, hypers, posteriors, means, variances = zip(*found, strict=True)

    def left(rows: np.ndarray) -> Array | None:
        if not interest.elements:
            return None
        pairs = zip(hypers, posteriors, strict=True)
        return jnp.stack([interest.left(run, posterior, hyper, rows) for hyper, posterior in pairs])

    def covariance(rows: np.ndarray) -> np.ndarray:
        parts = []
        for posterior, hyper in zip(posteriors, hypers, strict=True):
            if not isinstance(posterior, GaussianPosterior):
                raise ValueError(f"A {type(posterior).__name__} has no joint covariance: use EP.")
            design = posterior.form.design.to_dense()[jnp.asarray(rows)]
            if interest.elements:
                design = jnp.concatenate([design, interest.design(run, hyper)])
            parts.append(np.asarray(joint_covariance(posterior, design)))
        return np.stack(parts)

    mean, variance = jnp.stack(means), jnp.stack(variances)
    potentials: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(form.potentials for form in forms))
    return Points(jnp.asarray(weights, mean.dtype), potentials, mean, variance, left, covariance)


def outlooks_at(
    reading: LatentGaussianReading, points: Points, interest: Interest, slices: Slices | None
) -> tuple[dict[str, GaussianOutlook], set[str]]:
    """Outlooks by :func:`gaussian_outlooks`, from points of any origin."""
    out: dict[str, GaussianOutlook] = {}
    others: set[str] = set()
    joint = JointField(points.covariance, sum(map(len, interest.elements.values())))
    for part in observed_parts(reading, slices):
        name, kept = part.name, part.kept
        if are_coordinates_joint(reading, name):
            # nobody sees one of the factors of a vector: there is nothing to ask, or else draws say that they cannot
            if slices is not None or not reading.known_mask(name).all():
                others.add(name)
            continue
        potential = points.potentials[part.number]
        if part.rows_per_observation != 1 or potential.outcomes() is None:
            others.add(name)
            continue
        is_candidate = np.ones(kept.shape, bool)
        if slices is None:
            is_candidate = ~reading.known_mask(name).reshape(-1)[kept]
        out[name] = GaussianOutlook(
            name=name,
            shape=kept.shape,
            is_candidate=is_candidate,
            potential=chosen_factors(potential, kept.reshape(-1), part.size),
            mean=points.mean[:, part.rows],
            variance=jnp.maximum(points.variance[:, part.rows], 0.0),
            weights=points.weights,
            left=points.left(part.rows),
            is_about_hyper=interest.is_about_hyper,
            rows=part.rows,
            joint=joint,
        )
    return out, others


def check_no_others(names: set[str]) -> None:
    """Refuse a focus where these sites have no outlook of their predictors."""
    if names:
        raise ValueError(
            f"The observations of {sorted(names)} have several predictors each or no known outcomes: what they tell of "
            "a part of the unknowns has no rule. Leave focus out."
        )
