r"""Exact draws from a Gaussian with precision :math:`X^T N^{-1} X + B^T \operatorname{diag}(\pi) B` by solving for
perturbed data (Papandreou and Yuille 2010; Ko 2017, Algorithm 2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .conjugate_gradient import ConjugateGradientResult
from .posterior_precision import PosteriorPrecision


class Perturbations(NamedTuple):
    """Standard normal numbers behind a set of draws. With the same ones, draws vary smoothly with the precision."""

    data: Array
    """Shape ``(num_samples, m)``."""
    coefficients: Array
    """Shape ``(num_samples, n)``, or with a frame ``(num_samples, p)``."""


def draw_perturbations(rng_key: Array, num_samples: int, shape: tuple[int, int]) -> Perturbations:
    """Independent standard normal numbers.

    :param rng_key: random number generator key.
    :param int num_samples: number of draws.
    :param shape: the numbers of rows of the operator and of coefficients.
    """
    keys = jax.random.split(rng_key)
    return Perturbations(*(jax.random.normal(key, (num_samples, size)) for key, size in zip(keys, shape, strict=True)))


def perturb_and_map(
    precision: PosteriorPrecision,
    perturbations: Perturbations,
    gram_diagonal: Array,
    *,
    initial: Array | None = None,
    tol: float = 1e-3,
    max_iterations: int = 1000,
) -> ConjugateGradientResult:
    r"""Draws from :math:`N(0, A^{-1})`: solutions of :math:`A c = X^T N^{-1/2} a + B^T \pi^{1/2} b`, whose right-hand
    side has the covariance :math:`A` (:math:`B = I` without a frame).

    The mean of their squares is an unbiased estimate of each variance, with relative standard deviation
    ``sqrt(2 / num_samples)``.

    :param PosteriorPrecision precision: :math:`A`.
    :param Perturbations perturbations: :math:`a` and :math:`b`.
    :param gram_diagonal: about the diagonal of :math:`X^T N^{-1} X`, for the preconditioner.
    :param initial: earlier draws with the same perturbations, to start from.
    :param float tol: relative residual of the solutions.
    :param int max_iterations: iterations at most.
    :return: draws of shape ``(num_samples, n)``, with the iterations and residuals of their systems.

    >>> from numpyro_ext.linalg import identity
    >>> precision = PosteriorPrecision(identity(2), jnp.asarray(1.0), jnp.array([1.0, 3.0]))
    >>> draws = perturb_and_map(precision, draw_perturbations(jax.random.key(0), 4000, (2, 2)), jnp.ones(2)).solution
    >>> bool(jnp.allclose(jnp.mean(draws**2, axis=0), jnp.array([0.5, 0.25]), rtol=0.1))
    True
    """
    root = jnp.sqrt(precision.precision)
    scaled = perturbations.data * jnp.sqrt(precision.noise_variance)
    prior = jax.vmap(precision.synthesis)(root * perturbations.coefficients)
    right_hand_side = jax.vmap(precision.project)(scaled) + prior
    return precision.solve(right_hand_side, gram_diagonal, initial=initial, tol=tol, max_iterations=max_iterations)
