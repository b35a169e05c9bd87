"""Factorisation inside JAX programs: calls of the host, and the rules of their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

from ..frozen_pytree import frozen_pytree
from ..host_call import host_call
from . import numeric
from .analysis import Analysis, analyse, known_analysis
from .pattern import AnyPattern, SparsePattern, multiply

_COLUMNS_AT_ONCE = 16
"""Right-hand sides that are solved for together: of more, what fronts pass on leaves the cache, and memory for
it is asked of the system each time."""


@frozen_pytree
class SparseFactor:
    """Cholesky factor of a sparse symmetric matrix, a pytree; :func:`factorise` makes it.

    All answers are nan where the matrix is not positive definite. They are computed in double precision on the host,
    one after the other under ``vmap``.
    """

    values: Array
    """Entries of the matrix, shape (nnz,)."""
    words: Array
    """Bytes of the factor's doubles as uint32, since JAX without ``jax_enable_x64`` holds no doubles."""
    raw_log_determinant: Array
    """Log determinant without its derivatives."""
    pattern: AnyPattern

    @property
    def log_determinant(self) -> Array:
        """Log determinant of the matrix, a scalar; differentiable twice in the values.

        Its gradient is the selected inverse, that of off-diagonal entries twice.
        """
        return _log_determinant(self.pattern, self.values, self.words, self.raw_log_determinant)

    def solve(self, b: ArrayLike) -> Array:
        """Solution of ``H x = b``, differentiable in the values and in ``b`` to any order.

        :param b: right-hand sides, shape (n,) or (n, k).
        :return: of the shape of ``b``.
        :raises ValueError: if ``b`` has another number of rows.
        """
        values, b = _promoted(self.values, self._checked(b))
        return lax.custom_linear_solve(
            partial(multiply, self.pattern, values),
            b,
            lambda _, b: _call(self.pattern, _solve, b, self.words, b),
            symmetric=True,
        )

    def half_solve(self, z: ArrayLike) -> Array:
        """Draws ``P' L^-T z``: with white noise ``z`` their covariance is the inverse of the matrix.

        Differentiable in ``z``. A derivative in the values is refused: it would need the whole inverse.

        :param z: shape (n,) or (n, k), in the order of elimination.
        :return: of the shape of ``z``.
        :raises ValueError: if ``z`` has another number of rows.
        """
        values, z = _promoted(self.values, self._checked(z))
        z = z * one_without_derivative("SparseFactor.half_solve", values)
        # A linear map and its transpose; the first argument only says that the shapes are equal.
        return lax.custom_linear_solve(
            lambda x: x,
            z,
            lambda _, z: _call(self.pattern, _half_solve, z, self.words, z),
            lambda _, x: _call(self.pattern, _half_solve_transposed, x, self.words, x),
        )

    def selected_inverse(self) -> Array:
        """Inverse at the entries of the pattern, shape (nnz,); differentiable once in the values."""
        return _selected_inverse(self.pattern, self.values, self.words)

    def held(self, values: Array) -> SparseFactor:
        """The same factor beside the values that it is of as something else has computed them: derivatives, of first
        order alone, are by those."""
        return SparseFactor(values, *lax.stop_gradient((self.words, self.raw_log_determinant)), self.pattern)

    def _checked(self, b: ArrayLike) -> Array:
        b = jnp.asarray(b)
        if b.ndim not in (1, 2) or b.shape[0] != self.pattern.size:
            n = self.pattern.size
            raise ValueError(f"Right-hand sides have shape ({n},) or ({n}, k), not {b.shape}.")
        return b


def factorise(pattern: AnyPattern, values: ArrayLike) -> SparseFactor:
    """Cholesky factor of the symmetric matrix that has given values at the entries of a pattern.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg.sparse_cholesky import SparsePattern, factorise
    >>> pattern = SparsePattern.of(2, [1], [0])
    >>> factor = factorise(pattern, jnp.array([2.0, 1.0, 3.0]))  # (0, 0), (1, 0), (1, 1)
    >>> round(float(jnp.exp(factor.log_determinant)), 4)
    5.0
    >>> factor.solve(jnp.array([3.0, 4.0])).round(4).tolist()
    [1.0, 1.0]

    Cost: that of :func:`analyse` once for each pattern, then its ``flops``, on the host: a call costs 20 µs beside
    its work. May stand inside ``jit``, ``vmap`` and loops.

    :param pattern: entries of the lower triangle; a program is compiled for a :class:`SparsePattern`, and for the shape
        of a :class:`~.pattern.CarriedPattern` alone.
    :param values: real numbers in the order of the pattern, shape (nnz,), concrete or traced. Where the matrix is not
        positive definite, all answers are nan.
    :raises ValueError: if ``values`` has another shape, or the factor would not fit (:func:`analyse`).
    :raises TypeError: if ``values`` are complex.
    """
    values = _checked_values(pattern, values)
    words, log_determinant = _callback(pattern, _factorise, _of_factor(pattern, values), lax.stop_gradient(values))
    return SparseFactor(values, words, log_determinant, pattern)


