r"""Annealed importance sampling of the log evidence of a latent-Gaussian form (Neal 2001): a reference for the engines.

Chains go from the prior to the posterior through :math:`f_t(e) = p(y \mid e)^{\tau_t} N(e \mid 0, C)` with
:math:`0 = \tau_0 < \dots < \tau_T = 1`. Each collects the weight (Neal 2001, eq. 4)

.. math:: w = \prod_{t=1}^T \frac{f_t(e_{t-1})}{f_{t-1}(e_{t-1})}
    = \exp \sum_{t=1}^T (\tau_t - \tau_{t-1}) \log p(y \mid e_{t-1}),

whose mean is the evidence, without bias and whatever the number of steps. Elliptical slice sampling (Murray, Adams and
MacKay 2010) leaves every :math:`f_t` invariant and has nothing to tune.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from ...linalg.gaussian.block_diagonal import BlockDiagonal
from ...linalg.gaussian.prior import is_flat, is_valid_prior
from ...structure import read_latent_gaussian
from ...structure.latent_gaussian import LatentGaussian
from ..gaussian.fitting.failures import not_finite_error
from ..hyper.space import UnconstrainedSpace
from .kernels.slices import elliptical_slices

_EXPONENT = 4.0
_PILOT_FRACTION = 0.25
_FEWEST_PILOT_STEPS = 10
_EVEN_SHARE = 0.1


class AnnealedImportanceSampling(NamedTuple):
    """An estimate of the log evidence, and what it was made of."""

    log_evidence: Array
    """Logarithm of the mean weight: too low on average, by half the squared standard error."""
    standard_error: Array
    """Standard error of ``log_evidence``, from the spread of the weights (delta method); not to be trusted if above
    about one half."""
    effective_sample_size: Array
    """Squared sum of the weights over the sum of their squares, between one and the number of chains."""
    log_weights: Array
    """Logarithm of each chain's weight, shape ``(num_chains,)``."""
    temperatures: Array
    """The schedule, shape ``(num_temperatures + 1,)``."""


def power_temperatures(num_temperatures: int) -> np.ndarray:
    r"""The schedule :math:`\tau_t = (t / T)^4`, dense near the prior, where the likelihood varies most.

    :param int num_temperatures: :math:`T`.
    :return: shape ``(num_temperatures + 1,)``, from zero to one.

    >>> power_temperatures(2)
    array([0.    , 0.0625, 1.    ])
    """
    return np.linspace(0.0, 1.0, num_temperatures + 1) ** _EXPONENT


def estimate(
    form: LatentGaussian,
    rng_key: Array,
    *,
    num_chains: int = 256,
    num_temperatures: int = 100,
    num_transitions: int = 1,
    temperatures: ArrayLike | None = None,
) -> AnnealedImportanceSampling:
    r"""Estimate the log evidence of a form by annealed importance sampling.

    By default the temperatures are adapted: a shorter run on :func:`power_temperatures` measures the standard deviation
    of the log likelihood along the path, and the schedule spends equal shares of its integral on every step, which
    minimises the variance of long runs (Gelman and Meng 1998, eq. 49). The estimate comes from a second, independent
    run, so it stays unbiased. One in ten temperatures follows the power schedule, as a safeguard.

    Costs ``num_chains * num_temperatures * num_transitions`` times a few evaluations of predictors and factors.

    :param LatentGaussian form: the model; its priors must be proper.
    :param rng_key: random number generator key.
    :param int num_chains: number of independent chains, run side by side.
    :param int num_temperatures: number of steps from prior to posterior; one is plain importance sampling.
    :param int num_transitions: transitions at each temperature.
    :param temperatures: a schedule to use instead, strictly increasing from zero to one, ``(num_temperatures + 1,)``.
    :return: the estimate; nan if a prior is not positive definite.
    :raises ValueError: if a prior is flat, or not Gaussian: there is nothing to start from.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> from numpyro_ext.potentials import ProbitPotential
    >>> from numpyro_ext.structure.latent_gaussian import Blocks
    >>> form = LatentGaussian(
    ...     prior=(DiagonalPrior(jnp.ones(1)),), design=DenseDesign(jnp.ones((2, 1))), offset=jnp.zeros(2),
    ...     potentials=(ProbitPotential(jnp.array([1.0, 1.0])),), observed=(jnp.ones(2, bool),),
    ...     log_constant=jnp.zeros(()), blocks=Blocks(jnp.arange(2)[None], jnp.arange(1)[None]),
    ... )
    >>> result = estimate(form, jax.random.key(0), num_temperatures=20)
    >>> bool(abs(result.log_evidence - jnp.log(1 / 3)) < 3 * result.standard_error)
    True
    """
    if any(is_flat(block) for block in form.prior):
        raise ValueError(
            "Annealing starts from a Gaussian prior, and a part of the field has none: flat priors have no evidence, "
            "and priors of coefficients that are not Gaussian are factors here."
        )
    pilot_key, rng_key = random.split(rng_key)
    dtype = form.offset.dtype
    if temperatures is None:
        num_pilot = max(_FEWEST_PILOT_STEPS, int(_PILOT_FRACTION * num_temperatures))
        pilot = jnp.asarray(power_temperatures(num_pilot), dtype)
        _, deviation = _run(form, pilot_key, pilot, num_chains, 1)
        schedule = _equal_shares(pilot, deviation, num_temperatures)
    else:
        schedule = jnp.asarray(temperatures, dtype)
    log_weights, _ = _run(form, rng_key, schedule, num_chains, num_transitions)
    log_weights = jnp.where(is_valid_prior(form.prior), log_weights + form.log_constant, jnp.nan)
    log_evidence = logsumexp(log_weights) - jnp.log(num_chains)
    ratio = jnp.exp(log_weights - log_evidence)
    standard_error = jnp.std(ratio, ddof=1) / jnp.sqrt(num_chains)
    size = jnp.sum(ratio) ** 2 / jnp.sum(ratio**2)
    return AnnealedImportanceSampling(log_evidence, standard_error, size, log_weights, schedule)


