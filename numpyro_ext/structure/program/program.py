"""A jaxpr flattened into single assignments, which can be evaluated from any set of known values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ...compilation.collection import without_collection
from ...compilation.content import Structure, dtype_name
from .captured import ELEMENTWISE, Fingerprint, captured, changing_literals
from .equations import (
    Atom,
    Constant,
    Equation,
    apply_equation,
    atom_key,
    constant_of,
    inner_jaxpr,
    params_key,
)
from .recurrences import OpenedScan, body_of, is_long_sum, sum_step_by_step
from .selections import selected_before

_text = functools.lru_cache(maxsize=4096)(str)
"""Text of the shape and dtype of a value, which JAX writes down anew each time."""
_INLINED = ("jit", "pjit", "closed_call", "core_call", "call", "remat", "remat2", "checkpoint")


class Program:
    """Equations in order of execution over values numbered from zero.

    The first values are the inputs, then come the constants (arrays that the traced function closed over: the data of
    a model), then the results. Calls are inlined under fresh names, since nested calls share one jaxpr object;
    equal equations are merged, so that a predictor that a model computes twice is one value.

    :param closed: the jaxpr.
    :param int num_unknowns: how many inputs, the first ones, are unknowns: scans that depend on them are opened.
    """

    def __init__(self, closed: ClosedJaxpr, num_unknowns: int = 0):
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.defined_by: dict[int, int] = {}
        self._seen: dict[Any, tuple[int, ...]] = {}
        jaxpr = closed.jaxpr
        self.inputs = tuple(self._new(v.aval) for v in jaxpr.invars)
        self.constants = tuple(self._new(v.aval) for v in jaxpr.constvars)
        self.data = tuple(closed.consts)
        self._dependent = set(self.inputs[:num_unknowns])
        self._fingerprint: Fingerprint | None = None  # until something changes
        self.changing: frozenset[int] = frozenset()
        """Data whose values may be others: nothing is looked up in them."""
        self.recurrences: list[int] = []
        """For each scan that was opened and is of use, its first state: all states before each step."""
        self.literals: frozenset[int] = frozenset()
        """Data that were numbers of the program, until they turned out to change."""
        env: dict[Any, Atom] = dict(
            zip((*jaxpr.invars, *jaxpr.constvars), (*self.inputs, *self.constants), strict=True)
        )
        self.outputs = self._inline(jaxpr, env)
        self._drop_unused()
        self.as_written: Hashable = self.fingerprint()
        """:meth:`fingerprint` with all numbers as they were written, whatever has become of them."""

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """Shape of a value."""
        return np.shape(atom.value) if isinstance(atom, Constant) else tuple(self.avals[atom].shape)

    def _inline(self, jaxpr: Jaxpr, env: dict[Any, Atom]) -> tuple[Atom, ...]:
        def read(atom: object) -> Atom:
            return constant_of(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(read(v) for v in eqn.invars)
            inner = inner_jaxpr(eqn.params) if eqn.primitive.name in _INLINED else None
            if eqn.primitive.name == "scan" and self._depends(inputs) and eqn.params["length"] > 0:
                results: tuple[Atom, ...] = self._open(eqn, inputs)
            elif eqn.primitive.name == "cumsum" and self._depends(inputs) and is_long_sum(eqn):
                results = self._call(
                    partial(sum_step_by_step, axis=eqn.params["axis"], reverse=eqn.params["reverse"]), *inputs
                )
            elif eqn.primitive.name == "unstack":  # of JAX from 0.12 on: slices as before, which all know
                results = self._call(partial(_slices, axis=eqn.params["axis"]), *inputs)
            elif eqn.primitive.name == "select_n" and self._chooses_unknowns(inputs):
                which, *cases = inputs
                found = selected_before(self, which, cases, apply_equation)
                results = self._assign(eqn, inputs) if found is None else (found,)
            elif inner is not None:
                consts = tuple(self._embed(c) for c in inner.consts)
                inner_env = dict(zip((*inner.jaxpr.invars, *inner.jaxpr.constvars), (*inputs, *consts), strict=True))
                results = self._inline(inner.jaxpr, inner_env)
            else:
                results = self._assign(eqn, inputs)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(read(v) for v in jaxpr.outvars)

    def _depends(self, inputs: Iterable[Atom]) -> bool:
        return any(a in self._dependent for a in inputs if isinstance(a, int))

    def _chooses_unknowns(self, inputs: tuple[Atom, ...]) -> bool:
        """Tell whether something that is no unknown selects between values that depend on unknowns."""
        which, *cases = inputs
        return not self._depends([which]) and all(self._depends([case]) for case in cases)

    def inline(self, function: Callable[..., Sequence[Any]], *atoms: Atom) -> tuple[Atom, ...]:
        """Add the equations of a function of values, and return its results."""
        return self._call(function, *atoms)

    def _open(self, eqn: Any, inputs: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """Take a scan apart, see :mod:`.recurrences`."""
        is_dependent = [a in self._dependent if isinstance(a, int) else False for a in inputs]
        opened = OpenedScan(Program(body_of(eqn.params)), eqn.params, is_dependent)
        needed = [a if used else None for a, used in zip(inputs, opened.used, strict=True)]
        others = self._call(opened.carry_others, *needed) if opened.others else ()
        states: tuple[Atom, ...] = ()
        if opened.states:
            hoisted = self._call(opened.hoisted, others, *needed)
            states = self._call(opened.carry_states, others, hoisted, *needed, is_opened=True)
            self.recurrences.append(states[0])  # type: ignore[arg-type]
        return self._call(opened.outputs, others, states, *needed)

    def _call(self, function: Any, *args: Any, is_opened: bool = False) -> tuple[Atom, ...]:
        """Inline a function of atoms."""
        atoms, structure = jax.tree.flatten(args, is_leaf=lambda leaf: isinstance(leaf, Constant))
        examples = [jax.typeof(a.value) if isinstance(a, Constant) else self.avals[a] for a in atoms]
        closed = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)))(*examples)
        constants = [self._embed(c) for c in closed.consts]
        env: dict[Any, Atom] = dict(
            zip((*closed.jaxpr.invars, *closed.jaxpr.constvars), (*atoms, *constants), strict=True)
        )
        if not is_opened:
            return self._inline(closed.jaxpr, env)
        (scan,) = closed.jaxpr.eqns
        return self._assign(scan, tuple(constant_of(a) if isinstance(a, Literal) else env[a] for a in scan.invars))[
            -len(closed.jaxpr.outvars) :
        ]

    def _embed(self, value: object) -> int:
        """Take an array for data of the program, such as the constants of an inner call, so that no array hides in an
        equation: the number of its value."""
        number = self._new(jax.typeof(value))
        self.constants += (number,)
        self.data += (value,)
        return number

    def _assign(self, eqn: Any, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        params = params_key(eqn.params), captured(eqn.params)
        key = (eqn.primitive.name, params, tuple(atom_key(a) for a in inputs))
        if key not in self._seen:
            outputs = tuple(self._new(v.aval) for v in eqn.outvars)
            for number in outputs:
                self.defined_by[number] = len(self.equations)
            self.equations.append(Equation(eqn.primitive, eqn.params, inputs, outputs, key))
            self._seen[key] = outputs
            if self._depends(inputs):
                self._dependent.update(outputs)
        return self._seen[key]

    def _drop_unused(self) -> None:
        # argument validation inside distributions leaves equations that read latent values and lead nowhere
        needed = self.needed([a for a in self.outputs if isinstance(a, int)], known=())
        self.equations = [eqn for i, eqn in enumerate(self.equations) if i in needed]
        self.defined_by = {n: i for i, eqn in enumerate(self.equations) for n in eqn.outputs}
        used = {a for eqn in self.equations for a in eqn.inputs if isinstance(a, int)}
        used |= {a for a in self.outputs if isinstance(a, int)}
        kept = [(c, d) for c, d in zip(self.constants, self.data, strict=True) if c in used]
        self.constants = tuple(c for c, _ in kept)
        self.data = tuple(d for _, d in kept)
        self.recurrences = [n for n in dict.fromkeys(self.recurrences) if n in self.defined_by]

    def with_inputs_as_data(
        self, inputs: Sequence[int], values: Sequence[object], *, may_change: bool = False
    ) -> Program:
        """The same program with some of the inputs among its data.

        :param values: of these inputs; where these may become others, all are kept, also those of no use, and nothing
            is decided by them.
        """
        used = {a for eqn in self.equations for a in eqn.inputs if isinstance(a, int)} | set(self.outputs)
        pairs = [pair for pair in zip(inputs, values, strict=True) if may_change or pair[0] in used]
        return self.replace(
            inputs=tuple(number for number in self.inputs if number not in inputs),
            constants=(*(number for number, _ in pairs), *self.constants),
            data=(*(value for _, value in pairs), *self.data),
            changing=frozenset(inputs) if may_change else self.changing,
        )

    def with_constant(self, aval: Any) -> tuple[Program, int]:
        """The same program with an array of this shape and dtype among the data that it takes; and its number."""
        number = len(self.avals)
        return self.replace(avals=[*self.avals, aval], constants=(*self.constants, number)), number

    def with_data(self, data: Iterable[Any]) -> Program:
        """The same program on other data."""
        return self.replace(data=tuple(data))

    def replace(self, **changes: Any) -> Program:
        """The same program with other attributes."""
        out = copy.copy(self)
        vars(out).update(changes)
        if not changes.keys() <= {"data", "literals", "as_written"}:
            out._fingerprint = None
        return out

    def with_changing_literals(self) -> Program:
        """The same program with numbers among its data that have been others in one like it; see :mod:`.literals`."""

        def is_number(primitive: str, atom: Atom) -> bool:
            return isinstance(atom, Constant) and primitive in ELEMENTWISE and jnp.issubdtype(atom.dtype, jnp.floating)

        def without_number(primitive: str, atom: Atom) -> object:
            return dtype_name(atom.dtype) if is_number(primitive, atom) else atom_key(atom)  # type: ignore[union-attr]

        # What is returned, such as the scale of a prior, is a number like those that are copied.
        lines = [(e.primitive.name, e.key[1], e.inputs) for e in self.equations] + [("copy", (), self.outputs)]
        bodies = tuple((name, params, tuple(without_number(name, a) for a in atoms)) for name, params, atoms in lines)
        numbers = [a for name, _, atoms in lines for a in atoms if is_number(name, a)]
        header = tuple(_text(self.avals[n]) for n in (*self.inputs, *self.constants))
        changing = changing_literals((header, self.inputs, bodies), [a.value for a in numbers])  # type: ignore[union-attr]
        if not changing.any():
            return self
        is_changing, first, values = iter(changing.tolist()), len(self.avals), list[np.ndarray]()

        def moved(primitive: str, atom: Atom) -> Atom:
            if not is_number(primitive, atom) or not next(is_changing):
                return atom
            values.append(np.asarray(atom.value, atom.dtype))  # type: ignore[union-attr]
            return first + len(values) - 1

        def with_moved(eqn: Equation) -> Equation:
            inputs = tuple(moved(eqn.primitive.name, a) for a in eqn.inputs)
            return eqn._replace(inputs=inputs, key=(*eqn.key[:2], tuple(atom_key(a) for a in inputs)))

        equations, outputs = [with_moved(eqn) for eqn in self.equations], tuple(moved("copy", a) for a in self.outputs)
        places = range(first, first + len(values))
        return self.replace(
            avals=[*self.avals, *map(jax.typeof, values)],
            equations=equations,
            outputs=outputs,
            constants=(*self.constants, *places),
            data=(*self.data, *values),
            literals=frozenset(places),
        )

    @property
    def content_key(self) -> Fingerprint:
        """:meth:`fingerprint`, by which programs are compared."""
        return self.fingerprint()

    @property
    def structure(self) -> Structure[Program]:
        """The program without data, for functions that are compiled: they should keep no arrays alive."""
        return Structure(self.with_data(()))

    def needed(self, wanted: Iterable[Atom], known: Iterable[int]) -> set[int]:
        """Indices of the equations required to compute ``wanted`` when the values ``known`` are given."""
        known = set(known)
        stack = [a for a in wanted if isinstance(a, int)]
        seen: set[int] = set()
        needed: set[int] = set()
        while stack:
            number = stack.pop()
            if number in seen or number in known:
                continue
            seen.add(number)
            index = self.defined_by.get(number)
            if index is not None and index not in needed:
                needed.add(index)
                stack.extend(a for a in self.equations[index].inputs if isinstance(a, int))
        return needed

    def ancestors(self, wanted: Iterable[Atom], known: Iterable[int] = ()) -> set[int]:
        """Every value that ``wanted`` depends on, itself included, not looking behind the values ``known``."""
        wanted = list(wanted)
        found = {a for a in wanted if isinstance(a, int)}
        for index in self.needed(wanted, known):
            found |= {a for a in self.equations[index].inputs if isinstance(a, int)}
        return found

    def frontier(self, wanted: Iterable[Atom], inner: Iterable[int]) -> tuple[int, ...]:
        """The last values on the way to ``wanted`` that do not depend on the values ``inner``; what merely repeats a
        smaller value is looked behind."""
        wanted, inner = list(wanted), set(inner)
        found: set[int] = set()
        for index in sorted(self.needed(wanted, inner)):
            eqn = self.equations[index]
            if inner.intersection(a for a in eqn.inputs if isinstance(a, int)):
                inner.update(eqn.outputs)
                found.update(a for a in eqn.inputs if isinstance(a, int))
        found.update(a for a in wanted if isinstance(a, int))
        return tuple(sorted({self._before_repeats(a) for a in found - inner}))

    def _before_repeats(self, number: int) -> int:
        while number in self.defined_by:
            eqn = self.equations[self.defined_by[number]]
            if eqn.primitive.name != "broadcast_in_dim" or not isinstance(eqn.inputs[0], int):
                break
            number = eqn.inputs[0]
        return number

    def evaluate(
        self, wanted: Iterable[Atom], env: Mapping[int, Any], apply: Callable[..., Sequence[Any]] | None = None
    ) -> list[Any]:
        """Values of ``wanted``, computed from ``env`` (inputs, constants, or any intermediate values to take as given).

        :param apply: what computes an equation, by default :func:`apply_equation`.
        :raises KeyError: if ``wanted`` depends on an input or constant that ``env`` does not give.
        """
        return self.extend(wanted, dict(env), apply)

    def extend(
        self, wanted: Iterable[Atom], env: dict[int, object], apply: Callable[..., Sequence[Any]] | None = None
    ) -> list[Any]:
        """Evaluate, as :meth:`evaluate` does, and add values computed on the way to ``env``."""
        wanted = list(wanted)

        def read(atom: Atom) -> Any:
            return atom.value if isinstance(atom, Constant) else env[atom]

        for index in sorted(self.needed(wanted, env)):
            eqn = self.equations[index]
            results = (apply or apply_equation)(eqn, [read(a) for a in eqn.inputs])
            for number, result in zip(eqn.outputs, results, strict=True):
                env.setdefault(number, result)
        return [read(a) for a in wanted]

    def fingerprint(self) -> Fingerprint:
        """Hashable description: two programs with equal fingerprints compute the same function of inputs and data."""
        if self._fingerprint is None:
            body = tuple((e.key, e.outputs) for e in self.equations)
            header = tuple(_text(self.avals[n]) for n in (*self.inputs, *self.constants))
            outputs = tuple(atom_key(a) for a in self.outputs)
            self._fingerprint = Fingerprint((header, self.inputs, self.constants, body, outputs))
        return self._fingerprint


def make_program(function: Any, *args: Any, num_unknowns: int = 0, keep_literals: bool = False) -> tuple[Program, Any]:
    """Trace ``function(*args)`` into a :class:`Program`; also return its output structure, with atoms as leaves.

    :param int num_unknowns: as for :class:`Program`, counted in arrays.
    :param bool keep_literals: for programs that are not compiled, but compared: their numbers are theirs.
    """
    with without_collection():
        closed, out_shape = jax.make_jaxpr(function, return_shape=True)(*args)
        program = Program(closed, num_unknowns)
        if not keep_literals:
            program = program.with_changing_literals()
    return program, jax.tree.unflatten(jax.tree.structure(out_shape), program.outputs)


def _slices(x: jax.Array, axis: int) -> list[jax.Array]:
    return [jax.lax.index_in_dim(x, place, axis, keepdims=False) for place in range(x.shape[axis])]
