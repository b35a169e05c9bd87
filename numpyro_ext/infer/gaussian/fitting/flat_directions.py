"""Directions of the unknowns in which no observation changes: without a prior there they have no posterior, and with
one it is this prior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....linalg.gaussian.design import AnyDesign, DenseDesign, Design, OperatorRows, StateSpaceDesign
from ....linalg.gaussian.prior import DiagonalPrior, FlatPrior, SparsePrecisionPrior, is_flat, num_flat
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ...front.results import at_values

_NO_LENGTH = 1e-12
"""Length of a combination of columns of unit length below which it is zero up to rounding."""
_PROPER = "dist.Normal(0, 10), or one that adds up to zero (dist.ZeroSumNormal)"
_LARGEST_MATRIX = 4_000_000
"""Entries up to which rows that are known by their products are written down to say what is wrong with them."""
_MOST_COEFFICIENTS = 10
"""Independent unknowns of a site up to which they are taken for coefficients."""
_MOST_COLUMNS = 50
"""Columns up to which a look at them costs less than a fit."""
_ROUNDINGS = 8.0
"""Roundings of the columns below which a combination of them is none."""
_MOST_NAMED = 6


class _Column(NamedTuple):
    site: str
    place: str
    is_flat: bool


def check_flat_priors(reading: LatentGaussianReading, hyper: dict[str, Array]) -> None:
    """Refuse flat priors of what observations do not determine: there is no posterior, though rounding may make one.

    :param LatentGaussianReading reading: of the model.
    :param dict hyper: all hyperparameters, constrained.
    :raises ValueError: naming the site and its elements.
    """
    if _may_be_undetermined(reading):
        found = flat_direction(reading, reading.compiled_form(hyper))
        if found is not None:
            raise ValueError(f"The log evidence is not finite{at_values(hyper)}. {found}")


def explain_prior_alone(reading: LatentGaussianReading, hyper: dict[str, Array]) -> list[str]:
    """A message on coefficients with a proper prior which observations do not tell from what is flat, if there are any:
    along such a direction the posterior is that prior."""
    if not any(map(is_flat, reading.abstract_form.prior)):
        return explain_collinear(reading, hyper)
    if not _may_be_undetermined(reading):
        return []
    found = _moving_together(reading, reading.compiled_form(hyper), _MOST_COEFFICIENTS)
    flat, proper = ({column.site: None for column in found if column.is_flat is kind} for kind in (True, False))
    if not flat or not proper:
        return []
    named, others = (" and ".join(map(repr, names)) for names in (flat, proper))
    return [
        f"The observations do not tell {named} from {others}: what is added to one and taken from the other changes "
        f"nothing, so that there the posterior is the prior of {others}. Predictors are determined all the same. If "
        f"{others} should have the level alone, let {named} add up to zero (sum_to_zero=True of a "
        f"GaussianMarkovRandomField, dist.ZeroSumNormal); else leave {others} out."
    ]


def explain_collinear(reading: LatentGaussianReading, hyper: dict[str, Array]) -> list[str]:
    """A message on coefficients with proper priors that observations do not tell from one another, if there are any.

    Members of a plate, and coefficients whose scale is a hyperparameter, in the prior or in front of them, are effects
    of levels, as are more than ten of which each row sees one, and those that rows compare: all of them beside an
    intercept are no mistake. Among themselves alone some may be alike all the same.

    Cost: a QR decomposition of the columns of the coefficients, a few dozen.
    """
    form = reading.abstract_form
    names = names_of_blocks(reading, form)
    sizes = [block.size for block in form.prior]
    is_level = [name not in reading.sites or bool(reading.sites[name].plates) for name in names]
    chosen = [
        k
        for k, (block, is_one) in enumerate(zip(form.prior, is_level, strict=True))
        if isinstance(block, DiagonalPrior) and block.size <= (_MOST_COEFFICIENTS if is_one else _MOST_COLUMNS)
    ]
    chosen = [k for k in chosen if not is_level[k] or sizes[k] > 1]
    width = sum(sizes[k] for k in chosen)
    num_rows = form.offset.shape[0]
    is_known = not isinstance(form.design, StateSpaceDesign | OperatorRows)
    if not is_known or not 2 <= width <= min(_MOST_COLUMNS, num_rows) or num_rows * width > _LARGEST_MATRIX:
        return []
    columns_of, data = shared(_columns, reading, blocks=tuple(chosen)), reading.with_kinds(None).data
    ends = np.cumsum([sizes[k] for k in chosen])[:-1]
    (matrix, variances), (other_matrix, others) = (
        columns_of(values, data) for values in (hyper, jax.tree.map(_elsewhere, hyper))
    )
    parts, moved = (np.split(np.asarray(x, float), ends, axis=1) for x in (matrix, other_matrix))
    has_scale = {
        k: not (np.array_equal(part, other) and np.array_equal(variance, of_other))
        for k, part, other, variance, of_other in zip(chosen, parts, moved, variances, others, strict=True)
    }
    columns = dict(zip(chosen, parts, strict=True))
    levels = [k for k in chosen if is_level[k] or has_scale[k] or _are_effects(columns[k])]
    least = max(_NO_LENGTH, _ROUNDINGS * float(jnp.finfo(form.offset.dtype).eps))
    for group in ([k for k in chosen if k not in levels], *([k] for k in levels)):
        places = [(k, element) for k in group for element in range(sizes[k])]
        found = [
            places[i] for i in _alike(np.concatenate([columns[k] for k in group] or [np.zeros((0, 0))], axis=1), least)
        ]
        if found and not (group[0] in levels and len(found) == sizes[group[0]]):
            return [_collinear_message([_named(reading, names[k], element) for k, element in found])]
    return []


def _columns(reading: LatentGaussianReading, blocks: tuple[int, ...]) -> Callable[..., tuple[Array, list[Array]]]:
    """Program for the columns of some blocks of the prior, zero where nothing is observed, and for their variances."""

    def columns(hyper: dict[str, Array], data: Any) -> tuple[Array, list[Array]]:
        form: Any = reading.form(hyper, data)
        starts = np.cumsum([0, *(block.size for block in form.prior)])
        in_use = form.design.scale_rows(jnp.concatenate(form.observed).astype(form.offset.dtype))
        parts = [in_use.column_range(int(starts[k]), form.prior[k].size).to_dense() for k in blocks]
        return jnp.concatenate(parts, axis=1), [form.prior[k].variance for k in blocks]

    return quick_jit(columns, is_small=True)


def _are_effects(columns: np.ndarray) -> bool:
    """True if each row sees one of many columns, or compares some with each other."""
    sees_one = columns.shape[1] > _MOST_COEFFICIENTS and bool(np.all(np.count_nonzero(columns, axis=1) <= 1))
    return sees_one or not np.any(np.sum(columns, axis=1))


def _elsewhere(value: Any) -> Any:
    """Another value of a hyperparameter, within its support or not: to see what depends on it."""
    return 1.5 * value + 0.1 if jnp.issubdtype(jnp.result_type(value), jnp.inexact) else value


def _alike(matrix: np.ndarray, least: float) -> np.ndarray:
    """:func:`_undetermined` of columns that are not all zero, where rows are no fewer than these."""
    is_seen = np.any(matrix != 0.0, axis=0)
    num_rows = np.count_nonzero(np.any(matrix != 0.0, axis=1))
    if not np.isfinite(matrix).all() or not 2 <= np.count_nonzero(is_seen) <= num_rows:
        return np.zeros(0, int)
    return np.flatnonzero(is_seen)[_undetermined(matrix[:, is_seen], least)]


def _named(reading: LatentGaussianReading, name: str, element: int) -> str:
    shape = reading.sites[name].shape if name in reading.sites else ()
    place = ", ".join(map(str, np.unravel_index(element, shape))) if shape else ""
    return repr(f"{name}[{place}]" if place else name)


def _collinear_message(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    return (
        f"The observations do not tell {shown} from one another: along a direction of them no predictor changes (their "
        "columns are collinear), so that there the posterior is the prior. Predictors are determined all the same. "
        "Leave one of them out, as one level of a dummy coding beside an intercept, or look at their sum alone."
    )


def _may_be_undetermined(reading: LatentGaussianReading) -> bool:
    expected = reading.abstract_form
    # Rows that are known by their products are not written down where nothing has failed.
    return any(map(is_flat, expected.prior)) and not isinstance(expected.design, OperatorRows)


def flat_direction(reading: LatentGaussianReading, form: LatentGaussian) -> str | None:
    """A direction of the sites with a flat prior in which no predictor changes, in words."""
    found = _moving_together(reading, form)
    if not found:
        return None
    sites = list(dict.fromkeys(column.site for column in found))
    if len(sites) > 1:
        said = (
            f"priors of sites {sites} are flat, and the observations do not change along a direction of them together"
        )
        return f"The {said}, as an intercept and effects of all groups have. Give a proper prior, such as {_PROPER}."
    places = [column.place for column in found]
    shown = ", ".join(place.removeprefix("element ") for place in places[:5]) + (", ..." if len(places) > 5 else "")
    said = (
        f"do not change if the same is added to its elements {shown}, as where they are only compared with each other"
    )
    if len(found) == 1:
        said = f"say nothing of its {places[0]}"
    return (
        f"The prior of site {sites[0]!r} is flat, and the observations {said}. Give a proper prior, such as {_PROPER}."
    )


def names_of_blocks(reading: LatentGaussianReading, form: LatentGaussian) -> Sequence[str]:
    """Sites of the prior blocks, where there is one block for each."""
    alike = len(reading.field) == len(form.prior)
    return reading.field if alike else [f"block {i}" for i in range(len(form.prior))]


def _moving_together(reading: LatentGaussianReading, form: LatentGaussian, most_proper: int = 0) -> list[_Column]:
    """Flat unknowns, and independent ones of up to ``most_proper`` a site, that move together along a direction in
    which no predictor changes."""
    design = _entries(form.design)
    widths = list(map(num_flat, form.prior))
    if design is None or design.num_rows * sum(widths) > _LARGEST_MATRIX:
        return []
    in_use = design.scale_rows(jnp.concatenate(form.observed).astype(form.offset.dtype))
    parts, columns, start = [np.zeros((design.num_rows, 0))], list[_Column](), 0
    for name, block, width in zip(names_of_blocks(reading, form), form.prior, widths, strict=True):
        own = in_use.column_range(start, block.size)
        is_proper = isinstance(block, DiagonalPrior) and block.size <= most_proper
        if isinstance(block, FlatPrior) or is_proper:
            parts.append(np.asarray(own.to_dense(), float))
            columns += [_Column(name, f"element {element}", not is_proper) for element in range(block.size)]
        elif isinstance(block, SparsePrecisionPrior) and width and block.directions is not None:
            along = np.asarray(own.matvec(block.directions.T).T, float)
            size = float(jnp.sqrt(jnp.sum(own.squared().matvec(jnp.ones(block.size, form.offset.dtype)))))
            parts.append(np.where(np.linalg.norm(along, axis=0) > _NO_LENGTH * size, along, 0.0))
            columns += [_Column(name, f"null space (column {column})", True) for column in range(width)]
        start += block.size
    return [columns[k] for k in _undetermined(np.concatenate(parts, axis=1))]


def _entries(design: AnyDesign) -> Design | None:
    """The design with its entries, if these are known or few enough to be found."""
    if isinstance(design, OperatorRows) and design.num_rows * design.num_columns <= _LARGEST_MATRIX:
        return DenseDesign(design.to_dense())
    return None if isinstance(design, StateSpaceDesign | OperatorRows) else design


def _undetermined(matrix: np.ndarray, least: float = _NO_LENGTH) -> np.ndarray:
    """Columns that move together along a direction in which no row changes; none if there is no such.

    :param float least: length of a combination of columns of unit length below which it is none.
    """
    length = np.linalg.norm(matrix, axis=0)
    # In units of each column, of which others may be small: columns alike to many digits are determined, if badly.
    unit = np.where(length > 0.0, length, 1.0)
    _, size, directions = np.linalg.svd(np.linalg.qr(matrix / unit, mode="r"))
    size = np.append(size, np.zeros(matrix.shape[1] - size.size))
    null = np.linalg.qr((directions[size <= least] / unit).T)[0].T
    projection = null.T @ null
    which = int(np.argmax(np.diag(projection))) if null.size else 0
    return np.flatnonzero(np.abs(projection[which]) > 1e-3) if null.size else np.zeros(0, int)