def _run(
    form: LatentGaussian, rng_key: Array, temperatures: Array, num_chains: int, num_transitions: int
) -> tuple[Array, Array]:
    """Log weights of the chains, and the standard deviation of the log likelihood at each temperature but the last."""
    factor = BlockDiagonal(tuple(block.scale_part() for block in form.prior))

    def log_likelihood(white: Array) -> Array:
        return jnp.sum(form.log_factors(form.predictor(factor.apply(white))))

    def transit(key: Array, white: Array, current: Array, temperature: Array) -> tuple[Array, Array]:
        def tempered(white: Array) -> Array:
            return temperature * log_likelihood(white)

        white, level, _ = elliptical_slices(
            key, white, temperature * current, tempered, num_transitions, jnp.asarray(num_transitions), True
        )
        return white, level / temperature

    def advance(carry: tuple[Array, Array, Array], step: tuple[Array, Array, Array]) -> tuple[Any, Array]:
        white, current, log_weight = carry
        key, previous, temperature = step
        # The last transition leads to the posterior and is of no use to the weight; one program is simpler.
        keys = random.split(key, num_chains)
        moved = jax.vmap(transit, in_axes=(0, 0, 0, None))(keys, white, current, temperature)
        return (*moved, log_weight + (temperature - previous) * current), _finite_deviation(current)

    start_key, step_key = random.split(rng_key)
    white = random.normal(start_key, (num_chains, form.num_columns), temperatures.dtype)
    current = jax.vmap(log_likelihood)(white)
    keys = random.split(step_key, temperatures.size - 1)
    carry = (white, current, jnp.zeros_like(current))
    (_, _, log_weights), deviation = lax.scan(advance, carry, (keys, temperatures[:-1], temperatures[1:]))
    return log_weights, deviation


def _finite_deviation(values: Array) -> Array:
    is_finite = jnp.isfinite(values)
    count = jnp.maximum(jnp.sum(is_finite), 1)
    mean = jnp.sum(jnp.where(is_finite, values, 0.0)) / count
    return jnp.sqrt(jnp.sum(jnp.where(is_finite, (values - mean) ** 2, 0.0)) / count)


