"""Tables of rows as users have them: making :class:`LatentGaussianRows` of one, and checking what they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...potentials import (
    BinomialLogitPotential,
    BoundedPotential,
    CumulativeLogitPotential,
    GaussianPotential,
    LogitPotential,
    PoissonExpPotential,
    Potential,
    SoftmaxPotential,
    VectorPotential,
    logistic_bound,
)
from ...potentials.families.ordinal import CumulativeProbitPotential
from ...structure.model.running.pandas_arguments import check_rows
from .posteriors import LatentGaussianRows


def table_rows(
    table: object,
    mask: object = None,
    *,
    kinds: str | int | Sequence[str | int] = "real",
    num_factors: int | None = None,
    weights: Any = None,
    binary_bound: str = "exact",
    categorical_bound: str = "tilted",
) -> LatentGaussianRows:
    r"""The rows of a table with columns of several kinds, and parameters from which a fit may start.

    With ``num_factors`` this is the model :func:`numpyro_ext.models.factor_analysis`, without it
    :func:`numpyro_ext.models.latent_gaussian_graphical_model`; predictors have the same order and parameters the same
    start. A categorical column of ``K`` categories has ``K - 1`` predictors: that of category 0 is zero.

    :param table: cells, shape ``(N, C)``: an array, a list of lists or a pandas ``DataFrame``; NaN where one is
        missing.
    :param mask: false where a cell is missing or held out, shape ``(N, C)``; columns of a table by their
        names. With a mask NaN is missing only where the mask says so, and an error elsewhere. Values that are held out
        stay in the potentials, where :func:`predictive_log_density` finds them.
    :param kinds: of all columns or of each: ``"real"``, ``"binary"``, ``"count"``, or a whole number, which is the
        number of categories.
    :param int num_factors: length of the latent vector; ``None``: one latent variable behind every predictor.
    :param weights: how often each row is counted, shape ``(N,)``; once if not given.
    :param str binary_bound: name of a :func:`~numpyro_ext.potentials.logistic_bound`.
    :param str categorical_bound: name of a :func:`~numpyro_ext.potentials.log_sum_exp_bound`.
    :raises ValueError: for unknown kinds, cells that are not of the kind of their column, wrong shapes, and names of
        columns that a table and a mask in another order have twice.

    **Example:** a real, a binary and a categorical column, with two missing cells.

    >>> from numpyro_ext.infer import variational_em
    >>> table = [[0.3, 1, 2], [-1.2, 0, 0], [np.nan, 1, 1], [0.4, 0, 2], [0.9, 1, 0], [-0.2, np.nan, 1]]
    >>> rows = table_rows(table, kinds=["real", "binary", 3], num_factors=1)
    >>> print(rows.loadings.shape, [int(mask.sum()) for mask in rows.observed])
    (4, 1) [5, 5, 6]
    >>> found = variational_em(rows, learn=("loadings", "intercept"), num_steps=5)
    >>> bool(np.all(np.isfinite(found.objective_trace)))
    True
    """
    check_rows([("table", table), ("mask", mask)])
    names, masked = (list(getattr(given, "columns", ())) for given in (table, mask))
    if names != masked and set(names) == set(masked):
        if not len(names) == len(masked) == len(set(names)):
            raise ValueError(
                f"table and mask have a column twice, and others in another order: {names} and {masked}. Give each a "
                "name of its own, or mask.to_numpy() if the orders are the same."
            )
        mask = np.asarray(mask)[:, [masked.index(name) for name in names]]
    cells = _numbers(table, "table")
    if cells.ndim != 2 or 0 in cells.shape:
        raise ValueError(f"table_rows needs a table with rows and columns; got shape {cells.shape}.")
    num_columns = cells.shape[1]
    kinds = [kinds] * num_columns if isinstance(kinds, str | int) else list(kinds)
    wrong = [
        k for k in kinds if k not in ("real", "binary", "count") and not (isinstance(k, int | np.integer) and k > 1)
    ]
    if wrong or len(kinds) != num_columns:
        raise ValueError(
            "kinds must be 'real', 'binary', 'count' or a number of categories (two or more), one for all or one for "
            f"each of the {num_columns} columns; got {kinds}."
        )
    seen = ~np.isnan(cells) if mask is None else _booleans(mask, "mask", cells.shape)
    potentials, observed = [], []
    for kind, group in groupby(range(num_columns), key=lambda column: kinds[column]):
        columns = list(group)
        part, is_seen = cells[:, columns], seen[:, columns]
        _refuse(~is_seen | ~np.isnan(part), part, columns, "is NaN where the mask says observed", "Mask it")
        # Cells that are held out stay, for their predictive density; not even a masked cell may be NaN.
        values = jnp.asarray(np.where(np.isnan(part), 0.0, part))
        potential: Potential | VectorPotential
        if kind == "real":
            potential = GaussianPotential(values, jnp.ones(len(columns)))
        elif kind == "count":
            potential = PoissonExpPotential(values)
        elif kind == "binary":
            potential = LogitPotential(values)
            if binary_bound != "exact":
                potential = BoundedPotential(potential, logistic_bound(binary_bound))
        else:
            potential = SoftmaxPotential(values, int(kind), pinned=0, bound=categorical_bound)
        potentials.append(potential)
        observed.append(jnp.asarray(is_seen))
    size = sum(mask.shape[1] * _width(potential) for potential, mask in zip(potentials, observed, strict=True))
    if num_factors is None:
        loadings, covariance = jnp.eye(size), 2.0 * jnp.eye(size)
    else:
        # Orthogonal waves: EM never gets away from loadings of a rank that is too low.
        waves = np.outer(0.5 + np.arange(size), 0.5 + np.arange(num_factors))
        loadings, covariance = jnp.asarray(0.5 * np.cos(np.pi / size * waves)), jnp.eye(num_factors)
    return checked_rows(
        LatentGaussianRows(
            jnp.zeros(len(covariance)),
            covariance,
            loadings,
            jnp.zeros(size),
            tuple(potentials),
            tuple(observed),
            jnp.ones(len(cells)) if weights is None else weights,
        )
    )


def checked_rows(rows: LatentGaussianRows, *, learns_loadings: bool = False) -> LatentGaussianRows:
    """The rows as arrays of one floating dtype, after a look at every shape and every observed cell.

    :param LatentGaussianRows rows: arrays, or what NumPy makes an array of.
    :param bool learns_loadings: whether loadings are to be fitted, for which they need their full rank at the start.
    :raises ValueError: saying what was found, and where.
    """
    parameters = [np.asarray(part) for part in (rows.mean, rows.covariance, rows.loadings, rows.intercept)]
    floating = [part.dtype for part in parameters if np.issubdtype(part.dtype, np.floating)]
    dtype = jnp.result_type(*floating) if floating else jnp.result_type(float)
    weights = _numbers(rows.weights, "weights")
    if weights.ndim != 1 or len(weights) == 0:
        raise ValueError(f"weights must have one number for each row, and there must be rows; got {weights.shape}.")
    if not np.all(np.isfinite(weights) & (weights >= 0.0)) or not np.any(weights > 0.0):
        raise ValueError("weights must be finite and not negative, and not all of them zero.")
    if len(rows.potentials) != len(rows.observed) or not rows.potentials:
        raise ValueError(
            f"observed must hold one mask for each potential; got {len(rows.observed)} for {len(rows.potentials)}."
        )
    num_rows, size = len(weights), parameters[0].size
    potentials, observed, width, start = [], [], 0, 0
    for number, (raw, seen) in enumerate(zip(rows.potentials, rows.observed, strict=True)):
        potential = _with_arrays(raw, dtype)
        mask = _booleans(seen, f"observed[{number}]", None)
        if mask.ndim != 2 or len(mask) != num_rows:
            raise ValueError(f"observed[{number}] must have shape ({num_rows}, columns); got {mask.shape}.")
        columns = range(start, start + mask.shape[1])
        _check_cells(potential, mask, columns)
        potentials.append(potential)
        observed.append(jnp.asarray(mask))
        width += mask.shape[1] * _width(potential)
        start = columns.stop
    if not any(bool(mask.any()) for mask in observed):
        raise ValueError("No cell is observed: masks are true where a cell is in use.")
    shapes = {"mean": (size,), "covariance": (size, size), "loadings": (width, size), "intercept": (width,)}
    for (name, shape), part in zip(shapes.items(), parameters, strict=True):
        if part.shape != shape or not np.all(np.isfinite(part.astype(float))):
            raise ValueError(
                f"{name} must be finite and have shape {shape}, for {size} latent variables and {width} predictors; "
                f"got shape {part.shape}."
            )
    symmetric = np.allclose(parameters[1], parameters[1].T, rtol=1e-4, atol=0.0)
    if not symmetric or np.linalg.eigvalsh(parameters[1].astype(float)).min() <= 0.0:
        raise ValueError("covariance must be symmetric and positive definite.")
    if learns_loadings:
        _check_rank(parameters[2])
    mean, covariance, loadings, intercept = (jnp.asarray(part, dtype) for part in parameters)
    return LatentGaussianRows(
        mean, covariance, loadings, intercept, tuple(potentials), tuple(observed), jnp.asarray(weights, dtype)
    )


def runaway_columns(rows: LatentGaussianRows, learn: Sequence[str]) -> list[str]:
    """Sentences on columns whose parameters have no finite maximum, because all observed cells are the same.

    :param LatentGaussianRows rows: the data, checked.
    :param learn: the parameters that are maximised over.
    """
    found = []
    for column, values, potential in _observed_columns(rows):
        limits, is_located = _range(potential), bool({"mean", "intercept"} & set(learn))
        if hasattr(potential, "num_categories"):
            absent = np.setdiff1d(np.arange(potential.num_categories), values).tolist()
            if absent and is_located:
                found.append(f"column {column} never shows the categories {absent}, whose predictors run away")
        elif values.min() == values.max():
            is_extreme = limits.is_whole and values[0] in (limits.lower, np.max(limits.upper))
            has_own_noise = isinstance(potential, GaussianPotential) and np.ndim(potential.scale) == 1
            what = "predictor runs away" if is_extreme and is_located else ""
            if has_own_noise and {"loadings", "noise"} <= set(learn):
                what = "noise shrinks to zero"
            if what:
                found.append(f"column {column} is {values[0]:g} in every observed cell, and its {what}")
    return found


class _Range(NamedTuple):
    name: str
    """Name of the field of the potential that holds the cells."""
    lower: float
    upper: Any
    is_whole: bool


def _range(potential: Potential | VectorPotential) -> _Range:
    """Range of a cell. Families say so by the name of the field that holds their cells."""
    if isinstance(potential, BoundedPotential):
        return _range(potential.base)
    if hasattr(potential, "count"):
        upper = potential.total if isinstance(potential, BinomialLogitPotential) else np.inf
        return _Range("count", 0, upper, True)
    if hasattr(potential, "num_categories"):
        return _Range("label", 0, potential.num_categories - 1, True)
    if hasattr(potential, "label"):
        return _Range("label", 0, np.shape(getattr(potential, "thresholds", [0]))[-1], True)
    return _Range("observation", -np.inf, np.inf, False)


def _cells(potential: Potential | VectorPotential, shape: tuple[int, ...]) -> np.ndarray | None:
    """The cells of a family, or none where the potential is one that does not say which of its arrays they are."""
    base = potential.base if isinstance(potential, BoundedPotential) else potential
    cells = getattr(base, _range(base).name, None)
    return None if cells is None else np.broadcast_to(np.asarray(cells, float), shape)


def _check_cells(potential: Potential | VectorPotential, mask: np.ndarray, columns: Sequence[int]) -> None:
    base = potential.base if isinstance(potential, BoundedPotential) else potential
    kind = type(base).__name__
    where = f"the columns {columns[0]} to {columns[-1]} ({kind})" if len(columns) else f"a {kind} without columns"
    tail = {"thresholds": 1, "scores": 1}
    for field in dataclasses.fields(base):  # type: ignore[arg-type]
        value = getattr(base, field.name)
        if not isinstance(value, jax.Array):
            continue
        shape = value.shape[: value.ndim - tail.get(field.name, 0)]
        if not _fits(shape, mask.shape):
            raise ValueError(
                f"{field.name} of {where} has shape {value.shape}, which does not broadcast to the shape {mask.shape} "
                "of their mask in observed."
            )
    limits = _range(base)
    cells = _cells(base, mask.shape)
    if cells is not None:
        remedy = "Say which cells are missing in observed, or let table_rows take NaN for it"
        _refuse(~mask | np.isfinite(cells), cells, columns, f"is no number for a {kind}", remedy)
        inside = (cells >= limits.lower) & (cells <= np.asarray(limits.upper))
        if limits.is_whole:
            inside &= cells == np.floor(cells)
            upper = np.max(limits.upper)
            words = "0, 1, 2 and so on" if np.isinf(upper) else f"whole numbers from 0 to {upper:g}"
            _refuse(~mask | inside, cells, columns, f"is outside the range of a {kind}, {words}", "Correct or mask it")
    if isinstance(base, GaussianPotential) and not np.all(np.asarray(base.scale) > 0.0):
        raise ValueError(f"The scale of {where} must be positive.")
    if isinstance(base, CumulativeLogitPotential | CumulativeProbitPotential):
        thresholds = np.asarray(base.thresholds)
        if not np.all(np.diff(thresholds, axis=-1) > 0.0):
            raise ValueError(
                f"The thresholds of {where} must increase strictly: between equal ones no category has any "
                f"probability. Got {thresholds}."
            )


def _check_rank(loadings: np.ndarray) -> None:
    width, size = loadings.shape
    if size > width:
        raise ValueError(
            f"{size} latent variables for {width} predictors: no table tells more factors than columns apart. Use at "
            f"most {width}."
        )
    rank = np.linalg.matrix_rank(loadings.astype(float))
    if rank < size:
        raise ValueError(
            f"loadings start with rank {rank}, and there are {size} latent variables: EM would keep this rank, and "
            "stop at a saddle. Start from the loadings of table_rows, or from random ones."
        )


def _observed_columns(rows: LatentGaussianRows) -> Iterator[tuple[int, np.ndarray, Any]]:
    """Columns with their number, the observed cells of rows that count, of which there are some, and the potential."""
    counts = np.asarray(rows.weights) > 0.0
    column = 0
    for potential, seen in zip(rows.potentials, rows.observed, strict=True):
        mask = np.asarray(seen) & counts[:, None]
        cells = _cells(potential, mask.shape)
        for d in range(mask.shape[1]):
            if cells is not None and mask[:, d].any():
                yield column + d, cells[mask[:, d], d], potential
        column += mask.shape[1]


def _refuse(good: np.ndarray, cells: np.ndarray, columns: Sequence[int], what: str, remedy: str) -> None:
    if not good.all():
        row, column = np.argwhere(~good)[0]
        count = int(np.sum(~good))
        more = "" if count == 1 else f" So are {count - 1} more."
        raise ValueError(
            f"The cell in row {row}, column {columns[column]}, {cells[row, column]:g}, {what}.{more} {remedy}."
        )


def _numbers(value: object, name: str) -> np.ndarray:
    try:
        # Pandas has a missing value of its own.
        return value.to_numpy(float, na_value=np.nan) if hasattr(value, "to_numpy") else np.asarray(value, float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be numbers in rows of one length (code categories as 0, 1, ...): {error}"
        ) from error


def _booleans(value: object, name: str, shape: tuple[int, ...] | None) -> np.ndarray:
    mask = np.asarray(value)
    if mask.dtype != bool:
        numbers = _numbers(value, name)
        if not np.all((numbers == 0.0) | (numbers == 1.0)):
            raise ValueError(f"{name} must be booleans, true where a cell is observed.")
        mask = numbers == 1.0
    if shape is not None and not _fits(mask.shape, shape):
        raise ValueError(f"{name} has shape {mask.shape}, which does not broadcast to that of the table, {shape}.")
    return mask if shape is None else np.broadcast_to(mask, shape)


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _with_arrays(potential: Any, dtype: DTypeLike) -> Any:
    """The potential with arrays in place of lists, tables and numbers, floating ones of the given dtype."""
    changed = {}
    for field in dataclasses.fields(potential):
        value = getattr(potential, field.name)
        if isinstance(value, Potential):
            changed[field.name] = _with_arrays(value, dtype)
        elif not field.metadata.get("static") and not dataclasses.is_dataclass(value):
            array = np.asarray(value)
            if array.dtype == object:
                array = _numbers(value, field.name)
            changed[field.name] = jnp.asarray(array, dtype if np.issubdtype(array.dtype, np.floating) else None)
    return dataclasses.replace(potential, **changed)


def _width(potential: Potential | VectorPotential) -> int:
    return potential.dimension if isinstance(potential, VectorPotential) else 1
