"""Search for the sites that make the two blocks of a bilinear predictor, and for the vector of each element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import Conflict, ModelStructureError
from ...program.degrees import Degree, Degrees, classify
from ...program.dependence import dependence
from ...program.patterns import DenseDependence
from ...program.program import Atom, Program
from ...program.questions import Questions
from .places import Predictor, axis_of_vectors, places_along, same_places, union_of_places

_LARGEST_VECTOR = 500


class Layout(NamedTuple):
    """The vectors of one block."""

    names: tuple[str, ...]
    vector: np.ndarray
    """Vector that each observation touches, all observed sites one after another."""
    axes: dict[str, tuple[int, ...]]
    """Axes of each site along which vectors are counted; of the others, a vector holds everything."""
    places: np.ndarray | None = None
    """The vectors that each observation may touch, ``(observations, k)`` padded with ``-1``, if that are several or
    vectors depend on each other; then ``vector`` is empty."""


def elements_of(layout: Layout, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]) -> np.ndarray:
    """Unknowns of each vector, shape ``(num, size)``; the sites' unknowns begin at ``starts``."""
    return np.concatenate([starts[n] + _elements(shapes[n], layout.axes[n]) for n in layout.names], axis=1)


class _Grouping(NamedTuple):
    """Partition of one site into vectors."""

    axes: tuple[int, ...]
    """Axes along which vectors are counted; of the others, a vector holds everything."""
    num: int
    vector: np.ndarray
    """Per observation, ``-1`` where the site plays no part."""


def find_layouts(
    questions: Questions,
    field: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    coupled: Mapping[str, frozenset[int]],
    predictors: Sequence[Predictor],
    by_component: frozenset[str] = frozenset(),
) -> tuple[Layout, Layout]:
    """Two-colour the products between sites, and cut both blocks into vectors so that a cell touches one of each.

    :param questions: the model and its data.
    :param field: for each site its input of the program.
    :param shapes: of the sites.
    :param coupled: for each site the axes along which its prior is correlated.
    :param predictors: where the predictors are.
    :param by_component: sites of blocks whose vectors may depend on each other; cells may touch several of them.
    :return: layouts of the rows (the block with the first site of the model) and of the columns.
    :raises Conflict: naming sites that must leave the field.
    :raises ModelStructureError: for products that are not of two blocks.
    """
    products = _find_products(questions, field, predictors)
    if not products:
        raise ModelStructureError(
            f"the predictor is affine in all of {sorted(field)} jointly: there is no product of two Gaussian blocks. "
            "Use VariationalGaussian, EP or LaplaceApproximation, which are made for such models."
        )
    groupings = {n: _group(questions, field[n], shapes[n], coupled[n], predictors) for n in field}
    sides = _two_colour(field, products, predictors, groupings)
    layouts: list[tuple[list[str], _Grouping, bool]] = []
    coupled_layouts: dict[int, Layout] = {}
    for side, names in enumerate(sides):
        merged = _merge([groupings[n] for n in names])
        is_one = merged is None
        # an axis of length one, as that of a single component, cuts nothing
        if by_component & set(names) and (merged is None or merged.num == 1):
            linear = [n for n in field if not any(n in members for members in sides)]
            linear = [n for n in linear if not _joins(groupings[n], [groupings[x] for x in sides[1 - side]])]
            found = _coupled_layout(questions, field, shapes, coupled, predictors, names, linear)
            coupled_layouts[side] = found
            layouts.append((list(found.names), groupings[names[0]], True))
            continue
        if merged is None:
            size = sum(int(np.prod(shapes[n])) for n in names)
            if size > _LARGEST_VECTOR:
                raise ModelStructureError(
                    f"observations touch several elements of {sorted(names)} in ways that do not fall into independent "
                    f"vectors, and as one vector they have {size} elements. Index all of them by the same rows (or the "
                    "same columns), with independent priors between these; or, if each component enters with the same "
                    f"weights, as in w[u] @ (h[a] - h[b]), take covariance={{{sorted(names)[0]!r}: 'component'}}."
                )
            merged = _Grouping((), 1, np.zeros_like(groupings[names[0]].vector))
        layouts.append((list(names), merged, is_one))
    for name in field:
        if any(name in names for names, _, _ in layouts):
            continue
        for names, merged, is_one in layouts:
            if not is_one and _merge([merged, groupings[name]]) is not None:
                names.append(name)
                break
        else:
            raise Conflict(f"site '{name}' enters linearly and belongs to neither block.", frozenset([name]))
    out = []
    for side, (members, merged, is_one) in enumerate(layouts):
        if side in coupled_layouts:
            out.append(coupled_layouts[side])
            continue
        chosen = tuple(n for n in field if n in members)
        axes = {n: () if is_one else groupings[n].axes for n in chosen}
        index = merged.vector if is_one else _merged_index([groupings[n] for n in chosen])
        out.append(Layout(chosen, np.maximum(index, 0), axes))
    return out[0], out[1]


