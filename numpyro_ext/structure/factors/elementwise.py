"""Factors of no known family: where to cut, which element hangs on which predictor, and the function between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.content import ByContent
from ..errors import Conflict
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees, affine_cuts
from ..program.equations import Atom, Constant
from ..program.patterns import Pattern, ids_of
from ..program.program import Program
from ..program.questions import Questions
from ..program.sums import Term
from .pairs import Pairs, Ranges, patterns_from

Env = Mapping[int, Any]


class ElementwiseFactor(ByContent):
    """A sum of elementwise terms, each element a function of one predictor, or of the two of a pair.

    There is one factor for each predictor, or pair of predictors.

    :param pairs: what :func:`~.pairs.find_pairs` has found, for factors of two predictors.
    :ivar cut: the affine values cut at.
    :ivar predictors: the flat indices of their elements that are the predictors, through all values cut at: shape
        ``(num_factors,)``, for pairs ``(num_factors, 2)``.
    :ivar shape: shape of the log probability if each of its elements has a predictor of its own, so that rows line up
        with observations; else elements that share a predictor are added up.
    :ivar given: the values of the program that :meth:`log_density` is told: the last ones that know nothing of the
        predictors, so that what they are computed from is computed once for all predictors.
    :ivar has_own_arguments: whether it is known of factors of pairs that each array of :meth:`arguments` has one
        element for all of them, or one for each that no other depends on.
    :raises Conflict: if an element depends on several predictors and pairs are not given.
    """

    def __init__(
        self,
        questions: Questions,
        degrees: Degrees,
        name: str,
        traced: FactorTrace,
        terms: Sequence[Term],
        *,
        pairs: Pairs | None = None,
    ) -> None:
        program, self.traced = questions.program, traced
        self.varying = [t for t in terms if degrees.of(t.atom) != Degree.CONSTANT]
        self.fixed = [t for t in terms if degrees.of(t.atom) == Degree.CONSTANT]
        atoms = [t.atom for t in self.varying]
        if pairs is not None:
            self.cut, maps = pairs
        else:
            self.cut = _choose_cut(program, degrees, atoms)
            ranges, patterns = patterns_from(questions, self.cut, atoms)
            # for each element of each term the number of its predictor, -1 for constants such as a padded zero
            maps = [_one_predictor(program, degrees, name, a, p, ranges).reshape(-1) for a, p in patterns]
        numbers = np.concatenate(maps)
        varies = numbers.reshape(len(numbers), -1)[:, 0] >= 0
        self.predictors, which = np.unique(numbers[varies], axis=0, return_inverse=True)
        self.is_one_to_one = len(maps) == 1 and len(self.predictors) == len(numbers)
        if self.is_one_to_one:
            self.predictors, which = numbers, np.arange(len(numbers))
        # constants are kept with the first factor
        row_of = np.zeros(len(numbers), int)
        row_of[varies] = which.reshape(-1)
        self.num_factors = len(self.predictors)
        self.shape = program.shape(self.varying[0].atom) if self.is_one_to_one else (self.num_factors,)
        # What was looked up is data like any other, so that other indices of the same shapes run the same programs.
        targets = np.split(row_of, np.cumsum([len(m) for m in maps])[:-1])
        self._targets = [
            None if _is_identity(t, self.num_factors) else questions.carry(t.astype(np.int32)) for t in targets
        ]
        num_elements = sum(int(np.prod(program.shape(atom))) for atom in self.cut)
        # Each predictor of the factors is one of the values, element by element, or all of them are looked up.
        is_in_order = _is_identity(self.predictors.T.reshape(-1), num_elements)
        self._places = None if is_in_order else questions.carry(self.predictors.astype(np.int32))
        self.program = questions.program  # with what was carried
        scalars = [a for t in terms for a, _ in t.scalars]
        wanted = [*atoms, *scalars, *self._modifiers]
        looked_up = [n for n in (*self._targets, self._places) if n is not None]
        self.given = (*program.frontier(wanted, self.cut), *looked_up)
        self.has_own_arguments = pairs is not None and is_in_order and self._have_own_arguments(questions, atoms)

    @cached_property
    def log_density(self) -> Callable[..., Array]:
        """Log factors at predictors of the shape of :attr:`predictors`, given :meth:`arguments`.

        Engines ask for it in many places of one program: it is traced, differentiated and mapped once for all.
        """
        return jax.jit(self._log_density)

    @cached_property
    def log_density_of_columns(self) -> Callable[..., Array]:
        """The same of two columns of predictors, see :attr:`.PairPotential.columns`."""
        return jax.jit(self._of_columns)

    @property
    def _modifiers(self) -> list[Atom]:
        return [self.traced.mask, Constant(1.0) if self.traced.scale is None else self.traced.scale]

    @property
    def _are_columns(self) -> bool:
        """True if the values cut at are the first and the second predictors of pairs."""
        sizes = [np.prod(self.program.shape(atom)) for atom in self.cut]
        return self._places is None and sizes == [self.num_factors, self.num_factors]

    def _have_own_arguments(self, questions: Questions, atoms: Sequence[Atom]) -> bool:
        large = [n for n in self.given if np.prod(self.program.shape(n)) != 1]
        if any(np.prod(self.program.shape(n)) != self.num_factors for n in large):
            return False
        # with as many elements in each, the numbers of those of one factor differ by multiples of this
        numbers = np.arange(self.num_factors)[:, None]
        for atom, pattern in patterns_from(questions, [*self.cut, *large], atoms)[1]:
            if not isinstance(pattern, np.ndarray) or np.prod(self.program.shape(atom)) != self.num_factors:
                return False
            seen = pattern.reshape(self.num_factors, -1)
            if np.any((seen >= 0) & (seen % self.num_factors != numbers)):
                return False
        return all(target is None for target in self._targets)

    def _log_density(self, eta: Array, *values: Any) -> Array:
        if self._are_columns:
            return self._of_columns(eta[:, 0], eta[:, 1], *values)
        env = dict(zip(self.given, values, strict=False))
        shapes = [self.program.shape(atom) for atom in self.cut]
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = eta.T.reshape(-1)
        if self._places is not None:
            # What nobody sees, as the case that is not selected, has a predictor of another in its place.
            unseen = [jax.lax.stop_gradient(eta) if n == eta.size else jnp.zeros((n,), eta.dtype) for n in sizes]
            flat = jnp.concatenate([x.reshape(-1) for x in unseen]).at[env[self._places]].set(eta)
        return self._total(jnp.split(flat, np.cumsum(sizes)[:-1]), env, values)

    def _of_columns(self, first: Array, second: Array, *values: Any) -> Array:
        """The same where each predictor of a pair is an array of its own."""
        if self._are_columns:
            return self._total([first, second], dict(zip(self.given, values, strict=False)), values)
        return self._log_density(jnp.stack([first, second], axis=-1), *values)

    def _total(self, pieces: Sequence[Array], env: dict[int, Any], values: tuple[Any, ...]) -> Array:
        """The sum of the terms, with the elements of the values cut at."""
        dtype, shapes = pieces[0].dtype, [self.program.shape(atom) for atom in self.cut]
        env |= {a: jnp.reshape(piece, shape) for a, piece, shape in zip(self.cut, pieces, shapes, strict=True)}
        mask, scale = self.program.evaluate(self._modifiers, env)
        total = values[-1].astype(dtype) if self.fixed else jnp.zeros((self.num_factors,), dtype)
        for term, target in zip(self.varying, self._targets, strict=True):
            value = scale * term.coefficient(self.program, env) * self.program.evaluate([term.atom], env)[0]
            if not self.is_one_to_one:
                value = jnp.where(mask, value, 0.0)
            total = _add_to(total, None if target is None else env[target], jnp.reshape(value, -1).astype(dtype))
        return total

    def observed(self, env: Env) -> Array:
        """Mask of the factors that are observed, at given hyperparameters and data."""
        (mask,) = self.program.evaluate([self.traced.mask], env)
        observed = jnp.zeros((self.num_factors,), bool)
        for term, target in zip(self.varying, self._targets, strict=True):
            own = jnp.broadcast_to(jnp.reshape(mask, -1), (int(np.prod(self.program.shape(term.atom))),))
            observed = observed | own if target is None else observed.at[env[target]].max(own)
        return observed

    def arguments(self, env: Env) -> tuple[Any, ...]:
        """All that is needed of hyperparameters and data, computed as far as it goes: the values of :attr:`given`, and
        what is added to the log factors, where terms have no predictor."""
        given = tuple(self.program.evaluate(self.given, env))
        if not self.fixed:
            return given
        mask, scale = self.program.evaluate(self._modifiers, env)
        total = jnp.zeros((), jnp.result_type(float))
        for term in self.fixed:
            value = term.coefficient(self.program, env) * jnp.sum(self.program.evaluate([term.atom], env)[0])
            total += jnp.where(jnp.all(mask), jnp.max(scale) * value, 0.0)
        return *given, jnp.zeros((self.num_factors,), total.dtype).at[0].set(total)


def _is_identity(index: np.ndarray, size: int) -> bool:
    return index.shape == (size,) and bool(np.all(index == np.arange(size)))


def _add_to(total: Array, target: Array | None, values: Array) -> Array:
    return total + values if target is None else total.at[target].add(values)


def _choose_cut(program: Program, degrees: Degrees, atoms: Sequence[Atom]) -> list[int]:
    """The affine values to cut at: one that everything passes through, else the sources of all of them."""
    cuts = affine_cuts(program, degrees, atoms)
    free = {n for n in degrees.degree if n in program.inputs}
    for candidate in sorted(cuts, reverse=True):
        index = degrees.source[candidate].elements
        is_one_to_one = np.unique(index[index >= 0]).size == index.size
        if is_one_to_one and not program.ancestors(atoms, [candidate]) & free - {candidate}:
            return [candidate]
    return sorted({degrees.source[c].root for c in cuts})


def _one_predictor(
    program: Program,
    degrees: Degrees,
    name: str,
    atom: Atom,
    pattern: Pattern,
    ranges: Ranges,
) -> np.ndarray:
    if isinstance(pattern, np.ndarray) and pattern.shape[-1] == 1:
        return pattern[..., 0]
    ids, element = ids_of(pattern), ""
    if isinstance(pattern, np.ndarray):
        counts = (pattern >= 0).sum(-1)
        where = tuple(int(i) for i in np.unravel_index(int(np.argmax(counts)), counts.shape))
        ids, element = ids_of(pattern[where]), f"element {where} of " if where else ""
    sites = frozenset().union(*(degrees.sites_of(c) for c, lo, hi in ranges if np.any((ids >= lo) & (ids < hi))))
    through = " and ".join(f"'{s}'" for s in sorted(sites))
    remedy = (
        "fix or give a hyperprior to all but one of these sites (field=[...] says which are the field)"
        if len(sites) > 1
        else "write the data as observations of one predictor each (counts by category as Poisson, an outcome as "
        "Categorical(logits=...), correlated noise as a latent Gaussian site of its own)"
    )
    product = _product(program, degrees, atom)
    if product and len(sites) > 1:
        remedy += ", take BilinearVG, which integrates over both factors of a product"
    raise Conflict(
        f"site '{name}': {element}its log density depends on {ids.size} predictors, through {through}"
        f"{product}. This engine treats one predictor, affine in the Gaussian sites, per "
        f"observation: {remedy}, or use NUTS.",
        sites,
        name,
    )


def _product(program: Program, degrees: Degrees, atom: Atom) -> str:
    """Words for the first product of two affine values on the way, if there is one."""
    for index in sorted(program.needed([atom], ())):
        eqn = program.equations[index]
        factors = [a for a in eqn.inputs if degrees.of(a) == Degree.AFFINE]
        if eqn.primitive.name in ("mul", "dot_general") and len(factors) > 1:
            names = [", ".join(sorted(degrees.sites_of(a))) for a in factors]
            return f" (a product of {names[0]} and {names[1]})"
    return ""
