r"""Gaussian expectations of log factors, :math:`E_{N(\eta \mid m, v)} \log t(\eta)`, and their slopes.

What has logistic terms goes to the logistic log-partition. What is analytic around the real line takes the trapezoidal
rule unless some Gaussian is wide, and so does anything smooth where that rule shows that it can be trusted. What is
left is integrated by Gauss-Legendre rules on panels that are halved where the log density bends, because a
Gauss-Hermite rule is blind to bends under a wide Gaussian.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..moments import ExpectedLogDensity, LogFactor, LogisticTerms
from .logistic_expectation import LogPartitionExpectation, expected_log_partition
from .tilted.tilted_moments import broadcast_to_factors, sum_over_nodes

_MAX_PANELS = 64
_STRIP = 2.5
"""Half width of the strip in which what is called analytic is so."""
_WIDEST = 9.0
_BLOCK, _NUM_BLOCKS = 8, 10
"""Pairs of nodes of the trapezoidal rule; all of them for the widest variance."""
_STEP, _REACH = 0.2, 9.4
"""Step and reach of the trapezoidal rule for functions of which nothing is known, in standard deviations."""


class _Rule(NamedTuple):
    """Sizes of the quadrature in one precision."""

    num_nodes: int
    half_range: float
    tolerance: float


_DOUBLE = _Rule(num_nodes=20, half_range=12.0, tolerance=1e-13)
_SINGLE = _Rule(num_nodes=12, half_range=8.0, tolerance=2e-6)


def expected_log_density(potential: LogFactor, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
    r"""Expectation of any elementwise log factor and its slopes in the mean and the variance of the Gaussian.

    The slopes are those of the value, :math:`E\,f'` and :math:`\tfrac12 E\,f''` (a kink of :math:`f`, of which the
    second derivative knows nothing, is noticed and counted). Nodes are held fixed under differentiation, so that
    derivatives in the parameters of the potential, and of the slopes, are those of the integral.

    In float64 the value has an error of about ``1e-13`` times :math:`E |f|`, and the slopes of about ``1e-13`` times
    :math:`E |f'|` and :math:`E |f''|`, if the log density is continuous, grows no faster than a polynomial (or than
    :math:`e^{3 |\eta - m| / \sqrt v}`), and shows its bends at the scale of a tenth of the standard deviation: kinks
    and bends of any sharpness do. In float32 read ``1e-6``. A narrow dent in a function that is otherwise straight may
    be missed. A factor that is zero on part of the line has the value ``-inf`` and slopes that are ``nan``.

    Cost: 32 to 160 evaluations of an analytic log density with two derivatives if no variance exceeds 9. 96 for others
    where sums over all and over every second node of a trapezoidal rule agree, and where not, 600 more if it is smooth
    on the scale of the widest Gaussian, and 90 for each halving of a panel: about 2500 for bends that are a thousand
    times narrower than the Gaussian, 7000 at most. Memory of about 1000 arrays of the size of the result.

    :param LogFactor potential: the factors; only ``logistic_terms``, ``log_density``, ``derivatives`` and
        ``is_analytic`` are used.
    :param ArrayLike mean: means :math:`m`.
    :param ArrayLike variance: positive variances :math:`v`.
    :return: value and slopes, of the broadcast shape of the factors, ``mean`` and ``variance``.

    **Example:**

    >>> from numpyro_ext.potentials import ElementwisePotential
    >>> kink = ElementwisePotential(lambda eta: -jnp.abs(eta))
    >>> [x.item() for x in expected_log_density(kink, jnp.zeros(1), jnp.ones(1))]
    [-0.7979, 0.0, -0.3989]
    """
    terms = potential.logistic_terms()
    if terms is not None:
        return expected_logistic_terms(terms, expected_log_partition, mean, variance)
    return _by_quadrature(potential, mean, variance)


@jax.jit
def _by_quadrature(potential: LogFactor, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
    mean, variance = broadcast_to_factors(potential, mean, variance)
    if getattr(potential, "is_analytic", False):
        is_narrow = jnp.all((variance > 0.0) & (variance <= _WIDEST))
        return jax.lax.cond(is_narrow, _in_the_strip, _on_panels, potential, mean, variance)
    if not potential.is_smooth:
        return _on_panels(potential, mean, variance)
    sums, is_trusted = _on_even_nodes(potential, mean, variance, jnp.asarray(_STEP, mean.dtype), _REACH)
    found = jax.lax.cond(jnp.all(is_trusted), lambda *_: sums, _on_panels, potential, mean, variance)
    return found


def expected_logistic_terms(
    terms: LogisticTerms, log_partition: LogPartitionExpectation, mean: ArrayLike, variance: ArrayLike
) -> ExpectedLogDensity:
    r"""Expectation of a factor with logistic terms, given that of :math:`\log(1 + e^x)` or an upper bound of it.

    :param LogisticTerms terms: the factors.
    :param Callable log_partition: maps mean and variance of ``x`` to the expectation and its slopes.
    :param ArrayLike mean: means of the predictor.
    :param ArrayLike variance: variances of the predictor.
    """
    dtype = jnp.result_type(mean, variance, float)
    mean, variance = jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)
    terms = LogisticTerms(*(jnp.asarray(part, dtype) for part in terms))

    def of_one(weight: Array, slope: Array, offset: Array) -> tuple[Array, Array, Array]:
        value, mean_slope, variance_slope = log_partition(slope * mean + offset, jnp.square(slope) * variance)
        return weight * value, weight * slope * mean_slope, weight * jnp.square(slope) * variance_slope

    values, mean_slopes, variance_slopes = jax.vmap(of_one)(terms.weights, terms.slopes, terms.offsets)
    value = terms.constant + terms.linear * mean - jnp.sum(values, axis=0)
    return ExpectedLogDensity(
        value=value,
        mean_slope=jnp.broadcast_to(terms.linear - jnp.sum(mean_slopes, axis=0), value.shape),
        variance_slope=jnp.broadcast_to(-jnp.sum(variance_slopes, axis=0), value.shape),
    )


class _Panels(NamedTuple):
    """Panels in units of standard deviations, on the first axis. Values are of ``f``, ``f'`` and ``f''`` in these."""

    left: Array
    right: Array
    halves: Array
    """Integrals over the two halves, shape ``(panels, 2, 3, ...)``."""
    size: Array
    """Integrals of the absolute values, shape ``(panels, 3, ...)``."""
    error: Array
    """Change by the halves, and the part that they miss at their ends, shape ``(panels, 3, ...)``."""
    num_used: Array
    """Number of panels in use."""

    def relative_error(self) -> Array:
        """Largest of the three errors relative to the whole integral, shape ``(panels, ...)``."""
        total = jnp.sum(self.size, axis=0)
        ratio = self.error / jnp.where(total > 0.0, total, 1.0)
        return jnp.max(jnp.where(jnp.isfinite(ratio), ratio, 0.0), axis=1)


