"""Distributions that are the same as others, in the form in which a reading sees what they are."""

from __future__ import annotations

import copy

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.special import log_ndtr, xlog1py, xlogy
from numpyro.distributions import constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent, MaskedDistribution
from numpyro.distributions.transforms import AffineTransform, ComposeTransform, LowerCholeskyAffine

from ...potentials.integrals.stirling import log_beta, log_rising_coefficient

_JUMP = 2e-6
"""Error of ``jax.scipy.special.betaln``, which density functions have once or twice."""
_WRAPPERS = (ExpandedDistribution, Independent, MaskedDistribution)


def as_gaussian(fn: dist.Distribution) -> dist.Distribution:
    """A Gaussian that is written as affine transforms of another one, as that Gaussian; others as they are.

    So are ``TransformedDistribution(Normal(0, 1), AffineTransform(mean, scale))``, which tutorials write for
    :class:`~numpyro.infer.reparam.TransformReparam`, and a Cholesky factor in the place of the scale.

    >>> as_gaussian(dist.TransformedDistribution(dist.Normal(0.0, 1.0), AffineTransform(2.0, -3.0))).scale.item()
    3.0
    """
    if isinstance(fn, _WRAPPERS):
        inner = as_gaussian(fn.base_dist)
        return fn if inner is fn.base_dist else _around(fn, inner)
    if type(fn) is not dist.TransformedDistribution:
        return fn
    base, shape = as_gaussian(fn.base_dist), fn.batch_shape + fn.event_shape
    while isinstance(base, Independent | ExpandedDistribution):
        base = base.base_dist
    transforms = [part for t in fn.transforms for part in (t.parts if isinstance(t, ComposeTransform) else [t])]
    if type(base) is dist.Normal and all(type(t) is AffineTransform for t in transforms):
        loc, scale = base.loc, base.scale
        for t in transforms:
            loc, scale = t.loc + t.scale * loc, jnp.abs(t.scale) * scale
        loc, scale = (jnp.broadcast_to(x, shape) for x in (loc, scale))
        return dist.Normal(loc, scale, validate_args=False).to_event(len(fn.event_shape))
    if type(base) is dist.Normal and [type(t) for t in transforms] == [LowerCholeskyAffine]:
        (t,) = transforms
        loc, scale = (jnp.broadcast_to(x, shape) for x in (base.loc, base.scale))
        mean = t.loc + jnp.squeeze(t.scale_tril @ loc[..., None], -1)
        return dist.MultivariateNormal(mean, scale_tril=t.scale_tril * scale[..., None, :], validate_args=False)
    return fn


def with_exact_density(fn: dist.Distribution) -> dist.Distribution:
    """Truncated normal distributions, beta and beta-binomial ones, and zero-inflated gamma-Poisson ones with densities
    of full precision; others as they are.

    NumPyro divides truncated normal densities by the mass of the interval, which is zero to it some 38 standard
    deviations away (eight, if cut on the right or on both sides). The others have ``jax.scipy.special.betaln`` in them,
    which jumps by a millionth where an argument is eight: too much for the derivatives that engines take. Derivatives
    of these are short programs besides.
    """
    if isinstance(fn, _WRAPPERS):
        inner = with_exact_density(fn.base_dist)
        return fn if inner is fn.base_dist else _around(fn, inner)
    if isinstance(fn, dist.ZeroInflatedProbs):
        base = fn.base_dist.base_dist if isinstance(fn.base_dist, ExpandedDistribution) else fn.base_dist
        is_counts = type(base) in (dist.GammaPoisson, dist.NegativeBinomial2, dist.NegativeBinomialProbs)
        return _around(fn, _GammaPoisson(base, fn.batch_shape)) if is_counts else fn
    if type(fn) is dist.BetaBinomial:
        return _BetaBinomial(fn)
    if type(fn) in (dist.Beta, dist.BetaProportion):
        return _Beta(fn)
    if type(getattr(fn, "base_dist", None)) is not dist.Normal:
        return fn
    if type(fn) is dist.LeftTruncatedDistribution:
        return _TruncatedNormal(fn, fn.low, None)
    if type(fn) is dist.RightTruncatedDistribution:
        return _TruncatedNormal(fn, None, fn.high)
    if type(fn) is dist.TwoSidedTruncatedDistribution:
        return _TruncatedNormal(fn, fn.low, fn.high)
    return fn