def factorise_and_solve(pattern: AnyPattern, values: ArrayLike, b: Array) -> tuple[SparseFactor, Array]:
    """:func:`factorise` and the answer of :meth:`SparseFactor.solve`, by one call of the host.

    :param pattern: as for :func:`factorise`.
    :param values: as for :func:`factorise`.
    :param jax.Array b: right-hand sides, shape (n,) or (n, k).
    """
    values, b = _promoted(_checked_values(pattern, values), b)
    result = *_of_factor(pattern, values), jax.ShapeDtypeStruct(b.shape, b.dtype)
    words, log_determinant, x = _callback(pattern, _factorise_and_solve, result, *lax.stop_gradient((values, b)))
    return SparseFactor(values, words, log_determinant, pattern), _known_solution(pattern, values, words, b, x)


def _checked_values(pattern: AnyPattern, values: ArrayLike) -> Array:
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise TypeError("factorise: the values of a sparse matrix are real numbers here, not complex.")
    (values,) = _promoted(values)
    if values.shape != (pattern.num_entries,):
        raise ValueError(
            f"factorise: values have shape {values.shape}, the pattern has {pattern.num_entries} entries in its lower "
            "triangle. For several matrices of one pattern use jax.vmap."
        )
    return values


def _of_factor(pattern: AnyPattern, values: Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of the words of a factor and of its log determinant."""
    length = analyse(pattern).length if isinstance(pattern, SparsePattern) else pattern.length
    return jax.ShapeDtypeStruct((2 * length,), jnp.uint32), jax.ShapeDtypeStruct((), values.dtype)


def white_noise(rng_key: Array, dtype: DTypeLike, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    """Standard normal numbers made by NumPy on the host, in an eighth of the time of :func:`jax.random.normal`.

    The numbers are those of NumPy's default generator, begun with the words of the key.

    >>> from jax import random
    >>> [noise.shape for noise in white_noise(random.key(0), float, (2, 3), (1, 3))]
    [(2, 3), (1, 3)]

    :param jax.Array rng_key: random key.
    :param dtype: of the numbers.
    :param tuple shapes: of the arrays, which are filled one after the other.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)

    def on_host(outputs: tuple[np.ndarray, ...], words: NDArray[np.uint32]) -> None:
        generator = np.random.default_rng(words)
        for out in outputs:
            if out.dtype == np.float64:
                generator.standard_normal(out=out)
            else:  # of single precision, the same numbers rounded
                out[...] = generator.standard_normal(out.shape)

    result = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    found: tuple[Array, ...] = host_call(on_host, result, jax.random.key_data(rng_key), fills=True)
    return found


def _promoted(*arrays: Array) -> tuple[Array, ...]:
    dtype = jnp.result_type(*arrays)
    dtype = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
    return tuple(a.astype(dtype) for a in arrays)


# ---- calls of the host ----


def _callback(pattern: AnyPattern, function: Callable[..., object], result: object, *args: Array) -> Any:
    """Result of a function of the analysis, of the arrays that it is to fill, and of others."""
    carried, structure = jax.tree.flatten(pattern)  # nothing of a pattern that is static

    def on_host(outputs: object, carried: list[NDArray[np.generic]], *arrays: NDArray[np.generic]) -> None:
        analysis = known_analysis(jax.tree.unflatten(structure, carried))
        with np.errstate(all="ignore"):  # what is not finite comes back as nan
            function(analysis, outputs, *arrays)

    return host_call(on_host, result, carried, *args, fills=True)


def _call(pattern: AnyPattern, function: Callable[..., object], like: Array, *args: Array) -> Array:
    """Result of the shape and type of one of the arguments."""
    return _callback(pattern, function, jax.ShapeDtypeStruct(like.shape, like.dtype), *args)


def _factorise(analysis: Analysis, out: tuple[np.ndarray, ...], values: np.ndarray) -> None:
    words, log_determinant = out
    factor = numeric.factorise(analysis.batches, values.astype(np.float64, copy=False), _doubles(words))
    log_determinant[...] = numeric.log_determinant(analysis.batches, factor)


def _factorise_and_solve(analysis: Analysis, out: tuple[np.ndarray, ...], values: np.ndarray, b: np.ndarray) -> None:
    words, log_determinant, x = out
    _factorise(analysis, (words, log_determinant), values)
    _solve(analysis, x, words, b)


def _doubles(words: np.ndarray) -> NDArray[np.float64]:
    return words.view(np.float64)


