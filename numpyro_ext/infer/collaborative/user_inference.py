r"""Posteriors of users under one shared prior, and what an M-step needs of them (Ko 2017, section 3.2).

With the rows :math:`B_u` of the pairs of a user, sites of precision :math:`\Pi` and shift :math:`\beta`, the prior
:math:`N(\mu, \Sigma)` and :math:`E = (\Pi^{-1} + B \Sigma B^T)^{-1}`, the posterior of the utilities of all items is

.. math:: \xi = \mu + \Sigma w, \quad \Xi = \Sigma - \Sigma G \Sigma, \qquad G = B^T E B, \quad
    w = B^T (\beta - E (B \Sigma B^T \beta + B \mu)).

``G`` and ``w`` are zero but for items that the user compared. There, with the Laplacian :math:`L = B^T \Pi B`,
:math:`G = (I + L \Sigma)^{-1} L`: nothing is inverted that may be singular, and pairs count linearly.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...linalg.gaussian.design import SparseRows
from ...linalg.gaussian.prior import CovariancePrior
from ...linalg.saved_names import saved_as
from ...potentials import BoundedPotential, LogitPotential, Potential, ProbitPotential
from ...potentials.bounds.logistic import JaakkolaBound
from ...structure.latent_gaussian import Blocks, LatentGaussian
from ..gaussian.algorithms.algorithm import Algorithm
from ..gaussian.algorithms.values import ExpectationPropagation, Laplace
from ..gaussian.variational.values import NaturalGradient
from .pairs import UserBatch

Method = Literal["ep", "vg", "jaakkola", "laplace"]
_ALGORITHMS: dict[str, Algorithm] = {
    "ep": ExpectationPropagation(),
    "vg": NaturalGradient(),
    "jaakkola": NaturalGradient(),
    "laplace": Laplace(),
}


@saved_as("SharedPrior")
class SharedPrior(NamedTuple):
    r"""The prior :math:`N(b, V V^T + \sigma^2 K)` of the utilities of every user."""

    mean: Array
    """:math:`b`, shape ``(items,)``."""
    loadings: Array
    """:math:`V`, shape ``(items, rank)``."""
    variance: Array
    """:math:`\\sigma^2`."""
    kernel: Array
    """:math:`K`, shape ``(items, items)``."""

    def covariance(self) -> Array:
        """Covariance of all items, shape ``(items, items)``."""
        return self.loadings @ self.loadings.T + self.variance * self.kernel

    def blocks(self, items: Array) -> Array:
        """Covariances of some items, ``(n, m)``, shape ``(n, m, m)``; the identity where there is no item."""
        inside = items < self.mean.shape[0]
        safe = jnp.where(inside, items, 0)
        loadings = self.loadings[safe]
        found = loadings @ loadings.mT + self.variance * self.kernel[safe[:, :, None], safe[:, None, :]]
        both = inside[:, :, None] & inside[:, None, :]
        return jnp.where(both, found, jnp.eye(items.shape[1], dtype=found.dtype))

    def means(self, items: Array) -> Array:
        """Means of these items, zero where there is none."""
        return self.mean.at[items].get(mode="fill", fill_value=0.0)


class UserStatistics(NamedTuple):
    """Statistics of the pairs of a batch, summed over users."""

    objective: Array
    """Log evidence or its bound."""
    shift: Array
    """Sum of ``w``, shape ``(items,)``."""
    curvature: Array
    """Sum of ``G - w w^T``, shape ``(items, items)``."""
    converged: Array
    skipped: Array
    """Sites that kept an old value for want of a proper one."""
    precision: Array
    """Precision of the sites, shape ``(n, pairs)``."""
    site_shift: Array


def potential_of(method: Method) -> Potential:
    """The factor of a pair that was won."""
    if method == "jaakkola":
        return BoundedPotential(LogitPotential(jnp.ones(())), JaakkolaBound())
    return ProbitPotential(jnp.ones(()))


def user_form(user: UserBatch, prior: SharedPrior, method: Method) -> LatentGaussian:
    """Form of one user's pairs for the algorithms of latent Gaussian models, among the items that they touch.

    :param UserBatch user: a row of a batch, so that its arrays have one axis less.
    """
    (num_pairs,), (width,) = user.winner.shape, user.items.shape
    means = prior.means(user.items)
    signs = jnp.where(user.observed[:, None], jnp.array([1.0, -1.0], prior.mean.dtype), 0.0)
    return LatentGaussian(
        prior=(CovariancePrior(prior.blocks(user.items[None])),),
        design=SparseRows(jnp.stack([user.winner, user.loser], axis=-1), signs, width),
        offset=jnp.where(user.observed, means[user.winner] - means[user.loser], 0.0),
        potentials=(potential_of(method),),
        observed=(user.observed,),
        log_constant=jnp.zeros((), prior.mean.dtype),
        blocks=Blocks(jnp.arange(num_pairs)[None], jnp.arange(width)[None]),
    )


@partial(jax.jit, static_argnames="method")
def initial_state(batch: UserBatch, prior: SharedPrior, method: Method) -> Any:
    """Initial state of the method's algorithm for each user."""
    return jax.lax.map(lambda user: _ALGORITHMS[method].init(user_form(user, prior, method)), batch)


