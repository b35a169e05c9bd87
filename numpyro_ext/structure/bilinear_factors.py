"""The log factors that bilinear forms take: which families, and one potential for the cells of all observed sites."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..potentials.base import Potential
from .errors import ModelStructureError

__all__ = ["TAKEN", "check_label", "check_same_family", "join_cells", "take_cells"]

# Labels of the recogniser. All are log-concave, and analytic in a strip around the real line that is wide enough for
# their expectations under products of Gaussians, in which there is no place for kinks.
_LABELS = (
    "poisson, exp link",
    "poisson, softplus link",
    "softplus poisson",
    "gamma, exp link",
    "bernoulli logits",
    "bernoulli, logistic link",
    "bernoulli, probit link",
    "binomial logits",
    "binomial, logistic link",
    "ordered logistic",
    "ordered probit",
    "continuation ratio",
)
TAKEN = (
    "Poisson counts with the rate exp(predictor) or softplus(predictor), times an exposure if need be, negative "
    "binomial counts, Bernoulli and binomial outcomes (logits, or probit), and ordered categories (OrderedLogistic, "
    "OrderedProbit, ContinuationRatio)"
)


def check_label(name: str, label: str) -> None:
    """Refuse an observed site whose log factor is of another family.

    :param str name: of the site.
    :param str label: what was recognised.
    :raises ModelStructureError: if it is not taken.
    """
    if label not in _LABELS:
        raise ModelStructureError(
            f"observed site '{name}' was read as {label}: this engine takes {TAKEN}. Use NUTS for other likelihoods."
        )


def check_same_family(names: Sequence[str], potentials: Sequence[Potential]) -> None:
    """Refuse observed sites of different families.

    :param names: of the sites.
    :param potentials: theirs, after :func:`take_cells`.
    :raises ModelStructureError: if one differs from the first.
    """

    def kind(potential: Potential) -> tuple:
        return type(potential), [jnp.shape(x)[1:] for x in jax.tree.leaves(potential)]

    for name, potential in zip(names, potentials, strict=True):
        if kind(potential) != kind(potentials[0]):
            first, other = (type(p).__name__ for p in (potentials[0], potential))
            what = f"{first} and {other}" if first != other else "different numbers of categories"
            raise ModelStructureError(
                f"observed sites '{names[0]}' and '{name}' have factors of different kinds ({what}). This engine takes "
                "several sites of one family; use NUTS for several."
            )


def take_cells(potential: Potential, size: int, cells: np.ndarray) -> Potential:
    """The factors of some observations, with an axis for them in every array.

    :param potential: of all observations of a site; what is shared may have a leading axis of length one or none.
    :param int size: their number.
    :param cells: which to take.
    """

    def take(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        is_label = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
        found = jnp.broadcast_to(x, (size, *x.shape[1:]))[cells]
        return found if is_label else found.astype(jnp.result_type(float))

    return jax.tree.map(take, potential)


def join_cells(potentials: Sequence[Potential]) -> Potential:
    """The factors of several sites, one after another."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *potentials)
