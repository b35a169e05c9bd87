r"""A new form in one file: probabilities with Beta priors behind binomial counts, of which everything is known exactly.

A form is what an engine runs on: a NamedTuple of arrays with a ``log_density`` of the unknowns. A *reading* finds it in
a model. What a reading needs is there: the model as a program of values that can be asked what they depend on, the
split into field and hyperparameters, masks, constants, and the search, which takes one site out of each conflict. Three
parts are the form's own:

1. the NamedTuple, with the mathematics of its posterior, on arrays alone;
2. a subclass of :class:`~numpyro_ext.structure.ModelReading`: which factors it takes, and what it makes of them;
3. a :class:`~numpyro_ext.structure.Form`, which says what distributions may be the unknowns.

A reading need not see through everything that a model may do: what was read is compared with NumPyro's own density at
random points, and a model that was misread is refused. So the weight of each probability below is not looked at.

**Example:** counts in three groups, whose probabilities have a common prior.

>>> import jax
>>> import numpyro
>>> from numpyro_ext.structure import read_first
>>> def trials(group, totals, successes=None):
...     concentration = numpyro.sample("concentration", dist.Gamma(4.0, 0.5))
...     with numpyro.plate("groups", 3):
...         p = numpyro.sample("p", dist.Beta(0.4 * concentration, 0.6 * concentration))
...     numpyro.sample("successes", dist.Binomial(totals, probs=p[group]), obs=successes)
>>> group, totals = jnp.array([0, 1, 2, 2]), jnp.array([10, 8, 20, 6])
>>> reading = read_first([BETA_BINOMIAL], trials, (group, totals, jnp.array([3, 7, 9, 1])))
>>> print(reading.describe())
field: p (3,) (Beta)
hyperparameter: concentration () (Gamma)
factor: successes (4,), of 3 probabilities

The posterior is a product of Beta distributions, and the evidence that of beta-binomial counts. Both are functions of
the hyperparameters, which can be differentiated and mapped:

>>> form = reading.form({"concentration": 5.0})
>>> print(form.posterior().mean.round(3))
[0.333 0.692 0.387]
>>> slope = jax.grad(lambda c: reading.form({"concentration": c}).log_evidence())(5.0)
>>> print(f"{slope:.3f}")
0.023
>>> alone = read_first([BETA_BINOMIAL], trials, (group[:3], totals[:3], jnp.array([3, 7, 9])))
>>> known = dist.BetaBinomial(2.0, 3.0, totals[:3]).log_prob(jnp.array([3, 7, 9])).sum()
>>> bool(jnp.isclose(alone.form({"concentration": 5.0}).log_evidence(), known, rtol=1e-4))
True

What does not fit is refused, by the reading or by the comparison:

>>> def powers(successes):
...     p = numpyro.sample("p", dist.Beta(1.0, 1.0))
...     numpyro.sample("successes", dist.Binomial(5, probs=p**2), obs=successes)
>>> read_first([BETA_BINOMIAL], powers, (jnp.array([1, 2]),))
Traceback (most recent call last):
    ...
numpyro_ext.structure.errors.ModelStructureError: the probability of site 'successes' is not that of one Beta site.
>>> def halves(successes):
...     p = numpyro.sample("p", dist.Beta(1.0, 1.0))
...     numpyro.sample("successes", dist.Binomial(5, probs=0.5 * p), obs=successes)
>>> try:
...     read_first([BETA_BINOMIAL], halves, (jnp.array([1, 2]),))
... except ModelStructureError as error:
...     print(str(error).split(":")[0])
the model was misread
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.nn import sigmoid
from jax.scipy.special import betaln, gammaln, xlog1py, xlogy

from numpyro_ext.structure import Conflict, Form, ModelReading, ModelStructureError, family_of
from numpyro_ext.structure.model.priors import unwrap
from numpyro_ext.structure.program.degrees import Degree
from numpyro_ext.structure.program.rows.affine_rows import AffineRows


class BetaBinomial(NamedTuple):
    """Probabilities with independent Beta priors, and binomial counts of each."""

    successes: Array
    """Prior concentration of successes, shape ``(num_probabilities,)``."""
    failures: Array
    """That of failures."""
    index: Array
    """The probability behind each count, shape ``(num_counts,)``."""
    count: Array
    total: Array
    constant: Array
    """Other terms of the log density."""

    def posterior(self) -> dist.Beta:
        """The exact posterior of the probabilities."""
        num = self.successes.size
        more = (jnp.zeros(num).at[self.index].add(x) for x in (self.count, self.total - self.count))
        return dist.Beta(*(own + added for own, added in zip((self.successes, self.failures), more, strict=True)))

    def log_evidence(self) -> Array:
        """Log probability of the counts."""
        posterior = self.posterior()
        ratio = betaln(posterior.concentration1, posterior.concentration0) - betaln(self.successes, self.failures)
        return jnp.sum(ratio) + jnp.sum(self._log_ways()) + self.constant

    def log_density(self, p: Array) -> Array:
        """Log density of the probabilities and the counts."""
        prior = dist.Beta(self.successes, self.failures, validate_args=False).log_prob(p)
        used = p[self.index]
        counts = self._log_ways() + xlogy(self.count, used) + xlog1py(self.total - self.count, -used)
        return jnp.sum(prior) + jnp.sum(counts) + self.constant

    def _log_ways(self) -> Array:
        return gammaln(self.total + 1.0) - gammaln(self.count + 1.0) - gammaln(self.total - self.count + 1.0)


class BetaBinomialReading(ModelReading):
    """A model read as beta-binomial. The unknowns are the values of the Beta sites, one after another."""

    def __init__(self, call: Any, sites: Mapping[str, Any], field: Sequence[str]):
        super().__init__(call, sites, field, prior=_concentrations)
        degrees = self._classify("independent Beta variables")
        self._sort_factors(degrees)
        self._used = [self._observations_in_use(n) for n in self.factor_names]
        pairs = zip(self.factor_names, self._used, strict=True)
        self._index = [self._probability_of(name, used, degrees) for name, used in pairs]

    def _probability_of(self, name: str, used: np.ndarray, degrees: Any) -> np.ndarray:
        """The element of the field behind each observation."""
        traced = self._trace.factors[name]
        if traced.family is not family_of(dist.BinomialProbs) or traced.scale is not None:
            raise ModelStructureError(f"site '{name}' is not dist.Binomial(total, probs=...), or it is scaled.")
        probs = traced.parameters["probs"]
        if degrees.of(probs) == Degree.AFFINE and degrees.of(traced.parameters["total_count"]) == Degree.CONSTANT:
            pattern = AffineRows(self._questions, self._field, [((probs,), used)]).pattern
            if pattern is not None and pattern.shape[1] == 1:
                return pattern[:, 0]
        raise Conflict(f"the probability of site '{name}' is not that of one Beta site.", degrees.sites_of(probs))

    def form(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> BetaBinomial:
        env = self._env(hyper, data)
        counts, totals = [], []
        for name, used in zip(self.factor_names, self._used, strict=True):
            traced = self._trace.factors[name]
            found = self._program.evaluate([traced.value, traced.parameters["total_count"]], env)
            for parts, value in zip((counts, totals), found, strict=True):
                parts.append(jnp.reshape(value, -1)[used].astype(float))
        priors = [self._evaluated(self._trace.priors[n], env) for n in self.field]
        concentrations = (jnp.concatenate(parts) for parts in zip(*priors, strict=True))
        index = jnp.asarray(np.concatenate(self._index))
        return BetaBinomial(
            *concentrations, index, jnp.concatenate(counts), jnp.concatenate(totals), self._log_constant(env)
        )

    def draw(self, hyper: Mapping[str, Any], white: Array, data: Sequence[Any]) -> Array:
        return sigmoid(white)

    def describe(self) -> str:
        what = zip(self.factor_names, self.factor_shapes, strict=True)
        lines = [f"factor: {name} {shape}, of {self.num_columns} probabilities" for name, shape in what]
        return "\n".join([*self._describe_sites(), *lines])


def _concentrations(fn: Any) -> tuple[Array, Array]:
    """Parameters of a Beta site, flattened; ``unwrap`` takes off ``expand``, ``to_event`` and ``mask``."""
    base, shape = unwrap(fn), fn.batch_shape + fn.event_shape
    first, second = (jnp.broadcast_to(x, shape).reshape(-1) for x in (base.concentration1, base.concentration0))
    return first.astype(float), second.astype(float)


BETA_BINOMIAL = Form(
    reading=BetaBinomialReading,
    is_candidate=lambda fn: type(unwrap(fn)) is dist.Beta,
    no_candidate="the model has no Beta site (latent sites: {}).",
)
