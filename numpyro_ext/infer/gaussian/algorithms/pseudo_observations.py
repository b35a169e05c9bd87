"""Priors written as observations of zero: whether their power lets the evidence grow without limit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....linalg.gaussian.design import DenseDesign, OperatorRows, StateSpaceDesign
from ....structure import LatentGaussianReading
from ...hyper.space import UnconstrainedSpace

_LARGEST_MATRIX = 1 << 20


def explain_powers(
    reading: LatentGaussianReading, space: UnconstrainedSpace, largest_matrix: int = _LARGEST_MATRIX
) -> list[str]:
    r"""Explain models whose learned scales multiply more densities than there are directions.

    A prior such as :math:`\prod_k e^{-|(B u)_k| / \sigma}` is often written as ``K`` observations of zero. The field
    can meet all of them, so that their integral over it is of the order :math:`\sigma^r`, with the rank ``r`` of ``B``,
    while their densities bring :math:`\sigma^{-K}`. With more of them than directions (differences along the rows and
    the columns of an image, edges of a graph) the evidence grows like :math:`\sigma^{-(K - r)}` as the scale goes to
    zero, whatever the data, unless the model has a factor with the missing power.

    :param reading: of a latent Gaussian model.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param int largest_matrix: numbers of a design up to which its rank is computed; of others it is bounded.
    :return: a message for each such site.
    """
    messages = []
    for name, behind in reading.equal_observations().items():
        learned = [n for n in behind if n in space.names]
        if not learned:
            continue
        start = space.initial()
        build = jax.jit(lambda values: reading.form(space.unpack(values), reading.data))
        index = reading.factor_names.index(name)
        form = build(start)
        observed = np.asarray(form.observed[index])
        num = int(observed.sum())
        rank = _rank_if_met(form, index, observed, largest_matrix)
        if rank is None or rank >= num:
            continue
        # The power that the model itself corrects, from two values of the scale.
        ends = [build(start.at[space.slices[learned[0]]].add(shift)) for shift in (-0.5, 0.5)]
        logs = [float(jnp.mean(jnp.log(end.potentials[index].scale))) for end in ends]
        constants = [float(end.log_constant) for end in ends]
        corrected = (constants[1] - constants[0]) / (logs[1] - logs[0]) if logs[1] != logs[0] else 0.0
        if num - rank - corrected < 0.5:
            continue
        messages.append(
            f"The {num} equal observations of {name!r} can all be met and have the rank {rank}: as their scale goes to "
            f"zero the evidence grows like its power -{num - rank - corrected:.4g}, whatever the data, so that "
            f"{learned[0]!r} says nothing of these. If they stand for a prior, give it the power of its normaliser, "
            f"numpyro.factor('normaliser', {num - rank - corrected:.4g} * jnp.log(scale)), or write that prior itself, "
            "for differences of neighbours GaussianMarkovRandomField(graph_precision(pairs, num_nodes)"
            f".precision.scale_by(1 / scale**2), ...); or give {learned[0]!r} (hyper_values)."
        )
    return messages


def _rank_if_met(form: Any, index: int, observed: np.ndarray, largest_matrix: int) -> int | None:
    """The rank of the rows of one site, at most; ``None`` if the unknowns cannot meet its observations."""
    potential = form.potentials[index]
    centre = getattr(potential, "location", None)
    centre = potential.observation if centre is None else centre
    start = sum(mask.shape[0] for mask in form.observed[:index])
    rows = start + np.flatnonzero(observed)
    centre = np.broadcast_to(np.asarray(centre), observed.shape)[observed]
    missing = centre - np.asarray(form.offset)[rows]
    if rows.size * form.num_columns <= largest_matrix:
        matrix = np.asarray(form.design.to_dense())[rows]
        solution, _, rank, _ = np.linalg.lstsq(matrix, missing)
        error = float(np.abs(matrix @ solution - missing).max())
        return int(rank) if error <= 1e3 * np.finfo(missing.dtype).eps * np.abs(missing).max() else None
    if missing.any():
        return None
    if isinstance(form.design, DenseDesign):
        return min(int(rows.size), int(np.any(np.asarray(form.design.matrix)[rows] != 0.0, axis=0).sum()))
    if isinstance(form.design, StateSpaceDesign | OperatorRows):
        return int(min(rows.size, form.num_columns))
    columns, values = np.asarray(form.design.columns)[rows], np.asarray(form.design.values)[rows]
    return int(min(rows.size, np.unique(columns[values != 0.0]).size))