def _equal_shares(pilot: Array, deviation: Array, num_temperatures: int) -> Array:
    """Temperatures between which the integral of the standard deviation of the log likelihood is the same."""
    # The power schedule ends at one, where the pilot measures nothing: its last value is held.
    ends = jnp.concatenate([deviation, deviation[-1:]])
    parts = 0.5 * (ends[1:] + ends[:-1]) * jnp.diff(pilot)
    share = jnp.concatenate([jnp.zeros(1, pilot.dtype), jnp.cumsum(parts)])
    share = share / jnp.maximum(share[-1], jnp.finfo(share.dtype).tiny)
    even = jnp.linspace(0.0, 1.0, pilot.size, dtype=pilot.dtype)
    share = (1.0 - _EVEN_SHARE) * share + _EVEN_SHARE * even
    grid = jnp.linspace(0.0, share[-1], num_temperatures + 1, dtype=pilot.dtype)
    return jnp.interp(grid, share, pilot).at[0].set(0.0).at[-1].set(1.0)


_compiled_estimate = jax.jit(estimate, static_argnames=("num_chains", "num_temperatures", "num_transitions"))


def annealed_importance_sampling(
    model: Callable[..., object],
    rng_key: Array,
    *args: object,
    hyper_values: Mapping[str, object] | None = None,
    num_chains: int = 256,
    num_temperatures: int = 100,
    num_transitions: int = 1,
    temperatures: ArrayLike | None = None,
    **kwargs: object,
) -> AnnealedImportanceSampling:
    """The log evidence of a latent Gaussian NumPyro model at given hyperparameters, by annealed importance sampling.

    It has no other error than that of Monte Carlo, which it reports, and so it says how far the ``log_evidence`` of an
    engine is from the truth. Give it the hyperparameters of that engine. See :func:`estimate` for the method.

    **Example:**

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import EP, annealed_importance_sampling

    >>> def model(x, y=None):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    ...     numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    >>> x, y = jnp.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]), jnp.array([0, 0, 1, 0, 1, 1])
    >>> engine = EP(model, hyper_values={"scale": 1.5})
    >>> engine.run(jax.random.key(0), x, y)
    >>> truth = annealed_importance_sampling(model, jax.random.key(1), x, y, hyper_values={"scale": 1.5})
    >>> bool(abs(engine.log_evidence - truth.log_evidence) < 3 * truth.standard_error + 0.01)
    True

    :param model: a NumPyro model whose field is Gaussian given its hyperparameters.
    :param rng_key: random number generator key.
    :param args: arguments of the model.
    :param dict hyper_values: a value for every hyperparameter; their prior density is no part of the result.
    :param int num_chains: number of independent chains.
    :param int num_temperatures: number of steps from prior to posterior.
    :param int num_transitions: transitions at each temperature.
    :param temperatures: a schedule to use instead of the adapted one, strictly increasing from zero to one.
    :param kwargs: keyword arguments of the model.
    :return: log evidence, standard error, effective sample size, log weights and temperatures.
    :raises ModelStructureError: if the model is not of the form.
    :raises ValueError: if a hyperparameter has no value, a prior is flat, the schedule does not lead from zero to one,
        or the evidence is not finite.
    """
    for name, value, least in (
        ("num_chains", num_chains, 2),
        ("num_temperatures", num_temperatures, 1),
        ("num_transitions", num_transitions, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if temperatures is not None:
        schedule = np.asarray(temperatures)
        if schedule.ndim != 1 or schedule.size < 2 or schedule[0] != 0.0 or schedule[-1] != 1.0:
            raise ValueError("temperatures must be a vector that begins with 0 and ends with 1.")
        if not np.all(np.diff(schedule) > 0.0):
            raise ValueError("temperatures must increase strictly.")
        temperatures, num_temperatures = schedule, schedule.size - 1
    read_key, rng_key = random.split(rng_key)
    reading = read_latent_gaussian(model, args, kwargs, init_values=hyper_values, rng_key=read_key)
    space = UnconstrainedSpace(reading.hyper, hyper_values)
    if space.names:
        raise ValueError(
            f"Annealed importance sampling integrates over the field at given hyperparameters: give a value for "
            f"{', '.join(map(repr, space.names))} in hyper_values (those of an engine are in engine.hyper[name].value)."
        )
    result: AnnealedImportanceSampling = _compiled_estimate(
        reading.form(space.fixed, reading.data),
        rng_key,
        num_chains=num_chains,
        num_temperatures=num_temperatures,
        num_transitions=num_transitions,
        temperatures=temperatures,
    )
    if not np.isfinite(result.log_evidence):
        raise not_finite_error(reading, space.fixed)
    return result
