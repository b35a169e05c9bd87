"""Classify every value of a program as constant, affine or nonlinear in the unknowns of the field."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .dependence import MOVEMENT, propagate
from .equations import Atom, Constant, Equation
from .patterns import Pattern
from .program import Program
from .questions import Questions
from .recurrences import body_of, layout_of

# linear in their first operand; the others must be constant
_LINEAR_IN_FIRST = (MOVEMENT | {"reduce_sum", "cumsum", "neg", "gather", "dynamic_slice", "copy", "copy_p"}) | {
    "split",
    "reduce_window_sum",
    # linear over the real numbers
    "real",
    "imag",
    "conj",
    "fft",
}
# jointly linear in all operands
_JOINTLY_LINEAR = frozenset("add add_any sub concatenate stack pad complex optimization_barrier".split())
# linear in either operand when the other is constant
_BILINEAR = frozenset("mul dot_general bcoo_dot_general conv_general_dilated".split())
# each element of the result has many of the operand
_MIXING = frozenset("triangular_solve custom_linear_solve conv_general_dilated reduce_window_sum".split())


class Degree(enum.IntEnum):
    """Degree of a value in the field, given everything else."""

    CONSTANT = 0
    AFFINE = 1
    NONLINEAR = 2


class Source(NamedTuple):
    """An affine value whose elements are each an affine function of one element of the value ``root``."""

    root: int
    elements: np.ndarray
    """Flat index in the root of what each element is made of, ``-1`` for constants."""


class Degrees(NamedTuple):
    """The classification of a program."""

    degree: dict[int, Degree]
    """Only values that are not constant are listed."""
    sites: dict[int, frozenset[str]]
    """Field sites that a value depends on."""
    source: dict[int, Source]
    """Origin of affine values, elementwise."""

    def of(self, atom: Atom) -> Degree:
        """Degree of an atom."""
        return Degree.CONSTANT if isinstance(atom, Constant) else self.degree.get(atom, Degree.CONSTANT)

    def sites_of(self, atom: Atom) -> frozenset[str]:
        """Field sites that an atom depends on."""
        return frozenset() if isinstance(atom, Constant) else self.sites.get(atom, frozenset())


def classify(program: Program, field: Mapping[str, int], questions: Questions | None = None) -> Degrees:
    """Push degrees from the inputs of the field through the program.

    :param field: the input value of each field site.
    :param questions: of its data, for the sources; these take time and memory per element, and are left out without.
    :return: degrees, sites and elementwise sources. An affine operation that mixes elements starts a new source, so a
        predictor such as ``X @ b + a[group]`` is one value from which everything elementwise follows.
    """
    found = Degrees({}, {}, {})
    for name, number in field.items():
        found.degree[number] = Degree.AFFINE
        found.sites[number] = frozenset([name])
        if questions is not None:
            found.source[number] = _root(program, number)
    _push(program, found, questions)
    return found


def _push(program: Program, found: Degrees, questions: Questions | None) -> list[Degree]:
    """Classify what follows from the values that are classified; return the degrees of the outputs."""
    for eqn in program.equations:
        degrees = [found.of(a) for a in eqn.inputs]
        if max(degrees, default=Degree.CONSTANT) == Degree.CONSTANT:
            continue
        sites = frozenset().union(*(found.sites_of(a) for a in eqn.inputs))
        if eqn.primitive.name == "scan":
            for number, degree in zip(eqn.outputs, _scan_degrees(eqn, degrees), strict=True):
                _set(found, program, number, degree, sites, questions is not None)
            continue
        degree = _degree(eqn, degrees)
        sources: list[Source | None] = [None] * len(eqn.outputs)
        if questions is not None and degree == Degree.AFFINE:
            sources = _sources(eqn, found, questions)
        for number, source in zip(eqn.outputs, sources, strict=True):
            _set(found, program, number, degree, sites, questions is not None, source)
    return [found.of(a) for a in program.outputs]


def _set(
    found: Degrees,
    program: Program,
    number: int,
    degree: Degree,
    sites: frozenset[str],
    with_sources: bool,
    source: Source | None = None,
) -> None:
    if degree == Degree.CONSTANT:
        return
    found.degree[number], found.sites[number] = degree, sites
    if with_sources and degree == Degree.AFFINE:
        found.source[number] = source or _root(program, number)


def _scan_degrees(eqn: Equation, degrees: list[Degree]) -> list[Degree]:
    """Degrees of the outputs of a scan, from those of its inputs: what is carried depends on what was."""
    body, degrees = Program(body_of(eqn.params)), list(degrees)
    first, num_carry = layout_of(eqn.params)
    last = first + num_carry
    while True:
        found = Degrees({}, {}, {})
        for number, degree in zip(body.inputs, degrees, strict=True):
            _set(found, body, number, degree, frozenset(), False)
        outputs = _push(body, found, None)
        carried = [max(a, b) for a, b in zip(degrees[first:last], outputs, strict=False)]
        if carried == degrees[first:last]:
            return outputs
        degrees[first:last] = carried


def _root(program: Program, number: int) -> Source:
    shape = program.shape(number)
    return Source(number, np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape))


def _degree(eqn: Equation, degrees: list[Degree]) -> Degree:
    """Degree of an equation with at least one input that is not constant; unknown primitives are nonlinear."""
    name = eqn.primitive.name
    affine = [d == Degree.AFFINE for d in degrees]
    if Degree.NONLINEAR in degrees:
        return Degree.NONLINEAR
    if name in _JOINTLY_LINEAR:
        return Degree.AFFINE
    if name in _LINEAR_IN_FIRST or name == "div":
        return Degree.AFFINE if not any(affine[1:]) else Degree.NONLINEAR
    if name in _BILINEAR:
        return Degree.AFFINE if sum(affine) == 1 else Degree.NONLINEAR
    if name == "convert_element_type":
        is_inexact = np.issubdtype(np.dtype(eqn.params["new_dtype"]), np.inexact)
        return Degree.AFFINE if is_inexact else Degree.NONLINEAR
    if name in ("select_n",):
        return Degree.AFFINE if not affine[0] else Degree.NONLINEAR
    if name in ("scatter", "scatter-add", "scatter_add"):
        return Degree.AFFINE if not affine[1] else Degree.NONLINEAR
    if name == "dynamic_update_slice":
        return Degree.AFFINE if not any(affine[2:]) else Degree.NONLINEAR
    if name == "triangular_solve":
        return Degree.AFFINE if not affine[0] else Degree.NONLINEAR
    if name == "custom_linear_solve":  # of jnp.linalg.solve: the matrix, and what was made of it, come first
        return Degree.AFFINE if not any(affine[: sum(eqn.params["const_lengths"])]) else Degree.NONLINEAR
    return Degree.NONLINEAR


def _sources(eqn: Equation, found: Degrees, questions: Questions) -> list[Source | None]:
    """Sources of the outputs of an affine equation, None where it mixes elements or roots."""
    nothing: list[Source | None] = [None] * len(eqn.outputs)
    inputs = [None if found.of(a) == Degree.CONSTANT else found.source[a] for a in eqn.inputs]  # type: ignore[index]
    roots = {s.root for s in inputs if s is not None}
    if len(roots) != 1 or eqn.primitive.name in _MIXING:
        return nothing
    patterns: list[Pattern | None] = [None if s is None else s.elements[..., None] for s in inputs]
    out = propagate(eqn, patterns, questions.program, questions.decide)
    root = roots.pop()
    return [Source(root, p[..., 0]) if isinstance(p, np.ndarray) and p.shape[-1] == 1 else None for p in out]


def affine_cuts(program: Program, degrees: Degrees, atoms: Sequence[Atom]) -> set[int]:
    """The last affine values on the way to ``atoms``: those that a nonlinear operation reads, or atoms themselves."""
    cuts = {a for a in atoms if isinstance(a, int) and degrees.of(a) == Degree.AFFINE}
    for index in program.needed(atoms, [n for n, d in degrees.degree.items() if d == Degree.AFFINE]):
        cuts |= {a for a in program.equations[index].inputs if degrees.of(a) == Degree.AFFINE}  # type: ignore[misc]
    return cuts