def _in_the_strip(potential: LogFactor, mean: Array, variance: Array) -> ExpectedLogDensity:
    r"""The trapezoidal rule, for an analytic log density under Gaussians that are not wide.

    With nodes :math:`h` standard deviations apart its error is :math:`e^{a^2/2 - 2 \pi a / h}` for every :math:`a`
    standard deviations to either side of the real line up to which the integrand is analytic (Trefethen and Weideman
    2014, theorem 5.1); in the real direction derivatives may grow like the exponential of the predictor.
    """
    largest = jnp.sqrt(jax.lax.stop_gradient(jnp.max(variance, initial=0.0)))
    # Beyond eight standard deviations the Gaussian itself outgrows what is gained; exp(-34) is the error.
    strip = jnp.minimum(_STRIP / largest, 8.0)
    step = 2.0 * math.pi * strip / (34.0 + 0.5 * jnp.square(strip))
    return _on_even_nodes(potential, mean, variance, step, 9.0 + largest)[0]


def _on_even_nodes(
    potential: LogFactor, mean: Array, variance: Array, step: Array, reach: Array | float
) -> tuple[ExpectedLogDensity, Array]:
    """The trapezoidal rule, and where it can be trusted whatever the function is.

    Halving the step of this rule about squares its error, up to a factor that is large if poles carry little, so the
    sums over every second node need to agree with those over all up to a tenth of the root of the precision only. A
    kink changes the value by its place between two nodes in another way than the slope, and a jump the slope in another
    way than the curvature.
    """
    scale = jnp.sqrt(variance)
    exact = _SINGLE.tolerance if jnp.finfo(mean.dtype).bits <= 32 else 1e-14

    def terms(pairs: Array) -> tuple[Array, ...]:
        z = jnp.concatenate([pairs, -pairs]) * step
        weight = jnp.where(z == 0.0, 0.5, 1.0) * jnp.exp(-0.5 * jnp.square(z)) * (step / math.sqrt(2.0 * math.pi))
        values, slopes, curvatures = jax.vmap(lambda z: potential.derivatives(mean + scale * z))(z)
        moved = slopes * z.reshape(-1, *(1,) * mean.ndim)
        parts = (values, slopes, curvatures, moved, jnp.abs(moved))
        sums = [jnp.tensordot(weight, part, axes=1) for part in parts]
        fixed = jax.lax.stop_gradient(jnp.stack([values, slopes, curvatures], axis=1))
        sign = jnp.where(jnp.concatenate([pairs, pairs]) % 2.0 == 0.0, weight, -weight)
        is_end = jnp.abs(z) > reach - 1.5 * step
        checks = (sign, fixed), (weight, jnp.abs(fixed)), (jnp.where(is_end, weight, 0.0), jnp.abs(fixed))
        return *sums, *(jnp.tensordot(w, part, axes=1) for w, part in checks)

    pairs = jnp.arange(_BLOCK * _NUM_BLOCKS, dtype=mean.dtype).reshape(_NUM_BLOCKS, _BLOCK)
    sums = sum_over_nodes(terms, pairs, lambda pairs: pairs[0] * step <= reach)
    alternating, size, at_ends = sums[5:]
    is_trusted = (jnp.abs(alternating) <= 0.1 * math.sqrt(exact) * size) & (at_ends <= exact * size)
    return _with_slopes(sums[:5], scale, variance), jnp.all(is_trusted, axis=0)


