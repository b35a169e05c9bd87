"""An engine as pure functions of some arguments of its model: to be mapped, differentiated and run on other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.scipy.sparse.linalg import gmres

from ...compilation.pytree import PyTree
from ...compilation.store import shared
from ...structure import LatentGaussianReading
from ...structure.model.verification import check_form
from ..hyper.space import UnconstrainedSpace
from .algorithms.algorithm import Algorithm
from .algorithms.posterior import GaussianPosterior
from .programs import Programs

_LARGEST_DENSE, _BATCH = 1000, 32
"""Unknowns up to which the derivative of a fixed point is found by a matrix, and directions taken at once."""
_KRYLOV, _ROUNDS = 40, 20
_LONGEST_TRACE = 1


class ProgramState(NamedTuple):
    """A fit, as a tree of arrays: what one call hands to the next."""

    hyper: Array
    """Unconstrained values of the hyperparameters that are learned, shape ``(d,)``; see
    :meth:`EngineProgram.constrained`."""
    site_precision: Array
    """Precision of the Gaussian sites that stand for the factors, one for each row, shape ``(num_rows,)``."""
    site_shift: Array
    converged: Array
    num_steps: Array
    algorithm: Any
    """State from which the next fit starts. It has no derivative: nothing that is told depends on it, up to the
    tolerance."""


class EngineProgram:
    """Pure functions of arrays for one engine and one shape of its data; obtained as ``engine.program(...)``.

    ``arrays`` are values of the arguments that change, by name; those that are left out are what the program was made
    with. Every function may be given to ``jit``, ``vmap`` and ``grad``, and compiles once.

    :ivar changing: the arguments that change, with the values that the program was made with.
    """

    def __init__(
        self,
        reading: LatentGaussianReading,
        space: UnconstrainedSpace,
        algorithm: Algorithm,
        programs: Programs,
        start: Array,
        *,
        num_steps: int,
        max_iterations: int,
    ) -> None:
        self._reading, self._space, self._start = reading, space, start
        self.changing: dict[str, Any] = dict(reading.changing)
        self._functions = shared(_Functions, programs, algorithm, num_steps, max_iterations)

    def __repr__(self) -> str:
        shapes = {name: jax.tree.map(np.shape, value) for name, value in self.changing.items()}
        return f"EngineProgram({', '.join(f'{name} {shape}' for name, shape in shapes.items())})"

    def init(
        self, arrays: Mapping[str, object] | None = None, hyper: Mapping[str, object] | None = None
    ) -> ProgramState:
        """The state before any fit.

        :param arrays: values of the arguments that change, by name.
        :param hyper: values of hyperparameters (constrained); of others those of the engine's run, or where it has
            not run, those from which it would start.
        """
        values = self._start
        if hyper:
            given = {name: jnp.asarray(value) for name, value in hyper.items()}
            if not any(isinstance(value, jax.core.Tracer) for value in given.values()):
                given = {name: self._space.check(name, value) for name, value in given.items()}
            values = self._space.pack({**self._space.unpack(values), **given})
        return self._functions.init(*self._inputs(arrays), values)

    def fit(self, arrays: Mapping[str, object], state: ProgramState) -> ProgramState:
        """Fit the field at the hyperparameters of ``state``, from where it stopped.

        Derivatives in arrays and hyperparameters, by both modes, are those of the fixed point, by the implicit function
        theorem: nothing flows through the iteration, and where it did not converge they are nan.

        :param arrays: values of the arguments that change, by name.
        :param state: of :meth:`init` or of an earlier fit, on other values perhaps.
        """
        return self._functions.fit(*self._inputs(arrays), state)

    def learn(self, arrays: Mapping[str, object], state: ProgramState) -> ProgramState:
        """Learn the hyperparameters, from those of ``state``, and fit the field; it has no derivative.

        The engine's own search, to a point at which its objective has no slope; whether that is a maximum is judged by
        ``engine.run`` alone.
        """
        return self._functions.learn(*self._inputs(arrays), state)

    def predictors(self, arrays: Mapping[str, object], state: ProgramState) -> dict[str, tuple[Array, Array]]:
        """Mean and variance of the predictor of each observation, masked or not, by observed site.

        :param arrays: values of the arguments that change, by name.
        :param state: a fit.
        :return: arrays in the shape of the observations, with an axis behind where these have several rows each.
        """
        mean, variance = self._functions.predictors(*self._inputs(arrays), state)
        reading, out, start = self._reading, {}, 0
        families = zip(reading.observed_names, reading.factor_shapes, reading.rows_per_observation, strict=False)
        for name, shape, num_rows in families:
            here = slice(start, start + int(np.prod(shape)) * num_rows)
            whole, start = (*shape, *((num_rows,) if num_rows > 1 else ())), here.stop
            out[name] = mean[here].reshape(whole), variance[here].reshape(whole)
        return out

    def log_evidence(self, arrays: Mapping[str, object], state: ProgramState) -> Array:
        """Log evidence at the hyperparameters of ``state``, which is a fit to these arrays.

        Its derivatives in arrays and in ``state.hyper`` are those of fits that follow, as the sites are stationary.
        """
        return self._functions.log_evidence(*self._inputs(arrays), state)

    def constrained(self, state: ProgramState) -> dict[str, Array]:
        """All hyperparameters of a state by name, constrained."""
        return self._space.unpack(state.hyper)

    def check(self, arrays: Mapping[str, object] | None = None) -> None:
        """Compare the log density that was read with NumPyro's, at other values of the arguments that change.

        What was read are equations, and a likelihood is recognised at the values that the program was made with: this
        tells whether the model does the same elsewhere (no branch at a threshold, say).

        :raises ModelStructureError: if they differ.
        """
        reading = self._reading
        check_form(
            reading, jax.random.key(0), reading.with_changing(arrays or {})[: len(jax.tree.leaves(self.changing))]
        )

    def _inputs(self, arrays: Mapping[str, object] | None) -> tuple[Any, dict[str, Array]]:
        return self._reading.with_changing(arrays or {}), self._space.fixed


class _Fitted(NamedTuple):
    site_precision: Array
    site_shift: Array
    converged: Array
    num_steps: Array
    algorithm: Any


class _Functions:
    """The compiled functions, of ``(data, fixed, ...)`` as :class:`~.programs.Programs` have them."""

    def __init__(self, programs: Programs, algorithm: Algorithm, num_steps: int, max_iterations: int) -> None:
        self._programs, self._algorithm = programs, algorithm
        self._num_steps, self._max_iterations = num_steps, max_iterations
        self._fitted = jax.custom_jvp(self._solve)
        self._fitted.defjvp(self._fitted_jvp, symbolic_zeros=True)
        learned = jax.custom_jvp(self._learn)
        learned.defjvp(_refuse_derivative)
        self.init, self.fit, self.learn = jax.jit(self._init), jax.jit(self._fit), jax.jit(learned)
        self.predictors, self.log_evidence = jax.jit(self._predictors), jax.jit(self._log_evidence)

    def _form(self, data: Any, fixed: Any, hyper: Array) -> Any:
        return self._programs.form_at(data, fixed)(hyper)

    def _init(self, data: object, fixed: object, hyper: Array) -> ProgramState:
        form = self._form(data, fixed, hyper)
        nowhere = jnp.zeros_like(form.offset)
        return ProgramState(hyper, nowhere, nowhere, jnp.asarray(False), jnp.asarray(0), self._algorithm.init(form))

    def _fit(self, data: object, fixed: object, state: ProgramState) -> ProgramState:
        found = self._fitted(data, fixed, state.hyper, jax.lax.stop_gradient(state.algorithm))
        return ProgramState(state.hyper, *found)

    def _solve(self, data: object, fixed: object, hyper: Array, start: object) -> _Fitted:
        form = self._form(data, fixed, hyper)
        state, info = self._algorithm.solve(form, start, num_steps=self._num_steps, tol=self._programs.tol)
        posterior = self._algorithm.posterior(form, state)
        return _Fitted(posterior.site_precision, posterior.site_shift, info.converged, info.num_steps, state)

    def _fitted_jvp(self, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[_Fitted, _Fitted]:
        data, fixed, hyper, start = primals
        found = self._fitted(*primals)
        sites = found.site_precision, found.site_shift
        structure: Any
        leaves, structure = jax.tree.flatten((data, fixed, hyper))
        moves = jax.tree.leaves(tangents[:3])
        which = [n for n, move in enumerate(moves) if not isinstance(move, SymbolicZero)]

        def forced(moved: list[Array]) -> tuple[Array, Array]:
            values = dict(zip(which, moved, strict=True))
            return self._update(structure.unflatten([values.get(n, leaf) for n, leaf in enumerate(leaves)]), *sites)

        _, force = jax.jvp(forced, ([leaves[n] for n in which],), ([moves[n] for n in which],))
        _, push = jax.linearize(partial(self._update, (data, fixed, hyper)), *sites)

        def without_own(move: tuple[Array, Array]) -> tuple[Array, Array]:
            moved = push(*move)
            return move[0] - moved[0], move[1] - moved[1]

        answer = jax.lax.custom_linear_solve(without_own, force, _solution, _solution)
        answer = jax.tree.map(lambda leaf: jnp.where(found.converged, leaf, jnp.nan), answer)
        still = jax.tree.map(_no_tangent, found)
        return found, still._replace(site_precision=answer[0], site_shift=answer[1])

    def _update(self, inputs: PyTree, precision: Array, shift: Array) -> tuple[Array, Array]:
        """One step of the fixed point: see :meth:`Algorithm.update`."""
        form = self._form(*inputs)
        observed = jnp.concatenate(form.observed)
        new = self._algorithm.update(form, precision, shift)
        return jnp.where(observed, new[0], 0.0), jnp.where(observed, new[1], 0.0)

    def _learn(self, data: Sequence[object], fixed: Any, state: ProgramState) -> ProgramState:
        programs = self._programs
        start = programs.init_search(data, fixed, state.hyper, state.algorithm)
        # Nothing here would go on from where a search ends with few digits of the field.
        start = start._replace(is_coarse=jnp.asarray(False))
        search, _ = programs.whole_search(data, fixed, start, self._max_iterations, _LONGEST_TRACE)
        found = self._fit(data, fixed, state._replace(hyper=search.values, algorithm=search.best.state))
        return found._replace(converged=found.converged & search.converged)

    def _predictors(self, data: object, fixed: object, state: ProgramState) -> tuple[Array, Array]:
        posterior: GaussianPosterior = self._algorithm.posterior(self._form(data, fixed, state.hyper), state.algorithm)
        posterior = dataclasses.replace(posterior, site_precision=state.site_precision, site_shift=state.site_shift)
        mean, variance = posterior.predictor_moments()
        return mean, jnp.maximum(variance, 0.0)

    def _log_evidence(self, data: object, fixed: object, state: ProgramState) -> Array:
        return self._algorithm.log_evidence(
            self._form(data, fixed, state.hyper), jax.lax.stop_gradient(state.algorithm)
        )


def _solution(matvec: Any, target: tuple[Array, Array]) -> tuple[Array, Array]:
    """The solution of the equations of a fixed point for its derivative; nan if there is none."""
    flat = jnp.concatenate(target)
    if flat.size > _LARGEST_DENSE:
        return _krylov(matvec, target)

    def column(direction: Array) -> Array:
        return jnp.concatenate(matvec(tuple(jnp.split(direction, 2))))

    columns = jax.lax.map(column, jnp.eye(flat.size, dtype=flat.dtype), batch_size=min(_BATCH, flat.size))
    first, second = jnp.split(jnp.linalg.solve(columns.T, flat), 2)
    return first, second


def _krylov(matvec: Any, target: Any) -> Any:
    """The same by products, of which few are needed where a sweep changes little; nan if they do not suffice."""
    eps = float(jnp.finfo(jax.tree.leaves(target)[0].dtype).eps)
    found, _ = gmres(matvec, target, tol=10.0 * eps, restart=_KRYLOV, maxiter=_ROUNDS)

    def size(tree: object) -> Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    left = size(jax.tree.map(jnp.subtract, target, matvec(found)))
    is_solved = left <= eps**0.5 * size(target)
    return jax.tree.map(lambda leaf: jnp.where(is_solved, leaf, jnp.nan), found)


def _no_tangent(leaf: Any) -> Array | np.ndarray:
    is_real = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jnp.zeros_like(leaf) if is_real else np.zeros(jnp.shape(leaf), jax.dtypes.float0)


def _refuse_derivative(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
    raise TypeError(
        "learn has no derivative: differentiate fit, whose state holds the hyperparameters, or log_evidence by "
        "state.hyper."
    )