def rounding_of_density(fn: dist.Distribution, value: Array) -> Array | None:
    """Bound on the error of each log density that NumPyro computes where :func:`with_exact_density` has another one.

    :param fn: a distribution as a model has it.
    :param value: its value.
    :return: in a shape that broadcasts with that of the value; none where NumPyro's densities have full precision.
    """
    exact, mask = with_exact_density(fn), jnp.asarray(True)
    if exact is fn:
        return None
    while isinstance(exact, _WRAPPERS):
        if isinstance(exact, MaskedDistribution) and exact.event_dim == 0:
            mask = mask & jnp.asarray(exact._mask)
        exact = exact.base_dist
    eps = jnp.finfo(jnp.result_type(float)).eps
    bound = 8.0 * eps / jnp.exp(exact.log_mass()) if isinstance(exact, _TruncatedNormal) else jnp.asarray(_JUMP)
    return jnp.where(mask, bound, 0.0)


def _around(wrapper: dist.Distribution, inner: dist.Distribution) -> dist.Distribution:
    out = copy.copy(wrapper)
    out.base_dist = inner
    return out


class _Beta(dist.Distribution):
    pytree_data_fields = ("concentration1", "concentration0")
    support = constraints.unit_interval

    def __init__(self, fn: dist.Distribution):
        self.concentration1, self.concentration0 = fn.concentration1, fn.concentration0
        super().__init__(fn.batch_shape, validate_args=False)

    def log_prob(self, value: Array) -> Array:
        a, b = (jnp.asarray(x, float) for x in (self.concentration1, self.concentration0))
        # As in NumPyro, the ends of the interval have a density, but no derivative in the concentrations.
        is_end = (value == 0.0) | (value == 1.0)
        inside = jnp.where(is_end, 0.5, value)
        normaliser = log_beta(a, b)
        density: Array = (a - 1.0) * jnp.log(inside) + (b - 1.0) * jnp.log1p(-inside) - normaliser
        at_end = xlogy(a - 1.0, value) + xlog1py(b - 1.0, -value) - normaliser
        return jnp.where(is_end, lax.stop_gradient(at_end), density)


class _BetaBinomial(dist.Distribution):
    pytree_data_fields = ("concentration1", "concentration0", "total_count")

    def __init__(self, fn: dist.Distribution):
        self.concentration1, self.concentration0 = fn.concentration1, fn.concentration0
        self.total_count = fn.total_count
        super().__init__(fn.batch_shape, validate_args=False)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.total_count)

    def log_prob(self, value: Array) -> Array:
        total, count = (jnp.asarray(x, float) for x in (self.total_count, value))
        a, b = self.concentration1, self.concentration0
        # Three at once are one piece of program.
        parts = jnp.stack(jnp.broadcast_arrays(count, total - count, total, a, b, a + b))
        counts, sizes = parts[:3], parts[3:]
        of_successes, of_failures, of_all = log_rising_coefficient(counts, sizes)
        return of_successes + of_failures - of_all


class _GammaPoisson(dist.Distribution):
    stands_for = dist.GammaPoisson
    pytree_data_fields = ("concentration", "rate")
    support = constraints.nonnegative_integer

    def __init__(self, fn: dist.Distribution, batch_shape: tuple[int, ...]):
        self.concentration, self.rate = fn.concentration, fn.rate
        super().__init__(batch_shape, validate_args=False)

    def log_prob(self, value: Array) -> Array:
        value, size = (jnp.asarray(x, float) for x in (value, self.concentration))
        chances: Array = log_rising_coefficient(value, size)
        chances -= size * jnp.log1p(1.0 / self.rate) + value * jnp.log1p(self.rate)
        return chances


class _TruncatedNormal(dist.Distribution):
    pytree_data_fields = ("loc", "scale", "low", "high", "_support")

    def __init__(self, fn: dist.Distribution, low: Array | None, high: Array | None):
        self.loc, self.scale, self.low, self.high = fn.base_dist.loc, fn.base_dist.scale, low, high
        self._support = fn.support
        super().__init__(fn.batch_shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        return self._support

    def log_prob(self, value: Array) -> Array:
        density: Array = dist.Normal(self.loc, self.scale, validate_args=False).log_prob(value)
        return density - self.log_mass()

    def log_mass(self) -> Array:
        """Log of the probability of the interval before it is cut out, of the shape of the parameters."""
        if self.high is None:
            return log_ndtr((self.loc - self.low) / self.scale)
        above = (self.high - self.loc) / self.scale
        if self.low is None:
            return log_ndtr(above)
        # The mass between two points of the lower tail, to which the upper one is turned.
        below = (self.low - self.loc) / self.scale
        is_turned = below + above > 0.0
        near = log_ndtr(jnp.where(is_turned, -below, above))
        far = log_ndtr(jnp.where(is_turned, -above, below))
        return near + jnp.log(-jnp.expm1(far - near))
