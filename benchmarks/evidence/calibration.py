"""Coverage of EP's intervals on simulated data: ``python -m benchmarks.evidence.calibration WORK`` writes the table.

``WORK`` is a folder that keeps the ranks, one file for a model and a batch of simulations, so that a run that was ended
goes on. ``--only preferences`` (or several names) makes a table of these models alone. Some minutes.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from numpyro_ext.infer import EP
from numpyro_ext.infer.calibration import Calibration, calibrate

from ..harness import table_head, write_report
from ..harness.repeats import begin, keep, parser_of_work

_NUM_SIMULATIONS, _BATCH, _NUM_SAMPLES = 200, 50, 400
_GENERATOR = np.random.default_rng(0)
X, LEVELS = _GENERATOR.standard_normal((60, 3)), np.arange(60) % 12
TIMES = np.linspace(0.0, 4.0, 25)
SQUARES = (TIMES[:, None] - TIMES) ** 2


def logistic_regression(y: Any = None) -> None:
    """Four coefficients of 60 observations."""
    level = numpyro.sample("level", dist.Normal(0, 1.5))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Bernoulli(logits=level + jnp.asarray(X) @ slope), obs=y)


def poisson_intercepts(y: Any = None) -> None:
    """Twelve groups of five counts, with a scale."""
    level = numpyro.sample("level", dist.Normal(0.5, 0.7))
    spread = numpyro.sample("spread", dist.HalfNormal(0.7))
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([12]))
    numpyro.sample("y", dist.Poisson(jnp.exp(level + spread * effect[LEVELS])), obs=y)


def counts_of_a_process(y: Any = None) -> None:
    """A Gaussian process at 25 times with a scale and a length, and counts."""
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.4))
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.4))
    covariance = scale**2 * jnp.exp(-0.5 * SQUARES / length**2) + 1e-6 * jnp.eye(len(TIMES))
    f = numpyro.sample("f", dist.MultivariateNormal(0.7, covariance))
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def student_t_regression(y: Any = None) -> None:
    """Four coefficients of 60 observations with heavy-tailed noise of unknown scale."""
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    level = numpyro.sample("level", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.StudentT(4.0, level + jnp.asarray(X) @ slope, noise), obs=y)


NUM_USERS, NUM_ITEMS = 20, 8
PLACES = np.linspace(-1.0, 1.0, NUM_ITEMS)
KERNEL = np.exp(-((PLACES[:, None] - PLACES) ** 2)) + 0.1 * np.eye(NUM_ITEMS)
TASTES = np.stack([PLACES, np.cos(3.0 * PLACES)], axis=1)
USERS = np.arange(12 * NUM_USERS) % NUM_USERS
FIRST = _GENERATOR.integers(NUM_ITEMS, size=USERS.size)
SECOND = (FIRST + _GENERATOR.integers(1, NUM_ITEMS, size=USERS.size)) % NUM_ITEMS


def preferences(won: Any = None) -> None:
    """Twenty users with two shared tastes, ten answers each, and the probabilities of two more."""
    popularity = numpyro.sample("popularity", dist.Normal(0, 1).expand([NUM_ITEMS]).to_event(1))
    own_scale = numpyro.sample("own_scale", dist.LogNormal(-0.5, 0.5))
    covariance = TASTES @ TASTES.T + own_scale**2 * KERNEL
    with numpyro.plate("users", NUM_USERS):
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(NUM_ITEMS), covariance))
    utility = popularity + own
    probability = norm.cdf(utility[USERS, FIRST] - utility[USERS, SECOND])
    numpyro.deterministic("unseen", probability[: 2 * NUM_USERS])
    numpyro.sample("won", dist.Bernoulli(probs=probability[2 * NUM_USERS :]), obs=won)


MODELS = (logistic_regression, poisson_intercepts, counts_of_a_process, student_t_regression, preferences)
QUANTITIES = {"preferences": "unseen"}


def _simulated(model: Any, batch: int) -> dict[str, Any]:
    """Ranks of a batch of simulations, and how its fits ended."""
    engine = EP(model, num_samples=_NUM_SAMPLES, progress_bar=False)
    start = time.process_time()
    found = calibrate(
        engine, jax.random.key(batch), num_simulations=_BATCH, quantities=QUANTITIES.get(model.__name__, ())
    )
    return {"seconds": time.process_time() - start, **content_of(found)}


def content_of(found: Calibration) -> dict[str, Any]:
    """The ranks of a batch and how its fits ended, as its file holds them."""
    return {
        "ranks": {name: ranks.tolist() for name, ranks in found.ranks.items()},
        "converged": found.converged.tolist(),
        "errors": [str(error) for error in found.errors.values()],
    }


def together(parts: list[dict[str, Any]], num_draws: int) -> Calibration:
    """Join the ranks of batches, each as its file holds them."""
    ranks = {name: np.concatenate([np.asarray(part["ranks"][name]) for part in parts]) for name in parts[0]["ranks"]}
    converged = np.concatenate([np.asarray(part["converged"], bool) for part in parts])
    errors: dict[int, Exception] = dict(enumerate(RuntimeError(e) for part in parts for e in part["errors"]))
    return Calibration(ranks, num_draws, converged, errors)


def main() -> None:
    """Simulate, fit and write."""
    parser = parser_of_work(__doc__)
    parser.add_argument("--only", nargs="+", choices=[model.__name__ for model in MODELS])
    arguments = begin(parser)
    work: Path = arguments.work
    rows = []
    for model in MODELS:
        if arguments.only and model.__name__ not in arguments.only:
            continue
        paths = [work / f"{model.__name__}-{batch}.json" for batch in range(_NUM_SIMULATIONS // _BATCH)]
        for batch, path in enumerate(paths):
            keep(path, partial(_simulated, model, batch))
        parts = [json.loads(path.read_text()) for path in paths]
        found, seconds = together(parts, _NUM_SAMPLES), sum(part["seconds"] for part in parts)
        flat = {name: ranks.reshape(len(ranks), -1) for name, ranks in found.ranks.items()}
        found.ranks = {"all sites": np.concatenate(list(flat.values()), axis=1), **flat}
        for name, held in found.coverage((0.5, 0.8, 0.95)).items():
            shares = " | ".join(f"{100 * share:.1f} ± {100 * error:.1f}" for share, error in held.values())
            size = found.ranks[name].shape[1]
            rows.append(f"| `{model.__name__}` | `{name}` ({size}) | {shares} |")
        unfinished = int(np.sum(~found.converged))
        shown = f"{len(found.converged)} fitted, {unfinished} not converged, {len(found.errors)} failed"
        rows.append(f"| | {shown}, {seconds:.0f} CPU-seconds | | | |")
    lines = [
        "# How often central intervals of EP hold the true value",
        "",
        f"`calibrate(EP(model))`: {_NUM_SIMULATIONS} data sets from the prior of each model, {_NUM_SAMPLES} draws",
        "of each fit, hyperparameters integrated over. Shares in per cent, with standard errors over simulations.",
        "",
        *table_head("model | site (elements) | 50 % | 80 % | 95 %"),
        *rows,
    ]
    write_report("calibration", lines)


if __name__ == "__main__":
    main()