def same_layout(
    questions: Questions,
    field: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    predictors: Sequence[Predictor],
    known: Layout,
) -> Layout:
    """The layout of other observations, with vectors cut as in a known one.

    :raises ModelStructureError: if an observation touches several vectors.
    """
    if known.places is not None:
        seen = [places_along(questions, field[n], shapes[n], known.axes[n][0], predictors) for n in known.names]
        return known._replace(places=union_of_places(seen))
    groupings = []
    for name in known.names:
        index = _seen(questions, field[name], np.zeros(shapes[name], int), predictors)
        for axis in known.axes[name]:
            length = shapes[name][axis]
            places = np.broadcast_to(
                np.arange(length).reshape(-1, *(1,) * (len(shapes[name]) - axis - 1)), shapes[name]
            )
            found = _seen(questions, field[name], places, predictors)
            index = None if found is None or index is None else np.where(found < 0, -1, index * length + found)
        if index is None:
            raise ModelStructureError(
                f"on these arguments an observation touches several vectors of site '{name}'.", site=name
            )
        groupings.append(_Grouping(known.axes[name], int(np.prod([shapes[name][a] for a in known.axes[name]])), index))
    merged = _merge(groupings)
    if merged is None:
        raise ModelStructureError(f"on these arguments {list(known.names)} are not indexed alike.")
    return Layout(known.names, np.maximum(merged.vector, 0), known.axes)


def _coupled_layout(
    questions: Questions,
    field: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    coupled: Mapping[str, frozenset[int]],
    predictors: Sequence[Predictor],
    names: Sequence[str],
    linear: Sequence[str],
) -> Layout:
    """The vectors of a block that depend on each other, or of which observations touch several.

    :param names: sites of the block.
    :param linear: sites that enter linearly, of which those join that are seen at the same places.
    """
    chosen = {n: axis_of_vectors(questions, field[n], shapes[n], coupled[n], predictors) for n in names}
    lengths = {n: shapes[n][axis] for n, (axis, _) in chosen.items()}
    if len(set(lengths.values())) > 1:
        raise ModelStructureError(
            f"covariance='component' needs as many vectors of every site of a side, and finds {lengths}. Take 'full' "
            "or 'diagonal' for this side, or make hyperparameters of some (field=[...])."
        )
    places = union_of_places([found for _, found in chosen.values()])
    for name in linear:
        for axis, length in enumerate(shapes[name]):
            found = places_along(questions, field[name], shapes[name], axis, predictors)
            if length == lengths[names[0]] and same_places(found, places):
                chosen[name] = axis, found
                break
    members = tuple(n for n in field if n in chosen)
    return Layout(members, np.zeros(0, int), {n: (chosen[n][0],) for n in members}, places)


def _find_products(
    questions: Questions, field: Mapping[str, int], predictors: Sequence[Predictor]
) -> list[tuple[str, str]]:
    """Pairs of sites in which the predictor is not jointly affine, although it is in each."""

    program = questions.program

    def is_affine(*names: str) -> bool:
        degrees = classify(program, {n: field[n] for n in names})
        return all(degrees.of(p.atom) != Degree.NONLINEAR for p in predictors)

    for name in field:
        if not is_affine(name):
            degrees = classify(program, {name: field[name]})
            if any(self_product(program, degrees, p.atom) for p in predictors):
                raise ModelStructureError(shared_block(name))
            raise Conflict(f"the predictor is not affine in site '{name}'.", frozenset([name]))
    names = list(field)
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if not is_affine(a, b)]


def shared_block(name: str) -> str:
    """Explain why a site must not be multiplied with itself."""
    return (
        f"site '{name}' is multiplied with itself (as in w[rows] * w[cols]): both factors of a product must be "
        "different sites, because the bound needs them to be independent. Give the second factor a site of its own, or "
        "use NUTS."
    )


def self_product(program: Program, degrees: Degrees, atom: Atom) -> bool:
    """True if a product of two affine values (of the one site classified) stands on the way to ``atom``."""
    for index in program.needed([atom], ()):
        eqn = program.equations[index]
        factors = [a for a in eqn.inputs if degrees.of(a) == Degree.AFFINE]
        is_square = eqn.primitive.name in ("integer_pow", "square") and factors
        if is_square or (eqn.primitive.name in ("mul", "dot_general") and len(factors) > 1):
            return True
    return False


