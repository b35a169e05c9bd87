r"""The exact step of a bilinear posterior along the directions in which the data is silent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.cholesky import cholesky, inverse_lower
from ....structure.bilinear.form import Bilinear, CoupledSide, GaussianSide, Side
from .cells import Block, over_devices
from .cells import Side as SideName
from .incidence import CoupledBlock, SideBlock, white_size


class SideMoments(NamedTuple):
    """Moments of a side, or of some of its vectors, on which the step depends."""

    size: Array
    """Sums of the second moments of the paired components in units of their priors, shape ``(k,)``."""
    moment: Array | None
    """Sum of the second moments, shape ``(k, k)``, where covariances are full or points."""
    precision: tuple[Array, Array]
    """The least and the largest precision of the priors."""
    num_entropies: Array
    """Number of vectors that have a covariance."""
    num_hindrances: Array
    """Number of linear terms, prior means and correlations of the paired components that are not zero."""
    coupling: Array
    """Coefficients of the products, shape ``(k,)``."""

    def cost_of(self, transform: Array) -> Array:
        """Change of the divergence from the priors by a transform."""
        size = jnp.sum(self.size * jnp.diagonal(transform) ** 2)
        if self.moment is not None:
            whole = self.precision[1] * jnp.sum((transform @ self.moment) * transform)
            size = jnp.where(_is_constant(*self.precision), whole, size)
        return 0.5 * (size - jnp.sum(self.size)) - self.num_entropies * jnp.linalg.slogdet(transform)[1]


def side_moments(form: Bilinear, block: SideBlock, side: SideName, axis_name: str | None = None) -> SideMoments | None:
    """Moments of a side, ``None`` where there are no paired components that may be transformed.

    :param Bilinear form: the model.
    :param block: posterior of the side.
    :param str side: ``"rows"`` or ``"columns"``.
    :param str axis_name: of the axis of devices between which the vectors are divided, if they are.
    """
    k = _num_paired(form)
    if k == 0:
        return None
    prior, linear = (form.rows, form.row_linear) if side == "rows" else (form.columns, form.column_linear)
    moment, least, most = None, jnp.zeros(()), jnp.zeros(())
    if _is_full(block):
        precision = _paired_precision(prior, k)
        moment, least, most = jnp.sum(_second_moment(block, prior, k), 0), jnp.min(precision), jnp.max(precision)
    if axis_name is not None:
        least, most = lax.pmin(least, axis_name), lax.pmax(most, axis_name)
    sums = _size_in_prior(block, prior, k), moment, _num_entropies(block, prior), _num_hindrances(prior, k)
    size, moment, num_entropies, num_hindrances = over_devices(sums, axis_name)
    num_hindrances += jnp.sum(linear[:, :k] != 0.0)
    return SideMoments(size, moment, (least, most), num_entropies, num_hindrances, form.coupling[0])


def joined_moments(parts: Sequence[SideMoments]) -> SideMoments:
    """Moments of all vectors of a side, from those of parts of them."""
    first = parts[0]
    size, moment, num_entropies, num_hindrances = (
        jax.tree.map(lambda *x: sum(x), *found)
        for found in zip(*((p.size, p.moment, p.num_entropies, p.num_hindrances) for p in parts), strict=True)
    )
    least, most = zip(*(p.precision for p in parts), strict=True)
    num_hindrances += sum(jnp.sum(p.coupling != first.coupling) for p in parts)
    precision = jnp.min(jnp.stack(least)), jnp.max(jnp.stack(most))
    return SideMoments(size, moment, precision, num_entropies, num_hindrances, first.coupling)


def best_transforms(rows: SideMoments, columns: SideMoments) -> tuple[Array, Array]:
    r"""The best matrix for rows, and the one for columns that leaves all products as they are.

    With :math:`P = \sum_r E u u^\top / \sigma_u^2`, :math:`Q` likewise and ``n`` the difference in the numbers of
    vectors that have a covariance, the first one, ``X``, maximises
    :math:`-\tfrac12 \operatorname{tr} X P X^\top - \tfrac12 \operatorname{tr} X^{-\top} Q X^{-1} + n \log |X|`. It is
    any matrix if the priors of the paired components are isotropic and independent, and the covariances full or points;
    else a diagonal one. Where the transformation does not apply (linear terms or prior means in paired components, a
    coupling that differs, or priors correlated beyond them), it is the identity.
    """
    scale, dtype = rows.coupling, rows.size.dtype
    excess = jnp.asarray(rows.num_entropies - columns.num_entropies, dtype)
    # per component, with precisions of their own
    transform = jnp.diag(jnp.sqrt(_positive_root(rows.size, columns.size, excess)))
    if rows.moment is not None and columns.moment is not None:
        full = _best_transform(rows.precision[1] * rows.moment, columns.precision[1] * columns.moment, excess)
        is_isotropic = _is_constant(*rows.precision) & _is_constant(*columns.precision)
        is_isotropic &= _is_constant(jnp.min(scale), jnp.max(scale))
        transform = jnp.where(is_isotropic & jnp.all(jnp.isfinite(full)), full, transform)
    applies = (rows.num_hindrances + columns.num_hindrances == 0) & jnp.all(scale != 0.0)
    applies &= jnp.all(jnp.isfinite(transform))
    identity = jnp.eye(scale.size, dtype=dtype)
    transform = jnp.where(applies, transform, identity)
    back = jnp.linalg.inv(transform).T * (scale[None, :] / scale[:, None])
    return transform, jnp.where(applies, back, identity)


def gauge_step(
    form: Bilinear, rows: SideBlock, columns: SideBlock, *, axis_name: str | None = None
) -> tuple[SideBlock, SideBlock]:
    """Both sides after the best transform, see :func:`best_transforms`; as they are where none may be transformed.

    :param Bilinear form: the model.
    :param Block rows: posterior of the rows.
    :param Block columns: of the columns.
    :param str axis_name: of the axis of devices between which the rows are divided, if they are.
    """
    of_rows, of_columns = side_moments(form, rows, "rows", axis_name), side_moments(form, columns, "columns")
    if of_rows is None or of_columns is None:
        return rows, columns
    transform, back = best_transforms(of_rows, of_columns)
    return transformed(rows, transform), transformed(columns, back)


def gauge_residual(form: Bilinear, rows: Block, columns: Block) -> Array:
    r"""Largest entry of :math:`(P - n_u I) - (Q - n_v I)`, zero at an optimum if the priors are isotropic.

    Of the diagonal only, where covariances are diagonal.
    """
    k = _num_paired(form)
    p = _paired_precision(form.rows, k)[0, 0] * jnp.sum(_second_moment(rows, form.rows, k), 0)
    q = _paired_precision(form.columns, k)[0, 0] * jnp.sum(_second_moment(columns, form.columns, k), 0)
    excess = _num_entropies(rows, form.rows) - _num_entropies(columns, form.columns)
    residual = p - q - excess * jnp.eye(k, dtype=p.dtype)
    return jnp.max(jnp.abs(residual if _is_full(rows) and _is_full(columns) else jnp.diagonal(residual)))


def _num_paired(form: Bilinear) -> int:
    """Number of components that may be transformed; zero if it is known beforehand that none may."""
    if not form.is_paired or form.coupling.shape[0] != 1:
        return 0
    return form.coupling.shape[-1]


def _is_full(block: SideBlock) -> bool:
    return isinstance(block, Block) and (block.covariance is None or block.covariance.ndim == 3)


def _size_in_prior(block: SideBlock, prior: Side, k: int) -> Array:
    """Sums of the second moments of the first ``k`` components, in units of their prior."""
    if isinstance(block, CoupledBlock):
        return white_size(block)[:k]
    assert isinstance(block, Block) and isinstance(prior, GaussianSide)
    moment = block.mean[:, :k] ** 2 + block.variance[:, :k]
    if prior.weight is not None:
        moment *= prior.weight[:, None]
    return jnp.sum(_paired_precision(prior, k) * moment, 0)


def _num_entropies(block: SideBlock, prior: Side) -> Array:
    if isinstance(prior, CoupledSide):
        return jnp.asarray(prior.mean.shape[0])
    assert isinstance(block, Block)
    if block.covariance is None:
        return jnp.asarray(0)
    return jnp.asarray(block.mean.shape[0]) if prior.weight is None else jnp.sum(prior.weight)


def _second_moment(block: SideBlock, prior: Side, k: int) -> Array:
    """Second moments of the first ``k`` components of each vector, ``(num, k, k)``; zero for those not used."""
    assert isinstance(block, Block) and isinstance(prior, GaussianSide)
    mean = block.mean[:, :k]
    moment = mean[:, :, None] * mean[:, None, :] + block.matrices[:, :k, :k]
    return moment if prior.weight is None else prior.weight[:, None, None] * moment


def _paired_precision(prior: Side, k: int) -> Array:
    assert isinstance(prior, GaussianSide)
    return prior.diagonal[:, :k]


def _is_constant(least: Array, most: Array) -> Array:
    return most - least <= 8 * jnp.finfo(most.dtype).eps * jnp.maximum(jnp.abs(least), jnp.abs(most))


def _num_hindrances(prior: Side, k: int) -> Array:
    """Number of means of the first components that are not zero, and of their correlations."""
    found = jnp.sum(prior.mean[:, :k] != 0.0)
    if isinstance(prior, GaussianSide) and prior.precision.ndim == 3:
        others = prior.precision[:, :k, :] * (1.0 - jnp.eye(k, prior.precision.shape[-1]))
        found += jnp.sum(others != 0.0)
    return found


def _best_transform(p: Array, q: Array, excess: Array) -> Array:
    r"""With :math:`P = R R^\top` and :math:`R^\top Q R = W \operatorname{diag}(e) W^\top` it is, up to
    rotations, :math:`\operatorname{diag}(\sqrt s) W^\top R^{-1}`, where ``s`` solves a quadratic equation.
    """
    root = cholesky(p)
    eigenvalues, vectors = jnp.linalg.eigh(root.T @ q @ root)
    stretch = _positive_root(jnp.ones_like(eigenvalues), jnp.maximum(eigenvalues, 0.0), excess)
    transform = jnp.sqrt(stretch)[:, None] * (vectors.T @ inverse_lower(root))
    # Among those that differ by a rotation the symmetric one, which is the identity at the optimum.
    _, singular_values, right = jnp.linalg.svd(transform)
    return right.T @ (singular_values[:, None] * right)


def _positive_root(p: Array, q: Array, excess: Array) -> Array:
    """The positive ``s`` with ``p s^2 - excess s - q = 0``."""
    root = jnp.sqrt(excess**2 + 4.0 * p * q)
    # of two equal expressions the one that does not subtract
    return jnp.where(excess > 0.0, (excess + root) / (2.0 * p), 2.0 * q / (root - jnp.minimum(excess, 0.0)))


def transformed(block: SideBlock, transform: Array) -> SideBlock:
    """Vectors whose first components are multiplied by a matrix, which is diagonal where these are independent."""
    k, size = transform.shape[0], block.mean.shape[1]
    mean = block.mean.at[:, :k].set(block.mean[:, :k] @ transform.T)
    if isinstance(block, CoupledBlock):
        scale = jnp.diagonal(transform)[:, None, None] ** 2
        return CoupledBlock(mean, block.precision.at[:k].divide(scale))
    if block.covariance is None:
        return Block(mean, None)
    if block.covariance.ndim == 2:
        return Block(mean, block.covariance.at[:, :k].multiply(jnp.diagonal(transform) ** 2))
    whole = jnp.eye(size, dtype=transform.dtype).at[:k, :k].set(transform)
    return Block(mean, whole @ block.covariance @ whole.T)
