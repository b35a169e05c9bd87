"""Quadrature over the members of a large model, a part of them at a time.

The model is read on some of its members. Where the others differ from them in outcomes alone, the table of
their columns serves all, and what is kept of a member are its outcomes, a byte each, and its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.store import shared
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian import MoreBlocks
from ....structure.latent_gaussian.like_another import PartsDiffer, data_of_parts, reading_of_part
from ....structure.model.running.parts import MemberParts
from ...front.results import Diagnostics
from ...front.state import NO_ERRORS, EngineState, Fit
from ..algorithms.nodes.column_parts import PartColumns, PartScores, columns_of_parts, priors_of_parts, scores_of_parts
from ..algorithms.nodes.interpolated_priors import InterpolatedPriors
from ..algorithms.nodes.shared_columns import SharedColumns

_ALIKE, _ROUNDINGS = 1e-9, 100.0
"""Relative difference of numbers that are the same but for rounding, and units in the last place of these."""
_NUMBERS_OF_PROBES = (8, 32, 128)
"""Hyperparameters at which priors are compared: half of them may be needed for the sums, the others are a test."""


class Scores(NamedTuple):
    """Posteriors of all members at given hyperparameters."""

    log_evidence: float
    error: float
    """Error that the sum over nodes may have."""
    rounding: float
    """Rounding of the log evidence, which no finer rule mends."""
    moments: dict[str, tuple[np.ndarray, np.ndarray]]
    """Means and variances of affine sites, with the members on the first axis."""


class Priors(NamedTuple):
    """Priors of all members as sums of those of a few."""

    members: list[int]
    """These few."""
    weights: np.ndarray | None
    """Weights of their priors in those of each member, ``(members, r)``; nothing where all members have one prior."""


@dataclass(frozen=True, eq=False)
class Members:
    """The members of a model in parts, which share their columns.

    :param MemberParts parts: the calls of the model on them.
    :param LatentGaussianReading reading: of an example of these.
    :param SharedColumns algorithm: for it.
    :param init_values: of hyperparameters, as the reading has them.
    """

    parts: MemberParts
    reading: LatentGaussianReading
    algorithm: SharedColumns
    init_values: Mapping[str, object]

    def data(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """The first new member of each part, among its own, and the data of the part."""
        news, calls = zip(*self.parts.calls(), strict=True)
        yield from zip(news, data_of_parts(self.reading, calls, self.init_values), strict=True)

    def joined(
        self, of_part: Callable[[Sequence[Any]], Mapping[str, Any]], *, axis: int = 0, is_checked: bool = False
    ) -> dict[str, np.ndarray]:
        """Arrays of all members, from those of each part.

        :param of_part: of the data of a part, arrays with its members on an axis.
        :param bool is_checked: whether to see that what is found of a member is so in the company of others too.
        :raises PartsDiffer: where it is not.
        """
        pieces: dict[str, list[np.ndarray]] = {}
        for new, data in self.data():
            for name, values in of_part(data).items():
                pieces.setdefault(name, []).append(np.asarray(values)[(*(slice(None),) * axis, slice(new, None))])
        found = {name: np.concatenate(parts, axis=axis) for name, parts in pieces.items()}
        if is_checked:  # on some of each part, as one alone may be of another kind
            members, call = self.parts.mixed()
            mixed = of_part(next(data_of_parts(self.reading, [call], self.init_values)))
            for name, values in mixed.items():
                expected = np.take(found[name], members, axis=axis)
                if not np.allclose(values, expected, rtol=_alike(), atol=_alike(), equal_nan=True):
                    raise PartsDiffer
        return found

    def with_blocks(self, probes: Callable[[int], list[dict[str, Array]]]) -> tuple[LatentGaussianReading, Priors]:
        """A reading that knows the outcomes of all members, where they differ in these and in their priors alone.

        :param probes: so many hyperparameters that no model knows of.
        :return: the reading, of those members first of whose priors all others are sums, and these sums.
        :raises PartsDiffer: where members differ in more, or priors are no such sums.
        """
        has_one = self.reading.abstract_form.blocks.columns.shape[1] == 1
        program = shared(columns_of_parts, self.reading, replace(self.algorithm, has_gaps=True, has_shift=has_one))
        first: list[PartColumns] = []
        (hyper,) = probes(1)

        def of_part(data: Sequence[Any]) -> dict[str, Any]:
            found = program(data, hyper)
            first.extend([found] * (not first))
            if not _are_alike(first[0], found):
                raise PartsDiffer
            return {str(place): leaf for place, leaf in enumerate(jax.tree.leaves(found.blocks))}

        found = self.joined(of_part, is_checked=True)
        structure = jax.tree.structure(first[0].blocks)
        leaves = [found[str(place)] for place in range(len(found))]
        blocks: MoreBlocks = jax.tree.unflatten(structure, leaves)
        assert blocks.observed is not None  # as gaps were asked for
        observed = None if all(mask.all() for mask in blocks.observed) else blocks.observed
        priors = self._priors(probes) if has_one else Priors([0], None)
        reading = self.reading
        if priors.weights is not None:
            others = np.arange(self.parts.size - len(priors.members))
            call = self.parts.call_on(np.concatenate([priors.members, others]))
            reading = reading_of_part(reading, call, self.init_values)
        weights = None if priors.weights is None else jnp.asarray(priors.weights)
        kinds = jax.tree.map(jnp.asarray, MoreBlocks(blocks.labels, observed, weights))
        return reading.with_kinds(kinds), priors

    def _priors(self, probes: Callable[[int], list[dict[str, Array]]]) -> Priors:
        """Priors of all members as sums.

        :raises PartsDiffer: where they are none.
        """
        members, call = self.parts.mixed()
        mixed = next(data_of_parts(self.reading, [call], self.init_values))
        for number in _NUMBERS_OF_PROBES:
            hypers = probes(number)
            found = InterpolatedPriors(min(number - 2, self.parts.size), _alike())
            if found.weights(self._at(hypers, mixed), members) is not None and len(found.blocks) <= number // 2:
                break
        else:
            raise PartsDiffer
        weights, done = [], 0
        for new, data in self.data():
            of_part = found.weights(self._at(hypers, data)[new:], np.arange(done, self.parts.number))
            if of_part is None:
                raise PartsDiffer
            weights.append(of_part)
            done += len(of_part)
        number = len(found.blocks)
        if number == 1:
            return Priors(found.blocks, None)
        out = np.concatenate([np.pad(of_part, ((0, 0), (0, number - of_part.shape[1]))) for of_part in weights])
        return Priors(found.blocks, out)

    def _at(self, hypers: list[dict[str, Array]], data: Sequence[Any]) -> np.ndarray:
        """Locations and variances of the members of a part at several hyperparameters, shape ``(B, 2h)``."""
        stacked = jax.tree.map(lambda *values: np.stack(values), *hypers)
        found = np.asarray(shared(priors_of_parts, self.reading)(data, stacked))
        return found.reshape(-1, found.shape[-1]).T

    def check_priors(self, priors: Priors, hyper: dict[str, Array]) -> None:
        """See that priors are the same sums at other hyperparameters, whatever members there are beside one.

        :raises PartsDiffer: where they are not.
        """
        if priors.weights is None:
            return
        found = self.joined(lambda data: {"": self._at([hyper], data)}, is_checked=True)[""]
        own = found[priors.members]
        if not np.allclose(priors.weights @ own, found, rtol=0.0, atol=_alike() * (1.0 + np.abs(own).max())):
            raise PartsDiffer

    def scores(self, hyper: dict[str, Array]) -> Scores:
        """Posteriors of all members.

        :param hyper: all hyperparameters, constrained.
        :raises PartsDiffer: where members of a part do not share their columns, or see those of others.
        """
        program = shared(scores_of_parts, self.reading, self.algorithm)
        shapes = self.reading.site_shapes

        def of_part(data: Sequence[Any]) -> dict[str, Any]:
            found: PartScores = program(data, hyper)
            columns = found.columns
            if not _is_plain(columns) or (bool(columns.has_gaps) and not self.algorithm.has_gaps):
                raise PartsDiffer
            arrays: dict[str, Any] = {"evidence": found.log_evidence, "error": found.error}
            for name, both in found.moments.items():
                arrays |= {f"{k} {name}": np.asarray(x).reshape(shapes[name]) for k, x in enumerate(both)}
            return arrays

        found = self.joined(of_part, is_checked=True)
        if not np.isfinite(found["evidence"]).all():  # which the model on all members explains
            raise PartsDiffer
        moments = {name: (found[f"0 {name}"], found[f"1 {name}"]) for name in self.reading.affine_sites}
        evidence = found["evidence"]
        rounding = 4.0 * float(np.finfo(evidence.dtype).eps) * float(np.sum(1.0 + np.abs(evidence)))
        return Scores(float(evidence.sum()), float(found["error"].sum()), rounding, moments)


def scored_fit(scores: Scores, hyper: dict[str, Array]) -> Fit:
    """The outcome of a run in which there was nothing to learn."""
    trace = np.array([scores.log_evidence])
    diagnostics = Diagnostics(True, 1, trace, 0.0, 0, {}, None, (), quadrature_error=scores.error)
    state = EngineState(jnp.zeros((0,)), None, None, 1, "")
    return Fit(state, hyper, None, NO_ERRORS, scores.log_evidence, diagnostics)


def _alike() -> float:
    return max(_ALIKE, _ROUNDINGS * float(jnp.finfo(jnp.result_type(float)).eps))


def _is_plain(found: PartColumns) -> bool:
    """True if blocks differ in outcomes and priors alone, and the density has no terms beside theirs."""
    return float(found.spread) <= _alike() and float(found.log_constant) == 0.0


def _are_alike(first: PartColumns, found: PartColumns) -> bool:
    own, other = np.asarray(first.common), np.asarray(found.common)
    return _is_plain(found) and np.allclose(own, other, rtol=_alike(), atol=_alike())