def _two_colour(
    field: Mapping[str, int],
    products: Sequence[tuple[str, str]],
    predictors: Sequence[Predictor],
    groupings: Mapping[str, _Grouping],
) -> tuple[list[str], list[str]]:
    neighbours: dict[str, set[str]] = {}
    for a, b in products:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    colour: dict[str, int] = {}
    components: list[tuple[list[str], list[str]]] = []
    for first in (n for n in field if n in neighbours):
        if first in colour:
            continue
        colour[first], stack = 0, [first]
        component: tuple[list[str], list[str]] = ([first], [])
        while stack:
            name = stack.pop()
            for other in sorted(neighbours[name]):
                if other not in colour:
                    colour[other] = 1 - colour[name]
                    component[colour[other]].append(other)
                    stack.append(other)
                elif colour[other] == colour[name]:
                    third = sorted(neighbours[name] & neighbours[other])
                    names = [n for n in field if n in {name, other, *third[:1]}]
                    raise ModelStructureError(
                        f"the predictor of site '{predictors[0].name}' has products of {', '.join(map(repr, names))}, "
                        "each with each other: it is not bilinear in two blocks. Hold one of them "
                        f"(field={names[:2]} makes a hyperparameter of the other, to be learned or given in "
                        "hyper_values), or use NUTS.",
                        site=predictors[0].name,
                    )
        components.append(component)
    sides = components[0]
    for component in components[1:]:
        for order in (component, component[::-1]):
            if all(_merge([groupings[n] for n in [*x, *y]]) is not None for x, y in zip(sides, order, strict=True)):
                sides[0].extend(order[0])
                sides[1].extend(order[1])
                break
        else:
            names = [n for c in (sides, component) for side in c for n in side]
            raise ModelStructureError(
                f"the products of {names} do not share their rows and columns, so that their vectors cannot be put "
                "together. Index all of them alike, or make hyperparameters of some (field=[...])."
            )
    return sides


def _group(
    questions: Questions, number: int, shape: tuple[int, ...], coupled: frozenset[int], predictors: Sequence[Predictor]
) -> _Grouping:
    """The axes of a site of which every observation sees one place."""
    seen: dict[int, np.ndarray] = {}
    for axis, length in enumerate(shape):
        if axis not in coupled:
            places = np.broadcast_to(np.arange(length).reshape(-1, *(1,) * (len(shape) - axis - 1)), shape)
            found = _seen(questions, number, places, predictors)
            if found is not None:
                seen[axis] = found
    # An axis of which only one place is used, as in z[cols, 1], counts no vectors, unless there is no other axis.
    varying = [axis for axis, found in seen.items() if shape[axis] == 1 or np.unique(found[found >= 0]).size > 1]
    axes = tuple(varying or seen)
    index = _seen(questions, number, np.zeros(shape, int), predictors)
    assert index is not None
    for axis in axes:
        index = np.where(seen[axis] < 0, -1, index * shape[axis] + seen[axis])
    return _Grouping(axes, int(np.prod([shape[a] for a in axes])), index)


def _seen(questions: Questions, number: int, places: np.ndarray, predictors: Sequence[Predictor]) -> np.ndarray | None:
    """The one place that each observation depends on, or None if some depend on several."""
    seeds = {number: places.reshape(-1, 1).astype(np.int64)}
    found = dependence(questions, seeds, [p.atom for p in predictors])
    parts = []
    for predictor in predictors:
        pattern = found.get(predictor.atom)
        if pattern is None:
            parts.append(np.full(predictor.rows.size, -1))
            continue
        if isinstance(pattern, DenseDependence):
            if pattern.ids.size > 1:
                return None
            parts.append(np.full(predictor.rows.size, int(pattern.ids[0])))
            continue
        used = pattern.reshape(-1, pattern.shape[-1])[predictor.rows]
        if np.any((used >= 0).sum(-1) > 1):
            return None
        parts.append(used.max(-1))
    return np.concatenate(parts)


def _merge(groupings: Sequence[_Grouping]) -> _Grouping | None:
    """One grouping that all agree with, or None."""
    first = groupings[0]
    index = first.vector
    for other in groupings[1:]:
        both = (index >= 0) & (other.vector >= 0)
        if other.num != first.num or np.any(index[both] != other.vector[both]):
            return None
        index = np.maximum(index, other.vector)
    return _Grouping(first.axes, first.num, index)


def _joins(one: _Grouping, side: Sequence[_Grouping]) -> bool:
    """True if every observation sees one of several vectors of a site, that of the side which it sees."""
    return one.num > 1 and _merge([*side, one]) is not None


def _merged_index(groupings: Sequence[_Grouping]) -> np.ndarray:
    return np.max([g.vector for g in groupings], axis=0)


def _elements(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    num = int(np.prod([shape[a] for a in axes]))
    others = [a for a in range(len(shape)) if a not in axes]
    return np.transpose(flat, (*axes, *others)).reshape(num, -1)