def _on_panels(potential: LogFactor, mean: Array, variance: Array) -> ExpectedLogDensity:
    rule = _SINGLE if jnp.finfo(mean.dtype).bits <= 32 else _DOUBLE
    panels = _refined_panels(*jax.lax.stop_gradient((potential, mean, variance)), rule)
    return _integral(potential, mean, variance, panels, rule)


def _points(left: Array, right: Array, nodes: np.ndarray) -> tuple[Array, Array]:
    """Points on a panel, on a new first axis, and the standard normal density there times half the length."""
    half = 0.5 * (right - left)
    z = 0.5 * (left + right) + half * jnp.asarray(nodes, left.dtype).reshape(-1, *(1,) * left.ndim)
    return z, half * jnp.exp(-0.5 * jnp.square(z)) / math.sqrt(2.0 * math.pi)


def _functionals(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes of a Legendre rule and the two ends, and the weights on these of three numbers.

    The integral; and for either end, what the polynomial through the nodes misses there, times the length between the
    end and the first node, into which the rule does not look.
    """
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    orders = np.arange(num_nodes)
    to_coefficients = (orders + 0.5)[:, None] * np.polynomial.legendre.legvander(nodes, num_nodes - 1).T * weights
    gap = 1.0 + nodes[0]
    rows = np.zeros((3, num_nodes + 2))
    rows[0, :-2] = weights
    rows[1, :-2], rows[1, -2] = -gap * ((-1.0) ** orders) @ to_coefficients, gap
    rows[2, :-2], rows[2, -1] = -gap * to_coefficients.sum(axis=0), gap
    return np.concatenate([nodes, [-1.0, 1.0]]), rows


def _refined_panels(potential: LogFactor, mean: Array, variance: Array, rule: _Rule) -> _Panels:
    """Halve the worst panel of every row until no row has a panel whose halves change the integral."""
    scale = jnp.sqrt(variance)
    powers = jnp.stack([jnp.ones_like(scale), scale, variance])

    nodes, functionals = _functionals(rule.num_nodes)
    sums = jnp.asarray(functionals, mean.dtype)

    def integrate(left: Array, right: Array) -> tuple[Array, Array, Array]:
        """Integrals over one panel per row, their sizes, and what is missed at the ends; shape ``(3, ...)``."""
        z, density = _points(left, right, nodes)
        values = jax.vmap(lambda z: jnp.stack(potential.derivatives(mean + scale * z)))(z)
        terms = density[:, None] * values
        integral, *missed = powers * jnp.tensordot(sums, terms, axes=1)
        size = powers * jnp.tensordot(sums[0], jnp.abs(terms), axes=1)
        return integral, size, jnp.abs(missed[0]) + jnp.abs(missed[1])

    def measured(left: Array, right: Array, whole: Array) -> tuple[Array, Array, Array]:
        """Halves, size and error of a stack of panels."""
        middle = 0.5 * (left + right)
        ends = jnp.stack([left, middle], axis=1), jnp.stack([middle, right], axis=1)
        halves, sizes, missed = jax.vmap(jax.vmap(integrate))(*ends)
        return halves, jnp.sum(sizes, axis=1), jnp.abs(whole - jnp.sum(halves, axis=1)) + jnp.sum(missed, axis=1)

    def split(panels: _Panels) -> _Panels:
        worst = jnp.argmax(panels.relative_error(), axis=0)
        left, right = (jnp.take_along_axis(x, worst[None], axis=0)[0] for x in (panels.left, panels.right))
        halves = jnp.take_along_axis(panels.halves, worst[None, None, None], axis=0)[0]
        middle = 0.5 * (left + right)
        ends = jnp.stack([left, middle]), jnp.stack([middle, right])
        parts = (*ends, *measured(*ends, halves))

        def put(old: Array, new: Array) -> Array:
            index = jnp.arange(_MAX_PANELS).reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(index == worst, new[0], jnp.where(index == panels.num_used, new[1], old))

        updated = [put(old, new) for old, new in zip(panels[:-1], parts, strict=True)]
        return _Panels(*[*updated, panels.num_used + 1])

    def unfinished(panels: _Panels) -> Array:
        return (panels.num_used < _MAX_PANELS) & jnp.any(panels.relative_error() > rule.tolerance)

    # The whole line, or both sides of a peak, as halves of panels that nobody has measured: the loop is the one place
    # that integrates, and halves these twice before it looks at an error.
    unknown = 0.1 * jnp.finfo(mean.dtype).max ** 0.5
    cuts = [jnp.full_like(mean, -rule.half_range), jnp.full_like(mean, rule.half_range)]
    peak = getattr(potential, "center", None)
    if peak is not None:
        cuts.insert(1, jnp.clip((peak - mean) / scale, *(sign * rule.half_range for sign in (-1.0, 1.0))))
    left, right = jnp.stack(cuts[:-1]), jnp.stack(cuts[1:])
    num_first = len(left)
    size = jnp.zeros((num_first, 3, *mean.shape), mean.dtype)
    halves = jnp.full((num_first, 2, *size.shape[1:]), unknown, mean.dtype)
    start = left, right, halves, size, jnp.full_like(size, unknown)
    padded = [jnp.concatenate([x, jnp.zeros((_MAX_PANELS - num_first, *x.shape[1:]), x.dtype)]) for x in start]
    return jax.lax.while_loop(unfinished, split, _Panels(*[*padded, jnp.asarray(num_first)]))


def _integral(potential: LogFactor, mean: Array, variance: Array, panels: _Panels, rule: _Rule) -> ExpectedLogDensity:
    """The expectation on given panels. Those without length contribute nothing."""
    scale = jnp.sqrt(variance)
    nodes, legendre_weights = np.polynomial.legendre.leggauss(rule.num_nodes)

    def terms(panel: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        z, density = _points(*panel[1:], nodes)
        weight = density * jnp.asarray(legendre_weights, mean.dtype).reshape(-1, *(1,) * mean.ndim)
        values, slopes, curvatures = jax.vmap(lambda z: potential.derivatives(mean + scale * z))(z)
        moved = slopes * z
        used = weight > 0.0
        terms = (jnp.ones_like(z), values, slopes, curvatures, moved, jnp.abs(moved))
        return tuple(jnp.sum(jnp.where(used, weight * term, 0.0), axis=0) for term in terms)

    numbered = jnp.arange(_MAX_PANELS), panels.left, panels.right
    mass, *sums = sum_over_nodes(terms, numbered, lambda panel: panel[0] < panels.num_used)
    return _with_slopes(tuple(total / mass for total in sums), scale, variance)


def _with_slopes(sums: tuple[Array, ...], scale: Array, variance: Array) -> ExpectedLogDensity:
    """From the expectations of ``f``, ``f'``, ``f''``, ``f' z`` and its absolute value."""
    value, slope, curvature, moved, moved_size = sums
    # By Stein's identity also E f' z / (2 sqrt v), which knows of kinks but loses digits if the Gaussian is narrow.
    smooth, any_continuous = 0.5 * curvature, 0.5 * moved / scale
    noise = 1e3 * jnp.finfo(value.dtype).eps * (moved_size / scale + jnp.abs(curvature))
    variance_slope = jnp.where(jnp.abs(smooth - any_continuous) <= noise, smooth, any_continuous)
    # The derivative of the sum in the variance is the second form; make it the one that is returned.
    missing = jax.lax.stop_gradient(jnp.where(jnp.isfinite(value), variance_slope - any_continuous, 0.0))
    value = value + missing * (variance - jax.lax.stop_gradient(variance))
    return ExpectedLogDensity(value, slope, variance_slope)
