"""From the log probability of a site to one factor per predictor: where to cut, and which rows result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..potentials import ElementwisePotential, TemperedPotential
from .degrees import Degree, Degrees, affine_cuts
from .dependence import DenseDependence, dependence, ids_of
from .program import Atom, Constant, Program
from .recognise import Built, recognise
from .tracing import FactorTrace

__all__ = ["Conflict", "FactorPlan", "plan_factor"]

Env = Mapping[int, Any]


class Conflict(Exception):
    """A set of field sites that cannot stay together: the reason, and the sites of which one must leave the field."""

    def __init__(self, message: str, sites: frozenset[str]):
        super().__init__(message)
        self.sites = sites


class FactorPlan(NamedTuple):
    """How to build one family of factors from hyperparameters and data."""

    name: str
    parts: tuple[tuple[int, np.ndarray], ...]
    """Affine values and the flat indices of their elements that are the predictors, row by row."""
    shape: tuple[int, ...]
    """Shape of the rows in the model."""
    build: Callable[[Env], tuple[Built, Any]]
    """From the values of hyperparameters and data: the potential and the observed mask."""
    label: str
    """What was recognised, in words."""
    is_closed_form: bool


def plan_factor(program: Program, degrees: Degrees, name: str, traced: FactorTrace, probe: Env) -> FactorPlan:
    """Read one site whose log probability depends on the field.

    :param traced: the site, with atoms of ``program`` as leaves.
    :param probe: values of all hyperparameters and data at one point, to test what was recognised.
    :raises Conflict: if an observation depends on the field through more than one predictor.
    """
    for part in ("mask", "scale"):
        atom = getattr(traced, part)
        if atom is not None and degrees.of(atom) != Degree.CONSTANT:
            raise Conflict(f"the {part} of site '{name}' depends on latent values.", degrees.sites_of(atom))
    if traced.parameters:
        found = recognise(program, degrees, traced.family.value, traced, probe)
        if found is not None:
            return _recognised_plan(program, name, traced, found)
    return _elementwise_plan(program, degrees, name, traced)


def _recognised_plan(program: Program, name: str, traced: FactorTrace, found: Any) -> FactorPlan:
    def build(env: Env) -> tuple[Built, Any]:
        mask, scale = program.evaluate([traced.mask, _or_one(traced.scale)], env)
        mask = jnp.reshape(mask, -1)
        built = found.build(env, mask)
        if traced.scale is not None:
            built = built._replace(potential=TemperedPotential(built.potential, jnp.reshape(scale, -1)))
        return built, mask

    shape = program.shape(traced.log_prob)
    label = found.label if traced.scale is None else f"{found.label}, weighted"
    return FactorPlan(name, ((found.predictor, found.rows),), shape, build, label, traced.scale is None)


def _or_one(atom: Atom | None) -> Atom:
    return Constant(1.0) if atom is None else atom


class _Term(NamedTuple):
    """``coefficient * sum(value)`` inside a log probability that the model had summed up itself."""

    atom: Atom
    factors: tuple[tuple[Atom, bool], ...]
    """Scalars that multiply the term, or divide it where the flag is set."""
    sign: float


def _elementwise_plan(program: Program, degrees: Degrees, name: str, traced: FactorTrace) -> FactorPlan:
    whole = [_Term(traced.log_prob, (), 1.0)]
    shape = program.shape(traced.log_prob)
    error: Conflict | None = None
    attempts = [whole] if shape != () else [_sum_terms(program, degrees, traced.log_prob), whole]
    if shape != () and int(np.prod(shape)) > 0:
        attempts.append(whole)
    for terms in attempts:
        try:
            return _plan_terms(program, degrees, name, traced, terms)
        except Conflict as conflict:
            error = error or conflict
    assert error is not None
    raise error


def _plan_terms(
    program: Program, degrees: Degrees, name: str, traced: FactorTrace, terms: Sequence[_Term]
) -> FactorPlan:
    varying = [t for t in terms if degrees.of(t.atom) != Degree.CONSTANT]
    fixed = [t for t in terms if degrees.of(t.atom) == Degree.CONSTANT]
    cut = _choose_cut(program, degrees, [t.atom for t in varying])
    starts = np.concatenate([[0], np.cumsum([_size(program, c) for c in cut])])
    seeds = {
        c: (start + np.arange(_size(program, c), dtype=np.int64)).reshape(*program.shape(c), 1)
        for c, start in zip(cut, starts[:-1], strict=True)
    }
    patterns = dependence(program, seeds, {}, [t.atom for t in varying])
    maps = [_single_predictor(program, degrees, name, t.atom, patterns[t.atom], cut, starts) for t in varying]  # type: ignore[index]
    used = np.unique(np.concatenate([ids_of(m) for m in maps]))
    one_to_one = len(varying) == 1 and maps[0].size == used.size and bool(np.all(maps[0] >= 0))
    if one_to_one:
        # keep the order of the rows, so that results line up with the observations
        used = maps[0].reshape(-1)
    position = np.full(int(starts[-1]) + 1, used.size)
    position[used] = np.arange(used.size)
    parts = tuple(
        (c, used[(used >= lo) & (used < hi)] - lo) for c, lo, hi in zip(cut, starts[:-1], starts[1:], strict=True)
    )
    # rows stand in the order of `parts`; `order` says where each lies in `used`
    order = np.concatenate([np.nonzero((used >= lo) & (used < hi))[0] for lo, hi in zip(starts[:-1], starts[1:], strict=True)])
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    # elements that depend on no predictor (a padded zero) are constants, kept with the first row
    targets = [np.where(m < 0, 0, np.append(rank, 0)[position[m]]).reshape(-1) for m in maps]
    depends = frozenset(program.ancestors([t.atom for t in varying], cut))
    given = tuple(sorted(depends & set((*program.inputs, *program.constants)) - set(cut)))

    def log_density(eta: Any, *values: Any) -> Any:
        env = dict(zip(given, values[: len(given)], strict=True))
        for c, lo, hi, (_, rows) in zip(cut, starts[:-1], starts[1:], parts, strict=True):
            begin = sum(len(r) for _, r in parts[: cut.index(c)])
            flat = jnp.zeros((int(hi - lo),), eta.dtype).at[rows].set(eta[begin : begin + len(rows)])
            env[c] = flat.reshape(program.shape(c))
        total = jnp.zeros((used.size,), eta.dtype)
        mask, scale = program.evaluate([traced.mask, _or_one(traced.scale)], env)
        for term, target in zip(varying, targets, strict=True):
            (value,) = program.evaluate([term.atom], env)
            if not one_to_one:
                value = jnp.where(mask, value, 0.0)
            value = _coefficient(program, term, env) * value
            value = jnp.reshape(value * scale if traced.scale is not None else value, -1)
            total = total.at[target].add(value)
        for term in fixed:
            (value,) = program.evaluate([term.atom], env)
            total = total.at[0].add(_coefficient(program, term, env) * jnp.sum(value))
        return total

    extra = [traced.mask, _or_one(traced.scale), *(t.atom for t in fixed), *(a for t in terms for a, _ in t.factors)]
    need_mask = program.ancestors(extra)
    given = tuple(sorted(set(given) | (need_mask & set((*program.inputs, *program.constants)))))

    def build(env: Env) -> tuple[Built, Any]:
        (mask,) = program.evaluate([traced.mask], env)
        if one_to_one:
            observed = jnp.ones((used.size,), bool).at[targets[0]].set(jnp.reshape(mask, -1))
        else:
            observed = jnp.zeros((used.size,), bool)
            for target in targets:
                flags = jnp.broadcast_to(jnp.reshape(mask, -1), target.shape)
                observed = observed.at[target].max(flags)
        return Built(ElementwisePotential(log_density, tuple(env[g] for g in given))), observed

    shape = program.shape(traced.log_prob) if one_to_one else (used.size,)
    return FactorPlan(name, parts, shape, build, "elementwise factor, by quadrature", False)


def _coefficient(program: Program, term: _Term, env: Env) -> Any:
    value: Any = term.sign
    for atom, divides in term.factors:
        (scalar,) = program.evaluate([atom], env)
        value = value / jnp.reshape(scalar, ()) if divides else value * jnp.reshape(scalar, ())
    return value


def _size(program: Program, atom: Atom) -> int:
    return int(np.prod(program.shape(atom)))


def _choose_cut(program: Program, degrees: Degrees, atoms: Sequence[Atom]) -> list[int]:
    """The affine values to cut at: one that everything passes through, else the sources of all of them."""
    cuts = affine_cuts(program, degrees, atoms)
    free = {n for n in degrees.degree if n in program.inputs}
    for candidate in sorted(cuts, reverse=True):
        index = degrees.source[candidate].index
        is_one_to_one = np.unique(index[index >= 0]).size == index.size
        if is_one_to_one and not program.ancestors(atoms, [candidate]) & free - {candidate}:
            return [candidate]
    roots = sorted({degrees.source[c].root for c in cuts})
    return roots


def _single_predictor(
    program: Program, degrees: Degrees, name: str, atom: Atom, pattern: Any, cut: Sequence[int], starts: np.ndarray
) -> np.ndarray:
    """For each element of ``atom`` the one predictor element it depends on.

    :raises Conflict: naming the sites if an element depends on several.
    """
    if isinstance(pattern, np.ndarray) and pattern.shape[-1] == 1:
        return pattern[..., 0]
    ids = ids_of(pattern)
    if isinstance(pattern, np.ndarray):
        counts = (pattern >= 0).sum(-1)
        where = tuple(int(i) for i in np.unravel_index(int(np.argmax(counts)), counts.shape))
        ids, count = ids_of(pattern[where]), int(counts.max(initial=0))
    else:
        assert isinstance(pattern, DenseDependence)
        where, count = (), ids.size
    involved = {c for c, lo, hi in zip(cut, starts[:-1], starts[1:], strict=True) if np.any((ids >= lo) & (ids < hi))}
    sites = frozenset().union(*(degrees.sites_of(c) for c in involved))
    element = f"element {where} of " if where else ""
    through = " and ".join(f"'{s}'" for s in sorted(sites))
    message = (
        f"site '{name}': {element}its log density depends on {count} predictors, through {through}{_mixing(program, degrees, atom)}. "
        "This engine treats one predictor, affine in the Gaussian sites, per observation: fix or give a hyperprior to "
        "all but one of these sites (field=[...] says which are the field), or use NUTS."
    )
    raise Conflict(message, sites)


def _mixing(program: Program, degrees: Degrees, atom: Atom) -> str:
    """Words for the first nonlinear operation that brings different sites together, if there is one."""
    for index in sorted(program.needed([atom], ())):
        eqn = program.equations[index]
        inputs = [a for a in eqn.inputs if degrees.of(a) != Degree.CONSTANT]
        if len(inputs) > 1 and all(degrees.of(a) == Degree.AFFINE for a in inputs):
            if degrees.of(eqn.outputs[0]) == Degree.NONLINEAR and eqn.primitive.name in ("mul", "dot_general"):
                names = [", ".join(sorted(degrees.sites_of(a))) for a in inputs]
                return f" (a product of {names[0]} and {names[1]})"
    return ""


def _sum_terms(program: Program, degrees: Degrees, atom: Atom) -> list[_Term]:
    """Undo the sums, signs and scalar factors at the end of a log probability: it equals the sum of these terms."""
    out: list[_Term] = []
    stack = [_Term(atom, (), 1.0)]
    while stack:
        term = stack.pop()
        index = program.defined_by.get(term.atom) if isinstance(term.atom, int) else None
        eqn = None if index is None or degrees.of(term.atom) == Degree.CONSTANT else program.equations[index]
        name = "" if eqn is None else eqn.primitive.name
        shapes = [] if eqn is None else [program.shape(a) for a in eqn.inputs]
        same = eqn is not None and all(int(np.prod(s)) == _size(program, eqn.outputs[0]) for s in shapes)
        if name == "reduce_sum" or (name in ("reshape", "squeeze", "expand_dims", "copy") and same):
            stack.append(term._replace(atom=eqn.inputs[0]))  # type: ignore[union-attr]
        elif name == "neg":
            stack.append(term._replace(atom=eqn.inputs[0], sign=-term.sign))  # type: ignore[union-attr]
        elif name in ("add", "sub") and same:
            second = term.sign if name == "add" else -term.sign
            stack.append(term._replace(atom=eqn.inputs[0]))  # type: ignore[union-attr]
            stack.append(term._replace(atom=eqn.inputs[1], sign=second))  # type: ignore[union-attr]
        elif name in ("mul", "div") and (scaled := _scalar_factor(program, degrees, eqn, name)) is not None:
            stack.append(_Term(scaled[0], (*term.factors, (scaled[1], name == "div")), term.sign))
        else:
            out.append(term)
    return out


def _scalar_factor(program: Program, degrees: Degrees, eqn: Any, name: str) -> tuple[Atom, Atom] | None:
    first, second = eqn.inputs
    if degrees.of(second) == Degree.CONSTANT and _size(program, second) == 1:
        return first, second
    if name == "mul" and degrees.of(first) == Degree.CONSTANT and _size(program, first) == 1:
        return second, first
    return None
