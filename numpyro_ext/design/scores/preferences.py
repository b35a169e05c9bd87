"""Comparisons whose purpose is to find the best item."""

from __future__ import annotations

import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ..outcomes.draws import PosteriorDraws, draws_of

_CHUNK = 2**24


def expected_best_utility(
    source: object,
    first: ArrayLike,
    second: ArrayLike,
    *,
    site: str = "utility",
    rng_key: Array | None = None,
) -> dict[str, np.ndarray]:
    r"""Expected utility of the better one of each pair, :math:`E \max(u_i, u_j)` (Lin et al. 2022).

    Which pair to show to a person who is to end up with the best item: without noise in the answers, asking about the
    pair with the largest value is what raises the utility of the best recommendation after the answer the most.
    :func:`~numpyro_ext.design.expected_information_gain` learns all utilities instead, those of bad items too.

    By the draws of the source: its standard error is the standard deviation of the utilities over the root of their
    number. Cost: one evaluation per pair and draw.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.design import draws_of, expected_best_utility, select
    >>> def model(first, second, won=None):
    ...     utility = numpyro.sample("utility", dist.Normal(0, 1).expand([3]).to_event(1))
    ...     numpyro.sample("won", dist.Bernoulli(logits=utility[first] - utility[second]), obs=won)
    >>> draws = draws_of({"utility": jnp.array([[1.0, 2.0, -3.0], [1.0, 0.0, -3.0]])}, model=model)
    >>> scores = expected_best_utility(draws, [0, 0, 1], [1, 2, 2])
    >>> print(scores["utility"], select(scores).place)
    [1.5 1.  1. ] 0

    :param source: an engine after its run, draws of :func:`~numpyro_ext.design.draws_of`, or anything it takes.
    :param first: numbers of the items of each pair, in C order of the elements of the site.
    :param second: the other items, in the same shape.
    :param str site: of the utilities.
    :param rng_key: not used; every score takes one.
    :return: under the name of the site an array in the shape of the pairs.
    :raises ValueError: if there is no such site, a number is no item, or a pair is an item with itself.
    """
    draws = source if isinstance(source, PosteriorDraws) else draws_of(source)
    if site not in draws.samples:
        raise ValueError(
            f"There are no draws of a site {site!r}: name that of the utilities, one of {list(draws.samples)}."
        )
    utility = np.asarray(draws.samples[site], float).reshape(draws.num_draws, -1)
    pairs = np.asarray(first), np.asarray(second)
    if pairs[0].shape != pairs[1].shape or not pairs[0].size:
        raise ValueError(
            f"first and second must be as many items; got the shapes {pairs[0].shape} and {pairs[1].shape}."
        )
    for items in pairs:
        if items.dtype.kind not in "iu" or (items < 0).any() or (items >= utility.shape[1]).any():
            raise ValueError(f"Items are numbers from 0 to {utility.shape[1] - 1}, got {items.min()} to {items.max()}.")
    if (pairs[0] == pairs[1]).any():
        raise ValueError(f"{int((pairs[0] == pairs[1]).sum())} pairs are of an item with itself.")
    if not np.isfinite(utility).all():
        raise FloatingPointError(f"Some draws of {site!r} are not finite.")
    weights = np.full(len(utility), 1.0 / len(utility)) if draws.weights is None else np.asarray(draws.weights, float)
    one, other = (items.reshape(-1) for items in pairs)
    step = max(1, _CHUNK // len(utility))
    parts = [
        weights @ np.maximum(utility[:, one[k : k + step]], utility[:, other[k : k + step]])
        for k in range(0, len(one), step)
    ]
    return {site: np.concatenate(parts).reshape(pairs[0].shape)}
