r"""Cells that touch several vectors of a side with fixed weights, such as :math:`w_u^\top (h_a - h_b)`.

Which vectors a cell may touch follows from the program. The weights are directional derivatives of the predictor, told
from the coefficients of components by a reference cell in which one vector of either side has the weight one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.content import Structure
from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....linalg.gaussian.prior import DiagonalPrior
from ...errors import ModelStructureError
from .coefficients import Probe, Vectors, random_probe
from .lookups import Combinations, filled_up

Predict = Callable[[Array], Array]


class SidesRead(Protocol):
    """Protocol of a reading whose sides are known."""

    sides: Any
    elements: Any
    is_coupled: Any
    site_shapes: Any

    @property
    def predictor_rows(self) -> Any: ...
    def without_data(self) -> Self: ...
    def predictor_fn(self, env: dict[int, Any], rows: Any) -> Predict: ...
    def prior_at(self, name: str, env: Mapping[int, Any]) -> Any: ...
    def site_start(self, name: str) -> int: ...


class LaidOut(NamedTuple):
    """A reading whose sides are known, with its vectors: what functions of its cells are made of."""

    reading: Any
    vectors: Vectors

    @property
    def structure(self) -> Structure[LaidOut]:
        """Reading and vectors without data and cells."""
        return Structure(LaidOut(self.reading.without_data(), self.vectors.without_cells()))


class Incidence(NamedTuple):
    """The combinations of vectors of a side that cells see."""

    places: np.ndarray
    """Shape ``(num_combinations, k)``."""
    weight: np.ndarray
    """Zero for padding, of the same shape."""
    of_cells: np.ndarray
    """Number of the combination that each cell sees."""

    def combinations(self) -> Combinations:
        """Combinations for a form, with some more that no cell sees."""
        return filled_up(Combinations(self.places, self.weight), len(self.of_cells))

    def describe(self) -> str:
        """Number of combinations, in words."""
        num, width = self.places.shape
        return f"cells see {num} different ones of {'one vector' if width == 1 else f'up to {width} vectors'} each"


class _Look(NamedTuple):
    """Probe of a predictor to find weights."""

    slopes: tuple[Array | None, Array | None]
    """Slopes of each cell along the vectors that it may touch, shape ``(num_cells, k)``; ``None`` where it touches
    one."""
    reference: tuple[Array, Array, Array]
    """A cell in which slopes are large, and the vectors of rows and columns which have the weight one there."""
    products: Array
    """Coefficients of the products of components in that cell."""
    linear: tuple[Array, Array]
    values: Array
    """Predictors at other unknowns, with rows, columns, both or neither of them; shape ``(4, num_cells)``."""


def find_incidence(
    reading: SidesRead,
    vectors: Vectors,
    places: Sequence[np.ndarray | None],
    inputs: Sequence[dict[int, Any]],
    rng_key: Array,
) -> tuple[Vectors, tuple[Incidence | None, Incidence | None], dict[str, np.ndarray]]:
    """The combinations of vectors that cells see, where they may touch several vectors of a side.

    :param reading: whose sides and predictors are known.
    :param Vectors vectors: of both sides, without what cells see of those that are coupled.
    :param places: for either side the vectors that each cell may touch, ``(num_cells, k)`` padded with ``-1``; or
        ``None`` where it touches one.
    :param inputs: of the program, at two values of the hyperparameters.
    :param rng_key: for the numbers with which coefficients are looked for.
    :return: vectors with what cells see, the combinations, and for each site of the sides which blocks of its prior
        covariance are like the first.
    :raises ModelStructureError: if cells do not see combinations of vectors with the same weights in all components.
    """
    if not any(vectors.is_coupled):
        return vectors, (None, None), {}
    probe, others = random_probe(vectors, rng_key), random_probe(vectors, jax.random.fold_in(rng_key, 1)).unknowns
    compiled = shared(_look, LaidOut(reading, vectors))
    cells = reading.predictor_rows, tuple(vectors.of_cells), tuple(places)
    found = []
    # Weights that depend on hyperparameters differ between two values of these.
    for env in inputs:
        look, like_first = jax.tree.map(np.asarray, compiled(env, probe, others, cells))
        _check_finite(look, reading.sides)
        found.append(_combine(look, vectors, places, probe, others, reading.sides))
    for one, other in zip(*found, strict=True):
        if one is not None and other is not None:
            expected, weight = (x.weight[x.of_cells] for x in (one, other))
            if expected.shape != weight.shape or not np.allclose(expected, weight, rtol=1e-6, atol=1e-6):
                coupled = reading.sides[0 if found[0][0] is one else 1]
                raise ModelStructureError(
                    f"the weights with which cells see vectors of {list(coupled)} depend on hyperparameters. "
                    "covariance='component' needs weights that are known; take 'full' or 'diagonal' for this side.",
                    site=coupled[0],
                )
    incidences = found[0]
    of_cells = tuple(
        known if one is None else one.of_cells for known, one in zip(vectors.of_cells, incidences, strict=True)
    )
    cell, row, column = (int(x) for x in look.reference)
    return vectors._replace(of_cells=of_cells, reference=(cell, row, column)), incidences, like_first


def _look_at_cells(
    predict: Predict, vectors: Vectors, places: Sequence[Array | None], probe: Probe, others: Array
) -> _Look:
    """Derivatives of the predictors along vectors, and the coefficients of one cell.

    :param others: unknowns at which weights are put to the test.

    Cost: an evaluation of the predictors for every vector of a side of which cells touch several.
    """

    def along(direction: Array) -> Array:
        return jax.jvp(predict, (probe.unknowns,), (direction,))[1]

    def slopes_of(side: int) -> Array | None:
        seen, elements, test = places[side], jnp.asarray(vectors.elements[side]), probe.tests[side]
        if seen is None:
            return None
        if seen.shape[1] == 1:
            return jnp.where(seen >= 0, along(vectors.spread(side, test))[:, None], 0.0)

        def visit(found: Array, number: Array) -> tuple[Array, None]:
            slope = along(vectors.zeros.at[elements[number]].set(test))
            return jnp.where(seen == number, slope[:, None], found), None

        start = jnp.zeros(seen.shape, probe.unknowns.dtype)
        return jax.lax.scan(visit, start, jnp.arange(len(vectors.elements[side])))[0]

    slopes = slopes_of(0), slopes_of(1)
    strength = jnp.prod(jnp.stack([jnp.max(jnp.abs(s), axis=1) for s in slopes if s is not None]), axis=0)
    cell = jnp.argmax(strength)
    first = []
    for slope, seen, of_cells in zip(slopes, places, vectors.of_cells, strict=True):
        if slope is None or seen is None:
            first.append(jnp.asarray(of_cells)[cell])
        else:
            first.append(jnp.asarray(seen)[cell, jnp.argmax(jnp.abs(slope[cell]))])
    rows, columns = (jnp.asarray(e)[i] for e, i in zip(vectors.elements, first, strict=True))
    slope_of_cell = jax.grad(lambda x: predict(x)[cell])

    def product(place: Array) -> Array:
        found: Array = jax.jvp(slope_of_cell, (vectors.zeros,), (vectors.zeros.at[place].set(1.0),))[1]
        return found[rows]

    at_zero = slope_of_cell(vectors.zeros)
    u, v = vectors.split(others)
    nothing = jnp.zeros_like(u), jnp.zeros_like(v)
    points = jnp.stack([vectors.join(*pair) for pair in ((u, v), (u, nothing[1]), (nothing[0], v), nothing)])
    return _Look(
        slopes,
        (cell, first[0], first[1]),
        jax.lax.map(product, columns).T,
        (at_zero[rows], at_zero[columns]),
        jax.lax.map(predict, points),
    )


def _look(of: LaidOut) -> Callable[..., tuple[_Look, dict[str, Array]]]:
    names = [n for side in of.reading.sides for n in side]

    def look_at(
        env: dict[int, Any], probe: Probe, others: Array, cells: tuple[Any, Any, Any]
    ) -> tuple[_Look, dict[str, Array]]:
        rows, of_cells, places = cells
        vectors = of.vectors._replace(of_cells=of_cells)
        look = _look_at_cells(of.reading.predictor_fn(env, rows), vectors, places, probe, others)
        return look, _like_first({n: of.reading.prior_at(n, env) for n in names})

    return quick_jit(look_at, is_lean=True)


def _check_finite(look: _Look, names: Sequence[Sequence[str]]) -> None:
    for slopes, coupled in zip(look.slopes, names, strict=True):
        bad = np.zeros(0, bool) if slopes is None else ~np.isfinite(slopes).all(axis=1)
        if bad.any():
            raise ModelStructureError(
                f"the weights with which cells see vectors of {list(coupled)} are not finite in {int(bad.sum())} "
                f"cells; the first is cell {int(np.argmax(bad))}. Check them for NaN and infinity, or mask these.",
                site=coupled[0],
            )


def _combine(
    look: _Look, vectors: Vectors, places: Sequence[np.ndarray | None], probe: Probe, others: Array, names: Any
) -> tuple[Incidence | None, Incidence | None]:
    """The combinations that cells see.

    :param look: from :func:`_look_at_cells`, whose other arguments are those of it.
    :param names: of the sites of rows and columns.
    """
    found: list[Incidence | None] = [None, None]
    sizes = [0 if seen is None else seen.shape[1] for seen in places]
    # Of two sides the one of which cells touch fewer vectors has weights in proportion to each other alone.
    order = sorted((s for s in (0, 1) if sizes[s]), key=lambda side: sizes[side])
    for side in order:
        slopes, seen = np.asarray(look.slopes[side]), places[side]
        assert seen is not None
        if len(order) > 1 and side == order[0]:
            unit: Any = slopes[np.arange(len(slopes)), np.argmax(slopes != 0.0, axis=1)]
        else:
            partner = _seen(1 - side, vectors.split(probe.unknowns), vectors, found)
            products = np.asarray(look.products if side == 1 else look.products.T)
            unit = (partner @ products + np.asarray(look.linear[side])) @ np.asarray(probe.tests[side])
        weight = slopes / np.where(unit == 0.0, 1.0, unit)[:, None]
        found[side] = _distinct(seen, _rounded(weight))
    _check(look, vectors, found, others, names)
    return found[0], found[1]


def _seen(side: int, values: Sequence[Array], vectors: Vectors, found: Sequence[Incidence | None]) -> np.ndarray:
    """Values that each cell sees of a side, shape ``(num_cells, size)``."""
    x, incidence = np.asarray(values[side]), found[side]
    if incidence is None:
        return np.asarray(x[vectors.of_cells[side]])
    return np.einsum("ek,ekj->ej", incidence.weight, x[incidence.places])[incidence.of_cells]


def _rounded(weight: np.ndarray) -> np.ndarray:
    """Weights without the rounding of the derivatives that they are made of, where they are whole numbers."""
    tol = 1e-9 if weight.dtype == np.float64 else 1e-4
    return np.where(np.abs(weight - np.rint(weight)) < tol, np.rint(weight), weight)


def _distinct(seen: np.ndarray, weight: np.ndarray) -> Incidence:
    is_used = (seen >= 0) & (weight != 0.0)
    index, weight = np.where(is_used, seen, 0), np.where(is_used, weight, 0.0)
    both = np.concatenate([index.astype(weight.dtype), weight], axis=1)
    rows, of_cells = np.unique(both, axis=0, return_inverse=True)
    width = seen.shape[1]
    return Incidence(rows[:, :width].astype(int), rows[:, width:], of_cells.reshape(-1))


def _check(
    look: _Look, vectors: Vectors, found: Sequence[Incidence | None], others: Array, names: Sequence[Sequence[str]]
) -> None:
    values = vectors.split(others)
    seen = [_seen(side, values, vectors, found) for side in (0, 1)]
    both, rows_alone, columns_alone, nothing = look.values
    tests = [(np.sum(seen[0] @ look.products * seen[1], -1), both - rows_alone - columns_alone + nothing)]
    for side, alone in enumerate((rows_alone, columns_alone)):
        if found[side] is not None:
            tests.append((seen[side] @ look.linear[side], alone - nothing))
    tol = 1e-7 if both.dtype == np.float64 else 1e-3
    for expected, exact in tests:
        error = np.abs(expected - exact)
        if np.any(error > tol * (1.0 + np.abs(both).max())):
            cell = int(np.argmax(error))
            coupled = [list(n) for n, incidence in zip(names, found, strict=True) if incidence is not None]
            raise ModelStructureError(
                f"cell {cell} does not see one combination of the vectors of {coupled[0]}, with weights that are the "
                "same for all components and all values of the hyperparameters. covariance='component' needs that, as "
                "in w[u] @ (h[a] - h[b]); take 'full' or 'diagonal' for this side, which then is one vector.",
                site=coupled[0][0],
            )


class Roots(NamedTuple):
    """Covariances of the components of a side."""

    sources: tuple[tuple[str, int] | None, ...]
    """Site and number of the block of its prior; ``None`` where vectors are independent."""
    group: np.ndarray
    """Number of each component's covariance, shape ``(size,)``."""


