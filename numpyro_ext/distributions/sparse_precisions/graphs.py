"""Precisions of maps: neighbours, with weights of their edges."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.typing import ArrayLike
from scipy.sparse.csgraph import connected_components

from ...linalg.frozen_pytree import FixedArray, frozen_pytree
from ...linalg.saved_names import saved_as
from .checks import checked_count, checked_indices, checked_numbers, is_concrete
from .factors import Entries
from .precision import SparsePrecision, from_triangle, with_values

_MOST_LISTED = 12


def _listed(numbers: np.ndarray) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_LISTED].tolist()))
    return shown + (", ..." if numbers.size > _MOST_LISTED else "")


@saved_as("numpyro_ext.GraphPrecision")
@frozen_pytree
class GraphPrecision:
    """Graph with its intrinsic precision; made by :func:`graph_precision`."""

    precision: SparsePrecision
    """Degrees on the diagonal and minus the weights of edges beside it: ``x^T Q x`` is the weighted sum of squared
    differences of neighbours (the ICAR prior)."""
    scaled: SparsePrecision
    """The same, scaled for each connected part so that the geometric mean of its marginal variances, given that it adds
    up to zero, is one."""
    _labels: FixedArray = dataclasses.field(metadata={"static": True})

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.precision.size

    @property
    def labels(self) -> np.ndarray:
        """Number of the connected part of each node, shape ``(num_nodes,)``."""
        return self._labels.array

    @property
    def num_components(self) -> int:
        """Number of connected parts, islands included."""
        return int(self.labels.max()) + 1

    @property
    def is_island(self) -> np.ndarray:
        """True for nodes without neighbours, shape ``(num_nodes,)``; their rows of the precision are zero."""
        return np.bincount(self.labels)[self.labels] == 1

    @property
    def rank(self) -> int:
        """Rank of the precision: nodes less connected parts."""
        return self.num_nodes - self.num_components

    @property
    def null_space(self) -> np.ndarray:
        """Indicator of each connected part, shape ``(num_nodes, num_components)``; an island is a part of one node."""
        null_space = self.precision.null_space
        assert null_space is not None
        return null_space

    def describe(self) -> str:
        """Describe the connected parts, the islands by their numbers, and what ``sum_to_zero=True`` makes of them.

        >>> print(graph_precision([(0, 1), (1, 2), (4, 5)], num_nodes=7).describe())
        7 nodes, 3 pairs of neighbours, rank 3
        2 connected parts, of 3 and 2 nodes: with sum_to_zero=True the field adds up to zero over each
        2 islands without neighbours, nodes 3, 6: with sum_to_zero=True the field is zero there
        """
        sizes = np.bincount(self.labels)
        parts, islands = sizes[sizes > 1], np.flatnonzero(self.is_island)
        pairs = self.precision.indices.shape[0] - self.num_nodes
        lines = [f"{self.num_nodes} nodes, {pairs} pair{'s' * (pairs != 1)} of neighbours, rank {self.rank}"]
        if parts.size:
            known, last = _listed(parts[:-1]), _listed(parts[-1:])
            which = f"parts, of {known} and {last}" if known else f"part, of {last}"
            over = "over each" if known else "over it"
            zero = f"with sum_to_zero=True the field adds up to zero {over}"
            lines.append(f"{parts.size} connected {which} nodes: {zero}")
        if islands.size:
            many = "s" * (islands.size > 1)
            named = f"{islands.size} island{many} without neighbours, node{many} {_listed(islands)}"
            lines.append(f"{named}: with sum_to_zero=True the field is zero there")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"GraphPrecision({self.num_nodes} nodes, {self.num_components} connected parts, "
            f"{int(self.is_island.sum())} of them islands)"
        )


def graph_precision(
    neighbours: Any, weights: ArrayLike | None = None, *, num_nodes: int | None = None
) -> GraphPrecision:
    """Intrinsic (ICAR) precision of a graph, with its connected parts, islands, null space and scaling.

    The scaling makes one prior of the standard deviation mean the same on all graphs and in all their parts; it costs
    one sparse factorisation and its selected inverse. It is what BYM2 needs, as in the example; on islands the
    spatial part is zero.

    **Example:**

    .. doctest::

        >>> from numpyro_ext.distributions import graph_precision
        >>> graph = graph_precision([(0, 1), (1, 2), (3, 4)], num_nodes=6)
        >>> graph
        GraphPrecision(6 nodes, 3 connected parts, 1 of them islands)
        >>> print(graph.labels, graph.is_island.nonzero()[0], graph.rank)
        [0 0 0 1 1 2] [5] 3
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_ext.distributions import GaussianMarkovRandomField
        >>> def bym2(graph, counts=None):
        ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        ...     rho = numpyro.sample("rho", dist.Beta(0.5, 0.5))
        ...     field = GaussianMarkovRandomField(graph.scaled, null_space=graph.null_space, sum_to_zero=True)
        ...     spatial = numpyro.sample("spatial", field)
        ...     with numpyro.plate("areas", graph.num_nodes):
        ...         noise = numpyro.sample("noise", dist.Normal(0.0, 1.0))
        ...         r = jnp.where(graph.is_island, 0.0, rho)
        ...         f = sigma * (jnp.sqrt(r) * spatial + jnp.sqrt(1 - r) * noise)
        ...         numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    **References**

    1. Freni-Sterrantino, A., Ventrucci, M. and Rue, H. (2018), *A note on intrinsic conditional autoregressive models
       for disconnected graphs*, Spatial and Spatio-temporal Epidemiology 26.
    2. Riebler, A. et al. (2016), *An intuitive Bayesian spatial model for disease mapping that accounts for scaling*,
       Statistical Methods in Medical Research 25.

    :param neighbours: pairs of nodes, shape ``(edges, 2)``, each edge once or both ways; or a symmetric adjacency
        matrix, ``scipy.sparse`` of any format or a dense one, whose entries are the weights. A dense array of two
        columns is read as pairs.
    :param weights: positive weights of the pairs, shape ``(edges,)``; ``None`` for one.
    :param num_nodes: number of nodes. Required with pairs, where islands at the end do not show.
    :raises ValueError: if an index is no integer or out of range, a node is its own neighbour, the adjacency is not
        symmetric, or a weight is not positive.
    """
    name = "graph_precision"
    is_matrix = scipy.sparse.issparse(neighbours)
    if not is_matrix:
        shape = np.shape(neighbours)
        is_matrix = len(shape) == 2 and shape[0] == shape[1] and shape[1] != 2
    if is_matrix:
        if weights is not None:
            raise ValueError(f"{name}: the entries of an adjacency matrix are its weights; give no others.")
        pairs, numbers, size = _edges_of_matrix(neighbours, name)
        if num_nodes is not None and checked_count(num_nodes, "num_nodes", name) != size:
            raise ValueError(f"{name}: the adjacency matrix has {size} nodes; got num_nodes={num_nodes}.")
    else:
        if num_nodes is None:
            raise ValueError(
                f"{name}: with pairs of neighbours give num_nodes=, since nodes without neighbours do not show in them."
            )
        size = checked_count(num_nodes, "num_nodes", name)
        pairs = checked_indices(neighbours, size, name, "neighbours")
        numbers = np.ones(len(pairs)) if weights is None else checked_numbers(weights, name, "weights")
        if numbers.shape != (len(pairs),):
            raise ValueError(f"{name}: {len(pairs)} pairs need as many weights; got the shape {numbers.shape}.")
        pairs, numbers = _each_once(pairs, numbers, size, name)
    if np.any(numbers <= 0):
        k = int(np.argmax(numbers <= 0))
        raise ValueError(f"{name}: weights must be positive; the one of the pair {_pair(pairs[k])} is {numbers[k]}.")
    edges = scipy.sparse.coo_matrix((numbers, (pairs[:, 0], pairs[:, 1])), (size, size))
    count, labels = connected_components(edges, directed=False)
    null_space = (labels[:, None] == np.arange(count)).astype(float)
    precision = _intrinsic(size, pairs, numbers, null_space)
    factors = _typical_variances(precision, labels)
    scaled = _intrinsic(size, pairs, numbers * factors[labels[pairs[:, 0]]], null_space)
    return GraphPrecision(precision, scaled, FixedArray(labels))


def _intrinsic(size: int, pairs: np.ndarray, weights: np.ndarray, null_space: np.ndarray) -> SparsePrecision:
    """Degrees less weights, of pairs with the larger node in front."""
    nodes = np.arange(size)
    degrees = np.bincount(pairs[:, 0], weights, size) + np.bincount(pairs[:, 1], weights, size)
    rows, columns = np.concatenate([nodes, pairs[:, 0]]), np.concatenate([nodes, pairs[:, 1]])
    order = np.lexsort((columns, rows))
    values = np.concatenate([degrees, -weights])
    return from_triangle(size, rows[order], columns[order], values[order], null_space)


def _typical_variances(precision: SparsePrecision, labels: np.ndarray) -> np.ndarray:
    """Geometric mean of the marginal variances in each connected part, given its sum of zero; one for islands."""
    sizes = np.bincount(labels)
    if np.all(sizes == 1):
        return np.ones(len(sizes))
    assert precision.constants is not None
    entries = Entries(precision.size, precision.rows, precision.columns, precision.directions, precision.directions)
    factor, _ = entries.host_factor(precision.constants.array)
    inverse = factor.selected_inverse()[precision.rows.array == precision.columns.array]
    # one solve for all parts: the inverse couples no two of them
    unit = 1.0 / np.sqrt(sizes)[labels]
    solved = factor.solve(unit[:, None])[:, 0]
    inner = np.bincount(labels, unit * solved)[labels]
    variances = inverse - 2.0 * unit * solved + unit**2 * inner
    is_island = sizes[labels] == 1
    logs = np.log(np.where(is_island, 1.0, variances))
    return np.exp(np.bincount(labels, logs) / sizes)


def leroux(graph: GraphPrecision, rho: ArrayLike) -> SparsePrecision:
    r"""Precision of Leroux's prior, :math:`\rho\, Q + (1 - \rho) I` with the intrinsic :math:`Q` of the graph.

    Positive definite for :math:`\rho < 1`, islands included.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import graph_precision, leroux
        >>> print(np.asarray(leroux(graph_precision([(0, 1)], num_nodes=3), 0.5).to_dense()))
        [[ 1.  -0.5  0. ]
         [-0.5  1.   0. ]
         [ 0.   0.   0.5]]

    Source: Leroux, B. G., Lei, X. and Breslow, N. (2000), *Estimation of disease rates in small areas*.

    :param graph: of :func:`graph_precision`.
    :param rho: a number in ``[0, 1)``, or several of a batch shape; may be traced.
    :raises ValueError: if ``rho`` is known and outside of this range.
    """
    _check_range(rho, 0.0, 1.0, "leroux", "rho")
    rho = rho if is_concrete(rho) else jnp.asarray(rho)
    precision = graph.precision
    assert precision.constants is not None
    is_diagonal = precision.rows.array == precision.columns.array
    return with_values(precision, _column(rho) * precision.constants.array + _column(1.0 - rho) * is_diagonal)


def car(graph: GraphPrecision, alpha: ArrayLike) -> SparsePrecision:
    r"""Precision of the proper conditional autoregression, :math:`D - \alpha W` with weights :math:`W` and degrees
    :math:`D`.

    It is that of :class:`numpyro.distributions.CAR` with ``conditional_precision`` one.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import car, graph_precision
        >>> print(np.asarray(car(graph_precision([(0, 1), (1, 2)], num_nodes=3), 0.9).to_dense()))
        [[ 1.  -0.9  0. ]
         [-0.9  2.  -0.9]
         [ 0.  -0.9  1. ]]

    :param graph: of :func:`graph_precision`, without islands.
    :param alpha: a number in ``(-1, 1)``, or several of a batch shape; may be traced.
    :raises ValueError: if ``alpha`` is known and outside of this range, or the graph has islands, which would have a
        precision of zero.
    """
    _check_range(alpha, -1.0, 1.0, "car", "alpha")
    if graph.is_island.any():
        islands = np.flatnonzero(graph.is_island)
        told = ", ".join(map(str, islands[:10])) + (", ..." if len(islands) > 10 else "")
        raise ValueError(
            f"car: the nodes {told} have no neighbours, so that their precision is zero. Take leroux, which gives them "
            "a variance, or leave them out of the graph and give them a site of their own."
        )
    alpha = alpha if is_concrete(alpha) else jnp.asarray(alpha)
    precision = graph.precision
    assert precision.constants is not None
    is_diagonal = precision.rows.array == precision.columns.array
    weights = np.where(is_diagonal, 0.0, precision.constants.array)
    degrees = np.where(is_diagonal, precision.constants.array, 0.0)
    return with_values(precision, degrees + _column(alpha) * weights)


def _column(value: Any) -> object:
    return np.asarray(value, float)[..., None] if is_concrete(value) else value[..., None]


def _check_range(value: ArrayLike, low: float, high: float, name: str, what: str) -> None:
    if not is_concrete(value):
        return
    number = np.asarray(value, float)
    is_inside = (number >= low) & (number < high) if low == 0.0 else (number > low) & (number < high)
    if not np.all(is_inside):
        interval = f"[{low:g}, {high:g})" if low == 0.0 else f"({low:g}, {high:g})"
        raise ValueError(
            f"{name}: {what} must be in {interval}, where the precision is positive definite; got "
            f"{np.ravel(number)[~np.ravel(is_inside)][0]}. The intrinsic prior at one is graph.precision with "
            "null_space=graph.null_space."
        )


def _edges_of_matrix(matrix: object, name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Edges, weights and number of nodes of a symmetric adjacency matrix."""
    if not is_concrete(matrix):
        raise ValueError(f"{name}: the adjacency matrix is traced; it must be known. Make the graph outside of jit.")
    found = scipy.sparse.coo_matrix(scipy.sparse.csr_matrix(matrix, dtype=float))
    if found.shape[0] != found.shape[1]:
        raise ValueError(f"{name}: an adjacency matrix must be square; got the shape {found.shape}.")
    found.eliminate_zeros()
    pairs = np.stack([found.row, found.col], axis=1).astype(np.int64)
    numbers = checked_numbers(found.data, name, "the adjacency matrix", pairs)
    _check_loops(pairs, name)
    rest = scipy.sparse.coo_matrix(abs(found - found.T))
    if rest.nnz and rest.data.max() > 0:
        k = np.lexsort((rest.col, rest.row, rest.data <= 0))[0]
        i, j = int(rest.row[k]), int(rest.col[k])
        rows = found.tocsr()
        raise ValueError(
            f"{name}: the adjacency matrix is not symmetric: entry ({i}, {j}) is {rows[i, j]:g} and ({j}, {i}) is "
            f"{rows[j, i]:g}. If neighbours are named one way only, give matrix + matrix.T."
        )
    is_lower = pairs[:, 0] > pairs[:, 1]
    return pairs[is_lower], numbers[is_lower], found.shape[0]


def _each_once(pairs: np.ndarray, numbers: np.ndarray, size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Edges that are listed once or both ways, each once.

    :raises ValueError: if one is listed with two weights.
    """
    _check_loops(pairs, name)
    ordered = np.sort(pairs, axis=1)[:, ::-1]
    keys, first, inverse = np.unique(ordered[:, 0] * size + ordered[:, 1], return_index=True, return_inverse=True)
    differs = numbers != numbers[first][inverse.reshape(-1)]
    if np.any(differs):
        k = int(np.argmax(differs))
        other = numbers[first][inverse.reshape(-1)][k]
        raise ValueError(f"{name}: the pair {_pair(pairs[k])} is listed with the weights {other:g} and {numbers[k]:g}.")
    return ordered[first].reshape(-1, 2), numbers[first]


def _check_loops(pairs: np.ndarray, name: str) -> None:
    loops = pairs[:, 0] == pairs[:, 1]
    if np.any(loops):
        node = int(pairs[np.argmax(loops), 0])
        raise ValueError(f"{name}: node {node} is listed as its own neighbour. Remove the pair ({node}, {node}).")


def _pair(pair: np.ndarray) -> tuple[int, int]:
    return int(pair[0]), int(pair[1])
