"""EP on simulated grouped data whose truth is known, by ``run_many``: a section of the scoreboard.

``python -m benchmarks.simulations_table`` fits the cells that ``results/scoreboard.json`` lacks and writes them there as
each ends; names of families after it fit these alone. :mod:`benchmarks.scoreboard` makes the page.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints

from numpyro_ext import keep_compiled_programs
from numpyro_ext.infer import EP

from .results_table import run_environment

__all__ = ["CELLS", "Cell", "Deviations", "measure", "section_of"]

__all__ = ["CELLS", "Cell", "Deviations", "measure"]

RESULTS = Path(__file__).parent / "results" / "scoreboard.json"
NUM_SETS, CPU_SECONDS, SETS_OF_A_CALL = 100, 40.0, 10
"""Data sets of a cell at most; seconds of its fits after which no more are begun; data sets of one ``run_many``."""
FIXED = {"intercept": 0.5, "treatment": 0.5, "time": 0.3, "interaction": -0.4}
SPREAD = {"tau0": 1.0, "tau1": 0.6, "rho": 0.3}
_PROBS = np.array([0.05, 0.5, 0.95])
_COVERAGE, _MILLISECONDS = (0.85, 0.95), 20.0
"""Bounds that are asked for: of the coverage of 90 % intervals, and of the time of a fit."""
Entry = dict[str, Any]


class Cell(NamedTuple):
    """Family of the observations, number of groups, times of each, and whether slopes vary."""

    family: str
    groups: int
    times: int
    has_slopes: bool

    @property
    def name(self) -> str:
        """Words that tell it from others."""
        return f"{self.family}, {self.groups} x {self.times}, {'slopes' if self.has_slopes else 'intercepts'}"

    @property
    def truth(self) -> dict[str, float]:
        """True values by name."""
        return FIXED | (SPREAD if self.has_slopes else {"tau0": SPREAD["tau0"]})


CELLS = [
    Cell(family, groups, times, has_slopes)
    for has_slopes, times, groups, family in itertools.product(
        (False, True), (3, 9), (50, 100, 200), ("Bernoulli", "Poisson")
    )
]


class Deviations(dist.Distribution):
    """Prior of rstanarm for the deviations of intercepts and slopes: half the sum of their squares is that of an
    exponential variate, and the share of each in the sum is uniform (``decov``, Goodrich et al. 2020)."""

    support = constraints.independent(constraints.positive, 1)

    def __init__(self) -> None:
        super().__init__(event_shape=(2,))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of shape ``sample_shape + (2,)``."""
        of_scale, of_share = random.split(key)
        share = random.uniform(of_share, sample_shape)
        scale = random.exponential(of_scale, sample_shape)[..., None]
        return scale * jnp.sqrt(2.0 * jnp.stack([share, 1.0 - share], -1))

    def log_prob(self, value: Array) -> Array:
        """Log density; the length of the pair is the square root of two times an exponential variate."""
        length = jnp.linalg.norm(value, axis=-1)
        return -length / np.sqrt(2.0) + 0.5 * np.log(2.0) + jnp.log(value).sum(-1) - 3.0 * jnp.log(length)


