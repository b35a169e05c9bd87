"""Affine values of a program with scans as rows of a state space, in time and memory linear in the number of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from ....linalg.gaussian.design import Dynamics, StateSpaceDesign
from ....linalg.gaussian.recurrences import has_short_states, run_forward
from ....linalg.padding import padded_groups
from ..degrees import Degree, Degrees
from ..dependence import dependence
from ..equations import Equation
from ..patterns import DenseDependence, Pattern
from ..program import Program
from ..questions import Questions
from ..recurrences import body_of, layout_of
from .affine_rows import AffineRows, Parts, atoms_of, rows_of_pattern

_MOST_SHARED = 256
_NOWHERE = np.iinfo(np.int64).max


class NoStateSpace(Exception):
    """Reason for which the rows of a program with scans are not those of a state space, in words."""


class TimeBlocks:
    """The steps of the scans of a program cut into blocks, and the unknowns and states of each block.

    :ivar columns: unknowns of each block, ``(num_blocks, n)`` padded with ``num_columns``.
    :ivar shared: all other unknowns.
    """

    def __init__(self, program: Program, scans: Sequence[Equation], field: Mapping[str, tuple[int, int]], size: int):
        self.program, self.scans = program, tuple(scans)
        self.field = dict(field)
        self.inputs, self.sizes = tuple(n for n, _ in field.values()), tuple(s for _, s in field.values())
        self.num_columns = sum(self.sizes)
        self.length, self.is_reversed = scans[0].params["length"], scans[0].params["reverse"]
        self.size, self.num_blocks = size, -(-self.length // size)
        steps = np.arange(self.length)
        self.block_of_step = (steps[::-1] if self.is_reversed else steps) // size
        self.home = np.full(self.num_columns, _NOWHERE)
        """Block of each unknown, -1 where shared."""

    def set_home(self, home: np.ndarray) -> None:
        """Block of each unknown; those that belong nowhere are shared."""
        self.home = np.where(home == _NOWHERE, -1, home)
        self.shared = np.flatnonzero(self.home < 0)
        local = np.flatnonzero(self.home >= 0)
        self.columns = padded_groups(self.home[local], self.num_blocks, self.num_columns, members=local)
        digest = hashlib.blake2b(repr(self.program.fingerprint()).encode(), digest_size=16)
        digest.update(self.columns.tobytes() + self.shared.tobytes())
        self.key = digest.hexdigest()

    @property
    def content_key(self) -> str:
        """Key, by which blocks are compared."""
        return self.key

    @property
    def num_states(self) -> int:
        """Numbers that are carried from step to step."""
        return sum(self._carried(scan)[1] for scan in self.scans)

    def seeds(self) -> dict[int, Pattern]:
        """Numbers for the unknowns, and after them one for the states of each block."""
        starts = np.concatenate([[0], np.cumsum(self.sizes)])
        seeds: dict[int, Pattern] = {
            n: np.arange(a, b, dtype=np.int64).reshape(*self.program.shape(n), 1)
            for n, a, b in zip(self.inputs, starts[:-1], starts[1:], strict=True)
        }
        for scan in self.scans:
            for number in states_of(scan):
                shape = self.program.shape(number)
                ids = self.num_columns + self.block_of_step.reshape(-1, *(1,) * len(shape))
                seeds[number] = np.broadcast_to(ids, (*shape, 1))
        return seeds

    def blocks_of(self, pattern: np.ndarray | None) -> np.ndarray:
        """The block that each row of a pattern ``(rows, k)`` touches, -1 if none.

        :raises NoStateSpace: if a row touches several.
        """
        if pattern is None:
            raise NoStateSpace("each observation depends on all of its steps")
        homes = np.concatenate([self.home, np.arange(self.num_blocks), [-1]])[pattern]
        homes = np.where(homes == _NOWHERE, -1, homes)
        last: np.ndarray = homes.max(-1, initial=-1)
        first = np.where(homes < 0, _NOWHERE, homes).min(-1, initial=_NOWHERE)
        if np.any((last >= 0) & (first != last)):
            raise NoStateSpace("some observations depend on steps that are far from each other, or next to each other")
        return last

    def _carried(self, scan: Equation) -> tuple[list[tuple[int, ...]], int]:
        shapes = [self.program.shape(n)[1:] for n in states_of(scan)]
        return shapes, sum(int(np.prod(s)) for s in shapes)

    def evaluate(self, e: Array, starts: Array, env: Mapping[int, object], parts: Parts) -> tuple[Array, Array, Array]:
        """The program with the states before each block given.

        :param e: the unknowns.
        :param starts: shape ``(num_blocks, num_states)``.
        :return: the selected elements, the states after each block, and those at the beginning.
        """
        values, position = dict(env), 0
        for number, size in zip(self.inputs, self.sizes, strict=True):
            values[number] = e[position : position + size].reshape(self.program.shape(number))
            position += size
        after, first, position = [], [], 0
        for scan in self.scans:
            shapes, width = self._carried(scan)
            given = self.program.evaluate(scan.inputs, values)
            start = starts[:, position : position + width]
            position += width
            pieces = jnp.split(start, np.cumsum([int(np.prod(s)) for s in shapes])[:-1], axis=1)
            pieces = [p.reshape(-1, *s) for p, s in zip(pieces, shapes, strict=True)]
            carried, states = self._run(scan, given, pieces)
            values.update(zip(states_of(scan), states, strict=True))
            after += [v.reshape(self.num_blocks, -1) for v in carried]
            num_consts, _ = layout_of(scan.params)
            first += [jnp.reshape(v, -1) for v in given[num_consts : num_consts + len(shapes)]]
        return AffineRows.select(self.program, values, parts), jnp.concatenate(after, 1), jnp.concatenate(first)

    def _run(self, scan: Equation, given: Sequence[object], starts: list[Array]) -> tuple[list[Array], list[Array]]:
        num_consts, num_carry = layout_of(scan.params)
        step = jaxpr_as_fun(body_of(scan.params))
        consts, slices = given[:num_consts], [jnp.asarray(v) for v in given[num_consts + num_carry :]]
        # the last block is filled with the last step again, which nobody looks at
        index = np.minimum(np.arange(self.num_blocks * self.size), self.length - 1)
        index = self.length - 1 - index if self.is_reversed else index
        slices = [v[index].reshape(self.num_blocks, self.size, *v.shape[1:]) for v in slices]

        def one(carry: Sequence[object], now: Sequence[object]) -> tuple[list[Any], list[Any]]:
            found = step(*consts, *carry, *now)
            return found[:num_carry], found[num_carry:]

        dtypes = [self.program.avals[n].dtype for n in states_of(scan)]
        starts = [s.astype(d) for s, d in zip(starts, dtypes, strict=True)]
        after, states = jax.vmap(lambda c, x: lax.scan(one, c, x, length=self.size))(starts, slices)
        states = [v.reshape(-1, *v.shape[2:])[: self.length] for v in states]
        return after, [v[::-1] for v in states] if self.is_reversed else states


class StateRows:
    """Selected elements of affine values as a :class:`~numpyro_ext.linalg.gaussian.design.StateSpaceDesign`.

    The matrices are directional derivatives of the program in blocks: all blocks at once along each state and each of
    their unknowns, so that a direction costs as much as the program does.

    :param blocks: of the program.
    :param parts: as for :class:`~.affine_rows.AffineRows`.
    :param pattern: which unknowns and blocks each row touches.
    """

    is_dense = False
    pattern = None
    indices = None

    def __init__(self, blocks: TimeBlocks, parts: Parts, home: np.ndarray):
        self.blocks, self.parts = blocks, parts
        self.num_rows, self.num_columns = home.size, blocks.num_columns
        # rows that only see shared unknowns may stand anywhere
        anywhere = np.flatnonzero(home < 0)
        home[anywhere] = np.arange(anywhere.size) * blocks.num_blocks // max(anywhere.size, 1)
        self.rows = padded_groups(home, blocks.num_blocks, home.size)

    @classmethod
    def build(cls, questions: Questions, blocks: TimeBlocks, parts: Parts) -> Self:
        """The rows.

        :raises NoStateSpace: if one of them sees several blocks.
        """
        found = dependence(questions, blocks.seeds(), atoms_of(parts))
        return cls(blocks, parts, blocks.blocks_of(rows_of_pattern(blocks.program, found, parts)))

    def by_steps(self, questions: Questions, together: np.ndarray) -> StateRows | None:
        """The same rows with a block for each step; ``None`` if they see several, or if states are not short then.

        :param together: as for :func:`find_time_blocks`.
        """
        blocks = TimeBlocks(self.blocks.program, self.blocks.scans, self.blocks.field, 1)
        try:
            blocks.set_home(_homes(questions, blocks, self.parts, together))
            pays = has_short_states(blocks.num_states + blocks.shared.size, blocks.num_blocks)
            return StateRows.build(questions, blocks, self.parts) if pays else None
        except NoStateSpace:
            return None

    def without_data(self) -> StateRows:
        """These rows: what was looked up in the data is a part of them, so that other steps are other programs."""
        return self

    def describe(self) -> str:
        """The state space in words."""
        blocks = self.blocks
        return f"{blocks.length} steps of {blocks.num_states} states, {blocks.shared.size} shared unknowns"

    def design(self, env: Mapping[int, object], _: object = None) -> tuple[StateSpaceDesign, Array]:
        """Design and offset at the given hyperparameters and data."""
        blocks, dtype = self.blocks, jnp.result_type(float)
        num_states, shared, columns = blocks.num_states, blocks.shared, blocks.columns
        num_local, num_shared = columns.shape[1], shared.size
        zero = jnp.zeros((self.num_columns,), dtype), jnp.zeros((blocks.num_blocks, num_states), dtype)
        origin, push = jax.linearize(lambda e, starts: blocks.evaluate(e, starts, env, self.parts), *zero)
        places = np.zeros((num_local + num_shared, self.num_columns), bool)
        for number, column in enumerate(columns.T):
            places[number, column[column < self.num_columns]] = True
        places[num_local + np.arange(num_shared), shared] = True
        along = jnp.asarray(places, dtype), jnp.zeros((len(places), *zero[1].shape), dtype)
        by_unknown = jax.vmap(push)(*along)
        units = jnp.broadcast_to(jnp.eye(num_states, dtype=dtype)[:, None], (num_states, *zero[1].shape))
        by_state = jax.vmap(push)(jnp.zeros((num_states, self.num_columns), dtype), units)
        local, common = ([v[:num_local] for v in by_unknown], [v[num_local:] for v in by_unknown])
        # shared unknowns are states that stay what they are
        stay = jnp.zeros((blocks.num_blocks, num_shared, num_states), dtype)
        same = jnp.broadcast_to(jnp.eye(num_shared, dtype=dtype), (blocks.num_blocks, num_shared, num_shared))
        before, from_shared, own = (jnp.moveaxis(v[1], 0, -1) for v in (by_state, common, local))
        upper, lower = jnp.concatenate([before, from_shared], -1), jnp.concatenate([stay, same], -1)
        nothing = jnp.zeros((blocks.num_blocks, num_shared, num_local), dtype)
        dynamics = Dynamics(
            jnp.concatenate([upper, lower], -2),
            jnp.concatenate([own, nothing], -2),
            jnp.concatenate([common[2].T, jnp.eye(num_shared, dtype=dtype)]),
            jnp.asarray(columns),
            jnp.asarray(shared),
            self.num_columns,
            blocks.key,
        )
        rows = jnp.asarray(self.rows)

        def take(values: Array) -> Array:
            return jnp.moveaxis(values.at[:, rows].get(mode="fill", fill_value=0.0), 0, -1)

        states = jnp.concatenate([take(by_state[0]), take(common[0])], -1)
        design = StateSpaceDesign(dynamics, rows, states, take(local[0]), self.num_rows)
        path = run_forward(before, origin[1][..., None], origin[2][:, None])
        return design, origin[0] + design.from_blocks((states[..., :num_states] @ path)[..., 0])


def find_time_blocks(
    questions: Questions,
    degrees: Degrees,
    field: Mapping[str, tuple[int, int]],
    parts: Parts,
    together: np.ndarray,
    *,
    block_size: int,
    fewest_blocks: int,
) -> TimeBlocks | None:
    """Cut the scans of a program into blocks of steps in which its rows stay; None if it has none or it does not pay.

    :param degrees: of its values.
    :param parts: the rows.
    :param together: for each unknown the number of the prior block that must not be split; -1 where unknowns cannot be
        eliminated block by block.
    :param block_size: unknowns of a block, about.
    :param fewest_blocks: for which blocks pay.
    :raises NoStateSpace: if the rows have none.
    """
    program = questions.program
    needed = program.ancestors(atoms_of(parts))
    scans = [program.equations[program.defined_by[n]] for n in program.recurrences if n in needed]
    if not scans:
        return None
    if any(degrees.of(n) == Degree.NONLINEAR for scan in scans for n in states_of(scan)):
        raise NoStateSpace("it also carries what is not affine in the Gaussian sites")
    if len({(s.params["length"], s.params["reverse"]) for s in scans}) > 1:
        raise NoStateSpace("there are scans of different lengths or directions")
    length, num_columns = scans[0].params["length"], together.size
    size = max(1, round(block_size * length / max(num_columns, length)))
    if length < fewest_blocks * size or num_columns < fewest_blocks * block_size:
        return None
    blocks = TimeBlocks(program, scans, field, size)
    blocks.set_home(_homes(questions, blocks, parts, together))
    if blocks.shared.size > _MOST_SHARED:
        raise NoStateSpace(f"{blocks.shared.size} unknowns are seen at many of its steps")
    return blocks


def states_of(scan: Equation) -> tuple[int, ...]:
    """The states before each step, of a scan that does nothing but carry."""
    return scan.outputs[layout_of(scan.params)[1] :]


def _homes(questions: Questions, blocks: TimeBlocks, parts: Parts, together: np.ndarray) -> np.ndarray:
    """The block of each unknown, -1 for shared ones."""
    num_columns = blocks.num_columns
    atoms = [a for scan in blocks.scans for a in scan.inputs if isinstance(a, int)]
    found = dependence(questions, blocks.seeds(), [*atoms, *atoms_of(parts)])
    first, last = np.full(num_columns + blocks.num_blocks, _NOWHERE), np.full(num_columns + blocks.num_blocks, -2)

    def see(pattern: np.ndarray, block: np.ndarray) -> None:
        """Note that the unknowns of each row of a pattern are seen in a block, or everywhere (-1)."""
        block = np.broadcast_to(block[:, None], pattern.shape)[pattern >= 0]
        np.minimum.at(first, pattern[pattern >= 0], block)
        np.maximum.at(last, pattern[pattern >= 0], block)

    for scan in blocks.scans:
        num_fixed = sum(layout_of(scan.params))
        for position, atom in enumerate(scan.inputs):
            pattern = found.get(atom) if isinstance(atom, int) else None
            if isinstance(pattern, DenseDependence):
                raise NoStateSpace("each of its steps depends on the unknowns of all")
            if pattern is not None:
                rows = pattern.reshape(len(pattern) if position >= num_fixed else 1, -1)
                see(rows, blocks.block_of_step if position >= num_fixed else np.array([-1]))
    # a state has one block, which it is not seen outside of
    own = np.arange(blocks.num_blocks)
    if np.any((last[num_columns:] >= -1) & ((first[num_columns:] != own) | (last[num_columns:] != own))):
        raise NoStateSpace("it depends on states of another scan at other steps")
    home = np.where(last == -2, _NOWHERE, np.where(first == last, first, -1))[:num_columns]
    blocks.home = home
    pattern = rows_of_pattern(blocks.program, found, parts)
    block = blocks.blocks_of(pattern)
    assert pattern is not None  # it has blocks
    see(np.where(pattern < num_columns, pattern, -1), block)
    unseen = home == _NOWHERE
    home = np.where(unseen, np.where(first == last, first, -1)[:num_columns], home)
    home = np.where(home == _NOWHERE, -1, home)
    # a prior block stays together, or is shared as a whole
    grouped = np.flatnonzero(together >= 0)
    lowest, highest = np.full(num_columns, _NOWHERE), np.full(num_columns, -1)
    np.minimum.at(lowest, together[grouped], home[grouped])
    np.maximum.at(highest, together[grouped], home[grouped])
    is_whole = (together >= 0) & (lowest == highest)[together]
    return np.where(is_whole, home, -1)
