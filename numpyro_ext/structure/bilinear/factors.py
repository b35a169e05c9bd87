"""The log factors that bilinear forms take: which families, and one potential for the cells of all observed sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...potentials.base import Potential
from ...potentials.families.binary import LogitPotential
from ...potentials.families.poisson import PoissonExpPotential, PoissonSoftplusPotential
from ..errors import ModelStructureError
from .form import Bilinear

Unlisted = Literal["missing", "zero"]

TAKEN = (
    "log densities that are concave and analytic in the predictor: those of Poisson counts with the rate "
    "exp(predictor) or softplus(predictor), times an exposure if need be, negative binomial counts, Bernoulli and "
    "binomial outcomes (logits, or probit), ordered categories (OrderedLogistic, OrderedProbit, ContinuationRatio), "
    "Normal values, and what was registered with structure.register_family and says so"
)


def is_exponential(potential: Potential) -> bool:
    """True if expectations are those of an exponential: in closed form, and infinite for wide posteriors."""
    return isinstance(potential, PoissonExpPotential)


def has_bound(potential: Potential) -> bool:
    """True if there is a variational bound of a bilinear model with these factors."""
    return potential.is_log_concave and (potential.is_analytic or is_exponential(potential))


def check_factor(
    name: str, label: str, potential: Potential, rows_per_observation: int, takes_any: bool = False
) -> None:
    """Refuse an observed site whose log factor has no expectation under products of Gaussian vectors.

    :param str name: of the site.
    :param str label: what was recognised.
    :param Potential potential: its factors.
    :param int rows_per_observation: how many predictors an observation has.
    :param bool takes_any: whether factors need no such expectation, but tilted moments alone.
    :raises ModelStructureError: if it is not taken.
    """
    is_taken = takes_any or has_bound(potential)
    if not is_taken or rows_per_observation != 1:
        taken = "likelihoods with one predictor per observation" if takes_any else TAKEN
        other = "" if takes_any or rows_per_observation != 1 else "BilinearEP for others of one predictor, or "
        raise ModelStructureError(
            f"observed site '{name}' was read as {label}: this engine takes {taken}. Use {other}NUTS for other "
            "likelihoods.",
            site=name,
        )


def check_same_family(names: Sequence[str], potentials: Sequence[Potential]) -> None:
    """Refuse observed sites of different families.

    :param names: of the sites.
    :param potentials: theirs, after :func:`take_cells`.
    :raises ModelStructureError: if one differs from the first.
    """

    def kind(potential: Potential) -> tuple[type, list[tuple[int, ...]]]:
        return type(potential), [jnp.shape(x)[1:] for x in jax.tree.leaves(potential)]

    for name, potential in zip(names, potentials, strict=True):
        if kind(potential) != kind(potentials[0]):
            first, other = (type(p).__name__ for p in (potentials[0], potential))
            what = f"{first} and {other}" if first != other else "different numbers of categories"
            raise ModelStructureError(
                f"observed sites '{names[0]}' and '{name}' have factors of different kinds ({what}). This engine takes "
                "several sites of one family; use NUTS for several."
            )


def check_unlisted(
    form: Bilinear,
    names: Sequence[str],
    cells: Sequence[np.ndarray],
    shapes: Sequence[tuple[int, ...]],
    is_shared: bool,
) -> None:
    """Refuse forms in which pairs that are no cells cannot be zeros.

    :param Bilinear form: at some hyperparameters.
    :param names: of the observed sites.
    :param cells: which of their observations are in use.
    :param shapes: of their observations.
    :param bool is_shared: whether all cells have the same coefficients.
    :raises ModelStructureError: saying what is in the way.
    """

    def refuse(reason: str, advice: str) -> None:
        raise ModelStructureError(f"unlisted cells of {list(names)} cannot be zeros: {reason}. {advice}")

    def varies(values: jax.Array | float) -> bool:
        x = np.asarray(values)
        return bool(np.ptp(x) > 16 * np.finfo(x.dtype).eps * np.abs(x).max())

    potential = form.potential
    if any(c.size != int(np.prod(shape)) for c, shape in zip(cells, shapes, strict=True)):
        refuse("some listed ones are masked", "List no other cells than those that are in use.")
    if np.any(np.asarray(form.weight) != 1.0):
        refuse("listed ones are scaled", "Leave handlers.scale and subsampling out.")
    if not is_shared:
        refuse("coefficients of the predictor differ between cells", "Use dense counts and unlisted_cells='missing'.")
    exposure = potential.exposure if isinstance(potential, PoissonSoftplusPotential) else 1.0
    for what, values in (("offset of the predictor", form.offset), ("exposure", exposure)):
        if varies(values):
            refuse(f"the {what} differs between cells", "Use dense counts and unlisted_cells='missing'.")
    rows, columns = (np.asarray(index).astype(np.int64) for index in (form.row_index, form.column_index))
    cell, times = np.unique(rows * form.columns.mean.shape[0] + columns, return_counts=True)
    if (again := cell[times > 1]).size:
        is_count = isinstance(potential, PoissonSoftplusPotential)
        refuse(
            f"{again.size} cells are listed twice or more, the first in row {again[0] // form.columns.mean.shape[0]} "
            f"and column {again[0] % form.columns.mean.shape[0]}",
            "Add up its counts." if is_count else "List each cell once.",
        )
    if form.common is not None and any(varies(column) for column in np.asarray(form.common.coefficients).T):
        refuse("coefficients of the predictor differ between cells", "Use all cells and unlisted_cells='missing'.")


def exposure_of_zeros(names: Sequence[str], potential: Potential) -> jax.Array:
    """Minus the log probability of a zero over the softplus of its predictor, where that is the same for all.

    :param names: of the observed sites.
    :param Potential potential: factors of their cells.
    :raises ModelStructureError: if it is not known for factors of this kind.
    """
    if isinstance(potential, PoissonSoftplusPotential):
        return jnp.asarray(potential.exposure)[0]
    if isinstance(potential, LogitPotential):
        return jnp.ones((), jnp.result_type(float))
    raise ModelStructureError(
        f"unlisted cells of {list(names)} cannot be zeros: their factors are {type(potential).__name__}. The bounds of "
        "many zeros are for Poisson counts with the rate softplus(predictor), and for Bernoulli outcomes by their "
        "logits.",
        site=names[0],
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