def _like_first(priors: Mapping[str, object]) -> dict[str, Array]:
    """For each site with correlated unknowns which of its blocks are like the first."""

    def is_like_first(blocks: Array) -> Array:
        return jnp.all(blocks == blocks[:1], axis=(1, 2))

    return {
        name: is_like_first(jax.tree.leaves(prior)[0])
        for name, prior in priors.items()
        if not isinstance(prior, DiagonalPrior)
    }


def find_roots(reading: SidesRead, like_first: Mapping[str, np.ndarray]) -> tuple[Roots | None, Roots | None]:
    """Find the covariances of the components of coupled sides.

    :param reading: whose sides and vectors are known.
    :param like_first: from :func:`find_incidence`.
    :raises ModelStructureError: if the prior of a site is not independent by component.
    """
    rows, columns = (_roots_of(reading, side, like_first) if reading.is_coupled[side] else None for side in range(2))
    return rows, columns


def _roots_of(reading: SidesRead, side: int, like_first: Mapping[str, np.ndarray]) -> Roots:
    elements, names = reading.elements[side], reading.sides[side]
    starts = {n: reading.site_start(n) for n in names}
    sources: list[tuple[str, int] | None] = []
    group = []
    for places in elements.T:
        name = max((n for n in starts if starts[n] <= places.min()), key=lambda n: starts[n])
        source = None
        if name in like_first:
            block, place = np.divmod(places - starts[name], reading.site_shapes[name][-1])
            if np.any(block != block[0]) or not np.array_equal(place, np.arange(len(elements))):
                raise ModelStructureError(
                    f"the prior of site '{name}' correlates components: covariance='component' needs a Gaussian "
                    "process across the vectors for each component, as in MultivariateNormal(0, kernel) under a plate "
                    "of components. Take 'full' for this side, or multiply independent components by the root of "
                    "their covariance.",
                    site=name,
                )
            number = int(block[0]) % len(like_first[name])
            source = (name, 0 if like_first[name][number] else number)
        if source not in sources:
            sources.append(source)
        group.append(sources.index(source))
    return Roots(tuple(sources), np.array(group))
