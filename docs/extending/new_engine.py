r"""A new engine in one file: exact conditioning for models whose observations are all Gaussian.

An algorithm is a frozen dataclass below :class:`~numpyro_ext.infer.Algorithm`: its fields are its options, and its
methods are four functions of the form that was read: where to start, how to go on, the log evidence, and the posterior.
An engine is a class with one method, :meth:`~numpyro_ext.infer.Engine.algorithm`, that refuses a model or returns the
algorithm for it. Reading, the search for hyperparameters, draws, summaries, ArviZ, saving and cross-validation come
with the base class, and so do compiled programs, which equal algorithms share.

With Gaussian factors :math:`N(y_i \mid \eta_i, s_i^2)` the posterior is the prior conditioned on sites of precision
:math:`1/s_i^2` and shift :math:`y_i/s_i^2`: there is nothing to iterate, and the state is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_ext.infer import Algorithm, Engine, FitInfo, GaussianPosterior
from numpyro_ext.potentials import GaussianPotential
from numpyro_ext.structure import LatentGaussian, ModelStructureError


@dataclass(frozen=True)
class Exact(Algorithm):
    """Conditioning on Gaussian observations, which has no options.

    Options are fields, as in ``@dataclass(frozen=True) class Tempered(Exact): temperature: float = 1.0``. Methods read
    nothing else that may change, so that ``Tempered(2.0) == Tempered(2.0)`` may share programs.
    """

    def init(self, form: LatentGaussian) -> tuple[()]:
        return ()

    def solve(self, form: LatentGaussian, state: tuple[()], *, num_steps: int, tol: float) -> tuple[tuple[()], FitInfo]:
        """Nothing to do: one step, converged, no change, no factor left behind."""
        trace = jnp.full((num_steps,), jnp.nan).at[0].set(0.0)
        none_skipped = jnp.zeros((form.num_rows,), bool)
        return state, FitInfo(jnp.asarray(True), jnp.asarray(1), trace, jnp.asarray(0.0), none_skipped)

    def posterior(self, form: LatentGaussian, state: tuple[()]) -> GaussianPosterior:
        return GaussianPosterior(form, *_sites(form))

    def log_evidence(self, form: LatentGaussian, state: tuple[()]) -> Array:
        """Bayes' rule at the posterior mean: joint density over posterior density. The gradient is exact."""
        posterior = self.posterior(form, state)
        mean = posterior.mean
        log_normalizer = 0.5 * mean.size * jnp.log(2.0 * jnp.pi)
        return form.log_density(mean) + log_normalizer + jnp.sum(jnp.log(jnp.diagonal(posterior.scale_tril())))


class ExactGaussian(Engine):
    """The exact posterior of a model with Gaussian field and Gaussian observations, from one factorisation.

    **Example:** a mean with a standard normal prior and three observations of unit noise, whose evidence is known.

    >>> import jax
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
    ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> y = jnp.array([1.0, 2.0, 3.0])
    >>> engine = ExactGaussian(model)
    >>> engine.run(jax.random.key(0), y)
    >>> print(f"{engine.posterior['mean'].mean:.4f} {engine.posterior['mean'].variance:.4f}")
    1.5000 0.2500
    >>> joint = dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + jnp.ones((3, 3)))
    >>> bool(jnp.allclose(engine.log_evidence, joint.log_prob(y), rtol=1e-5))
    True

    Other observations are refused by name, like everything that an engine cannot treat:

    >>> def counts(y):
    ...     rate = numpyro.sample("rate", dist.Normal(0, 1))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp(rate)), obs=y)
    >>> ExactGaussian(counts).run(jax.random.key(0), jnp.array([1, 2]))
    Traceback (most recent call last):
        ...
    numpyro_ext.structure.errors.ModelStructureError: Site 'y' is not Gaussian (PoissonExpPotential): use EP.
    """

    def algorithm(self, reading: Any) -> Algorithm:
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            if not isinstance(potential, GaussianPotential):
                raise ModelStructureError(f"Site {name!r} is not Gaussian ({type(potential).__name__}): use EP.")
        return Exact()


def _sites(form: LatentGaussian) -> tuple[Array, Array]:
    precision, shift = [], []
    for potential, observed in zip(form.potentials, form.observed, strict=True):
        weight = jnp.where(observed, 1.0 / jnp.square(potential.scale), 0.0)
        precision.append(weight)
        shift.append(jnp.where(observed, weight * potential.observation, 0.0))
    return jnp.concatenate(precision), jnp.concatenate(shift)
