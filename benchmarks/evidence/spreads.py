"""Means and standard deviations of unknowns beside those of long chains of NUTS, and CPU-seconds of both.

``python -m benchmarks.evidence.spreads`` writes ``results/<date>-spreads.md`` of the models of :mod:`.cases`. Two
chains of NUTS run each model decentred, in double precision; errors of their means and standard deviations are those
of 40 batches. Each fit has a process of its own, so that the first run compiles all of its programs; a run includes
its draws. Hyperparameters are integrated over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from jax import random

from numpyro_ext.infer import EP, AdaptiveQuadrature, LaplaceApproximation, VariationalGaussian

from ..harness import COLD, Study, blocks, decentred, first_and_next, make_nuts, run_chains, table
from .cases import CASES

ENGINES: dict[str, Callable[..., Any]] = {
    "EP": EP,
    "EP, normal": partial(EP, integrate="normal"),
    "Laplace": LaplaceApproximation,
    "VG": VariationalGaussian,
    "quadrature": AdaptiveQuadrature,
}
NUM_BATCHES = 40
NUM_WARMUP, NUM_DRAWS = 1500, 4000
"""Length of each of the two chains of NUTS; an engine has as many draws."""


def _elements(site: str, values: np.ndarray, lead: int) -> Iterator[tuple[str, np.ndarray]]:
    """Label and values of each element; so many axes at the front count draws."""
    for place in np.ndindex(values.shape[lead:]):
        yield site + (str(list(place)) if place else ""), values[(..., *place)]


def by_nuts(draw: int, name: str) -> dict[str, Any]:
    """Moments by two chains, and their errors by batches; CPU-seconds."""
    case = CASES[name]()
    options = {"target_accept_prob": 0.95, "max_tree_depth": 9}
    sampler = make_nuts(case.twin or decentred(case.model), NUM_WARMUP, NUM_DRAWS, num_chains=2, **options)
    chains = run_chains(sampler, 1, *case.arguments())
    found = {}
    for site, draws in chains.draws.items():
        for label, values in _elements(site, draws, 2):
            if values.std() > 1e-10:
                sd, batches = values.std(), values.reshape(NUM_BATCHES, -1)
                squares = (batches - values.mean()) ** 2
                found[label] = {
                    "mean": float(values.mean()),
                    "sd": float(sd),
                    "mean_error": float(batches.mean(1).std(ddof=1) / NUM_BATCHES**0.5),
                    "sd_error": float(0.5 * squares.mean(1).std(ddof=1) / NUM_BATCHES**0.5 / sd**2),
                }
    return {"seconds": chains.seconds, "divergent": chains.divergent, "moments": found}


def by_engine(draw: int, name: str, by: str) -> dict[str, Any]:
    """Moments, CPU-seconds of a first and of the next run with draws, and what the run says of itself."""
    case, told = CASES[name](), set()
    data = case.arguments()

    def run(_: int) -> tuple[Any, dict[str, np.ndarray]]:
        engine = ENGINES[by](case.model, progress_bar=False, num_samples=NUM_DRAWS)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engine.run(random.key(0), *data)
            draws = {site: np.asarray(values) for site, values in engine.get_samples().items()}
        told.update(str(warning.message) for warning in warned)
        return engine, draws

    (engine, draws), first, later = first_and_next(run)
    if case.sites:
        pairs = {site: (draws[site].mean(0), draws[site].std(0)) for site in case.sites}
    else:
        pairs = {
            site: (np.asarray(engine.posterior[site].mean), np.asarray(engine.posterior[site].sd)) for site in draws
        }
    moments = {
        label: {"mean": float(mean), "sd": float(sd)}
        for site, pair in pairs.items()
        for label, (mean, sd) in _elements(site, np.stack(pair), 1)
        if sd > 1e-10
    }
    values = [v for site in case.sites or draws for _, v in _elements(site, draws[site], 1) if v.std() > 1e-10]
    return {
        "first": first,
        "next": later,
        "evidence": float(engine.log_evidence),
        "converged": bool(engine.diagnostics.converged),
        "messages": sorted({*told, *engine.diagnostics.messages}),
        "distinct": min(len(np.unique(one)) for one in values),
        "moments": moments,
    }


def compare(reference: dict[str, Any], found: dict[str, Any]) -> list[tuple[str, float, float, float, float]]:
    """For each element the ratio of sds, its error, the gap of the means in sds, and its error; both by NUTS."""
    rows = []
    for name, ours in found["moments"].items():
        if true := reference["moments"].get(name):
            gap = (ours["mean"] - true["mean"]) / true["sd"]
            rows.append((name, ours["sd"] / true["sd"], true["sd_error"], gap, true["mean_error"] / true["sd"]))
    return rows


def _fits(found: Mapping[str, list[Any]]) -> Iterator[tuple[str, str, Any, Any]]:
    """Model, engine, what it found, and what NUTS did."""
    for name, make in CASES.items():
        case = make()
        for by in case.engines:
            for ours, theirs in zip(found[f"{name}, {by}"], found[f"{case.same_as or name} by NUTS"], strict=False):
                yield name, by, ours, theirs


def _row(name: str, by: str, ours: Any, theirs: Any) -> Iterable[Any]:
    gaps = compare(theirs, ours)
    gap = max(gaps, key=lambda row: abs(row[3]))
    ratios = [
        f"{row[1]:.2f} ± {row[2]:.2f} ({row[0]})" for row in (f(gaps, key=lambda row: row[1]) for f in (min, max))
    ]
    case = CASES[name]()
    times = f"{ours['first']:.1f} / {ours['next']:.2f}", case.wanted if by == case.engines[0] else ""
    said = f"{ours['evidence']:.3f}", ours["distinct"], ours["converged"]
    nuts = f"{theirs['seconds']:.0f} ({theirs['divergent']})"
    return name, by, *times, f"{gap[3]:+.2f} ± {gap[4]:.2f} ({gap[0]})", *ratios, *said, nuts


def main() -> None:
    experiments: dict[str, Callable[[int], Any]] = {}
    for name, make in CASES.items():
        experiments |= {f"{name}, {by}": partial(by_engine, name=name, by=by) for by in make().engines}
        if not make().same_as:
            experiments[f"{name} by NUTS"] = partial(by_nuts, name=name)
    study = Study(__doc__, experiments, environment=COLD)
    fits = list(_fits(study.run()))
    said = [f"- {name}, {by}: {message}" for name, by, ours, _ in fits for message in ours["messages"]]
    lines = blocks(
        "# Spreads of unknowns",
        "The largest gap of the means (in standard deviations), and the smallest and the largest ratio of standard "
        "deviations (the engine's over that of NUTS), with the Monte Carlo error of NUTS: of the draws of the "
        "hyperparameters and coefficients, or where an observation has two predictors of all unknowns by their "
        "marginals. Draws have so many distinct values of the unknown that has the fewest; CPU-seconds of a first and "
        f"a next run with {NUM_DRAWS} draws, and of NUTS with two chains of {NUM_WARMUP} + {NUM_DRAWS} (with divergent "
        "transitions).",
        table(
            "model | engine | CPU-s | wanted | gap of means | least sd ratio | largest sd ratio | log evidence "
            "| distinct | converged | NUTS",
            (_row(*fit) for fit in fits),
        ),
        ["What the runs said:", "", *said] if said else [],
    )
    study.write("spreads", lines)


if __name__ == "__main__":
    main()
