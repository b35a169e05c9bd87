"""Overlap of an approximation with the posterior, by weights of its draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random

from ...structure.model.running.execution import check_key
from ..front.answers.resampling import pareto_smoothed
from ..front.engine import BaseEngine
from ..front.options import check_at_least
from .kernel import log_weight_and_sites
from .reparam import PosteriorReparam, map_draws

_FEWEST_DRAWS = 100
_KINDS = {
    "none": "",
    "optimum": ", hyperparameters drawn about their optimum",
    "integrated": ", hyperparameters by their normal approximation",
}


class Overlap(NamedTuple):
    """Outcome of ``engine.overlap``."""

    share: float
    """Chance that a draw of the approximation would do for the posterior: the acceptance of
    :class:`~numpyro_ext.infer.IndependenceMetropolis`. Parts of the posterior that no draw has reached do not count."""
    k_hat: float
    """Shape of the tail of the weights (Vehtari et al. 2024): below 0.7 averages by weights hold. Above it tails of the
    posterior are heavier than those of the approximation, which leaves means and standard deviations often unharmed."""


def overlap(engine: BaseEngine[Any], rng_key: Array, num_draws: int = 1000) -> Overlap:
    """Overlap by independent draws of the approximation; the engine's summary says it from then on."""
    check_at_least(_FEWEST_DRAWS, num_draws=num_draws)
    check_key(rng_key, "overlap(jax.random.key(0))", "comes first")
    run, reparam = engine._finished(), PosteriorReparam(engine)
    weigh = log_weight_and_sites(reparam, run.reading.args, dict(run.reading.kwargs))
    white = random.normal(rng_key, (num_draws, reparam.coordinates.size))
    # batches, as the sites of all draws together may be large
    one = jax.jit(lambda row: {"log_weight": weigh(row)[0]})
    log_weights = np.asarray(jax.jit(lambda rows: map_draws(one, rows))(white)["log_weight"], float)
    if not np.max(log_weights) > -np.inf:
        raise FloatingPointError(
            f"The model has density zero, or none that is a number, at all of {num_draws} draws of the engine: look at "
            "engine.diagnostics."
        )
    found = overlap_of_weights(log_weights)
    kind = _KINDS[engine.log_evidence.hyperparameters]
    line = f"overlap with the posterior {found.share:.2f} (k-hat {found.k_hat:.2f})"
    vars(run)["notes"] = (f"Approximation: {type(engine).__name__}{kind}; {line}",)
    return found


def overlap_of_weights(log_weights: np.ndarray) -> Overlap:
    """Average acceptance of independent proposals, and k-hat, from log weights of shape ``(n,)``."""
    weights = np.sort(np.exp(log_weights - np.max(log_weights)))
    # sum over all pairs of the smaller weight: in increasing order each is the smaller one with all behind it
    pairs = weights @ (2.0 * np.arange(weights.size)[::-1] + 1.0)
    return Overlap(float(pairs / (weights.size * weights.sum())), float(pareto_smoothed(log_weights)[1]))
