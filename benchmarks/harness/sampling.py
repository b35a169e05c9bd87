"""NUTS as the judge or the peer of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam


class Chains(NamedTuple):
    """Draws of a run and what they cost."""

    draws: dict[str, np.ndarray]
    """By site, chains on the first axis."""
    seconds: float
    """CPU-seconds of the run, warm-up included, with compilation where it was the first."""
    gradients: int
    """Leapfrog steps after the warm-up."""
    divergent: int
    warmup_gradients: int = 0
    """Leapfrog steps of the warm-up, where they were counted."""

    @property
    def seconds_of_draws(self) -> float:
        """CPU-seconds without those of the warm-up, by the leapfrog steps of both."""
        return self.seconds * self.gradients / (self.gradients + self.warmup_gradients)


def make_nuts(
    model: Callable[..., None], num_warmup: int, num_samples: int, *, num_chains: int = 1, **kernel: Any
) -> MCMC:
    """Chains of NUTS one after the other; what is left are options of the kernel."""
    return MCMC(
        NUTS(model, **kernel),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="sequential",
        progress_bar=False,
    )


def decentred(model: Callable[..., None]) -> Callable[..., None]:
    """The model with locations and scales of normal, Student, Cauchy and Laplace sites taken out."""

    def choose(site: dict[str, Any]) -> LocScaleReparam | None:
        fn = site["fn"]
        while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
            fn = fn.base_dist
        is_done = site["is_observed"] or site["name"].endswith("_decentered")
        if is_done or not isinstance(fn, dist.Normal | dist.StudentT | dist.Cauchy | dist.Laplace):
            return None
        return LocScaleReparam(0.0, ("df",) if isinstance(fn, dist.StudentT) else ())

    found: Callable[..., None] = handlers.reparam(model, config=choose)
    return found


class CompiledNuts:
    """One chain of NUTS as a compiled program, whose runs compile nothing: those of ``MCMC`` do each time.

    :param model: of NumPyro.
    :param args: of the model.
    :param kernel: options of ``NUTS``.
    """

    def __init__(
        self, model: Callable[..., None], num_warmup: int, num_samples: int, *args: Any, **kernel: Any
    ) -> None:
        start = time.process_time()
        nuts = NUTS(model, **kernel)
        self._state = nuts.init(jax.random.key(0), num_warmup, None, args, {})
        sites = nuts.postprocess_fn(args, {})

        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = nuts.sample(state, args, {})
            return state, (sites(state.z), state.num_steps, state.diverging)

        def warm(_: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state = nuts.sample(carry[0], args, {})
            return state, carry[1] + state.num_steps

        def chain(state: Any) -> Any:
            state, number = jax.lax.fori_loop(0, num_warmup, warm, (state, jax.numpy.zeros_like(state.num_steps)))
            return jax.lax.scan(step, state, length=num_samples)[1], number

        self._run = jax.jit(chain).lower(self._state).compile()
        self.compilation = time.process_time() - start
        """CPU-seconds of tracing, of the first state and of compilation."""

    def run(self, seed: int) -> Chains:
        """Draws of the latent and deterministic sites from the first state on."""
        start = time.process_time()
        found = self._run(self._state._replace(rng_key=jax.random.key(seed)))
        (draws, steps, diverging), warmup = jax.tree.map(np.asarray, found)
        seconds = time.process_time() - start
        draws = {name: value[None] for name, value in draws.items()}
        return Chains(draws, seconds, int(steps.sum()), int(diverging.sum()), int(warmup))


def run_chains(mcmc: MCMC, seed: int, *args: Any, **kwargs: Any) -> Chains:
    """Run, and wait for the draws."""
    start = time.process_time()
    mcmc.run(jax.random.key(seed), *args, extra_fields=("num_steps", "diverging"), **kwargs)
    draws = {name: np.asarray(values) for name, values in mcmc.get_samples(group_by_chain=True).items()}
    seconds, extra = time.process_time() - start, mcmc.get_extra_fields()
    return Chains(draws, seconds, int(extra["num_steps"].sum()), int(extra["diverging"].sum()))
