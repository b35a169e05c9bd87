"""Multilevel regressions of everyday, ten thousand rows: first and next runs of ``EP``, and NUTS.

``python -m benchmarks.runs.everyday`` writes ``results/<date>-everyday.md``. Three covariates and intercepts of 300
groups; everything is learned, and ``EP`` integrates over the hyperparameters. Each model has a process of its own, so
that the first run compiles all of its programs. NUTS has 300 steps to adapt and 300 draws of one chain of the model
with centred groups, compilation included; ``--only`` leaves it out where it names models alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

from numpyro_ext.infer import EP

from ..harness import Study, blocks, first_and_next, make_nuts, run_chains, table

NUM_ROWS, NUM_GROUPS = 10_000, 300
RANDOM = np.random.default_rng(0)
GROUP, X = RANDOM.integers(0, NUM_GROUPS, NUM_ROWS), RANDOM.normal(size=(NUM_ROWS, 3))
ETA = X @ [0.5, -0.3, 0.2] + 0.7 * RANDOM.normal(size=NUM_GROUPS)[GROUP] - 0.2
MEAN, SHARE = np.exp(ETA), 1.0 / (1.0 + np.exp(-ETA))
NUM_WARMUP = NUM_DRAWS = 300


def _scale() -> Any:
    return numpyro.sample("noise", dist.HalfNormal(1))


def _shape() -> Any:
    return numpyro.sample("shape", dist.Exponential(1))


def _gamma(eta: Any) -> Any:
    shape = _shape()
    return dist.Gamma(shape, shape * jnp.exp(-eta))


def _ordinal(eta: Any) -> Any:
    ordered = dist.transforms.OrderedTransform()
    cutpoints = numpyro.sample("cutpoints", dist.TransformedDistribution(dist.Normal(0, 2).expand([4]), ordered))
    return dist.OrderedLogistic(eta, cutpoints)


def _beta(eta: Any) -> Any:
    return dist.BetaProportion(jax.nn.sigmoid(eta), numpyro.sample("size", dist.Gamma(2, 0.1)))


def _zero_inflated(eta: Any) -> Any:
    return dist.ZeroInflatedPoisson(numpyro.sample("gate", dist.Beta(1, 1)), jnp.exp(eta))


MODELS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "normal": (lambda eta: dist.Normal(eta, _scale()), ETA + 0.5 * RANDOM.normal(size=NUM_ROWS)),
    "Student-t": (lambda eta: dist.StudentT(4.0, eta, _scale()), ETA + 0.5 * RANDOM.standard_t(4, NUM_ROWS)),
    "logistic": (lambda eta: dist.Bernoulli(logits=eta), RANDOM.binomial(1, SHARE)),
    "binomial of ten": (lambda eta: dist.Binomial(10, logits=eta), RANDOM.binomial(10, SHARE)),
    "ordered logistic": (_ordinal, np.searchsorted([-1, 0, 1, 2], ETA + RANDOM.logistic(size=NUM_ROWS))),
    "Poisson": (lambda eta: dist.Poisson(jnp.exp(eta)), RANDOM.poisson(MEAN)),
    "negative binomial": (
        lambda eta: dist.NegativeBinomial2(jnp.exp(eta), _shape()),
        RANDOM.poisson(MEAN * RANDOM.gamma(3.0, 1 / 3.0, NUM_ROWS)),
    ),
    "zero-inflated Poisson": (_zero_inflated, RANDOM.poisson(MEAN) * RANDOM.binomial(1, 0.8, NUM_ROWS)),
    "gamma": (_gamma, RANDOM.gamma(2.0, MEAN / 2.0)),
    "Weibull": (lambda eta: dist.Weibull(jnp.exp(eta), _shape()), MEAN * RANDOM.weibull(1.5, NUM_ROWS)),
    "beta": (_beta, np.clip(RANDOM.beta(10 * SHARE, 10 * (1 - SHARE)), 1e-6, 1 - 1e-6)),
}


def model_of(name: str) -> Callable[..., None]:
    def model(x: Any, group: Any, y: Any) -> None:
        intercept = 0.0 if name == "ordered logistic" else numpyro.sample("intercept", dist.Normal(0, 1))
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([3]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("groups", NUM_GROUPS):
            effects = numpyro.sample("effects", dist.Normal(0, spread))
        numpyro.sample("y", MODELS[name][0](intercept + x @ slopes + effects[group]), obs=y)

    return model


def by_engine(draw: int, name: str) -> dict[str, float]:
    """CPU-seconds of runs of ``EP``, and the posterior mean and deviation of the spread of the groups."""
    model = model_of(name)

    def run(_: int) -> tuple[EP, Any]:
        engine = EP(model, progress_bar=False)
        engine.run(random.key(0), X, GROUP, MODELS[name][1])
        return engine, engine.get_samples()["spread"]

    (engine, draws), first, later = first_and_next(run)
    if not engine.diagnostics.converged:
        raise RuntimeError(f"EP did not converge on {name}.")
    return {"first": first, "next": later, "mean": float(draws.mean()), "sd": float(draws.std())}


def by_nuts(draw: int, name: str) -> dict[str, float]:
    """The same by one chain, compilation included."""
    chains = run_chains(make_nuts(model_of(name), NUM_WARMUP, NUM_DRAWS), 0, X, GROUP, MODELS[name][1])
    spread = chains.draws["spread"]
    return {"seconds": chains.seconds, "mean": float(spread.mean()), "sd": float(spread.std())}


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name in MODELS:
        for ours in found[name]:
            peers = found[f"{name} by NUTS"]
            theirs = [f"{peer['seconds']:.0f}" for peer in peers] or [""]
            theirs += [f"{peer['seconds'] / ours['first']:.0f}" for peer in peers] or [""]
            spreads = [f"{one['mean']:.3f} ± {one['sd']:.3f}" for one in (ours, *peers)]
            yield name, f"{ours['first']:.1f}", f"{ours['next']:.1f}", *theirs, *spreads, *([] if peers else [""])


def main() -> None:
    experiments: dict[str, Callable[[int], Any]] = {name: partial(by_engine, name=name) for name in MODELS}
    experiments |= {f"{name} by NUTS": partial(by_nuts, name=name) for name in MODELS}
    study = Study(__doc__, experiments, environment={})
    found = study.run()
    lines = blocks(
        "# Multilevel regressions of everyday",
        f"{NUM_ROWS:,} rows, three covariates, {NUM_GROUPS} groups. CPU-seconds of a run with its draws: of `EP` with "
        "hyperparameters integrated over, in a new process and again; of NUTS with compilation, "
        f"{NUM_WARMUP} steps to adapt and {NUM_DRAWS} draws.",
        table(
            "likelihood | EP, first | EP, next | NUTS | NUTS over EP, first | spread of the groups, EP | NUTS",
            _rows(found),
        ),
    )
    study.write("everyday", lines)


if __name__ == "__main__":
    main()
