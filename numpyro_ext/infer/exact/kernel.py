"""Metropolis' method with the draws of an engine as proposals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro import handlers
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density
from numpyro.util import is_prng_key

from ...linalg.library_calls import of_each
from ..front.engine import AnyEngine
from .reparam import LATENT, PosteriorReparam, log_normal

_FIRST = 32
"""Draws of which the first state of a chain is chosen by their weights."""


class IndependenceState(NamedTuple):
    """State of a chain of :class:`IndependenceMetropolis`."""

    i: Array
    """Number of the step."""
    z: dict[str, Array]
    """Values of the sites."""
    log_weight: Array
    """Log density of the model over that of the proposals, up to a constant."""
    accept_prob: Array
    mean_accept_prob: Array
    """Average since warm-up."""
    rng_key: Array


class IndependenceMetropolis(MCMCKernel):
    """Kernel of ``MCMC`` whose proposals are draws of an engine's posterior, each accepted by the model's own density.

    The average acceptance is the overlap of approximation and posterior: the chance that a draw of the one would do for
    the other. Near one the draws are nearly independent. Proposals are the normal approximation of the hyperparameters
    and the field given these, with the sites of the fit held (:class:`PosteriorReparam`). A posterior with heavier
    tails than these keeps a chain at one place for long: look at the effective sample size, and take
    ``engine.sample_exactly`` where it is small.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_ext.infer import EP, IndependenceMetropolis

    >>> def model(y):
    ...     level = numpyro.sample("level", dist.Normal(0, 2))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    >>> engine = EP(model)
    >>> engine.run(jax.random.key(0), jnp.array([3, 5, 2, 4]))
    >>> mcmc = MCMC(IndependenceMetropolis(engine), num_warmup=0, num_samples=1000, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), jnp.array([3, 5, 2, 4]))
    >>> bool(mcmc.last_state.mean_accept_prob > 0.9)
    True

    Each step costs one evaluation of the model and one conditioning of the field, and no gradient. Latent sites on
    which nothing depends (missing observations) are not sampled: ``Predictive(model, mcmc.get_samples())`` draws them.

    :param engine: as for :class:`PosteriorReparam`.
    """

    sample_field = "z"

    def __init__(self, engine: AnyEngine) -> None:
        self._reparam = PosteriorReparam(engine)
        self._sample_fn: Callable[..., IndependenceState] | None = None

    @property
    def model(self) -> Callable[..., Any]:
        """The model of the engine."""
        return self._reparam.model

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: object = None,
        model_args: tuple[object, ...] = (),
        model_kwargs: dict[str, object] | None = None,
    ) -> IndependenceState:
        """First state of a chain, or of several where the key is one of several."""
        weigh = log_weight_and_sites(self._reparam, model_args, model_kwargs or {})
        size = self._reparam.coordinates.size

        def first(rng_key: Array) -> IndependenceState:
            rng_key, key_draws, key_choice = random.split(rng_key, 3)
            draws = random.normal(key_draws, (_FIRST, size))
            log_weights = jax.lax.map(lambda white: weigh(white)[0], draws)
            chosen = random.categorical(key_choice, log_weights)
            log_weight, sites = weigh(draws[chosen])
            zero = jnp.zeros_like(log_weight)
            return IndependenceState(jnp.asarray(0), sites, log_weight, zero, zero, rng_key)

        def step(state: IndependenceState) -> IndependenceState:
            rng_key, key_draw, key_choice = random.split(state.rng_key, 3)
            log_weight, sites = weigh(random.normal(key_draw, (size,)))
            accept_prob = jnp.exp(jnp.minimum(log_weight - state.log_weight, 0.0))
            is_taken = random.uniform(key_choice) < accept_prob
            log_weight, sites = jax.tree.map(
                lambda new, old: jnp.where(is_taken, new, old), (log_weight, sites), (state.log_weight, state.z)
            )
            i = state.i + 1
            number = jnp.where(i <= num_warmup, i, i - num_warmup)
            mean = state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / number
            return IndependenceState(i, sites, log_weight, accept_prob, mean, rng_key)

        is_one = is_prng_key(rng_key)
        self._sample_fn = step if is_one else of_each(jax.jit(step))
        found: IndependenceState = jax.jit(first if is_one else of_each(jax.jit(first)))(rng_key)
        if not isinstance(found.log_weight, jax.core.Tracer) and not bool(jnp.all(found.log_weight > -jnp.inf)):
            raise ValueError(
                f"The model has density zero, or none that is a number, at {_FIRST} draws of the engine: look at "
                "engine.diagnostics."
            )
        return found

    def sample(
        self, state: IndependenceState, model_args: tuple[object, ...], model_kwargs: dict[str, object] | None
    ) -> IndependenceState:
        """State after one proposal."""
        assert self._sample_fn is not None  # as init goes before
        return self._sample_fn(state)

    def get_diagnostics_str(self, state: IndependenceState) -> str:
        """Average acceptance, for the bar."""
        return f"acc. prob={state.mean_accept_prob:.2f}"


def log_weight_and_sites(
    reparam: PosteriorReparam, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Callable[[Array], tuple[Array, dict[str, Array]]]:
    """Function from coordinates to the log density of the model over theirs, and to the values of the model's sites.

    Where the density is not a number the weight is zero.
    """
    left_out = reparam.coordinates.left_out
    model = handlers.block(handlers.seed(reparam.reparam(), random.key(0)), hide=list(left_out))

    def weigh(white: Array) -> tuple[Array, dict[str, Array]]:
        log_joint, trace = log_density(model, args, kwargs, {LATENT: white})
        sites = {name: jnp.asarray(site["value"]) for name, site in trace.items() if site["type"] == "deterministic"}
        log_weight = log_joint - log_normal(white)
        return jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight), sites

    return weigh
