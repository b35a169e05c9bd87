"""Counts on a map: a field of a sparse precision beside noise, slope and intercept, first and next runs.

``python -m benchmarks.runs.maps`` writes ``results/<date>-maps.md``; ``--sides`` and ``--by`` name the grids and the
engines. Each has a process of its own, with one thread for linear algebra, so that the first run compiles all of its
programs; the next one has other data on the same map. A run includes its draws. Hyperparameters are integrated over.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

from numpyro_ext.compilation.disk_cache import VARIABLE
from numpyro_ext.distributions import GaussianMarkovRandomField, graph_precision
from numpyro_ext.infer import EP, LaplaceApproximation

from ..harness import in_own_process, write_report

ENGINES = {"Laplace": LaplaceApproximation, "EP": EP}
REPORTED = {32: ("0.58", "none in 200 s"), 100: ("8.3", "")}
"""CPU-seconds of TMB with standard errors, by a template of its own, on maps of these sides; and of ours before."""
WANTED = {32: "8 / 0.87", 100: "16.6 / 10"}
"""CPU-seconds that a first and a next run should take at most: 1.5 and 1.2 times those of TMB, when compiled."""
COLD = {VARIABLE: "off", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of processes that compile all of their programs."""
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


def measure(side: int, by: str) -> dict[str, Any]:
    """CPU-seconds of runs in this process, and moments after the second."""
    graph, found = grid(side), {}
    for name, seed in (("first", 1), ("next", 2)):
        args = data(graph, seed)
        start = time.process_time()
        engine = ENGINES[by](icar, progress_bar=False)
        engine.run(random.key(0), graph, *args)
        engine.get_samples()
        found[name] = time.process_time() - start
    posterior = engine.posterior
    found["converged"] = engine.diagnostics.converged
    found["moments"] = {n: (float(posterior[n].mean), float(np.sqrt(posterior[n].variance))) for n in SITES}
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=list(REPORTED))
    parser.add_argument("--by", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--loaded", action="store_true", help="other processes run beside it")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        numpyro.enable_x64()
        print(json.dumps(measure(int(options.one[0]), options.one[1])))
        return
    found = {}
    for side in options.sides:
        for by in options.by:
            found[side, by] = in_own_process("runs.maps", "--one", side, by, environment=COLD)
            print(side, by, found[side, by], flush=True)
    write_report("maps-loaded" if options.loaded else "maps", _report(found), "runs.maps")


def _report(found: dict[tuple[int, str], dict[str, Any]]) -> list[str]:
    lines = [
        "# Counts on a map",
        "",
        "CPU-seconds of a run with its draws: in a new process, with compilation, and again on other data of the same",
        "map. Hyperparameters are integrated over; one thread for linear algebra. TMB finds the mode and standard",
        "errors from a template of its own, on data of the same kind, measured earlier on a machine of the same kind.",
        "",
        "| nodes | engine | first | next | wanted | TMB | before | memory, GiB | converged | a | b | tau | s |",
        "|" + "---|" * 13,
    ]
    for (side, by), row in found.items():
        moments = " | ".join(f"{mean:.3f} ± {sd:.3f}" for mean, sd in row["moments"].values())
        peer, before = REPORTED.get(side, ("", ""))
        times = f"{row['first']:.1f} | {row['next']:.1f} | {WANTED.get(side, '')} | {peer} | {before}"
        times += f" | {row['memory']:.2f}"
        lines.append(f"| {side**2:,} | {by} | {times} | {row['converged']} | {moments} |")
    return lines


if __name__ == "__main__":
    main()
