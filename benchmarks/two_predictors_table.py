"""Models whose observations have two predictors each, and a likelihood of the user's own: first and next runs.

``python -m benchmarks.two_predictors_table`` writes ``results/<date>-two-predictors.md``; ``--only`` and ``--by`` name
models and engines, ``--before`` gives the data of an earlier table to stand beside it. Each model and engine has a
process of its own, so that the first run compiles all of its programs; a run includes its draws. Everything is learned,
and hyperparameters are integrated over.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC, NUTS

from numpyro_ext.compilation.disk_cache import VARIABLE
from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian

from .own_process import in_own_process
from .results_table import write_report

ENGINES = {"EP": EP, "Laplace": LaplaceApproximation, "VG": VariationalGaussian}
NUM_ROWS, NUM_SITES, NUM_VISITS = 300, 200, 5
NUM_WARMUP, NUM_DRAWS = 1000, 4000
Data = tuple[np.ndarray, ...]


def _grouped(num_groups: int, seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    """Random numbers, groups of the rows, a covariate, and standard normal effects of the groups."""
    draws = np.random.default_rng(seed)
    group = draws.integers(0, num_groups, NUM_ROWS)
    return draws, group, draws.normal(size=NUM_ROWS), draws.normal(size=(2, num_groups))


def _effects(name: str, num_groups: int) -> Any:
    spread = numpyro.sample(f"spread_{name}", dist.HalfNormal(1))
    with numpyro.plate(f"groups_{name}", num_groups):
        return spread * numpyro.sample(f"effect_{name}", dist.Normal(0, 1))


def _lines(x: Any, group: Any, num_groups: int, first: str, second: str) -> tuple[Any, Any]:
    """Two predictors, each an intercept, a slope and effects of groups."""
    predictors = []
    for name in (first, second):
        intercept = numpyro.sample(f"intercept_{name}", dist.Normal(0, 1))
        slope = numpyro.sample(f"slope_{name}", dist.Normal(0, 1))
        predictors.append(intercept + slope * x + _effects(name, num_groups)[group])
    return predictors[0], predictors[1]


def _zero_inflated_data() -> Data:
    draws, group, x, effect = _grouped(15, 1)
    rate = np.exp(0.8 + 0.4 * x + 0.4 * effect[0][group])
    gate = 1 / (1 + np.exp(-(-0.8 + 0.5 * x + 0.7 * effect[1][group])))
    return x, group, draws.poisson(rate) * (draws.uniform(size=NUM_ROWS) > gate)


def zero_inflated(x: Any, group: Any, y: Any) -> None:
    log_rate, gate_logits = _lines(x, group, 15, "rate", "gate")
    counts = dist.Poisson(jnp.exp(log_rate))
    numpyro.sample("y", dist.ZeroInflatedDistribution(counts, gate_logits=gate_logits), obs=y)


def _weibull_data() -> Data:
    draws, group, x, effect = _grouped(30, 2)
    shape = np.exp(0.5 + 0.2 * x + 0.25 * effect[0][group])
    return x, group, np.exp(1.0 - 0.3 * x + 0.3 * effect[1][group]) * draws.weibull(shape)


def weibull(x: Any, group: Any, y: Any) -> None:
    log_shape, log_scale = _lines(x, group, 30, "shape", "scale")
    numpyro.sample("y", dist.Weibull(jnp.exp(log_scale), jnp.exp(log_shape)), obs=y)


def weibull_by_factor(x: Any, group: Any, y: Any) -> None:
    log_shape, log_scale = _lines(x, group, 30, "shape", "scale")
    shape = jnp.exp(log_shape)
    log_ratio = jnp.log(y) - log_scale
    numpyro.factor("y", jnp.sum(log_shape + shape * log_ratio - jnp.log(y) - jnp.exp(shape * log_ratio)))


def _negative_binomial_data() -> Data:
    draws, group, x, effect = _grouped(30, 3)
    mean, size = np.exp(1.2 + 0.4 * x + 0.4 * effect[0][group]), np.exp(0.8 - 0.3 * x + 0.4 * effect[1][group])
    return x, group, draws.poisson(draws.gamma(size, mean / size))


def negative_binomial(x: Any, group: Any, y: Any) -> None:
    log_mean, log_size = _lines(x, group, 30, "mean", "size")
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_mean), jnp.exp(log_size)), obs=y)


def _occupancy_data() -> Data:
    draws = np.random.default_rng(4)
    region, x, z = draws.integers(0, 20, NUM_SITES), *draws.normal(size=(2, NUM_SITES))
    presence, detection = 0.3 + 0.8 * x + 0.7 * draws.normal(size=20)[region], -0.5 + 0.6 * z
    is_there = draws.uniform(size=NUM_SITES) < 1 / (1 + np.exp(-presence))
    seen = draws.binomial(NUM_VISITS, 1 / (1 + np.exp(-detection)))
    return x, z, region, seen * is_there


def occupancy(x: Any, z: Any, region: Any, seen: Any) -> None:
    b, c = (numpyro.sample(name, dist.Normal(0, 1.5).expand([2]).to_event(1)) for name in ("presence", "detection"))
    presence = b[0] + b[1] * x + _effects("region", 20)[region]
    detection = c[0] + c[1] * z
    there = jax.nn.log_sigmoid(presence) + dist.Binomial(NUM_VISITS, logits=detection).log_prob(seen)
    not_there = jnp.where(seen == 0, jax.nn.log_sigmoid(-presence), -jnp.inf)
    numpyro.factor("seen", jnp.sum(jnp.logaddexp(there, not_there)))


class CensoredWeibull(dist.Distribution):
    """Survival times of which some are known to be longer than what is observed."""

    support = dist.constraints.positive

    def __init__(self, scale: Any, shape: Any, is_event: Any) -> None:
        self.scale, self.concentration, self.is_event = scale, shape, is_event
        batch_shape = jnp.broadcast_shapes(jnp.shape(scale), jnp.shape(shape), jnp.shape(is_event))
        super().__init__(batch_shape, validate_args=False)

    def log_prob(self, value: Any) -> Any:
        base = dist.Weibull(self.scale, self.concentration)
        log_survival = -((value / self.scale) ** self.concentration)
        return jnp.where(self.is_event, base.log_prob(value), log_survival)


def _censored_data() -> Data:
    draws, group, x, effect = _grouped(15, 5)
    time_of_event = np.exp(1.0 + 0.4 * x + 0.4 * effect[0][group]) * draws.weibull(1.4, NUM_ROWS)
    end = draws.uniform(1.0, 6.0, NUM_ROWS)
    return x, group, np.minimum(time_of_event, end), time_of_event < end


def censored(x: Any, group: Any, t: Any, is_event: Any) -> None:
    intercept, slope = numpyro.sample("intercept", dist.Normal(0, 2)), numpyro.sample("slope", dist.Normal(0, 1))
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
    eta = intercept + slope * x + _effects("group", 15)[group]
    numpyro.sample("t", CensoredWeibull(jnp.exp(eta), shape, is_event), obs=t)


def _location_scale_data() -> Data:
    draws, group, x, effect = _grouped(30, 6)
    scale = np.exp(-0.4 + 0.3 * x + 0.4 * effect[1][group])
    return x, group, 1.0 + 0.5 * x + 0.6 * effect[0][group] + scale * draws.normal(size=NUM_ROWS)


def location_scale(x: Any, group: Any, y: Any) -> None:
    location, log_scale = _lines(x, group, 30, "location", "scale")
    numpyro.sample("y", dist.Normal(location, jnp.exp(log_scale)), obs=y)


MODELS: dict[str, tuple[Callable[..., None], Callable[[], Data], tuple[float, float]]] = {
    "zero-inflated Poisson, effects on rate and gate": (zero_inflated, _zero_inflated_data, (10, 1)),
    "Weibull, effects on shape and scale": (weibull, _weibull_data, (10, 1)),
    "the same by `numpyro.factor`": (weibull_by_factor, _weibull_data, (10, 1)),
    "negative binomial, effects on mean and dispersion": (negative_binomial, _negative_binomial_data, (10, 1)),
    "occupancy, covariates of presence and detection": (occupancy, _occupancy_data, (10, 1)),
    "right-censored survival, a class with `log_prob`": (censored, _censored_data, (6, 0.5)),
    "location and scale, effects on both": (location_scale, _location_scale_data, (8, 0.5)),
}
"""Model, data, and CPU-seconds that a first and a next run of ``EP`` should take at most."""
REPORTED = {
    zero_inflated: "above 105",
    weibull: "116 / 100",
    weibull_by_factor: "116 / 100",
    negative_binomial: "107 / 79",
    occupancy: "59 / 123",
    censored: "14 / 4.8",
    location_scale: "24 / 4",
}
"""CPU-seconds of ``EP`` when nested integrals served all factors of two predictors, on models like these."""


def measure(name: str, by: str) -> dict[str, Any]:
    """CPU-seconds of runs in this process, the log evidence, and means and deviations of all scalar unknowns."""
    model, make, _ = MODELS[name]
    data = make()
    found: dict[str, Any] = {"warnings": []}
    if by == "NUTS":
        start = time.process_time()
        mcmc = MCMC(NUTS(model), num_warmup=NUM_WARMUP, num_samples=NUM_DRAWS, progress_bar=False)
        mcmc.run(random.key(0), *data)
        draws = mcmc.get_samples()
        found["first"] = time.process_time() - start
        found["error"] = {}
        for site, values in draws.items():
            if values.ndim == 1:
                size = numpyro.diagnostics.effective_sample_size(np.asarray(values)[None])
                found["error"][site] = float(values.std() / np.sqrt(size))
    else:
        for key in ("first", "next"):
            start = time.process_time()
            engine = ENGINES[by](model, progress_bar=False)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                engine.run(random.key(0), *data)
                draws = engine.get_samples()
            found[key] = time.process_time() - start
            found["warnings"] = sorted({str(warning.message) for warning in told})
        found["converged"], found["log_evidence"] = bool(engine.diagnostics.converged), float(engine.log_evidence)
        values = {site: engine.posterior[site] for site in draws if site not in engine.hyper}
        found["posterior"] = {
            site: [np.asarray(value.mean).tolist(), np.asarray(value.sd).tolist()] for site, value in values.items()
        }
    draws = {site: np.asarray(values) for site, values in draws.items()}
    found["draws"] = {site: [v.mean(0).tolist(), v.std(0).tolist()] for site, v in draws.items()}
    return found


def _in_own_process(name: str, by: str, most_seconds: float) -> dict[str, Any]:
    """Result of :func:`measure` without programs that are kept on disk; seconds alone where it does not end."""
    command = ("two_predictors_table", "--one", name, "--by", by)
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        return in_own_process(*command, environment={VARIABLE: "off"}, timeout=most_seconds)
    except subprocess.TimeoutExpired:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"at_least": ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=list(MODELS), help="measure this model in this process")
    parser.add_argument("--by", nargs="+", default=list(ENGINES), choices=[*ENGINES, "NUTS"])
    parser.add_argument("--only", nargs="+", default=list(MODELS), help="models, by the beginning of their names")
    parser.add_argument("--before", type=Path, help="the data of an earlier table, to stand beside this one")
    parser.add_argument("--most-seconds", type=float, default=3600.0, help="of the clock, for both runs of a model")
    options = parser.parse_args()
    numpyro.enable_x64()
    if options.one:
        print(json.dumps(measure(options.one, options.by[0])))
        return
    earlier = json.loads(options.before.read_text()) if options.before else {}
    rows, data, load = [], {}, os.getloadavg()
    for name, (model, _, limits) in MODELS.items():
        if not name.startswith(tuple(options.only)):
            continue
        data[name] = {by: _in_own_process(name, by, options.most_seconds) for by in options.by}
        for by, found in data[name].items():
            before = earlier.get(name, {}).get(by)
            wanted = f"{limits[0]:g} / {limits[1]:g}" if by == "EP" else ""
            reported = REPORTED[model] if by == "EP" else ""
            cells = [name, by, reported, _seconds(found), wanted]
            if earlier:
                cells += [_seconds(before), *_difference(before, found)]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    more = " earlier | log evidence | means |" if earlier else ""
    lines = [
        "# Two predictors in an observation, and a likelihood of the user's own",
        "",
        "CPU-seconds of a run with its draws: in a new process, with compilation, and again. Everything is learned,",
        "and hyperparameters are integrated over. Those `first reported` are of other data of these sizes, by nested",
        f"integrals for all factors. Processes that wanted the {os.cpu_count()} cores at the start and the end: "
        f"{load[0]:.0f} and {os.getloadavg()[0]:.0f}.",
        *(["Differences of log evidences, and the largest of posterior means in deviations."] if earlier else []),
        "",
        "| model | engine | first reported | first / next | wanted |" + more,
        "|---|---|---|---|---|" + "---|---|---|" * bool(earlier),
        *rows,
    ]
    write_report("two-predictors", lines, "two_predictors_table", data)


def _seconds(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "at_least" in found:
        return f"no end after {found['at_least']:.0f}"
    return " / ".join(f"{found[key]:.1f}" for key in ("first", "next") if key in found)


def _difference(before: dict[str, Any] | None, found: dict[str, Any]) -> tuple[str, str]:
    if before is None or "log_evidence" not in before or "log_evidence" not in found:
        return "", ""
    gaps = [
        np.max(np.abs(np.subtract(mean, before["posterior"][site][0])) / np.asarray(before["posterior"][site][1]))
        for site, (mean, _) in found["posterior"].items()
    ]
    return f"{found['log_evidence'] - before['log_evidence']:.1e}", f"{max(gaps):.1e}"


if __name__ == "__main__":
    main()
