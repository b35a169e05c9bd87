r"""Expectations of log factors whose predictor is a product of two Gaussian vectors: :math:`E \log t(e + u^\top w)`.

Given one of the vectors the predictor is Gaussian, but the integral over the other one has as many dimensions as it
has components. The characteristic function of the predictor, however, is known in closed form (that of a quadratic form
in normal variables; the kernel of :mod:`.exponential_product` at an imaginary argument), and always exists. So

.. math:: E\, r(\eta) = \frac{1}{2\pi} \int \varphi(t)\, \hat r(t)\, dt

is one integral for vectors of any length. It is done by the trapezoidal rule on a window outside which the predictor
has no probability, with a smooth taper at its ends: the error falls exponentially in the number of nodes for functions
that are analytic in a strip around the real line, as are the logistic, probit and softplus families. The gradients are
expectations of the same kind, with the moments of ``u`` and ``w`` tilted by :math:`e^{it\eta}`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..moments import LogFactor

__all__ = ["ExpectedBilinearLogDensity", "ProductPredictor", "expected_bilinear_log_density", "expected_bilinear_value"]

# Of the half width of the tapered window: where the taper begins.
_PLAIN = 2.0 / 3.0
# Slopes at which the tail is bounded, as multiples of the standard deviation.
_TAIL_SLOPES = (0.02, 0.05, 0.1, 0.15, 0.25)


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
        """Whether both vectors are points."""
        return self.covariance is None and self.root is None

    @property
    def is_diagonal(self) -> bool:
        """Whether everything can be done component by component."""
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


class _Rule(NamedTuple):
    """Sizes of the quadrature in one precision."""

    num_frequencies: int
    tail: float
    """Minus the log of the probability outside the window."""
    smallest: float
    """Half width relative to the size of the predictor."""


_DOUBLE = _Rule(num_frequencies=128, tail=28.0, smallest=1e-7)
_SINGLE = _Rule(num_frequencies=64, tail=15.0, smallest=1e-3)


class _Canonical(NamedTuple):
    r"""The predictor as :math:`c + \gamma^\top q + z \sqrt{\tau + 2 k^\top q + \sum_d \lambda_d q_d^2}`, after a
    rotation of ``q``, with standard normal ``z``."""

    center: Array
    slope: Array
    """:math:`\\gamma`, shape ``(n, r)``."""
    cross: Array
    """:math:`k`, shape ``(n, r)``."""
    spread: Array
    """:math:`\\lambda`, shape ``(n, r)``."""
    share: Array
    """:math:`k^2 / \\lambda`, shape ``(n, r)``: the parts of :math:`\\tau` that come with a component of ``q``."""
    rest: Array
    """What is left of :math:`\\tau`, shape ``(n,)``."""
    rotation: Array | None
    """Its columns are the new directions, shape ``(n, r, r)``."""


def _canonical(predictor: ProductPredictor) -> _Canonical:
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
        return _Canonical(center, nothing, nothing, nothing, nothing, variance, None)
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
    share = jnp.where(spread > 0.0, cross**2 / jnp.where(spread > 0.0, spread, 1.0), 0.0)
    rest = jnp.maximum(variance - jnp.sum(share, -1), 0.0)
    rest = rest if noise is None else rest + noise
    return _Canonical(center, slope, cross, spread, share, rest, rotation)


def _half_width(form: _Canonical, rule: _Rule) -> Array:
    """A distance from the center beyond which there is no probability to speak of, by Chernoff's bound; ``(n,)``."""
    total = form.rest + jnp.sum(form.share + form.slope**2 + form.spread, -1)
    deviation = jnp.sqrt(total)
    largest = jnp.sqrt(jnp.max(form.spread, axis=-1, initial=0.0))
    smallest = rule.smallest * (1.0 + jnp.abs(form.center))

    def distance(factor: float) -> Array:
        theta = 1.0 / jnp.maximum(largest + factor * deviation, smallest)
        gap = 1.0 - jnp.square(theta)[:, None] * form.spread
        growth = form.share + form.slope**2 + 2.0 * theta[:, None] * jnp.abs(form.slope * form.cross)
        log_moment = 0.5 * theta**2 * (form.rest + jnp.sum(growth / gap, -1)) - 0.5 * jnp.sum(jnp.log(gap), -1)
        return (log_moment + rule.tail) / theta

    distances = jnp.stack([distance(factor) for factor in _TAIL_SLOPES])
    return jnp.maximum(jnp.min(distances, axis=0), smallest)


