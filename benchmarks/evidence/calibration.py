"""Coverage of intervals on simulated data: ``python -m benchmarks.evidence.calibration WORK`` writes the table.

``EP`` on five kinds of models, and ``AdaptiveQuadrature`` on 200 people and 20 two-parameter logistic items, both from
their priors, with items drawn and as points. Some minutes, and six more for the items.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

from numpyro_ext.infer import EP, AdaptiveQuadrature
from numpyro_ext.infer.calibration import Calibration, calibrate

from ..harness import Study, blocks, cpu_seconds, table
from ..items.many_people import two_parameter_logistic

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


_ITEMS = partial(two_parameter_logistic, num_people=200, num_items=20)
MODELS: dict[str, Callable[..., Any]] = {
    **{
        model.__name__: partial(EP, model)
        for model in (logistic_regression, poisson_intercepts, counts_of_a_process, student_t_regression, preferences)
    },
    "items drawn": partial(AdaptiveQuadrature, _ITEMS, integrate="auto"),
    "items as points": partial(AdaptiveQuadrature, _ITEMS, integrate="none"),
}
QUANTITIES = {"preferences": "unseen"}


def simulated(engine: Any, batch: int, num_simulations: int, **options: Any) -> dict[str, Any]:
    """Ranks of a batch of simulations, CPU-seconds, how its fits ended and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found, seconds = cpu_seconds(
            lambda: calibrate(engine, jax.random.key(batch), num_simulations=num_simulations, **options)
        )
    return {
        "seconds": seconds,
        "ranks": {name: ranks.tolist() for name, ranks in found.ranks.items()},
        "converged": found.converged.tolist(),
        "errors": [str(error) for error in found.errors.values()],
        "warnings": sorted({str(warning.message) for warning in caught}),
    }


def together(parts: list[dict[str, Any]], num_draws: int) -> Calibration:
    """Join the ranks of batches."""
    ranks = {name: np.concatenate([np.asarray(part["ranks"][name]) for part in parts]) for name in parts[0]["ranks"]}
    converged = np.concatenate([np.asarray(part["converged"], bool) for part in parts])
    errors: dict[int, Exception] = dict(enumerate(RuntimeError(e) for part in parts for e in part["errors"]))
    return Calibration(ranks, num_draws, converged, errors)


def endings(found: Calibration, parts: list[dict[str, Any]]) -> str:
    """Words on how the fits ended, and their CPU-seconds."""
    seconds = sum(part["seconds"] for part in parts)
    return (
        f"{len(found.converged)} fitted, {np.sum(~found.converged)} not converged, {len(found.errors)} failed, "
        f"{seconds:.0f} CPU-seconds"
    )


def _fit(batch: int, name: str) -> dict[str, Any]:
    engine = MODELS[name](num_samples=_NUM_SAMPLES, progress_bar=False)
    return simulated(engine, batch, _BATCH, quantities=QUANTITIES.get(name, ()))


def _rows(found: Mapping[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for model, parts in found.items():
        if parts:
            joined = together(parts, _NUM_SAMPLES)
            flat = {name: ranks.reshape(len(ranks), -1) for name, ranks in joined.ranks.items()}
            joined.ranks = {"all sites": np.concatenate(list(flat.values()), axis=1), **flat}
            for name, held in joined.coverage((0.5, 0.8, 0.9, 0.95)).items():
                shares = (f"{100 * share:.1f} ± {100 * error:.1f}" for share, error in held.values())
                yield f"`{model}`", f"`{name}` ({joined.ranks[name].shape[1]})", *shares
            yield "", endings(joined, parts), "", "", "", ""


def main() -> None:
    """Simulate, fit and write."""
    experiments = {name: partial(_fit, name=name) for name in MODELS}
    study = Study(__doc__, experiments, draws=_NUM_SIMULATIONS // _BATCH)
    lines = blocks(
        "# How often central intervals hold the true value",
        f"`calibrate(engine)`: {_NUM_SIMULATIONS} data sets from the prior of each model, {_NUM_SAMPLES} draws of each "
        "fit, hyperparameters integrated over, but for items as points, of which all draws are equal. Shares in per "
        "cent, with standard errors over simulations.",
        table("model | site (elements) | 50 % | 80 % | 90 % | 95 %", _rows(study.run())),
    )
    study.write("calibration", lines)


if __name__ == "__main__":
    main()
