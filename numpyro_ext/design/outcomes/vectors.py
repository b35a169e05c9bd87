"""Information of cells of a bilinear model about some of its vectors, the others being a nuisance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ...infer.bilinear.algorithms.cells import Block, conditional_moments, draw_block
from ...infer.bilinear.algorithms.incidence import touched
from ...infer.bilinear.marginals.places import site_places
from ...infer.bilinear.runs.run import BilinearRun
from ...linalg.cholesky import cholesky
from ...linalg.short_axes import as_matrices
from ...potentials import Potential
from ...potentials.information import EntropyMethod, predictive_entropy
from ...potentials.outcomes import log_predictive_probabilities, num_outcomes
from . import committee
from .committee import BiasCorrection
from .focus import Focus, elements_in_focus, named_sites
from .outlooks import LARGEST_TABLE, DrawnOutlook, Outlook, RealOutlook

Points = Literal["draws", "sigma-points", "mode"]
"""Values of the vectors in focus that stand for their posterior."""


@dataclass(kw_only=True)
class VectorOutlook(Outlook):
    """Levels of cells, and what each tells of a vector.

    :param log_p: log predictive probabilities of the levels, shape ``(observations, levels)``.
    :param gain: function that computes the information in each observation, in nats.
    :param frequencies: how often each level was seen in places like that of each observation, of the shape of
        ``log_p``; ``None`` where that is not known.
    """

    log_p: Array
    gain: Callable[[], Array]
    frequencies: np.ndarray | None = None

    def _log_mixture(self) -> Array:
        return self.log_p

    def information(self, method: EntropyMethod, bias_correction: BiasCorrection) -> Array:
        if bias_correction != "none":
            raise ValueError(f"Corrections of the bias need draws of all of {self.name!r}, which are not kept.")
        return self.gain()

    def members(self, num_members: int, rng_key: Array) -> tuple[Array, Array | None]:
        raise ValueError(f"A score by votes needs draws of all of {self.name!r}, which are not kept.")

    def part(self, chosen: np.ndarray) -> Self:
        at = chosen.reshape(-1)
        return dataclasses.replace(
            self,
            shape=chosen.shape,
            is_candidate=self.is_candidate.reshape(-1)[chosen],
            log_p=self.log_p[at],
            gain=lambda: self.gain()[at],
            frequencies=None if self.frequencies is None else self.frequencies[at],
        )


def sigma_points(block: Block) -> Array:
    r"""The :math:`2 D` points of equal weight that have mean and covariance of each vector, shape ``(2 D, num, D)``.

    Those of the unscented transform without its centre (Julier and Uhlmann 1997, with :math:`\kappa = 0`).

    :param Block block: of vectors, which are no points.
    """
    mean, covariance = block
    assert covariance is not None  # as whoever asks has checked
    size = mean.shape[1]
    root = as_matrices(jnp.sqrt(covariance)) if block.is_diagonal else cholesky(covariance)
    steps = jnp.sqrt(float(size)) * jnp.moveaxis(root, -1, 0)
    return jnp.concatenate([mean + steps, mean - steps])


def outlooks_on_vectors(
    run: BilinearRun,
    focus: Focus,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    rng_key: Array,
    *,
    points: Points = "draws",
) -> dict[str, Outlook]:
    """The observations of a bilinear model, by what the vectors of interest say of them (Houlsby et al. 2014).

    Given the vectors of one side the predictor of a cell is Gaussian, so that its other vector is integrated out by the
    rules of the factor, and the vectors of interest alone are drawn.

    :param BilinearRun run: of an engine.
    :param focus: vectors of one side, all their components; others are a nuisance.
    :param args: arguments of the model with the cells that are looked at; without, the masked ones of the fit.
    :param kwargs: keyword arguments of the model.
    :param rng_key: of the draws, as many as the run has of its sites.
    :param str points: draws of the vectors; :func:`sigma_points` in their place; or these for the predictive
        probabilities, and the mean for those given the vectors.
    :raises ValueError: if the focus is no part of one side that can be told from the rest.

    Cost: one quadrature per cell, outcome and draw.
    """
    side, chosen = _vectors_of(run, focus)
    is_fit = not args and not kwargs
    if is_fit:
        args, kwargs = run.reading.args, dict(run.reading.kwargs)
        if run.reading.uses_all_cells:
            return {}
    # What all cells see is a nuisance, too.
    nuisance: Literal["rows", "columns"] = "rows" if side else "columns"
    reading, form = run._read_cells(args, kwargs, is_held_out=is_fit, needs_observations=False, side_of_common=nuisance)
    rows, columns = run.cell_blocks(nuisance)
    seen = touched(rows, form.rows), touched(columns, form.columns)
    own, other = seen[side], seen[1 - side]
    if own.covariance is None:
        raise ValueError(
            f"focus is on {list(reading.sides[side])}, which this fit sets to points: nothing can be learned of them."
        )
    if points == "draws":
        values = jax.lax.map(lambda key: draw_block(own, key), random.split(rng_key, run.num_samples))
    else:
        values = sigma_points(own)
    weights = jnp.full(len(values), 1.0 / len(values), own.mean.dtype)
    inner = weights
    if points == "mode":
        values = jnp.concatenate([values, own.mean[None]])
        weights, inner = jnp.append(weights, 0.0), jnp.append(jnp.zeros_like(weights), 1.0)
    # vectors that are of no interest stay where they are, so that their cells tell nothing
    values = jnp.where(jnp.asarray(chosen)[:, None], values, own.mean) if chosen is not None else values
    mean, variance = jax.lax.map(lambda value: conditional_moments(form, nuisance, other, value), values)
    out: dict[str, Outlook] = {}
    start = 0
    for name, cells, shape in zip(reading.factor_names, reading.cells, reading.factor_shapes, strict=True):
        here, start = slice(start, start + cells.size), start + cells.size
        if cells.size:
            factors = jax.tree.map(lambda x, at=here: jnp.asarray(x)[at] if jnp.ndim(x) else x, form.potential)
            moments = mean[:, here], variance[:, here]
            out[name] = _outlook_of(name, tuple(shape), cells, factors, moments, (weights, inner), points)
    return out


def _outlook_of(
    name: str,
    shape: tuple[int, ...],
    cells: np.ndarray,
    factors: Potential,
    moments: tuple[Array, Array],
    weights: tuple[Array, Array],
    points: Points,
) -> Outlook:
    """The observations of one site.

    :param cells: flat indices of the observations that are looked at, shape ``(n,)``.
    :param factors: of these.
    :param moments: means and variances of their predictors at each value of the vectors, shape ``(values, n)``.
    :param weights: of the values, for predictive distributions and for those given the vectors.
    """
    (mean, variance), size = moments, int(np.prod(shape))
    is_candidate = np.isin(np.arange(size), cells).reshape(shape)
    common: dict[str, Any] = {"name": name, "shape": shape, "is_candidate": is_candidate}
    number = num_outcomes(factors, mean, variance, weights[0])
    if number is None:
        entropy = predictive_entropy(factors, mean, variance, weights[0])
        conditional = weights[1] @ predictive_entropy(factors, mean, variance)
        filled = [jnp.zeros(size, mean.dtype).at[cells].set(value) for value in (entropy, conditional)]
        return RealOutlook(**common, entropy=filled[0], conditional=filled[1])
    if len(mean) * size * number > LARGEST_TABLE:
        raise ValueError(
            f"{len(mean)} draws, {size} observations of {name!r} and {number} outcomes are too many at once: "
            "score the candidates in parts, or give the engine a smaller num_samples."
        )
    log_p = log_predictive_probabilities(factors, mean[None], variance[None], jnp.ones(1), number)
    sure = jnp.where(jnp.arange(number) == 0, 0.0, -jnp.inf).astype(mean.dtype)
    table = jnp.broadcast_to(sure, (len(mean), size, number)).at[:, cells].set(jnp.moveaxis(log_p, 0, -1))
    if points != "mode":
        return DrawnOutlook(**common, log_p=table)
    mixture = committee.mixture(table, weights[0])
    gain = committee.entropy(mixture) - committee.entropy(table[-1])
    return VectorOutlook(**common, log_p=mixture, gain=partial(jnp.asarray, gain))


def _vectors_of(run: BilinearRun, focus: Focus) -> tuple[int, np.ndarray | None]:
    """The side of which a focus names vectors, and which of them; ``None`` where all are."""
    named, reading = named_sites(run, focus), run.reading
    common = sorted(set(named) & set(reading.common_sites))
    if common:
        raise ValueError(
            f"focus names {common}, which all cells see, and has a rule for vectors of one side: name sites of "
            f"{list(reading.sides[0])} or of {list(reading.sides[1])}, or leave focus out."
        )
    points = sorted(set(named) & set(reading.hyper))
    if points:
        raise ValueError(
            f"focus names {points}, which this fit sets to a point: nothing can be learned of it. Name sites of "
            f"{list(reading.sides[0])} or of {list(reading.sides[1])}."
        )
    sides = [side for side, names in enumerate(reading.sides) if set(names) & set(named)]
    if len(sides) > 1:
        raise ValueError(
            f"focus names {list(named)}, vectors of both sides, which have no rule together: name those of one side "
            f"({list(reading.sides[0])} or {list(reading.sides[1])}), or leave focus out where all are of interest."
        )
    (side,) = sides
    num, size = reading.elements[side].shape
    count = np.zeros(num, int)
    for name in reading.sides[side]:
        if name in named:
            numbers = elements_in_focus(name, named[name], tuple(reading.site_shapes[name]))
            vector = site_places(reading, run.blocks, name, run.priors).vector
            np.add.at(count, np.asarray(vector)[np.unique(numbers)], 1)
    parted = np.flatnonzero((count > 0) & (count < size))
    if parted.size:
        raise ValueError(
            f"focus names a part of vector {parted[0]}, which {list(reading.sides[side])} make, and has a rule for "
            "whole vectors: name all of these sites, at the same vectors."
        )
    if reading.is_coupled[side] and not count.all():
        raise ValueError(
            f"{list(reading.sides[side])} are vectors that depend on each other: focus on all of them, as what one "
            "cell tells of some has no rule here."
        )
    return side, None if count.all() else count > 0