class _Spectrum(NamedTuple):
    """The characteristic function about the center, at frequencies on the last axis."""

    step: Array
    """Distance of the nodes, shape ``(n,)``."""
    frequency: Array
    """Shape ``(n, K)``."""
    shrinkage: Array
    """:math:`1 / (1 + t^2 \\lambda)`, shape ``(n, r, K)``: variances of ``q`` under the tilt."""
    real: Array
    imaginary: Array
    """Both with the weights of the sum over frequencies, shape ``(n, K)``."""


def _spectrum(form: _Canonical, rule: _Rule) -> _Spectrum:
    num = rule.num_frequencies
    width = _half_width(form, rule) / _PLAIN
    t = (math.pi / width)[:, None] * jnp.arange(num, dtype=width.dtype)
    square = t[:, None, :] ** 2
    growth = square * form.spread[:, :, None]
    shrinkage = 1.0 / (1.0 + growth)
    decay = form.rest[:, None] + jnp.einsum("nr,nrk->nk", form.share + form.slope**2, shrinkage)
    log_size = -0.5 * t**2 * decay - 0.5 * jnp.sum(jnp.log1p(growth), axis=1)
    phase = -(t**3) * jnp.einsum("nr,nrk->nk", form.slope * form.cross, shrinkage)
    size = jnp.exp(log_size) * jnp.where(jnp.arange(num) == 0, 0.5 / num, 1.0 / num)
    return _Spectrum(width / num, t, shrinkage, size * jnp.cos(phase), size * jnp.sin(phase))


def _tables(rule: _Rule, dtype: Any) -> tuple[Array, Array, Array]:
    """Cosines and sines of shape ``(frequencies, nodes)`` for nodes from zero upwards, and the taper."""
    num = rule.num_frequencies
    index = np.arange(num)
    angle = math.pi * (np.outer(index, index) % (2 * num)) / num
    sharpness = math.sqrt(3.0 * math.pi * num)
    taper = np.array([0.5 * math.erfc(sharpness * (j / num - 0.5 * (1.0 + _PLAIN))) for j in index])
    return jnp.asarray(np.cos(angle), dtype), jnp.asarray(np.sin(angle), dtype), jnp.asarray(taper, dtype)


def _nodes(form: _Canonical, spectrum: _Spectrum) -> Array:
    """Predictors above and below the center, from there outwards, shape ``(2, K, n)``."""
    distance = jnp.arange(spectrum.frequency.shape[1], dtype=spectrum.step.dtype)[:, None] * spectrum.step
    return jnp.stack([form.center + distance, form.center - distance])


