"""Counts on a map: a field of a sparse precision beside noise, slope and intercept, first and next runs.

``python -m benchmarks.runs.maps`` writes ``results/<date>-maps.md``. Each grid and engine has a process of its own,
with one thread for linear algebra, so that the first run compiles all of its programs; the next one has other data on
the same map. A run includes its draws. Hyperparameters are integrated over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

from numpyro_ext.distributions import GaussianMarkovRandomField, graph_precision
from numpyro_ext.infer import EP, LaplaceApproximation

from ..harness import COLD, Study, blocks, first_and_next, peak_bytes, table

ENGINES = {"Laplace": LaplaceApproximation, "EP": EP}
REPORTED = {32: "0.58", 100: "8.3"}
"""CPU-seconds of TMB with standard errors, by a template of its own, on maps of these sides."""
WANTED = {32: "8 / 0.87", 100: "16.6 / 10"}
"""CPU-seconds that a first and a next run should take at most: 1.5 and 1.2 times those of TMB, when compiled."""
SITES = ("a", "b", "tau", "s")


def icar(graph: Any, expected: Any, x: Any, y: Any = None) -> None:
    a, b = numpyro.sample("a", dist.Normal(0, 5)), numpyro.sample("b", dist.Normal(0, 5))
    tau, s = numpyro.sample("tau", dist.HalfNormal(1)), numpyro.sample("s", dist.HalfNormal(1))
    field = GaussianMarkovRandomField(graph.scaled, null_space=graph.null_space, sum_to_zero=True)
    spatial = numpyro.sample("spatial", field)
    with numpyro.plate("areas", graph.num_nodes):
        noise = numpyro.sample("noise", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(expected * jnp.exp(a + b * x + tau * spatial + s * noise)), obs=y)


def grid(side: int) -> Any:
    """Graph of a square, each node with up to four neighbours."""
    node = np.arange(side**2).reshape(side, side)
    pairs = ((node[1:], node[:-1]), (node[:, 1:], node[:, :-1]))
    edges = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in pairs])
    return graph_precision(edges, num_nodes=side**2)


def data(graph: Any, seed: int) -> tuple[np.ndarray, ...]:
    """Expected counts, a covariate and counts."""
    draws, size = np.random.default_rng(seed), graph.num_nodes
    field = GaussianMarkovRandomField(graph.scaled, null_space=graph.null_space, sum_to_zero=True)
    spatial = np.asarray(field.sample(random.key(seed)))
    expected, x = draws.gamma(3.0, 3.0, size), draws.normal(size=size)
    rate = expected * np.exp(0.1 + 0.3 * x + 0.5 * spatial + 0.3 * draws.normal(size=size))
    return expected, x, draws.poisson(rate)


def measure(draw: int, side: int, by: str) -> dict[str, Any]:
    """CPU-seconds of two runs on other data of one map, memory, and moments after the second."""
    graph = grid(side)
    args = [data(graph, seed) for seed in (1, 2)]

    def run(number: int) -> Any:
        engine = ENGINES[by](icar, progress_bar=False)
        engine.run(random.key(0), graph, *args[number])
        engine.get_samples()
        return engine

    engine, first, later = first_and_next(run)
    moments = {n: (float(engine.posterior[n].mean), float(engine.posterior[n].sd)) for n in SITES}
    ended = {"converged": bool(engine.diagnostics.converged), "memory": peak_bytes() / 2**30}
    return {"first": first, "next": later, "moments": moments, **ended}


CASES = {f"{side} by {by}": (side, by) for side in REPORTED for by in ENGINES}


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, (side, by) in CASES.items():
        for row in found[name]:
            times = f"{row['first']:.1f}", f"{row['next']:.1f}", WANTED.get(side), REPORTED.get(side)
            moments = (f"{mean:.3f} ± {sd:.3f}" for mean, sd in row["moments"].values())
            yield f"{side**2:,}", by, *times, f"{row['memory']:.2f}", row["converged"], *moments


def main() -> None:
    experiments = {name: partial(measure, side=side, by=by) for name, (side, by) in CASES.items()}
    study = Study(__doc__, experiments, environment=COLD)
    found = study.run()
    lines = blocks(
        "# Counts on a map",
        "CPU-seconds of a run with its draws: in a new process, with compilation, and again on other data of the same "
        "map. Hyperparameters are integrated over; one thread for linear algebra. TMB finds the mode and standard "
        "errors from a template of its own, on data of the same kind, measured earlier on a machine of the same kind.",
        table(
            "nodes | engine | first | next | wanted | TMB | memory, GiB | converged | a | b | tau | s",
            _rows(found),
        ),
    )
    study.write("maps", lines)


if __name__ == "__main__":
    main()