@partial(jax.jit, static_argnames=("method", "num_steps"))
def infer_users(
    batch: UserBatch, prior: SharedPrior, state: object, *, method: Method, num_steps: int, tol: float
) -> tuple[object, UserStatistics]:
    """Fit the posteriors of the users of a batch: the E-step.

    :param UserBatch batch: the users, whose names are not looked at.
    :param SharedPrior prior: the prior of all.
    :param state: from :func:`initial_state`, or of a fit under another prior.
    :param str method: ``"ep"``, ``"vg"``, ``"jaakkola"`` or ``"laplace"``.
    :param int num_steps: the largest number of steps.
    :param float tol: when to stop, as the algorithm has it.
    :return: the state to go on from, and the statistics.

    Cost: for each user and step the cube of its pairs or of the items that it touches, whichever are fewer.
    """
    algorithm = _ALGORITHMS[method]

    def infer(user: UserBatch, state: object) -> tuple[Any, tuple[Array, ...]]:
        form = user_form(user, prior, method)
        state, info, objective = algorithm.fit(form, state, num_steps=num_steps, tol=tol)
        posterior = algorithm.posterior(form, state)
        sites = (jnp.where(user.observed, part, 0.0) for part in (posterior.site_precision, posterior.site_shift))
        return state, (objective, info.converged, info.skipped, *sites)

    # One after the other: each has steps and an end of its own, and who is hard to infer holds up nobody else.
    state, (objective, converged, skipped, precision, shift) = jax.lax.map(lambda each: infer(*each), (batch, state))
    matrix, vector = user_moments(batch, prior, precision, shift)
    outer = matrix - vector[:, :, None] * vector[:, None, :]
    items, size = batch.items, prior.mean.shape[0]
    total = jnp.zeros((size,), vector.dtype).at[items].add(vector, mode="drop")
    curvature = jnp.zeros((size, size), vector.dtype)
    curvature = curvature.at[items[:, :, None], items[:, None, :]].add(outer, mode="drop")
    found = jnp.sum(objective), total, curvature, jnp.all(converged), jnp.sum(skipped), precision, shift
    return state, UserStatistics(*found)


def user_moments(batch: UserBatch, prior: SharedPrior, precision: Array, shift: Array) -> tuple[Array, Array]:
    """``G``, shape ``(n, touched, touched)``, and ``w``, shape ``(n, touched)``, at sites of shape ``(n, pairs)``."""
    row, width = jnp.arange(batch.items.shape[0])[:, None], batch.items.shape[1]
    i, j = batch.winner, batch.loser
    laplacian = jnp.zeros((row.size, width, width), precision.dtype)
    laplacian = laplacian.at[row, i, i].add(precision).at[row, j, j].add(precision)
    laplacian = laplacian.at[row, i, j].add(-precision).at[row, j, i].add(-precision)
    pull = jnp.zeros((row.size, width), shift.dtype).at[row, i].add(shift).at[row, j].add(-shift)
    covariance = prior.blocks(batch.items)
    # Both by one factorisation: as pull - matrix @ (covariance @ pull + mean), the vector of a user with many pairs
    # would be the difference of large numbers, which in single precision leaves none of its digits.
    residual = pull - jnp.einsum("nij,nj->ni", laplacian, prior.means(batch.items))
    given = jnp.concatenate([laplacian, residual[..., None]], axis=-1)
    found = jnp.linalg.solve(jnp.eye(width, dtype=precision.dtype) + laplacian @ covariance, given)
    return 0.5 * (found[..., :-1] + found[..., :-1].mT), found[..., -1]
