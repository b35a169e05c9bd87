"""Names of directions: of those in which the model is the same, such as rotations of loadings, and of all others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpyro.distributions.transforms import IdentityTransform

from ....display import listed
from ...hyper.curvature import Curvature
from ...hyper.space import UnconstrainedSpace

# Cosine of the angle to the flat directions, which are those of differences of a gradient.
_ALIKE = 0.95
_MOST_COLUMNS = 12
_MOST_ELEMENTS = 6
"""Elements of a site that a message names."""


def names_of_directions(space: UnconstrainedSpace, directions: np.ndarray) -> str:
    """The hyperparameters that have a part in some directions, with their elements where these are few; what is no
    hyperparameter is the field."""
    squares = np.square(directions)
    shares = {name: np.max(np.sum(squares[:, part], axis=1), initial=0.0) for name, part in space.slices.items()}
    of_field = np.max(np.sum(squares[:, space.size :], axis=1), initial=0.0)
    least = min(0.1, 0.5 * max([of_field, *shares.values()]))
    named = [repr(name) + _few_elements(squares[:, space.slices[name]]) for name in shares if shares[name] > least]
    return ", ".join([*named, *(["the field"] if of_field > least else [])])


def _few_elements(squares: np.ndarray) -> str:
    """The elements of a site that have nearly all of its part in some directions, if they are few.

    :param squares: of the directions, shape ``(k, size)``.
    """
    parts = np.sum(squares, axis=0)
    order = np.argsort(-parts, kind="stable")
    number = int(np.searchsorted(np.cumsum(parts[order]), 0.99 * parts.sum())) + 1
    if number > min(_MOST_ELEMENTS, parts.size // 2):
        return ""
    return f" ({listed('element', sorted(order[:number]))})"


def why_no_errors(space: UnconstrainedSpace, values: np.ndarray, units: np.ndarray, curvature: Curvature) -> str:
    """Explain which standard errors are missing: by the name of a symmetry, else by sites.

    :param values: where the search ended, unconstrained, with the field behind the hyperparameters if it was searched.
    :param units: of the coordinates of the search.
    :param Curvature curvature: in these coordinates.
    """
    directions = np.concatenate([curvature.rising, curvature.flat])
    symmetries: list[str] = []
    moves = units * curvature.flat
    if not len(curvature.rising) and not np.any(moves[:, space.size :]):
        symmetries, directions = known_symmetries(space, values[: space.size], moves[:, : space.size])
    if symmetries and not len(directions):
        return (
            f"The log evidence knows nothing of {' and '.join(symmetries)}, under which the model is the same: "
            f"{_of_what(curvature)}. What does not depend on them is learned."
        )
    rest = f"({names_of_directions(space, directions)})" + "".join(f", nor along {each}" for each in symmetries)
    return f"The log evidence does not curve downwards in every direction {rest}: {_of_what(curvature)}."


def _of_what(curvature: Curvature) -> str:
    """The standard errors that there are not: all, or those of the sites that are named."""
    return "no standard errors of these" if curvature.has_error.any() else "no standard errors"


def known_symmetries(
    space: UnconstrainedSpace, values: np.ndarray, directions: np.ndarray
) -> tuple[list[str], np.ndarray]:
    """Names of the changes that moves along flat directions make to hyperparameters, where these have one.

    :param UnconstrainedSpace space: the hyperparameters.
    :param values: where the objective is flat, the unconstrained vector of shape ``(size,)``.
    :param directions: along which it is, of any length, shape ``(k, size)``.
    :return: the names, and orthonormal directions without those that are named, shape ``(l, size)``.
    """
    flat = _orthonormal(_unit(directions.T))
    found = []
    for name, tangents in _moves(space, values):
        own = _orthonormal(_unit(tangents))
        if own.shape[1] and flat.shape[1] and np.min(np.linalg.norm(flat.T @ own, axis=0)) > _ALIKE:
            found.append(name)
            flat = _orthonormal(flat - own @ (own.T @ flat), smallest=np.sqrt(1.0 - _ALIKE**2))
    return found, flat.T


def _moves(space: UnconstrainedSpace, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Names of families of moves, with their directions as columns."""
    for name in space.names:
        part, shape = space.slices[name], space.shapes[name]
        if not isinstance(space.sites[name].transform, IdentityTransform):
            continue
        if len(shape) == 2 and 2 <= shape[1] <= _MOST_COLUMNS:
            matrix = values[part].reshape(shape)
            turned = []
            for i, j in itertools.combinations(range(shape[1]), 2):
                turn = np.zeros(shape)
                turn[:, i], turn[:, j] = -matrix[:, j], matrix[:, i]
                turned.append(turn.reshape(-1))
            yield f"rotations of the columns of {name!r}", _placed(np.stack(turned, axis=1), part, space.size)
        if shape and part.stop - part.start > 1:
            ones = np.ones((part.stop - part.start, 1))
            yield f"a constant added to {name!r}", _placed(ones, part, space.size)


def _placed(columns: np.ndarray, part: slice, size: int) -> np.ndarray:
    whole = np.zeros((size, columns.shape[1]))
    whole[part] = columns
    return whole


def _orthonormal(columns: np.ndarray, smallest: float = 1e-8) -> np.ndarray:
    """A basis of what columns span, but for what is smaller than ``smallest``."""
    if not columns.size:
        return np.zeros((len(columns), 0))
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, sizes > smallest])


def _unit(columns: np.ndarray) -> np.ndarray:
    return np.asarray(columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300))