def _weighted(spectrum: _Spectrum, values: Array, tables: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Transform of values at the nodes, ``(2, K, n)``, times the characteristic function; real and imaginary part."""
    cosines, sines, taper = tables
    above, below = values * taper[:, None]
    both = (above + below).at[0].multiply(0.5)
    even = jnp.matmul(cosines, both, precision=jax.lax.Precision.HIGHEST).T
    odd = jnp.matmul(sines, above - below, precision=jax.lax.Precision.HIGHEST).T
    real, imaginary = spectrum.real, spectrum.imaginary
    return real * even + imaginary * odd, imaginary * even - real * odd


def _value(form: _Canonical, spectrum: _Spectrum, tables: Any, at_center: Array, at_nodes: Array) -> Array:
    # What is left is small where the distribution is narrow, and rounding with it.
    return at_center + jnp.sum(_weighted(spectrum, at_nodes - at_center, tables)[0], -1)


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
    form, rule = _canonical(predictor), _rule(predictor.mean)
    spectrum, tables = _spectrum(form, rule), _tables(rule, predictor.mean.dtype)
    values, firsts, seconds = potential.derivatives(_nodes(form, spectrum))
    value = _value(form, spectrum, tables, potential.log_density(form.center), values)
    real, imaginary = _weighted(spectrum, firsts, tables)
    real2, imaginary2 = _weighted(spectrum, seconds, tables)
    # The mean of q under the tilt is -z + ip.
    t, shrinkage = spectrum.frequency[:, None, :], spectrum.shrinkage
    p, z = t * form.slope[:, :, None] * shrinkage, t**2 * form.cross[:, :, None] * shrinkage
    first_q = -jnp.einsum("nrk,nk->nr", z, real) - jnp.einsum("nrk,nk->nr", p, imaginary)
    second_q = -jnp.einsum("nrk,nk->nr", z, real2) - jnp.einsum("nrk,nk->nr", p, imaginary2)
    variance = jnp.einsum("nrk,nk->nr", shrinkage, real2)
    left, right = real2[:, None] * z + imaginary2[:, None] * p, imaginary2[:, None] * z - real2[:, None] * p
    if predictor.is_diagonal:
        second_qq = variance + jnp.sum(left * z + right * p, -1)
    else:
        second_qq = jnp.einsum("nrk,nsk->nrs", left, z) + jnp.einsum("nrk,nsk->nrs", right, p)
        second_qq += variance[:, :, None] * jnp.eye(variance.shape[-1], dtype=variance.dtype)
    if form.rotation is not None:
        first_q, second_q = (jnp.einsum("nsr,nr->ns", form.rotation, x) for x in (first_q, second_q))
        second_qq = form.rotation @ second_qq @ form.rotation.swapaxes(-1, -2)
    return _Moments(value, jnp.sum(real, -1), jnp.sum(real2, -1), first_q, second_q, second_qq)


def expected_bilinear_log_density(potential: LogFactor, predictor: ProductPredictor) -> ExpectedBilinearLogDensity:
    r"""Expected log factors and their slopes in mean and covariance of ``u``.

    In float64 the error is about ``1e-12`` of the size of the log factor, for factors that are analytic within a
    distance of two or three of the real line, as long as the largest singular value of :math:`A^{1/2} R` does not
    exceed one; at two it is ``1e-8`` and at four ``1e-5``. In float32 it is about ``1e-5``.

    :param LogFactor potential: the factors, whose arrays have leading axes ``n``; ``derivatives`` is used.
    :param ProductPredictor predictor: distributions of their predictors.
    :return: value and slopes.

    Cost: 255 evaluations of the log factor with two derivatives, :math:`O(128\, r^2)` operations per factor and an
    eigendecomposition; ``O(128 r)`` if everything is diagonal.

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
    form, rule = _canonical(predictor), _rule(predictor.mean)
    spectrum, tables = _spectrum(form, rule), _tables(rule, predictor.mean.dtype)
    at_nodes = potential.log_density(_nodes(form, spectrum))
    return _value(form, spectrum, tables, potential.log_density(form.center), at_nodes)


@expected_bilinear_value.defjvp
def _expected_bilinear_value_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    potential, predictor = primals
    d_potential, d = tangents
    _, mean, covariance, partner, root, *_ = predictor
    if predictor.is_certain:
        eta, d_eta = jax.jvp(lambda p: p.constant + jnp.sum(p.mean * p.partner, -1), (predictor,), (d,))
        return jax.jvp(lambda potential, eta: potential.log_density(eta), (potential, eta), (d_potential, d_eta))
    form, rule = _canonical(predictor), _rule(mean)
    spectrum, tables = _spectrum(form, rule), _tables(rule, mean.dtype)
    nodes = _nodes(form, spectrum)

    def at_held_nodes(potential: LogFactor) -> Array:
        return _value(form, spectrum, tables, potential.log_density(form.center), potential.log_density(nodes))

    _, change = jax.jvp(at_held_nodes, (potential,), (d_potential,))
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


def _rule(x: Array) -> _Rule:
    return _SINGLE if jnp.finfo(x.dtype).bits <= 32 else _DOUBLE
