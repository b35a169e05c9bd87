"""NUTS as the judge or the peer of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC, NUTS


class Chains(NamedTuple):
    """Draws of a run and what they cost."""

    draws: dict[str, np.ndarray]
    """By site, chains on the first axis."""
    seconds: float
    """CPU-seconds of the run, warm-up included, with compilation where it was the first."""
    gradients: int
    """Leapfrog steps after the warm-up."""
    divergent: int


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


def run_chains(mcmc: MCMC, seed: int, *args: Any, **kwargs: Any) -> Chains:
    """Run, and wait for the draws."""
    start = time.process_time()
    mcmc.run(jax.random.key(seed), *args, extra_fields=("num_steps", "diverging"), **kwargs)
    draws = {name: np.asarray(values) for name, values in mcmc.get_samples(group_by_chain=True).items()}
    seconds, extra = time.process_time() - start, mcmc.get_extra_fields()
    return Chains(draws, seconds, int(extra["num_steps"].sum()), int(extra["diverging"].sum()))
