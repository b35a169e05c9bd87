"""Names of dimensions and labels of the places along them, as ArviZ has them: ``coords`` and ``dims``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

Coords = Mapping[str, Sequence[Any]]
Dims = Mapping[str, Sequence[str]]
_Plates = Mapping[str, Sequence[tuple[str, int]]]


@dataclass(frozen=True)
class Labels:
    """Names of the places along the axes of sites.

    The dimensions of a site are those of ``dims``; without an entry there, the plates that it stands in, each along the
    axis of its size.

    >>> labels = Labels({"shop": ["north", "south"]}, plates={"effect": [("shop", 2)]})
    >>> [label for label, _ in labels.places("effect", (2, 2))]
    ['effect[north,0]', 'effect[north,1]', 'effect[south,0]', 'effect[south,1]']

    :param coords: labels of the places along a dimension, by its name.
    :param dims: names of the dimensions of a site, by its name.
    :param plates: names and sizes of the plates of a site, outermost axis first, by its name.
    """

    coords: Coords = field(default_factory=dict)
    dims: Dims = field(default_factory=dict)
    plates: _Plates = field(default_factory=dict)

    @classmethod
    def given(cls, coords: Coords | None, dims: Dims | None) -> Labels:
        """Labels as a person gives them: any sequences, such as columns of pandas.

        :raises TypeError: if one of them is no dictionary, or a name of a dimension no string.
        """
        for name, value in (("coords", coords), ("dims", dims)):
            if not isinstance(value or {}, Mapping):
                raise TypeError(f"{name} must be a dictionary, got {type(value).__name__}.")
        named = {site: [names] if isinstance(names, str) else list(names) for site, names in (dims or {}).items()}
        wrong = next((name for names in named.values() for name in names if not isinstance(name, str)), None)
        if wrong is not None:
            raise TypeError(f"dims names dimensions by strings, got {wrong!r}.")
        return cls({dim: [_plain(label) for label in labels] for dim, labels in (coords or {}).items()}, named)

    def updated(self, other: Labels) -> Labels:
        """These labels, and in the place of some of them others."""
        return Labels({**self.coords, **other.coords}, {**self.dims, **other.dims}, {**self.plates, **other.plates})

    def dims_of(self, name: str, shape: tuple[int, ...]) -> list[str | None]:
        """The name of the dimension along each axis of a site, ``None`` where it has none.

        :raises ValueError: if ``dims`` names more or fewer than the site has.
        """
        dims = self.dims.get(name)
        if dims is not None:
            if len(dims) != len(shape):
                raise ValueError(_wrong_dims(name, shape, dims))
            return list(dims)
        plates = self.plates.get(name, ())
        sizes = tuple(size for _, size in plates)
        names: list[str | None] = [plate for plate, _ in plates] if sizes == shape[: len(sizes)] else []
        return names + [None] * (len(shape) - len(names))

    def along(self, name: str, shape: tuple[int, ...]) -> list[Sequence[Any]]:
        """Labels along each axis of a site: numbers where none are known.

        :raises ValueError: if there are not as many dimensions or labels as the site has.
        """
        out: list[Sequence[Any]] = []
        for dim, size in zip(self.dims_of(name, shape), shape, strict=True):
            labels = range(size) if dim is None else self.coords.get(dim, range(size))
            if len(labels) != size:
                raise ValueError(_wrong_coords(str(dim), labels, name, size))
            out.append(labels)
        return out

    def places(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Label and index of each element of a site, in C order.

        :raises ValueError: as :meth:`along`.
        """
        axes = self.along(name, shape)
        for labels, index in zip(product(*axes), np.ndindex(shape), strict=True):
            yield _joined(name, labels), index

    def label(self, name: str, shape: tuple[int, ...], place: int) -> str:
        """Label of one element of a site, by its number in C order."""
        index = np.unravel_index(place, shape) if shape else ()
        names = [labels[int(i)] for labels, i in zip(self.along(name, shape), index, strict=True)]
        return _joined(name, names)

    def of_arviz(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """``coords`` and ``dims`` for ArviZ; none where nothing was named, as it then looks for plates itself.

        :param shapes: of the sites.
        """
        if not (self.coords or self.dims):
            return {}
        dims = {name: self.dims_of(name, shape) for name, shape in shapes.items()}
        named = {
            name: [dim or f"{name}_dim_{axis}" for axis, dim in enumerate(found)]
            for name, found in dims.items()
            if any(found)
        }
        used = {dim for found in named.values() for dim in found}
        return {"coords": {dim: list(labels) for dim, labels in self.coords.items() if dim in used}, "dims": named}

    def fitting(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Labels, list[str]]:
        """The labels that fit the sites of a model, and what is to be said of the others.

        :param shapes: of the sites.
        """
        messages, dims, coords = [], dict(self.dims), dict(self.coords)
        for name, names in self.dims.items():
            if name not in shapes:
                messages.append(f"dims names {name!r}, and the model has no site of this name.")
                del dims[name]
            elif len(names) != len(shapes[name]):
                messages.append(_wrong_dims(name, shapes[name], names))
                del dims[name]
        kept = Labels(coords, dims, self.plates)
        for name, shape in shapes.items():
            for dim, size in zip(kept.dims_of(name, shape), shape, strict=True):
                if dim in coords and len(coords[dim]) != size:
                    messages.append(_wrong_coords(dim, coords.pop(dim), name, size))
        known = {dim for name, shape in shapes.items() for dim in kept.dims_of(name, shape)}
        for dim in [dim for dim in coords if dim not in known]:
            messages.append(f"coords has labels of {dim!r}, and no site has this dimension: name it in dims.")
            del coords[dim]
        return kept, messages


def _joined(name: str, labels: Sequence[object]) -> str:
    return f"{name}[{','.join(map(str, labels))}]" if labels else name


def _wrong_dims(name: str, shape: tuple[int, ...], dims: Sequence[str]) -> str:
    return f"Site {name!r} has the shape {shape}, and dims gives it {len(dims)} dimensions: {list(dims)}."


def _wrong_coords(dim: str, labels: Sequence[object], name: str, size: int) -> str:
    return f"coords has {len(labels)} labels of {dim!r}; site {name!r} has {size} places along it."


def _plain(label: object) -> int | float | str:
    """A label that files can hold."""
    label = label.item() if isinstance(label, np.integer | np.floating | np.bool_ | np.str_) else label
    return label if isinstance(label, int | float | str) else str(label)


def labels_of_call(
    model: Callable[..., object], kwargs: dict[str, object], coords: Any, dims: Any
) -> tuple[dict[str, Any], Labels]:
    """Keyword arguments of the model, and the labels of a run.

    A model that has an argument of the name ``coords`` or ``dims`` gets it.

    :param kwargs: keyword arguments of the model so far.
    """
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        parameters = inspect.signature(lambda: None).parameters
    own = {"coords": coords, "dims": dims}
    taken = {name: value for name, value in own.items() if value is not None and name in parameters}
    labels = Labels.given(*(None if name in taken else value for name, value in own.items()))
    return {**kwargs, **taken}, labels
