r"""The exact step of a bilinear posterior along the directions in which the data is silent."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....linalg.cholesky import cholesky, inverse_lower
from ....structure.bilinear.form import Bilinear, CoupledSide, GaussianSide, Side
from .cells import Block, over_devices
from .incidence import CoupledBlock, SideBlock, white_size


def gauge_step(
    form: Bilinear, rows: SideBlock, columns: SideBlock, *, axis_name: str | None = None
) -> tuple[SideBlock, SideBlock]:
    r"""The best ``X``: any matrix if the priors of the paired components are isotropic and independent, and the
    covariances full or points; else a diagonal one.

    With :math:`P = \sum_r E u u^\top / \sigma_u^2`, :math:`Q` likewise and ``n`` the difference in the numbers of
    vectors that have a covariance, it maximises
    :math:`-\tfrac12 \operatorname{tr} X P X^\top - \tfrac12 \operatorname{tr} X^{-\top} Q X^{-1} + n \log |X|`.

    Where the transformation does not apply (no paired components, linear terms or prior means in them, a coupling that
    differs between cells or priors correlated beyond them), it is the identity.

    :param Bilinear form: the model.
    :param Block rows: posterior of the rows.
    :param Block columns: of the columns.
    :param str axis_name: of the axis of devices between which the rows are divided, if they are.
    :return: both, transformed.
    """
    k = _num_paired(form)
    if k == 0:
        return rows, columns
    scale = form.coupling[0]
    num_rows = over_devices(_num_entropies(rows, form.rows), axis_name)
    excess = jnp.asarray(num_rows - _num_entropies(columns, form.columns), rows.mean.dtype)
    # per component, with precisions of their own
    p, q = over_devices(_size_in_prior(rows, form.rows, k), axis_name), _size_in_prior(columns, form.columns, k)
    stretch = _positive_root(p, q, excess)
    transform = jnp.diag(jnp.sqrt(stretch))
    if _is_full(rows) and _is_full(columns):
        row_moment, column_moment = _second_moment(rows, form.rows, k), _second_moment(columns, form.columns, k)
        row_precision, column_precision = _paired_precision(form.rows, k), _paired_precision(form.columns, k)
        full = _best_transform(
            row_precision[0, 0] * over_devices(jnp.sum(row_moment, 0), axis_name),
            column_precision[0, 0] * jnp.sum(column_moment, 0),
            excess,
        )
        is_isotropic = _is_constant(row_precision, axis_name) & _is_constant(column_precision) & _is_constant(scale)
        transform = jnp.where(is_isotropic & jnp.all(jnp.isfinite(full)), full, transform)
    applies = _applies(form, k, axis_name) & jnp.all(jnp.isfinite(transform))
    transform = jnp.where(applies, transform, jnp.eye(k, dtype=transform.dtype))
    inverse = jnp.linalg.inv(transform).T
    back = inverse * (scale[None, :] / scale[:, None])
    return _transformed(rows, transform), _transformed(columns, jnp.where(applies, back, jnp.eye(k, dtype=back.dtype)))


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


def _is_constant(x: Array, axis_name: str | None = None) -> Array:
    """On all devices of the axis."""
    least, most = jnp.min(x), jnp.max(x)
    if axis_name is not None:
        least, most = lax.pmin(least, axis_name), lax.pmax(most, axis_name)
    return most - least <= 8 * jnp.finfo(x.dtype).eps * jnp.maximum(jnp.abs(least), jnp.abs(most))


def _applies(form: Bilinear, k: int, axis_name: str | None) -> Array:
    """True if nothing but the products and independent priors with mean zero know of the paired components."""
    num_hindrances = [over_devices(_num_hindrances(form.rows, k), axis_name), _num_hindrances(form.columns, k)]
    num_hindrances += [jnp.sum(linear[:, :k] != 0.0) for linear in (form.row_linear, form.column_linear)]
    return jnp.all(form.coupling != 0.0) & (sum(num_hindrances) == 0)


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


def _transformed(block: SideBlock, transform: Array) -> SideBlock:
    """The first components times a matrix; it is diagonal where the components are independent."""
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
