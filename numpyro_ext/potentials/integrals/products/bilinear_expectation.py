r"""Expectations of log factors whose predictor is a product of two Gaussian vectors: :math:`E \log t(e + u^\top w)`.

Given one of the vectors the predictor is Gaussian, but the integral over the other one has as many dimensions as it
has components. The characteristic function of the predictor, however, is known in closed form (that of a quadratic form
in normal variables; the kernel of :mod:`.exponential_product` at an imaginary argument), and always exists. So

.. math:: E\, r(\eta) = \frac{1}{2\pi} \int \varphi(t)\, \hat r(t)\, dt

is one integral for vectors of any length. It is done by the trapezoidal rule on a window outside which the predictor
has no probability, up to frequencies beyond which either :math:`\varphi` or :math:`\hat r` vanishes, the latter because
``r`` is analytic in a strip around the real line, as are the logistic, probit and softplus families
(:mod:`.characteristic_function`). The gradients are expectations of the same kind, with the moments of ``u`` and ``w``
tilted by :math:`e^{it\eta}`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from ...moments import LogFactor
from .characteristic_function import Canonical, Spectrum, Window, in_chunks, integrate, with_all_blocks


class ProductPredictor(NamedTuple):
    r"""Predictors :math:`\eta = e + u^\top w + g^\top q + \varepsilon` with :math:`u \sim N(a, A)`,
    :math:`w = m + R q`, standard normal ``q`` and :math:`\varepsilon \sim N(0, s)`, all independent; one per entry of
    the leading axis, of length ``n``.
    """

    constant: Array
    """:math:`e`, shape ``(n,)``."""
    mean: Array
    """:math:`a`, shape ``(n, size)``."""
    covariance: Array | None
    """:math:`A`, shape ``(n, size, size)``, or variances ``(n, size)``; ``None`` for zero."""
    partner: Array
    """:math:`m`, shape ``(n, size)``."""
    root: Array | None
    """:math:`R`, shape ``(n, size, r)``, or its diagonal, ``(n, size)``, if :math:`A` is diagonal, too; ``None`` for
    zero."""
    linear: Array | None
    """:math:`g`, shape ``(n, r)``; ``None`` for zero, as it must be without :math:`R`."""
    variance: Array | None = None
    """:math:`s`, shape ``(n,)``; ``None`` for zero, as it must be without :math:`R`."""

    @property
    def is_certain(self) -> bool:
        """True if both vectors are points."""
        return self.covariance is None and self.root is None

    @property
    def is_diagonal(self) -> bool:
        """True if everything can be done component by component."""
        return all(x is None or x.ndim == 2 for x in (self.covariance, self.root))


class ExpectedBilinearLogDensity(NamedTuple):
    r"""Expectation of a log factor ``f`` and its slopes in the distribution of ``u``."""

    value: Array
    """:math:`E f`, shape ``(n,)``."""
    slope: Array
    """:math:`E f' w`, the gradient in the mean of ``u``, shape ``(n, size)``."""
    precision: Array
    r""":math:`-E f'' w w^\top`, minus twice the gradient in the covariance of ``u``: ``(n, size, size)``, or its
    diagonal where the covariances are diagonal."""


def _canonical(predictor: ProductPredictor) -> Canonical:
    constant, mean, covariance, partner, root, linear, noise = predictor
    center = constant + jnp.sum(mean * partner, -1)
    if covariance is None:
        pushed = jnp.zeros_like(mean)
    elif covariance.ndim == 2:
        pushed = covariance * partner
    else:
        pushed = jnp.einsum("nij,nj->ni", covariance, partner)
    variance = jnp.sum(partner * pushed, -1)
    if root is None:
        nothing = jnp.zeros((*mean.shape[:1], 0), mean.dtype)
        return Canonical(center, nothing, nothing, nothing, nothing, variance, None)
    if root.ndim == 2:
        slope, cross = root * mean, root * pushed
        spread = jnp.zeros_like(slope) if covariance is None else root**2 * covariance
    else:
        slope = jnp.einsum("nir,ni->nr", root, mean)
        cross = jnp.einsum("nir,ni->nr", root, pushed)
        spread = jnp.zeros_like(slope)
    slope = slope if linear is None else slope + linear
    rotation = None
    if covariance is not None and covariance.ndim == 3:
        spread, rotation = jnp.linalg.eigh(root.swapaxes(-1, -2) @ covariance @ root)
        slope, cross = (jnp.einsum("nrs,nr->ns", rotation, x) for x in (slope, cross))
    spread = jnp.maximum(spread, 0.0)
    # An eigenvalue that is rounding has a share that is noise of any size, and at such a one all shares do the same
    # as the rest. Together they are at most the variance.
    floor = spread.shape[-1] * jnp.finfo(spread.dtype).eps * jnp.max(spread, axis=-1, keepdims=True, initial=0.0)
    is_real = spread > floor
    share = jnp.where(is_real, cross**2 / jnp.where(is_real, spread, 1.0), 0.0)
    total = jnp.sum(share, -1)
    share *= jnp.where(total > variance, variance / jnp.where(total > 0.0, total, 1.0), 1.0)[:, None]
    rest = jnp.maximum(variance - total, 0.0)
    rest = rest if noise is None else rest + noise
    return Canonical(center, slope, cross, spread, share, rest, rotation)


def _value(potential: LogFactor, form: Canonical, window: Window, num_blocks: Array | int) -> Array:
    # What is left of values less those at the center is small where the distribution is narrow, and rounding with it.
    center = potential.log_density(form.center)
    found: Array = integrate(
        lambda eta: (potential.log_density(eta) - center)[:, None],
        lambda spectrum, real, imaginary: jnp.sum(real[:, 0], 0),
        form,
        window,
        num_blocks,
    )
    return center + found


class _Moments(NamedTuple):
    """Expectations of a log factor ``f``, its derivatives, and their products with ``q``."""

    value: Array
    first: Array
    """:math:`E f'`, shape ``(n,)``."""
    second: Array
    """:math:`E f''`, shape ``(n,)``."""
    first_q: Array
    """:math:`E f' q`, shape ``(n, r)``."""
    second_q: Array
    """:math:`E f'' q`, shape ``(n, r)``."""
    second_qq: Array
    """:math:`E f'' q q^\\top`, shape ``(n, r, r)``, or its diagonal."""


def _moments(potential: LogFactor, predictor: ProductPredictor) -> _Moments:
    form = _canonical(predictor)
    found: _Moments = in_chunks(functools.partial(_chunk_moments, predictor.is_diagonal), potential, form)
    if form.rotation is None:
        return found
    first_q, second_q = (jnp.einsum("nsr,nr->ns", form.rotation, x) for x in (found.first_q, found.second_q))
    second_qq = form.rotation @ found.second_qq @ form.rotation.swapaxes(-1, -2)
    return found._replace(first_q=first_q, second_q=second_q, second_qq=second_qq)


def _chunk_moments(
    is_diagonal: bool, potential: LogFactor, form: Canonical, window: Window, num_blocks: Array
) -> _Moments:
    center = potential.log_density(form.center)

    def functions(eta: Array) -> Array:
        value, first, second = potential.derivatives(eta)
        return jnp.stack([value - center, first, second], axis=1)

    def collect(spectrum: Spectrum, real: Array, imaginary: Array) -> _Moments:
        value, first, second = jnp.sum(real, 0)
        # The mean of q under the tilt is -z + ip.
        shrinkage = spectrum.shrinkage
        p = spectrum.frequency * form.slope.T[:, None] * shrinkage
        z = spectrum.frequency**2 * form.cross.T[:, None] * shrinkage
        first_q = -jnp.sum(z * real[:, 1] + p * imaginary[:, 1], 1)
        second_q = -jnp.sum(z * real[:, 2] + p * imaginary[:, 2], 1)
        left, right = real[:, 2] * z + imaginary[:, 2] * p, imaginary[:, 2] * z - real[:, 2] * p
        if is_diagonal:
            second_qq = jnp.sum(shrinkage * real[:, 2] + left * z + right * p, 1).T
        else:
            second_qq = jnp.einsum("rkn,skn->nrs", left, z) + jnp.einsum("rkn,skn->nrs", right, p)
            variance = jnp.sum(shrinkage * real[:, 2], 1).T
            second_qq += variance[:, :, None] * jnp.eye(variance.shape[-1], dtype=variance.dtype)
        return _Moments(value, first, second, first_q.T, second_q.T, second_qq)

    found: _Moments = integrate(functions, collect, form, window, num_blocks)
    return found._replace(value=center + found.value)


def expected_bilinear_log_density(potential: LogFactor, predictor: ProductPredictor) -> ExpectedBilinearLogDensity:
    r"""Expected log factors and their slopes in mean and covariance of ``u``.

    In float64 the error is about ``1e-12`` of the size of the log factor, for factors that are analytic within a
    distance of two or three of the real line, as long as the largest singular value of :math:`A^{1/2} R` does not
    exceed one; at two it is ``1e-8`` and at four ``1e-5``. In float32 it is about ``1e-5``.

    :param LogFactor potential: the factors, whose arrays have leading axes ``n``; ``derivatives`` is used.
    :param ProductPredictor predictor: distributions of their predictors.
    :return: value and slopes.

    Cost: for each factor 64 to 256 evaluations of the log factor with two derivatives (most for wide products of few
    components), :math:`O(128\, r^2)` operations and an eigendecomposition; ``O(128 r)`` if everything is diagonal.

    **Example:**

    >>> from numpyro_ext.potentials import LogitPotential
    >>> one = jnp.ones((1, 1))
    >>> predictor = ProductPredictor(jnp.zeros(1), 0.5 * one, one, 2.0 * one, one, None)
    >>> print(expected_bilinear_log_density(LogitPotential(jnp.ones(1)), predictor).value)
    [-0.6814]
    """
    constant, mean, _, partner, root, *_ = predictor
    if predictor.is_certain:
        value, first, second = potential.derivatives(constant + jnp.sum(mean * partner, -1))
        nothing = jnp.zeros((mean.shape[0], 0), mean.dtype)
        found = _Moments(value, first, second, nothing, nothing, nothing)
    else:
        found = _moments(potential, predictor)
    slope = found.first[:, None] * partner
    if predictor.is_diagonal:
        precision = -found.second[:, None] * partner**2
        if root is not None:
            slope += root * found.first_q
            precision -= 2.0 * partner * root * found.second_q + root**2 * found.second_qq
        return ExpectedBilinearLogDensity(found.value, slope, precision)
    precision = -found.second[:, None, None] * partner[:, :, None] * partner[:, None, :]
    if root is not None:
        slope += jnp.einsum("nir,nr->ni", root, found.first_q)
        mixed = partner[:, :, None] * jnp.einsum("nir,nr->ni", root, found.second_q)[:, None, :]
        precision -= mixed + mixed.swapaxes(-1, -2) + root @ found.second_qq @ root.swapaxes(-1, -2)
    return ExpectedBilinearLogDensity(found.value, slope, precision)


@jax.custom_jvp
def expected_bilinear_value(potential: LogFactor, predictor: ProductPredictor) -> Array:
    """The value of :func:`expected_bilinear_log_density` alone, at a third of its cost.

    Differentiable once, in everything, by moments and not through the quadrature.
    """
    if predictor.is_certain:
        return potential.log_density(predictor.constant + jnp.sum(predictor.mean * predictor.partner, -1))
    return in_chunks(_value, potential, _canonical(predictor))


@functools.partial(expected_bilinear_value.defjvp, symbolic_zeros=True)
def _expected_bilinear_value_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    potential, predictor = primals
    d_potential, d = tangents
    is_held = all(isinstance(x, SymbolicZero) for x in jax.tree.leaves(d_potential))
    d_potential, d = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x, (d_potential, d)
    )
    _, mean, covariance, partner, root, *_ = predictor
    if predictor.is_certain:
        eta, d_eta = jax.jvp(lambda p: p.constant + jnp.sum(p.mean * p.partner, -1), (predictor,), (d,))
        return jax.jvp(lambda potential, eta: potential.log_density(eta), (potential, eta), (d_potential, d_eta))
    change = jnp.zeros_like(predictor.constant)
    if not is_held:
        form = _canonical(predictor)
        _, change = jax.jvp(lambda t: with_all_blocks(_value, t, form), (potential,), (d_potential,))
    found = _moments(potential, predictor)
    slopes = expected_bilinear_log_density(potential, predictor)
    change += found.first * d.constant + jnp.sum(slopes.slope * d.mean, -1)
    # Along the partner: the mean of u takes part in the predictor, its covariance in the variance of the predictor.
    is_diagonal = predictor.is_diagonal
    of_partner = found.first[:, None] * mean
    second_w = found.second[:, None] * partner
    if root is not None:
        second_w += root * found.second_q if is_diagonal else jnp.einsum("nir,nr->ni", root, found.second_q)
        outer_q = found.second_q if is_diagonal else found.second_q[:, None, :]
        second_wq = (partner if is_diagonal else partner[:, :, None]) * outer_q
        second_wq += root * found.second_qq if is_diagonal else root @ found.second_qq
        of_root = mean * found.first_q if is_diagonal else mean[:, :, None] * found.first_q[:, None, :]
        if covariance is not None:
            of_root += covariance * second_wq if is_diagonal else covariance @ second_wq
        change += jnp.sum((of_root * d.root).reshape(len(change), -1), -1)
    if covariance is not None:
        of_partner += covariance * second_w if is_diagonal else jnp.einsum("nij,nj->ni", covariance, second_w)
        change -= 0.5 * jnp.sum((slopes.precision * d.covariance).reshape(len(change), -1), -1)
    change += jnp.sum(of_partner * d.partner, -1)
    if d.linear is not None:
        change += jnp.sum(found.first_q * d.linear, -1)
    if d.variance is not None:
        change += 0.5 * found.second * d.variance
    return slopes.value, change
