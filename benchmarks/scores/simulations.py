"""EP on simulated grouped data whose truth is known, by ``run_many``: a section of the scoreboard.

``python -m benchmarks.scores.simulations`` fits the cells that ``results/scoreboard.json`` lacks, or has without times,
and writes them there as each ends; words after it fit the cells alone whose names have one of them.
:mod:`benchmarks.scores.scoreboard` makes the page.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints

from numpyro_ext.infer import EP

from ..harness import complete_scoreboard, in_words, table_head

__all__ = ["CELLS", "Cell", "Deviations", "measure", "simulations_section"]

NUM_SETS, CPU_SECONDS, SETS_OF_A_CALL = 100, 20.0, 10
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
            own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(2), scale_tril=deviation[:, None] * factor))
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


def simulations_section(entries: Mapping[str, Entry], environment: Mapping[str, str]) -> str:
    """Section of the page; nothing if no cell is measured."""
    found = {cell: entries[cell.name] for cell in CELLS if cell.name in entries}
    if not found:
        return ""
    names = [*FIXED, *SPREAD]
    truth = ", ".join(f"{name} {value:g}" for name, value in (FIXED | SPREAD).items())
    rows = []
    for cell, entry in found.items():
        cells = [
            f"{entry['rmse'][n][0]:.2f} ({entry['rmse'][n][1]:.2f}), {_percent(entry['covered'][n] / entry['sets'])}"
            if n in entry["rmse"]
            else ""
            for n in names
        ]
        times = [f"{entry[key]:.0f}" if key in entry else "" for key in ("converged", "first", "milliseconds")]
        rows.append("| " + " | ".join([cell.name, str(entry["sets"]), *cells, *times]) + " |")
    sets = sum(entry["sets"] + entry["refused"] for entry in found.values())
    converged = sum(entry["converged"] for entry in found.values())
    milliseconds = [entry["milliseconds"] for entry in found.values() if "milliseconds" in entry]
    fast = sum(time <= _MILLISECONDS for time in milliseconds)
    missing = [cell.name for cell in CELLS if cell not in found]
    missing += [f"the time of {cell.name}" for cell, entry in found.items() if "milliseconds" not in entry]
    heads = " | ".join(["cell", "sets", *names, "converged", "first, s", "next, ms"])
    return f"""
## Simulations with known truth

The 24 kinds of data of Li and Signorelli (2026, arXiv 2606.15933): yes or no and counts, 50, 100 and 200 groups, 3
and 9 times each, with random intercepts, or intercepts and slopes that are correlated; the priors are those that
rstanarm has by default. **Their true values and covariates are not known here, so others are chosen, and figures are
not comparable with theirs**: half of the groups are treated (coded one half and minus one half), times are even from -1
to 1, and the truth is {truth}. The engine is EP with its defaults, by `run_many`, {SETS_OF_A_CALL} data sets a call and
at most {NUM_SETS} of a cell; no more are begun after {CPU_SECONDS:.0f} CPU-seconds.

A cell has the root mean squared error of the posterior median over data sets, with its Monte Carlo error in brackets,
and the coverage of the central 90 % interval, whose Monte Carlo error is {_percent(np.sqrt(0.09 / NUM_SETS))} with
{NUM_SETS} data sets and {_percent(np.sqrt(0.09 / 20))} with 20. Seconds are CPU-seconds: of the first call, which
compiles and fits {SETS_OF_A_CALL}, and milliseconds of a fit of the calls after it, quantiles included. Up to
twenty-five other processes ran beside it.

{chr(10).join([*table_head(heads), *rows])}

Over all cells: coverage {_pooled(found, names)}. {converged} of {sets} fits converged.

A coverage of {_percent(_COVERAGE[0])} to {_percent(_COVERAGE[1])} in every cell, convergence of all and at most
{_MILLISECONDS:.0f} ms a fit are asked for. The time is kept in {fast} of {len(milliseconds)} cells (median
{np.median(milliseconds):.0f} ms, largest {max(milliseconds)}). A little more than half of it is compiled: a search, and
about ten fits of the field at points of the one scale, or with slopes some 190 at points of two scales and a
correlation (61 that follow their density, and 128 that judge it), each of a few sweeps that integrate every observation
by quadrature. The rest is the reading of each data set and the prediction of where fits begin, and with slopes the
emulator of the density. Losses in coverage and convergence, with
a star where coverage is outside by more than two Monte Carlo errors:

{chr(10).join(_losses(found)) or "None."}

Not run: {"; ".join(missing) or "none"}.

Measured by `python -m benchmarks.scores.simulations`: {in_words(environment)}.
"""


def _percent(share: float, digits: int = 0) -> str:
    return f"{100.0 * share:.{digits}f} %"


def _pooled(found: Mapping[Cell, Entry], names: Sequence[str]) -> str:
    """Coverage of each quantity over all data sets that have it, with its Monte Carlo error."""
    said = []
    for name in names:
        having = [entry for entry in found.values() if name in entry["covered"]]
        if having:
            number = sum(entry["sets"] for entry in having)
            share = sum(entry["covered"][name] for entry in having) / number
            said.append(f"{name} {_percent(share, 1)} ({_percent(np.sqrt(share * (1.0 - share) / number), 1)})")
    return ", ".join(said)


def _losses(found: Mapping[Cell, Entry]) -> Iterator[str]:
    """Lines on the cells whose coverage is outside the bounds, or that have fits that did not converge."""
    for cell, entry in found.items():
        said = []
        for name, count in entry["covered"].items():
            share = count / entry["sets"]
            outside = max(_COVERAGE[0] - share, share - _COVERAGE[1])
            if outside > 1e-9:
                bound = _COVERAGE[0] if share < _COVERAGE[0] else _COVERAGE[1]
                is_clear = outside > 2.0 * np.sqrt(bound * (1.0 - bound) / entry["sets"])
                said.append(f"{name} {_percent(share)}{'*' if is_clear else ''}")
        if entry["converged"] < entry["sets"]:
            said.append(f"{entry['sets'] - entry['converged']} of {entry['sets']} fits not converged")
        if entry["refused"]:
            said.append(f"{entry['refused']} refused")
        if said:
            yield f"- {cell.name}: {', '.join(said)}."


def main(words: Sequence[str]) -> None:
    """Fit the cells that the results lack, and write each as it ends."""
    cells = {cell.name: cell for cell in CELLS if not words or any(word in cell.name for word in words)}
    complete_scoreboard("simulations", cells, lambda name: measure(cells[name]), needed=["milliseconds"])


if __name__ == "__main__":
    main(sys.argv[1:])
