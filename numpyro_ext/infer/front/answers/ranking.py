"""Rankings: what draws of utilities say of places, and how good a ranking is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from ..options import wrong_kind
from .sites import LargeSite

_FIRST_PLACES = 5
_USUAL_SITE = "utility"


class RankSummary(NamedTuple):
    """Places of items, the first being one, under the uncertainty of their utilities."""

    expected_rank: np.ndarray
    """Shape ``(..., items)``."""
    lower: np.ndarray
    """Lower end of the central interval of the rank, shape ``(..., items)``."""
    upper: np.ndarray
    best: np.ndarray
    """Probability of the first place, shape ``(..., items)``."""
    among_first: np.ndarray
    """Probability of one of the first ``k`` places, shape ``(..., items)``."""
    above: np.ndarray
    """Probability that the item of the last axis but one stands above that of the last."""


def rank_summary(
    draws: object,
    site: str | None = None,
    *,
    users: ArrayLike | None = None,
    k: int | None = None,
    probability: float = 0.9,
) -> RankSummary:
    """Places of items by their utilities: expected ranks with intervals, and probabilities of places.

    :param draws: utilities of shape ``(num_samples, ..., items)``; or what has ``get_samples()``, such as an engine or
        NumPyro's ``MCMC`` after its run, the dictionary that this returns, or an array of ArviZ with its chains; or a
        fit of :func:`~numpyro_ext.infer.collaborative_em`, of which the utilities of ``users`` are drawn.
    :param str site: which site of an engine or dictionary holds the utilities; ``None`` for ``"utility"``, as in
        :func:`~numpyro_ext.models.collaborative_preferences`, or else the only site whose draws are vectors.
    :param users: which places of the axis before the items to take; ``None`` for all. Of a site of more than 100,000
        utilities an engine then draws those of these users alone.
    :param int k: how many places are the first ones; ``None`` for five, or all of fewer.
    :param float probability: of the central intervals.
    :return: the summary, of shape ``(..., items)``; items of equal utility stand in their order.
    :raises ValueError: if there is no such site or user, or ``k`` or the probability is out of range.

    **Example:**

    >>> from numpyro_ext.infer import rank_summary
    >>> summary = rank_summary([[3.0, 1.0, 2.0], [3.0, 2.0, 1.0]], k=2)
    >>> print(summary.expected_rank, summary.best, summary.among_first, summary.above[1])
    [1.  2.5 2.5] [1. 0. 0.] [1.  0.5 0.5] [0.  0.  0.5]
    """
    utilities = _utilities(draws, site, users)
    size = utilities.shape[-1]
    k = min(_FIRST_PLACES, size) if k is None else k
    if not 1 <= k <= size:
        raise ValueError(f"k must be in 1, ..., {size}, the number of items; got {k}.")
    if not 0.0 < probability < 1.0:
        raise ValueError(f"probability must be between 0 and 1; got {probability}.")
    ranks = np.argsort(np.argsort(-utilities, axis=-1, kind="stable"), axis=-1) + 1
    tails = 0.5 * (1.0 - probability)
    lower, upper = np.quantile(ranks, [tails, 1.0 - tails], axis=0, method="inverted_cdf")
    above = np.zeros((*ranks.shape[1:], size))
    for draw in ranks:
        above += draw[..., :, None] < draw[..., None, :]
    return RankSummary(ranks.mean(0), lower, upper, np.mean(ranks == 1, 0), np.mean(ranks <= k, 0), above / len(ranks))


def shortlist(
    draws: object,
    site: str | None = None,
    *,
    users: ArrayLike | None = None,
    k: int | None = None,
    exclude: ArrayLike | None = None,
) -> np.ndarray:
    """The ``k`` items to show to each user: those that are the likeliest to be among the first ``k``.

    (:func:`~numpyro_ext.infer.recommend` says which engine to start with.)

    :param draws: as for :func:`rank_summary`.
    :param str site: as for :func:`rank_summary`.
    :param users: as for :func:`rank_summary`.
    :param int k: how many; ``None`` for five, or all of fewer.
    :param exclude: booleans that broadcast against ``(..., items)``, true for what is not shown, such as items that the
        user has; they take no places from others.
    :return: items, the likeliest first, shape ``(..., k)``.
    :raises ValueError: as for :func:`rank_summary`, or if ``exclude`` is something else, or fewer than ``k`` items are
        left.

    **Example:**

    >>> from numpyro_ext.infer import shortlist
    >>> print(shortlist([[3.0, 1.0, 2.0], [3.0, 1.5, 1.0], [3.0, 1.5, 2.0]], k=1, exclude=[True, False, False]))
    [2]
    """
    utilities = _utilities(draws, site, users)
    if exclude is not None:
        excluded = _checked_exclusions(exclude, utilities.shape[1:])
        num_left = int(np.min(np.sum(~excluded, axis=-1)))
        k = min(_FIRST_PLACES, num_left) if k is None else k
        if num_left < max(k, 1):
            raise ValueError(f"fewer than k = {max(k, 1)} items are left when others are excluded.")
        utilities = np.where(excluded, -np.inf, utilities)
    k = min(_FIRST_PLACES, utilities.shape[-1]) if k is None else k
    summary = rank_summary(utilities, k=k)
    order = np.lexsort((summary.expected_rank, -summary.among_first), axis=-1)
    return order[..., :k]


def _utilities(draws: Any, site: str | None, users: ArrayLike | None) -> np.ndarray:
    wanted = "draws of utilities, or an engine or MCMC after its run"
    if isinstance(draws, type):
        raise wrong_kind("rank_summary", draws, wanted)
    if hasattr(draws, "draw_utilities"):  # a fit by collaborative_em, which draws for those who are asked for
        who = np.arange(draws.num_users) if users is None else _checked_users(users, draws.num_users)
        found = np.asarray(draws.draw_utilities(jax.random.key(0), who.reshape(-1)), float)
        return found.reshape(len(found), *who.shape, found.shape[-1])
    posterior = getattr(draws, "posterior", {})
    if site is None and _USUAL_SITE in posterior:
        site = _USUAL_SITE
    large = None if site is None else posterior.get(site)
    if users is not None and isinstance(large, LargeSite):
        # draws of all users at once would be of that many utilities each
        who = _checked_users(users, large.shape[-2])
        return np.asarray(large[who].sample(jax.random.key(0), draws.num_samples), float)
    if hasattr(draws, "get_samples"):
        draws = draws.get_samples()
    if isinstance(draws, dict):
        draws = draws[_site_of_utilities(draws, site)]
    of_chains = getattr(draws, "dims", ())[:2] == ("chain", "draw")  # an array of ArviZ
    try:
        utilities = np.asarray(draws, float)
    except (TypeError, ValueError) as error:
        raise wrong_kind("rank_summary", draws, wanted) from error
    if of_chains:
        utilities = utilities.reshape(-1, *utilities.shape[2:])
    if utilities.ndim < 2:
        raise ValueError(f"draws must have shape (num_samples, ..., items); got {utilities.shape}.")
    if np.isnan(utilities).any():
        raise ValueError("draws of the utilities are nan: the run that they are of has failed.")
    if users is None:
        return utilities
    if utilities.ndim == 2:
        raise ValueError(
            f"users says which places of the axis before the items to take, and draws of shape {utilities.shape} have "
            "none: these are utilities of one person. Leave users out."
        )
    return utilities[..., _checked_users(users, utilities.shape[-2]), :]


def _checked_users(users: ArrayLike, num_users: int) -> np.ndarray:
    who = np.asarray(users)
    if who.dtype == bool and who.shape == (num_users,):
        return np.flatnonzero(who)
    if who.dtype.kind not in "iu" or (who.size and not 0 <= who.min() <= who.max() < num_users):
        raise ValueError(f"users must hold integers in 0, ..., {num_users - 1}; got {who.tolist()}.")
    return who


def _checked_exclusions(exclude: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    found = np.asarray(exclude)
    try:
        fits = found.dtype == bool and np.broadcast_shapes(found.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"exclude must hold booleans that broadcast to {shape}; got {found.dtype} of shape {found.shape}. Numbers "
            f"of items are np.isin(np.arange({shape[-1]}), numbers)."
        )
    return np.broadcast_to(found, shape)


def _site_of_utilities(draws: dict[str, Any], site: str | None) -> str:
    """The site that is named, or the one that goes without saying."""
    if site is None:
        vectors = [name for name, values in draws.items() if np.ndim(values) >= 2]
        found = [_USUAL_SITE] if _USUAL_SITE in draws else vectors
        site = found[0] if len(found) == 1 else None
    if site not in draws:
        raise ValueError(f"site must name the utilities, one of {', '.join(map(repr, draws))}; got {site!r}.")
    return site


def expected_ranks(draws: ArrayLike, group: ArrayLike) -> np.ndarray:
    """Mean over draws of the rank of each entry within its group, the largest being first.

    :param draws: shape ``(num_samples, n)``.
    :param group: shape ``(n,)``.
    :return: shape ``(n,)``, from one.

    **Example:**

    >>> from numpyro_ext.infer import expected_ranks
    >>> print(expected_ranks([[3.0, 1.0, 2.0], [3.0, 2.0, 1.0]], [0, 0, 0]))
    [1.  2.5 2.5]
    """
    draws, group = np.asarray(draws), np.asarray(group)
    total = np.zeros(draws.shape[1])
    _, number, counts = np.unique(group, return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    for draw in draws:
        order = np.lexsort((-draw, number))
        total[order] += np.arange(order.size) - starts[number[order]] + 1
    return total / len(draws)


def ranking_scores(ranks: ArrayLike, relevant: ArrayLike, group: ArrayLike, k: int = 10) -> dict[str, float]:
    """Precision, recall and normalised discounted cumulative gain among the first ``k``, averaged over groups.

    :param ranks: of the entries within their groups; only their order counts. Shape ``(n,)``.
    :param relevant: boolean, which entries should come first, shape ``(n,)``.
    :param group: such as the user, shape ``(n,)``.
    :param int k: length of the list that is shown.
    :return: ``precision``, ``recall`` and ``ndcg``; groups without relevant entries are left out.
    :raises ValueError: if nothing is relevant, or the shapes differ.

    **Example:**

    >>> from numpyro_ext.infer import ranking_scores
    >>> ranking_scores([1, 2, 3, 4], [True, False, True, False], [0, 0, 0, 0], k=2)
    {'precision': 0.5, 'recall': 0.5, 'ndcg': 0.613}
    """
    ranks, relevant, group = np.asarray(ranks), np.asarray(relevant, bool), np.asarray(group)
    if not ranks.shape == relevant.shape == group.shape:
        raise ValueError(f"ranks, relevant and group have shapes {ranks.shape}, {relevant.shape} and {group.shape}.")
    if not relevant.any():
        raise ValueError("no entry is relevant: there is nothing to score.")
    scores = []
    gains = 1.0 / np.log2(np.arange(2, k + 2))
    for one in np.unique(group[relevant]):
        members = np.flatnonzero(group == one)
        first = relevant[members[np.argsort(ranks[members], kind="stable")][:k]]
        num_relevant = int(relevant[members].sum())
        best = gains[: min(num_relevant, k)].sum()
        scores.append((first.sum() / k, first.sum() / num_relevant, gains[: first.size][first].sum() / best))
    precision, recall, ndcg = np.mean(scores, axis=0).tolist()
    return {"precision": precision, "recall": recall, "ndcg": ndcg}
