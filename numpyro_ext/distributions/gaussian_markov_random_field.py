"""Gaussian vectors of a sparse precision: proper, flat along a null space, or conditioned on sums of zero."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from ..linalg.frozen_pytree import FixedArray
from .categories import checked_key
from .sparse_precisions.checks import is_concrete
from .sparse_precisions.directions import OrthogonalTo
from .sparse_precisions.factors import Entries
from .sparse_precisions.precision import SparsePrecision, checked_directions

_LOG_2PI = math.log(2.0 * math.pi)


class GaussianMarkovRandomField(Distribution):
    r"""Gaussian vector with a sparse precision matrix :math:`Q`: a map, a walk, a surface or a mesh.

    Three kinds of fields:

    - Proper, :math:`N(\mu, Q^{-1})` with :math:`Q` positive definite.
    - **Flat along the null space**, with ``null_space=N`` where :math:`Q N = 0`. The density is
      :math:`(2\pi)^{-(n - k) / 2} \sqrt{|Q|_+}\, e^{-(x - \mu)^T Q (x - \mu) / 2}` with :math:`|Q|_+` the product of
      the eigenvalues that are not zero: normalised on what is orthogonal to :math:`N`, constant along :math:`N`. It is
      improper, so that it has no draws and no moments.
    - **Conditioned on sums of zero**, with ``sum_to_zero=True``: the values are orthogonal to *every* column of
      ``null_space``. For a map that is a sum of zero over each connected part (and zero on islands), for a walk of
      second order neither level nor slope. Without ``null_space`` the matrix is positive definite and the sum of all
      values is zero. The conditioning is exact, by kriging, in density, draws and moments alike. The density is one on
      the subspace: its support has ``n - k`` dimensions, and :func:`numpyro.distributions.biject_to` maps to it by an
      isometry, as for ``ZeroSumNormal``, so that samplers and guides see ``n - k`` free numbers.

    Where the numbers of :math:`Q` are a factor times constants (:meth:`SparsePrecision.scale_by`), the log determinant
    is known once and for all; else each evaluation costs a sparse factorisation. Both have derivatives.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_ext.distributions import GaussianMarkovRandomField, difference_precision
        >>> walk = difference_precision(4, order=1)
        >>> flat = GaussianMarkovRandomField(walk.scale_by(4.0), null_space=walk.null_space)
        >>> x = jnp.array([0.0, 1.0, 1.0, 2.0])
        >>> print(flat.log_prob(x).round(4), flat.log_prob(x + 100.0).round(4))
        -3.9842 -3.9842
        >>> zero_sum = GaussianMarkovRandomField(walk, null_space=walk.null_space, sum_to_zero=True)
        >>> print(zero_sum.variance.round(3))
        [0.875 0.375 0.375 0.875]
        >>> print(zero_sum.sample(random.key(0), (2,)).shape)
        (2, 4)

    **References**

    1. Rue, H. and Held, L. (2005), *Gaussian Markov Random Fields*, sections 2.3.3 (kriging) and 3.2 (intrinsic).

    :param precision: :math:`Q`, a :class:`SparsePrecision` or what :meth:`SparsePrecision.of` takes: a ``scipy.sparse``
        matrix, a ``BCOO``, a dense array.
    :param loc: :math:`\mu`, a number or shape ``(..., n)``.
    :param null_space: what :math:`Q` annihilates, shape ``(n, k)`` or ``(n,)``; must be known (not traced). It has to
        be given although a precision may know its own, so that a program says where it is improper.
    :param sum_to_zero: whether values are conditioned on being orthogonal to ``null_space``, or on adding up to zero.
    :raises ValueError: if the precision is known and not positive definite outside of ``null_space``, does not
        annihilate it, or is one of those that :meth:`SparsePrecision.of` refuses. Where its numbers are traced,
        ``log_prob`` is ``nan`` instead.
    """

    arg_constraints = {"loc": constraints.real_vector}
    reparametrized_params = ["loc"]
    pytree_data_fields = ("loc", "numbers", "scale")
    pytree_aux_fields = ("entries", "constants", "sum_to_zero")

    def __init__(
        self,
        precision: object,
        loc: ArrayLike = 0.0,
        *,
        null_space: ArrayLike | None = None,
        sum_to_zero: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        precision = SparsePrecision.of(precision)
        size = precision.size
        null = None
        if null_space is not None:
            null = FixedArray(checked_directions(null_space, size, "GaussianMarkovRandomField"))
        elif precision.directions is not None:
            raise ValueError(
                "GaussianMarkovRandomField: the precision is not positive definite: it is flat along "
                f"{precision.directions.array.shape[1]} directions. Give null_space=precision.null_space (and "
                "sum_to_zero=True for a field that has draws), or add a small number to the diagonal."
            )
        self.sum_to_zero = bool(sum_to_zero)
        ones = FixedArray(np.ones((size, 1)))
        constraint = (ones if null is None else null) if self.sum_to_zero else None
        self.entries = Entries(size, precision.rows, precision.columns, null, constraint)
        if self.entries.rank == 0:
            raise ValueError(
                f"GaussianMarkovRandomField: all {size} directions are flat, so that nothing is Gaussian. Take "
                "ImproperUniform, or leave the site out where values add up to zero."
            )
        loc = jnp.asarray(loc, jnp.result_type(float))
        if loc.ndim and loc.shape[-1] not in (1, size):
            raise ValueError(
                f"GaussianMarkovRandomField: the precision has {size} unknowns; got loc of shape {loc.shape}."
            )
        batch_shape = lax.broadcast_shapes(precision.batch_shape, loc.shape[:-1])
        self.constants, self.numbers = precision.constants, precision.numbers
        self.scale = jnp.broadcast_to(precision.scale, batch_shape)
        self.loc = jnp.broadcast_to(loc, (*batch_shape, size))
        if self.constants is not None:
            self.entries.constant_log_determinant(self.constants)  # refuses
        elif is_concrete(self.numbers):
            for numbers in np.asarray(self.numbers).reshape(-1, len(precision.rows.array)):
                self.entries.constant_log_determinant(FixedArray(numbers))
        super().__init__(batch_shape=batch_shape, event_shape=(size,), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        """All real vectors, or those that are orthogonal to what ``sum_to_zero`` says."""
        constraint = self.entries.constraint
        return constraints.real_vector if constraint is None else OrthogonalTo(constraint)

    @property
    def precision(self) -> SparsePrecision:
        """The precision, of the batch shape that it was given."""
        made = object.__new__(SparsePrecision)
        fields = (self.entries.size, self.entries.rows, self.entries.columns, self.constants, self.numbers, self.scale)
        names = ("size", "rows", "columns", "constants", "numbers", "scale")
        for name, value in zip((*names, "directions"), (*fields, self.entries.null_space), strict=True):
            object.__setattr__(made, name, value)
        return made

    @property
    def is_proper(self) -> bool:
        """True if the density has a finite integral: there is no null space, or values are orthogonal to it."""
        return self.entries.null_space is None or self.sum_to_zero

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log density of vectors on the last axis, by the generalised determinant where the precision is singular."""
        value = jnp.asarray(value)
        residual = value - self.mode
        if self.entries.null_directions is not None:
            # a large level would take the digits of the differences
            residual = self.entries.null_directions.without(residual)
        quadratic = self.scale * self.entries.quadratic(self._numbers, residual)
        rank = self.entries.rank
        return 0.5 * (self._log_determinant() + rank * (jnp.log(self.scale) - _LOG_2PI) - quadratic)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of shape ``sample_shape + batch_shape + (n,)``; one factorisation serves all of them.

        :raises NotImplementedError: if the field is flat along a null space.
        """
        self._check_proper("drawn from")
        key = checked_key(self, key)
        shape = (*sample_shape, *self.batch_shape)
        white = random.normal(key, (*shape, self.entries.size), self.loc.dtype)
        numbers = self._numbers
        own = numbers.ndim - 1  # axes of the batch along which numbers differ
        front = len(shape) - own
        expanded = jnp.broadcast_to(numbers, (*shape[front:], numbers.shape[-1])) if own else numbers
        columns = jnp.moveaxis(white.reshape(-1, *white.shape[front:]), 0, -1)
        drawn = jnp.vectorize(self.entries.coloured, signature="(m),(n,d)->(n,d)")(expanded, columns)
        drawn = jnp.moveaxis(drawn, -1, 0).reshape(white.shape)
        return self.mode + drawn / jnp.sqrt(self.scale)[..., None]

    @property
    def mean(self) -> Array:
        """Mean, shape ``batch_shape + (n,)``.

        :raises NotImplementedError: if the field is flat along a null space.
        """
        self._check_proper("averaged")
        return jnp.broadcast_to(self.mode, (*self.batch_shape, self.entries.size))

    @property
    def variance(self) -> Array:
        """Marginal variances, shape ``batch_shape + (n,)``, by the selected inverse.

        :raises NotImplementedError: if the field is flat along a null space.
        """
        self._check_proper("averaged")
        found = jnp.vectorize(self.entries.variances, signature="(m)->(n)")(self._numbers)
        return jnp.broadcast_to(found / self.scale[..., None], (*self.batch_shape, self.entries.size))

    @property
    def mode(self) -> Array:
        """Location, conditioned on sums of zero where values are; also of an improper field, which has its largest
        density there and everywhere along the null space. Shape ``batch_shape + (n,)``."""
        null, constrained = self.entries.null_directions, self.entries.constrained
        if constrained is None or (is_concrete(self.loc) and not np.any(np.asarray(self.loc))):
            return self.loc
        if null is not None:
            return constrained.without(self.loc)
        conditioned = jnp.vectorize(self.entries.conditioned, signature="(m),(n,d)->(n,d)")
        return conditioned(self._numbers, self.loc[..., None])[..., 0]

    def dense_precision(self) -> Array:
        """Precision on the support as a dense matrix, in the coordinates of ``biject_to(support)``: shape
        ``batch_shape + (d, d)`` with ``d`` the dimension of the support."""
        if self.constants is not None:
            dense = self.entries.constant_dense(self.constants, self.loc.dtype)
        else:
            dense = jnp.vectorize(self.entries.dense, signature="(m)->(d,e)")(self._numbers)
        return self.scale[..., None, None] * dense

    @property
    def _numbers(self) -> Array:
        """Numbers of the precision without its scale, shape ``(*batch, entries)``."""
        if self.constants is not None:
            return jnp.asarray(self.constants.array, self.loc.dtype)
        numbers: Array | None = self.numbers
        assert numbers is not None
        return numbers

    @property
    def known_log_determinant(self) -> Array | None:
        """Log determinant of the precision before it is scaled, where its numbers are not traced."""
        if self.constants is None:
            return None
        # as an array: a number would belong to the programs that hold it, and those of another graph would be others
        return jnp.asarray([self.entries.constant_log_determinant(self.constants)], self.loc.dtype)[0]

    def _log_determinant(self) -> Array:
        if (known := self.known_log_determinant) is not None:
            return known
        return jnp.vectorize(self.entries.log_determinant, signature="(m)->()")(self._numbers)

    def _check_proper(self, what: str) -> None:
        if not self.is_proper:
            assert self.entries.null_space is not None
            raise NotImplementedError(
                "GaussianMarkovRandomField: the density is flat along the "
                f"{self.entries.null_space.array.shape[1]} columns of null_space, so that it is improper and cannot be "
                f"{what}. With sum_to_zero=True it is proper: values are then orthogonal to these columns, and their "
                "level is a site of its own."
            )
