"""Outcome of expectation maximisation, for the users and for what they share, and predictions of new questions."""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...display import counted, shown
from ...linalg.saved_names import saved_as
from ..front.files.archive import read_archive, write_archive
from .pairs import UserBatch, batches_of_users, checked_outcomes, checked_pairs, warn_of_self_comparisons
from .user_inference import Method, SharedPrior, infer_users, initial_state, potential_of, user_moments


class PairPrediction(NamedTuple):
    """The difference of two utilities, and what it means for a comparison; all of shape ``(n,)``."""

    mean: np.ndarray
    variance: np.ndarray
    probability: np.ndarray
    """Probability that the first item wins."""


@saved_as("CollaborativeFit")
@shown
class CollaborativeFit(NamedTuple):
    """Outcome of :func:`collaborative_em`.

    Users are known by the pairs with which they were fitted, or folded in, and all others by the prior.
    """

    prior: SharedPrior
    """Mean ``b``, loadings ``V``, variance ``sigma ** 2`` and kernel."""
    method: Method
    batches: tuple[UserBatch, ...]
    sites: tuple[tuple[Array, Array], ...]
    """Precisions and shifts of the sites of each batch."""
    num_users: int
    objective_trace: np.ndarray
    """The sum over users of log evidences or bounds: at the start, then after each iteration. In minibatches of users:
    of each pass, with users under the priors of their turns, and at last of all under the prior found."""
    converged: bool
    """True if the last iteration gained little, and all posteriors were found. Never with random pairs or users."""
    num_steps: int
    """Iterations that were made; by L-BFGS fits of all users."""
    num_skipped: int
    """Sites that kept an old value in the last fit of the users."""
    num_constant: int
    """Pairs of an item with itself, which say nothing and were left out."""

    def _shown(self) -> list[str]:
        ending = "converged" if self.converged else "NOT converged"
        num_items, rank = self.prior.loadings.shape
        lines = [
            f"collaborative_em by {self.method}: {ending} after {counted(self.num_steps, 'step')}",
            f"{self.num_users} users, {num_items} items, {counted(rank, 'shared taste')}",
            f"objective {float(self.objective_trace[-1]):.6g}",
        ]
        if self.num_skipped:
            lines.append(f"{counted(self.num_skipped, 'site')} kept an old value")
        if self.num_constant:
            lines.append(f"left out: {counted(self.num_constant, 'pair')} of an item with itself")
        return lines

    @property
    def parameters(self) -> dict[str, Array]:
        """Values of the sites of :func:`numpyro_ext.models.collaborative_preferences`, for ``hyper_values``."""
        found = {"b": self.prior.mean, "sigma": jnp.sqrt(self.prior.variance)}
        return found | ({"V": self.prior.loadings} if self.prior.loadings.shape[1] else {})

    def predict(self, user: ArrayLike | None, first: ArrayLike, second: ArrayLike) -> PairPrediction:
        """Moments of the difference of two utilities, and the probability that the first item wins.

        :param user: shape ``(n,)``; ``None`` for people of whom nothing is known.
        :param first: items, shape ``(n,)``.
        :param second: the other items.
        :return: the predictions.
        :raises ValueError: if an index is out of range.
        """
        queries = _checked_queries(user, first, second, self.num_users, self.prior.mean.shape[0])
        mean, variance, log_probability = self._differences(*queries)
        return PairPrediction(*(np.asarray(found) for found in (mean, variance, jnp.exp(log_probability))))

    def _differences(self, who: np.ndarray, i: np.ndarray, j: np.ndarray) -> tuple[Array, Array, Array]:
        """Means and variances of differences, and log probabilities that the first item wins, also of far tails."""
        b, V, variance, K = self.prior
        size = b.shape[0]
        difference = V[i] - V[j]
        mean = b[i] - b[j]
        spread = jnp.sum(difference**2, -1) + variance * (K[i, i] + K[j, j] - 2.0 * K[i, j])
        for batch, sites in zip(self.batches, self.sites, strict=True):
            rows = np.flatnonzero(np.isin(batch.users, who))
            if not rows.size:
                continue
            part = batch.take(rows)
            matrix, vector = user_moments(part, self.prior, *(site[rows] for site in sites))
            order = np.argsort(part.users)
            place = np.minimum(np.searchsorted(part.users[order], who), rows.size - 1)
            row = order[place]
            mine = np.flatnonzero(part.users[row] == who)
            row, items = row[mine], part.items[row[mine]]
            safe = jnp.where(items < size, items, 0)
            cross = jnp.einsum("qtd,qd->qt", V[safe], difference[mine])
            cross += variance * (K[safe, i[mine, None]] - K[safe, j[mine, None]])
            cross = jnp.where(items < size, cross, 0.0)
            mean = mean.at[mine].add(jnp.sum(cross * vector[row], -1))
            spread = spread.at[mine].add(-jnp.einsum("qt,qtr,qr->q", cross, matrix[row], cross))
        return mean, spread, _log_probability(mean, spread, self.method)

    def log_predictive(
        self, user: ArrayLike | None, first: ArrayLike, second: ArrayLike, won: ArrayLike | None = None
    ) -> np.ndarray:
        """Log probability of each outcome; by default that the first item wins.

        :param user: as for :meth:`predict`.
        :param first: items, shape ``(n,)``.
        :param second: the other items.
        :param won: one where the first won, else zero, shape ``(n,)``.
        :return: shape ``(n,)``.
        :raises ValueError: if an index is out of range, or an outcome is neither one nor zero.
        """
        who, i, j = _checked_queries(user, first, second, self.num_users, self.prior.mean.shape[0])
        if won is not None:
            is_won = checked_outcomes(won, i.size)
            i, j = np.where(is_won, i, j), np.where(is_won, j, i)
        return np.asarray(self._differences(who, i, j)[2])

    def utilities(self, users: ArrayLike) -> tuple[Array, Array]:
        """Posterior means, shape ``(n, items)``, and covariances, ``(n, items, items)``, of all items for some users.

        An additive constant of all utilities of a user is not determined by comparisons.

        :param users: their numbers, shape ``(n,)``.
        :raises ValueError: if a number is out of range.
        """
        who = _checked_numbers("users", np.atleast_1d(np.asarray(users)), self.num_users)
        covariance = self.prior.covariance()
        mean = jnp.tile(self.prior.mean, (who.size, 1))
        spread = jnp.tile(covariance, (who.size, 1, 1))
        for batch, sites in zip(self.batches, self.sites, strict=True):
            for row in np.flatnonzero(np.isin(batch.users, who)):
                here, one = np.flatnonzero(who == batch.users[row]), np.array([row])
                matrix, vector = user_moments(batch.take(one), self.prior, *(site[one] for site in sites))
                cross = covariance.at[:, batch.items[row]].get(mode="fill", fill_value=0.0)
                mean = mean.at[here].add(cross @ vector[0])
                spread = spread.at[here].add(-cross @ matrix[0] @ cross.T)
        return mean, spread

    def draw_utilities(self, rng_key: Array, users: ArrayLike, num_samples: int = 1000) -> Array:
        """Draws of the utilities of all items for some users, shape ``(num_samples, n, items)``."""
        mean, covariance = self.utilities(users)
        return jax.random.multivariate_normal(rng_key, mean, covariance, (num_samples, mean.shape[0]), method="svd")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it, the pairs of the users included, to a file that reads back exactly.

        :param path: of the file; used as it is, whatever its ending.
        """
        write_archive(path, {"collaborative_fit": self})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CollaborativeFit:
        """A fit that :meth:`save` wrote. Reading it runs no code from the file.

        :param path: of the file.
        :raises ValueError: if the file is damaged, or holds something else.
        """
        found = read_archive(path).get("collaborative_fit")
        if not isinstance(found, cls):
            raise ValueError(f"{os.fspath(path)!r} holds no fit by collaborative_em; engines load their own files.")
        return found

    def fold_in(self, pairs: object, num_users: int | None = None) -> CollaborativeFit:
        """Other users under the prior that was found: nothing of it is learned anew.

        :param pairs: as for :func:`collaborative_em`, with users numbered from zero.
        :param num_users: ``None`` for one more than the largest number.
        :return: a fit of these users; :attr:`objective_trace` holds their one log evidence.
        """
        size = self.prior.mean.shape[0]
        found, num_users, num_constant = checked_pairs(pairs, num_users, size)
        warn_of_self_comparisons(num_constant)
        batches, sites, total, skipped, converged = batches_of_users(found, size), [], 0.0, 0, True
        for batch in batches:
            state = initial_state(batch, self.prior, self.method)
            _, each = infer_users(batch, self.prior, state, method=self.method, num_steps=200, tol=1e-10)
            sites.append((each.precision, each.site_shift))
            total, skipped = total + float(each.objective), skipped + int(each.skipped)
            converged &= bool(each.converged)
        return self._replace(
            batches=tuple(batches),
            sites=tuple(sites),
            num_users=num_users,
            objective_trace=np.array([total]),
            converged=converged,
            num_steps=0,
            num_skipped=skipped,
            num_constant=num_constant,
        )

    def add_items(self, cross: ArrayLike, kernel: ArrayLike) -> CollaborativeFit:
        """The same users with new items, of which nothing is known but how like the others they are.

        New items have no loadings and the mean of the others: they are predicted by the Gaussian process part alone.

        :param cross: kernel between new and old items, shape ``(new, old)``.
        :param kernel: kernel of the new items, shape ``(new, new)``.
        :return: a fit in which new items stand behind the others.
        """
        mean, V, variance, old = self.prior
        cross, own = jnp.asarray(cross, old.dtype), jnp.asarray(kernel, old.dtype)
        size, new = old.shape[0], own.shape[0]
        if cross.shape != (new, size) or own.shape != (new, new):
            raise ValueError(
                f"cross and kernel must have shapes (new, {size}) and (new, new); got {cross.shape} and {own.shape}."
            )
        prior = SharedPrior(
            jnp.concatenate([mean, jnp.full(new, jnp.mean(mean))]),
            jnp.concatenate([V, jnp.zeros((new, V.shape[1]), V.dtype)]),
            variance,
            jnp.block([[old, cross.T], [cross, own]]),
        )
        padded = [b._replace(items=jnp.where(b.items < size, b.items, size + new)) for b in self.batches]
        return self._replace(prior=prior, batches=tuple(padded))


@partial(jax.jit, static_argnames="method")
def _log_probability(mean: Array, variance: Array, method: Method) -> Array:
    """Log probability that a difference of utilities of these moments is answered by one, as a program: integrals
    have branches, which outside of one would be compiled at each call."""
    return potential_of(method).log_normaliser(mean, jnp.maximum(variance, jnp.finfo(mean.dtype).tiny))


def _checked_queries(
    user: ArrayLike | None, first: ArrayLike, second: ArrayLike, num_users: int, num_items: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users and two items each, as vectors of one length; no users for people of whom nothing is known."""
    given = {"user": 0 if user is None else user, "first": first, "second": second}
    arrays = [np.atleast_1d(np.asarray(values)) for values in given.values()]
    try:
        spread = np.broadcast_arrays(*arrays)
    except ValueError as error:
        raise ValueError(
            f"user, first and second must be vectors of one length; got {[a.shape for a in arrays]}."
        ) from error
    sizes = (num_users, num_items, num_items)
    who, i, j = (_checked_numbers(*part) for part in zip(given, spread, sizes, strict=True))
    return who[: 0 if user is None else None], i, j


def _checked_numbers(name: str, values: np.ndarray, size: int) -> np.ndarray:
    is_wrong = values.dtype.kind not in "iu" or (values.size and not 0 <= values.min() <= values.max() < size)
    if values.size and is_wrong:
        raise ValueError(f"{name} must hold integers in 0, ..., {size - 1}; got {values}.")
    return values.astype(int)