def _in_columns(
    function: Callable[[Analysis, NDArray[np.float64], np.ndarray, np.ndarray], None],
) -> Callable[[Analysis, np.ndarray, np.ndarray, np.ndarray], None]:
    """Function of right-hand sides of shape (n, k), for those of shape (n,) and for any number of columns as well."""

    def of_any_shape(analysis: Analysis, out: np.ndarray, words: np.ndarray, b: np.ndarray) -> None:
        factor, size = _doubles(words), analysis.order.size
        columns, found = b.reshape(size, -1), out.reshape(size, -1)
        for first in range(0, columns.shape[1], _COLUMNS_AT_ONCE):
            own = slice(first, first + _COLUMNS_AT_ONCE)
            function(analysis, factor, found[:, own], columns[:, own])

    return of_any_shape


@_in_columns
def _solve(analysis: Analysis, factor: Any, out: np.ndarray, b: np.ndarray) -> None:
    y = numeric.solve_lower(analysis.batches, factor, b[analysis.order])
    out[analysis.order] = numeric.solve_upper(analysis.batches, factor, y)


@_in_columns
def _half_solve(analysis: Analysis, factor: Any, out: np.ndarray, z: np.ndarray) -> None:
    out[analysis.order] = numeric.solve_upper(analysis.batches, factor, z)


@_in_columns
def _half_solve_transposed(analysis: Analysis, factor: Any, out: np.ndarray, x: np.ndarray) -> None:
    out[...] = numeric.solve_lower(analysis.batches, factor, x[analysis.order])


def _selected_inverse_on_host(analysis: Analysis, out: np.ndarray, words: np.ndarray) -> None:
    out[...] = numeric.selected_inverse(analysis.batches, _doubles(words), out.size)


def _tangent_on_host(analysis: Analysis, out: np.ndarray, words: np.ndarray, tangent: np.ndarray) -> None:
    tangent = tangent.astype(np.float64, copy=False)
    out[...] = numeric.selected_inverse_tangent(analysis.batches, _doubles(words), tangent)


# ---- derivatives ----


@jax.custom_jvp
def _known_solution(pattern: AnyPattern, values: Array, words: Array, b: Array, raw: Array) -> Array:
    return raw


@_known_solution.defjvp
def _known_solution_jvp(primals: tuple[Any, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    pattern, values, words, b, raw = primals
    x = _known_solution(pattern, values, words, b, raw)
    change = tangents[3] - multiply(pattern, tangents[1], x)
    return x, SparseFactor(values, words, jnp.zeros((), values.dtype), pattern).solve(change)


@jax.custom_jvp
def _log_determinant(pattern: AnyPattern, values: Array, words: Array, raw: Array) -> Array:
    return raw


@_log_determinant.defjvp
def _log_determinant_jvp(primals: tuple[Any, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    pattern, values, words, raw = primals
    inverse = _selected_inverse(pattern, values, words)
    return _log_determinant(pattern, values, words, raw), jnp.sum(_times(pattern, inverse) * tangents[1])


def _times(pattern: AnyPattern, entries: Array) -> Array:
    """Entries counted as often as they are in the whole matrix: twice off the diagonal."""
    return jnp.where(pattern.rows == pattern.columns, 1, 2) * entries


@jax.custom_jvp
def _selected_inverse(pattern: AnyPattern, values: Array, words: Array) -> Array:
    return _call(pattern, _selected_inverse_on_host, values, words)


@_selected_inverse.defjvp
def _selected_inverse_jvp(primals: tuple[Any, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    pattern, values, words = primals
    # Both this map and its transpose, since the factor of the transpose is the same.
    tangent = tangents[1] * one_without_derivative("SparseFactor: the derivative of the selected inverse", values)

    def transposed(_: object, y: Array) -> Array:
        # the second derivative of the log determinant is symmetric once entries are counted as often as they occur
        y = y / _times(pattern, jnp.ones_like(y))
        return _times(pattern, _call(pattern, _tangent_on_host, y, words, y))

    # a linear map and its transpose, as in `half_solve`
    change = lax.custom_linear_solve(
        lambda x: x, tangent, lambda _, x: _call(pattern, _tangent_on_host, x, words, x), transposed
    )
    return _selected_inverse(pattern, values, words), change


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def one_without_derivative(what: str, values: Array) -> Array:
    """Number 1 as a factor of what has no derivative with respect to ``values``: asking for one is refused."""
    return jnp.ones((), values.dtype)


def _one_without_derivative_jvp(
    what: str, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    if not isinstance(tangents[0], SymbolicZero):
        raise NotImplementedError(
            f"{what} has no derivative in the values of the matrix: it would need the whole inverse. "
            "jax.lax.stop_gradient(values) says that none is wanted."
        )
    return one_without_derivative(what, *primals), jnp.zeros((), primals[0].dtype)


one_without_derivative.defjvp(_one_without_derivative_jvp, symbolic_zeros=True)