def covariates(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the fixed effects but the intercept, all of mean zero, and the group of each row."""
    group = np.repeat(np.arange(cell.groups), cell.times)
    treatment, time_of = group % 2 - 0.5, np.tile(np.linspace(-1.0, 1.0, cell.times), cell.groups)
    return np.stack([treatment, time_of, treatment * time_of], 1), group


def grouped(columns: np.ndarray, group: np.ndarray, family: str, has_slopes: bool, y: Any = None) -> None:
    """Mixed model of binary data or of counts, with the priors that rstanarm has by default."""
    level = numpyro.sample("intercept", dist.Normal(0.0, 2.5))
    effects = numpyro.sample("effects", dist.Normal(0.0, 2.5 / columns.std(0, ddof=1)).to_event(1))
    number = int(group.max()) + 1
    if has_slopes:
        deviation = numpyro.sample("deviations", Deviations())
        rho = numpyro.sample("rho", dist.Uniform(-1.0, 1.0))
        factor = jnp.array([[1.0, 0.0], [rho, jnp.sqrt(1.0 - rho**2)]])
        with numpyro.plate("groups", number):
            own = numpyro.sample(
                "own", dist.MultivariateNormal(jnp.zeros(2), scale_tril=deviation[:, None] * factor)
            )
        shift = own[group, 0] + own[group, 1] * columns[:, 1]
    else:
        scale = numpyro.sample("deviations", dist.Exponential(1.0))
        with numpyro.plate("groups", number):
            own = numpyro.sample("own", dist.Normal(0.0, scale))
        shift = own[group]
    eta = level + columns @ effects + shift
    likelihood = dist.Poisson(jnp.exp(eta)) if family == "Poisson" else dist.Bernoulli(logits=eta)
    numpyro.sample("y", likelihood, obs=y)


def simulate(cell: Cell, rng: np.random.Generator) -> np.ndarray:
    """Observations given the true values."""
    columns, group = covariates(cell)
    tau1, rho = (SPREAD["tau1"], SPREAD["rho"]) if cell.has_slopes else (0.0, 0.0)
    white = rng.normal(size=(2, cell.groups))
    level = SPREAD["tau0"] * white[0]
    slope = tau1 * (rho * white[0] + np.sqrt(1.0 - rho**2) * white[1])
    fixed = np.array(list(FIXED.values()))
    eta = fixed[0] + columns @ fixed[1:] + level[group] + slope[group] * columns[:, 1]
    if cell.family == "Poisson":
        return rng.poisson(np.exp(eta))
    return rng.binomial(1, 1.0 / (1.0 + np.exp(-eta)))


def _quantiles(fit: EP, cell: Cell) -> np.ndarray:
    """Lower end, median and upper end of each quantity, shape ``(3, quantities)``."""
    names = ["intercept", "effects", "deviations"] + (["rho"] if cell.has_slopes else [])
    return np.concatenate([np.asarray(fit.posterior[n].quantile(_PROBS)).reshape(3, -1) for n in names], 1)


def measure(cell: Cell, num_sets: int = NUM_SETS, cpu_seconds: float = CPU_SECONDS) -> Entry:
    """Errors of posterior medians and coverage of central 90 % intervals over data sets of one cell.

    :param num_sets: data sets at most.
    :param cpu_seconds: of fits that compile nothing, after which no more are begun.
    """
    columns, group = covariates(cell)
    shared = {"columns": columns, "group": group, "family": cell.family, "has_slopes": cell.has_slopes}
    rng = np.random.default_rng(CELLS.index(cell))
    engine = EP(grouped, progress_bar=False)
    ends: list[np.ndarray] = []
    converged, seconds, refused = 0, [], 0
    while (len(ends) + refused) < num_sets and sum(seconds[1:]) < cpu_seconds:
        datasets = [{"y": simulate(cell, rng)} for _ in range(SETS_OF_A_CALL)]
        started = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fits = engine.run_many(random.key(len(seconds)), datasets, **shared)
            done = [n for n in range(len(fits)) if n not in fits.errors]
            ends += [_quantiles(fits[n], cell) for n in done]
        seconds.append(time.process_time() - started)
        converged += int(fits.converged.sum())
        refused += len(fits.errors)
    low, middle, high = np.stack(ends, 1)
    truth = np.array(list(cell.truth.values()))
    squares = (middle - truth) ** 2
    rmse = np.sqrt(squares.mean(0))
    error = squares.std(0, ddof=1) / np.sqrt(len(squares)) / (2.0 * rmse)
    covered = ((low <= truth) & (truth <= high)).sum(0)
    later = seconds[1:] or seconds
    return {
        "sets": len(ends),
        "refused": refused,
        "converged": converged,
        "first": round(seconds[0], 1),
        "milliseconds": round(1000.0 * sum(later) / (SETS_OF_A_CALL * len(later))),
        "rmse": {n: [round(float(v), 4), round(float(e), 4)] for n, v, e in zip(cell.truth, rmse, error, strict=True)},
        "bias": {n: round(float(v), 4) for n, v in zip(cell.truth, (middle - truth).mean(0), strict=True)},
        "covered": {n: int(v) for n, v in zip(cell.truth, covered, strict=True)},
    }


def main(families: Sequence[str]) -> None:
    """Fit the cells that the results lack, and write each as it ends."""
    numpyro.enable_x64()
    keep_compiled_programs(False)
    for cell in CELLS:
        if families and cell.family not in families:
            continue
        if cell.name in json.loads(RESULTS.read_text()).get("simulations", {}):
            continue
        entry = measure(cell)
        print(cell.name, entry, flush=True)
        results = json.loads(RESULTS.read_text())  # another process may have written
        results.setdefault("simulations", {})[cell.name] = entry
        results["simulations_environment"] = run_environment()
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1:])
