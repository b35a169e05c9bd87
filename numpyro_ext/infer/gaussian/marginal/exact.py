"""Evidence and posterior in closed form where all factors are Gaussian, without a fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ....compilation.pytree import PyTree
from ....linalg.gaussian.conditioning import log_partition_without_sites
from ....linalg.gaussian.prior import is_valid_prior
from ....potentials import GaussianPotential
from ....structure.latent_gaussian import LatentGaussian
from ..algorithms.algorithm import Algorithm
from ..algorithms.fit_info import FitInfo
from ..algorithms.held_sites import gaussian_sites
from ..algorithms.posterior import GaussianPosterior, gaussian_prior


def exactly(algorithm: Algorithm, form: LatentGaussian) -> Algorithm:
    """The algorithm, or where all factors are Gaussian and it would find the exact posterior, one that has it at once.

    :param Algorithm algorithm: to be run on forms like this one.
    :param LatentGaussian form: its families of factors are looked at, its numbers are not.
    """
    is_gaussian = all(type(potential) is GaussianPotential for potential in form.potentials)
    return Exact() if is_gaussian and algorithm.is_exact_for_gaussian else algorithm


@dataclass(frozen=True)
class Exact(Algorithm):
    """Conditioning on the observations of forms of which all factors in use are Gaussian."""

    def init(self, form: LatentGaussian) -> tuple[()]:
        return ()

    def solve(self, form: LatentGaussian, state: Any, *, num_steps: int, tol: float) -> tuple[Any, FitInfo]:
        zero = jnp.zeros((), form.offset.dtype)
        return state, FitInfo(jnp.asarray(True), jnp.asarray(1), zero[None], zero, jnp.zeros((form.num_rows,), bool))

    def log_evidence(self, form: LatentGaussian, state: PyTree) -> Array:
        return log_evidence(form, state)

    def posterior(self, form: LatentGaussian, state: PyTree) -> GaussianPosterior:
        return GaussianPosterior(form, *gaussian_sites(form))


def log_evidence(form: LatentGaussian, state: PyTree = ()) -> Array:
    """The log density of the data of a form whose factors are Gaussian, the unknowns integrated out.

    :param LatentGaussian form: the model; differentiable.
    :param state: not used.
    :return: a scalar; nan where a prior is not positive definite.
    """
    precision, shift = gaussian_sites(form)
    prior = gaussian_prior(form)
    posterior = prior.condition(precision, shift - precision * form.offset)
    at_mean = jnp.sum(form.log_factors(form.offset + prior.predictor(posterior.coordinates)))
    total = form.log_constant + at_mean + log_partition_without_sites(prior, posterior)
    return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), total, jnp.nan)
