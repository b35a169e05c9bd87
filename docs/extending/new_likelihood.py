r"""A new likelihood in one file: counts that are never zero, which NumPyro does not have.

A count of what is met at all is at least one: nights in hospital, people in a car, bids at an auction. Given one or
more, a Poisson count of rate :math:`\lambda` has :math:`p(y) = \lambda^y e^{-\lambda} / (y!\,(1 - e^{-\lambda}))`.

Three parts make a likelihood:

1. a NumPyro distribution, for the model, NUTS and prediction;
2. a potential: the log density as a function of one predictor :math:`\eta`, here of :math:`\lambda = c\,e^\eta`, and
   what is known of it in closed form. :meth:`~numpyro_ext.potentials.Potential.log_density` is enough, all else has a
   default: derivatives by differentiation, moments and expectations by quadrature. The flags of the class say what
   engines may rely on;
3. the entry in the registry that ties them: which parameter carries the predictor, and through which links.

A likelihood of one predictor needs none of this for EP, the Laplace approximation or the variational Gaussian: a site
that is not in the registry is read as an elementwise function and integrated by quadrature. An entry makes it faster
and more accurate (log-concavity spares the search for a second mode), gives it a name in what engines report, and is
what bilinear models ask for.

**Example:** a regression of counts, by expectation propagation and by quadrature of NumPyro's own density.

>>> import jax
>>> import numpyro
>>> from numpyro.infer.util import log_density
>>> from numpyro_ext.infer import EP
>>> from numpyro_ext.structure import read_latent_gaussian
>>> def stays(age, nights=None):
...     intercept = numpyro.sample("intercept", dist.Normal(0, 1))
...     slope = numpyro.sample("slope", dist.Normal(0, 1))
...     numpyro.sample("nights", ZeroTruncatedPoisson(2.0 * jnp.exp(intercept + slope * age)), obs=nights)
>>> age, nights = jnp.linspace(-1.0, 1.0, 6), jnp.array([1, 1, 3, 2, 4, 6])

It is read by its name, and the reading is compared with NumPyro's density:

>>> print(read_latent_gaussian(stays, (age, nights)).describe())
field: intercept () (Normal)
field: slope () (Normal)
factor: nights (6,) (zero-truncated poisson, exp link)
design: 6 x 2, dense

The posterior of both coefficients on a grid, to compare with:

>>> engine = EP(stays, progress_bar=False)
>>> engine.run(random.key(0), age, nights)
>>> a, b = (x.ravel() for x in jnp.meshgrid(jnp.linspace(-2.5, 2.5, 101), jnp.linspace(-2.5, 2.5, 101)))
>>> def log_joint(a, b):
...     return log_density(stays, (age, nights), {}, {"intercept": a, "slope": b})[0]
>>> weight = jnp.exp(jax.vmap(log_joint)(a, b))
>>> def by_quadrature(values):
...     mean = (weight * values).sum() / weight.sum()
...     return mean, jnp.sqrt((weight * (values - mean) ** 2).sum() / weight.sum())
>>> for site, values in (("intercept", a), ("slope", b)):
...     found, (mean, sd) = engine.posterior[site], by_quadrature(values)
...     print(f"{site}: EP {found.mean:.2f} +- {found.sd:.2f}, quadrature {mean:.2f} +- {sd:.2f}")
intercept: EP -0.10 +- 0.34, quadrature -0.10 +- 0.34
slope: EP 1.07 +- 0.43, quadrature 1.07 +- 0.44
>>> print(f"log evidence: EP {engine.log_evidence:.2f}, quadrature {jnp.log(weight.sum() * 0.05**2):.2f}")
log evidence: EP -10.11, quadrature -10.10
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_ext.potentials import Potential, potential
from numpyro_ext.structure import EXP, register_family


class ZeroTruncatedPoisson(dist.Distribution):
    """A Poisson count given that it is not zero.

    :param ArrayLike rate: of the count before zeros are taken out.

    >>> bool(jnp.isclose(jnp.exp(ZeroTruncatedPoisson(2.0).log_prob(jnp.arange(1, 40))).sum(), 1.0))
    True
    """

    arg_constraints = {"rate": constraints.positive}
    support = constraints.positive_integer
    pytree_data_fields = ("rate",)

    def __init__(self, rate: ArrayLike = 1.0, *, validate_args: bool | None = None):
        self.rate = jnp.asarray(rate)
        super().__init__(self.rate.shape, (), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        first_key, rest_key = random.split(key)
        # The time of the first event, given that it comes before the end; the others follow as if nothing were known.
        uniform = random.uniform(first_key, self.shape(sample_shape), jnp.result_type(self.rate, float))
        first = -jnp.log1p(uniform * jnp.expm1(-self.rate))
        return 1 + random.poisson(rest_key, jnp.maximum(self.rate - first, 0.0))

    def log_prob(self, value: Any) -> Array:
        log_positive = jnp.log(-jnp.expm1(-self.rate))
        return value * jnp.log(self.rate) - self.rate - gammaln(value + 1.0) - log_positive

    @property
    def mean(self) -> Array:
        return self.rate / -jnp.expm1(-self.rate)


@potential
class ZeroTruncatedPoissonPotential(Potential):
    r"""Zero-truncated counts with the rate :math:`c\,e^\eta`.

    :param Array count: counts, one or more.
    :param Array exposure: the factor :math:`c` of the rate.

    Closed forms can be compared with the defaults that they replace:

    >>> factors, eta = ZeroTruncatedPoissonPotential(jnp.array([1, 2, 5]), 0.7), jnp.array([-2.0, 0.5, 1.5])
    >>> pairs = zip(factors.derivatives(eta), Potential.derivatives(factors, eta), strict=True)
    >>> all(bool(jnp.allclose(own, automatic, rtol=1e-4, atol=1e-5)) for own, automatic in pairs)
    True
    """

    count: Array
    exposure: Array | float = 1.0

    is_log_concave: ClassVar[bool] = True  # as an exponential family in eta is

    def _log_rate(self, eta: ArrayLike) -> Array:
        return jnp.asarray(eta) + jnp.log(self.exposure)

    def log_density(self, eta: ArrayLike) -> Array:
        log_rate = self._log_rate(eta)
        # Of the smallest rates the logarithm is that of 1 - exp(-rate). Both branches are finite, and so are gradients.
        is_small = log_rate < -30.0
        rate = jnp.exp(jnp.where(is_small, 0.0, log_rate))
        log_positive = jnp.where(is_small, log_rate, jnp.log(-jnp.expm1(-rate)))
        return self.count * log_rate - jnp.exp(log_rate) - gammaln(self.count + 1.0) - log_positive

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        """The slope is the count less its mean, the curvature minus the variance."""
        rate, mean = jnp.exp(self._log_rate(eta)), self.mean(eta)
        return self.log_density(eta), self.count - mean, -mean * (1.0 + rate - mean)

    def mean(self, eta: ArrayLike) -> Array:
        rate = jnp.exp(self._log_rate(eta))
        return jnp.where(rate < 1e-6, 1.0 + 0.5 * rate, rate / -jnp.expm1(-jnp.maximum(rate, 1e-6)))


# The factor that the link leaves open, y.scale, is the exposure: exp(log_population + predictor) is read like
# population * exp(predictor).
register_family(
    ZeroTruncatedPoisson,
    label="zero-truncated poisson",
    predictor="rate",
    links={EXP: lambda y: ZeroTruncatedPoissonPotential(y.value, y.scale)},
)
