"""Scans taken apart: what is carried from step to step, and what follows from it step by step.

A scan is one equation whose body an analysis does not see. Here it becomes two scans that do nothing but carry, one of
what does not depend on the unknowns (a counter, lags of data) and one of the states that do, and the body mapped over
all steps at once. The mapped body is ordinary equations on stacked arrays, in which likelihoods are recognised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr

_SHORTEST_SUM, _MOST_SUMS = 500, 8
"""Elements at least of a cumulative sum that becomes a scan, and sums side by side at most, which make its state."""


def body_of(params: Mapping[str, Any]) -> ClosedJaxpr:
    """The body of a scan."""
    body = params["jaxpr"]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def layout_of(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of the inputs of a scan that are constants, and of those that are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # later versions of JAX keep them as flattened trees
    constants, carried, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))


def is_long_sum(eqn: Any) -> bool:
    """True if a cumulative sum, as of a random walk, is so long that a state space is cheaper than its matrix."""
    shape: tuple[int, ...] = eqn.outvars[0].aval.shape
    length: int = shape[eqn.params["axis"]]
    return length >= _SHORTEST_SUM and math.prod(shape) <= _MOST_SUMS * length


def sum_step_by_step(x: Array, *, axis: int, reverse: bool) -> list[Array]:
    """A cumulative sum written as a recurrence."""

    def step(total: Array, now: Array) -> tuple[Array, Array]:
        return total + now, total + now

    x = jnp.moveaxis(x, axis, 0)
    return [jnp.moveaxis(lax.scan(step, jnp.zeros_like(x[0]), x, reverse=reverse)[1], 0, axis)]


class OpenedScan:
    """The parts of one scan, each a function of arrays.

    :param body: program of one step, whose inputs are constants, carry and slices.
    :param params: parameters of the scan.
    :param is_dependent: for each input of the scan, whether it depends on the unknowns.
    """

    def __init__(self, body: Any, params: Mapping[str, Any], is_dependent: Sequence[bool]):
        self._body = body
        num_consts, self.num_carry = layout_of(params)
        self.length, self._reverse = params["length"], params["reverse"]
        self._behind = [body.ancestors([atom]) & set(body.inputs) for atom in body.outputs]
        used = set().union(*self._behind)
        self._consts, self._carry, self._slices = (
            body.inputs[:num_consts],
            body.inputs[num_consts : num_consts + self.num_carry],
            body.inputs[num_consts + self.num_carry :],
        )
        dependent = {n for n, flag in zip(body.inputs, is_dependent, strict=True) if flag and n in used}
        while True:
            more = {n for n, behind in zip(self._carry, self._behind, strict=False) if behind & dependent} - dependent
            if not more:
                break
            dependent |= more
        self.states = [i for i, n in enumerate(self._carry) if n in dependent]
        """Parts of the carry that depend on the unknowns, of those that a step looks at."""
        self.others = [i for i, n in enumerate(self._carry) if n in used and i not in self.states]
        self.used = [n in used for n in body.inputs]
        """Inputs that the body needs."""
        self._find_hoisted(dependent)

    def _find_hoisted(self, dependent: set[int]) -> None:
        """Find values that a step computes from unknowns without the states, such as an element ``drift[t]`` of a
        site outside: it is computed for all steps at once, so that each step is seen to need its own element alone."""
        body = self._body
        carried = {self._carry[i] for i in self.states}
        moving, unknown = _behind(body, carried), _behind(body, dependent - carried)
        each_step = _behind(body, {*self._slices, *(self._carry[i] for i in self.others)})
        wanted = [body.outputs[i] for i in self.states]
        read = {
            a for i in body.needed(wanted, ()) for a in body.equations[i].inputs if _moves(body.equations[i], moving)
        }
        found = sorted(a for a in read | set(wanted) if a in unknown - moving - set(body.inputs))
        self._fixed = [a for a in found if a not in each_step]
        self._stacked = [a for a in found if a in each_step]
        self._needed = body.ancestors(wanted, found)

    def _step(self, wanted: Sequence[int], given: Mapping[int, Any]) -> list[Any]:
        return self._values([self._body.outputs[i] for i in wanted], given)

    def _values(self, wanted: Sequence[object], given: Mapping[int, Any]) -> list[Any]:
        env = {**dict(zip(self._body.constants, self._body.data, strict=True)), **given}
        return self._body.evaluate(wanted, env)

    def _carried(self, which: Sequence[int]) -> Callable[..., list[Any]]:
        """The scan of some parts of the carry: from inputs of the body to these parts before each step."""

        def run(start: list[Any], fixed: dict[int, Any], slices: dict[int, Any]) -> list[Any]:
            def step(carry: list[object], now: dict[int, object]) -> tuple[list[Any], list[Any]]:
                given = {self._carry[i]: v for i, v in zip(which, carry, strict=True)}
                return self._step(which, {**fixed, **now, **given}), carry

            return lax.scan(step, start, slices, length=self.length, reverse=self._reverse)[1]

        return run

    def _split(self, inputs: Sequence[object]) -> tuple[dict[int, Any], list[Any], dict[int, Any]]:
        known = dict(zip(self._body.inputs, inputs, strict=True))
        fixed = {n: known[n] for n in self._consts if known[n] is not None}
        slices = {n: known[n] for n in self._slices if known[n] is not None}
        return fixed, [known[n] for n in self._carry], slices

    def carry_others(self, *inputs: object) -> list[Array]:
        """Parts of the carry that do not depend on the unknowns, before each step.

        :param inputs: those of the scan, None for what is not needed.
        """
        fixed, start, slices = self._split(inputs)
        needed = set().union(*(self._behind[i] for i in self.others))
        fixed = {n: v for n, v in fixed.items() if n in needed}
        slices = {n: v for n, v in slices.items() if n in needed}
        return self._carried(self.others)([start[i] for i in self.others], fixed, slices)

    def hoisted(self, others: Sequence[object], *inputs: object) -> list[Array]:
        """Inputs of the states, apart from themselves, for all steps at once."""
        fixed, _, slices = self._split(inputs)
        slices |= {self._carry[i]: v for i, v in zip(self.others, others, strict=True)}
        stacked = jax.vmap(lambda now: self._values(self._stacked, {**fixed, **now}), axis_size=self.length)(slices)
        return self._values(self._fixed, fixed) + stacked

    def carry_states(self, others: Sequence[object], hoisted: Sequence[object], *inputs: object) -> list[Array]:
        """The states before each step."""
        fixed, start, slices = self._split(inputs)
        slices |= {self._carry[i]: v for i, v in zip(self.others, others, strict=True)}
        fixed |= dict(zip(self._fixed, hoisted, strict=False))
        slices |= dict(zip(self._stacked, hoisted[len(self._fixed) :], strict=True))
        fixed = {n: v for n, v in fixed.items() if n in self._needed}
        slices = {n: v for n, v in slices.items() if n in self._needed}
        return self._carried(self.states)([start[i] for i in self.states], fixed, slices)

    def outputs(self, others: Sequence[object], states: Sequence[object], *inputs: object) -> list[Array]:
        """The outputs of the scan."""
        fixed, _, slices = self._split(inputs)
        slices |= {self._carry[i]: v for i, v in zip(self.others, others, strict=True)}
        slices |= {self._carry[i]: v for i, v in zip(self.states, states, strict=True)}
        wanted = range(len(self._body.outputs))
        stacked = jax.vmap(lambda now: self._step(wanted, {**fixed, **now}), axis_size=self.length)(slices)
        last = 0 if self._reverse else -1
        return [v[last] if i < self.num_carry else v for i, v in enumerate(stacked)]


def _behind(body: Any, seeds: set[int]) -> set[int]:
    """All values that depend on some, themselves included."""
    found = set(seeds)
    for eqn in body.equations:
        if _moves(eqn, found):
            found.update(eqn.outputs)
    return found


def _moves(eqn: Any, values: set[int]) -> bool:
    return any(a in values for a in eqn.inputs if isinstance(a, int))
