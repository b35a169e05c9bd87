"""Models whose observations have two predictors each, and a likelihood of the user's own: times, and errors by NUTS.

``python -m benchmarks.evidence.two_predictors`` writes ``results/<date>-two-predictors.md``. Each model and engine has
a process of its own, so that the first run compiles all of its programs; a run includes its draws. Everything is
learned, and hyperparameters are integrated over.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.handlers import seed, trace

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian

from ..harness import COLD, Study, blocks, first_and_next, table
from .spreads import Case, by_nuts, compare

ENGINES = {"EP": EP, "Laplace": LaplaceApproximation, "VG": VariationalGaussian}
NUM_ROWS, NUM_SITES, NUM_VISITS = 300, 200, 5
NUM_WARMUP, NUM_DRAWS = 1500, 2000
"""Length of each of the two chains of NUTS."""
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


def _lines(x: Any, group: Any, num_groups: int, *names: str) -> list[Any]:
    """Predictors that are each an intercept, a slope and effects of groups."""
    predictors = []
    for name in names:
        intercept = numpyro.sample(f"intercept_{name}", dist.Normal(0, 1))
        slope = numpyro.sample(f"slope_{name}", dist.Normal(0, 1))
        predictors.append(intercept + slope * x + _effects(name, num_groups)[group])
    return predictors


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


def _categories_data() -> Data:
    draws, group, x, effect = _grouped(25, 7)
    eta = np.stack([np.zeros(NUM_ROWS), 0.5 + 0.6 * x, -0.3 - 0.4 * x], axis=1)
    eta[:, 1:] += 0.6 * effect.T[group]
    return x, group, np.argmax(eta + draws.gumbel(size=eta.shape), axis=1)


def categories(x: Any, group: Any, y: Any) -> None:
    lines = _lines(x, group, 25, "first", "second")
    numpyro.sample("y", dist.Categorical(logits=jnp.stack([jnp.zeros_like(lines[0]), *lines], axis=-1)), obs=y)


def _more_categories_data(number: int) -> Data:
    draws, group, x, _ = _grouped(25, 8)
    slopes, levels = np.array([0.6, -0.4, 0.2, 0.5])[: number - 1], np.array([0.5, -0.3, 0.2, -0.2])[: number - 1]
    eta = levels + slopes * x[:, None] + 0.6 * draws.normal(size=(25, number - 1))[group]
    eta = np.pad(eta, ((0, 0), (1, 0)))
    return x, group, np.argmax(eta + draws.gumbel(size=eta.shape), axis=1)


def four_categories(x: Any, group: Any, y: Any) -> None:
    lines = _lines(x, group, 25, "first", "second", "third")
    numpyro.sample("y", dist.Categorical(logits=jnp.stack([jnp.zeros_like(lines[0]), *lines], axis=-1)), obs=y)


def five_categories(x: Any, group: Any, y: Any) -> None:
    lines = _lines(x, group, 25, "first", "second", "third", "fourth")
    numpyro.sample("y", dist.Categorical(logits=jnp.stack([jnp.zeros_like(lines[0]), *lines], axis=-1)), obs=y)


class Task(NamedTuple):
    """A model with its data, and the CPU-seconds that it should take and took."""

    model: Callable[..., None]
    data: Callable[[], Data]
    engines: tuple[str, ...]
    """The first is that whose times are wanted."""
    wanted: str
    """CPU-seconds of a first and of a next run at most."""
    reported: str
    """CPU-seconds on models like it when nested integrals served all factors of two predictors."""
    earlier: str
    """CPU-seconds on 2026-11-29, by 320 nodes in the axes of the curvature."""


BOTH = ("EP", "Laplace")
TASKS = {
    "zero-inflated Poisson, effects on rate and gate": Task(
        zero_inflated, _zero_inflated_data, BOTH, "10 / 1", "above 105", "14.4 / 1.5"
    ),
    "Weibull, effects on shape and scale": Task(weibull, _weibull_data, BOTH, "10 / 1", "116 / 100", "18.7 / 3.8"),
    "the same by `numpyro.factor`": Task(weibull_by_factor, _weibull_data, BOTH, "10 / 1", "116 / 100", "19.9 / 3.3"),
    "negative binomial, effects on mean and dispersion": Task(
        negative_binomial, _negative_binomial_data, BOTH, "10 / 1", "107 / 79", "37.8 / 11.0"
    ),
    "occupancy, covariates of presence and detection": Task(
        occupancy, _occupancy_data, BOTH, "10 / 1", "59 / 123", "14.7 / 1.3"
    ),
    "right-censored survival, a class with `log_prob`": Task(
        censored, _censored_data, BOTH, "6 / 0.5", "14 / 4.8", "7.0 / 1.0"
    ),
    "location and scale, effects on both": Task(
        location_scale, _location_scale_data, BOTH, "8 / 0.5", "24 / 4", "14.6 / 1.2"
    ),
    "three categories, effects on both": Task(
        categories, _categories_data, ("VG", "EP", "Laplace"), "10 / 1", "38 / 22", "10.2 / 1.7"
    ),
    "four categories, effects on all but one": Task(
        four_categories, partial(_more_categories_data, 4), ("EP", "VG", "Laplace"), "15 to 25 / 4", "", ""
    ),
    "five categories, effects on all but one": Task(
        five_categories, partial(_more_categories_data, 5), ("EP", "VG", "Laplace"), "", "refused", "refused"
    ),
}


def chains_of(draw: int, name: str) -> dict[str, Any]:
    """Moments of all unknowns by NUTS, with their errors."""
    task = TASKS[name]
    data = task.data()
    sites = trace(seed(task.model, 0)).get_trace(*data).values()
    latent = tuple(site["name"] for site in sites if site["type"] == "sample" and not site["is_observed"])
    return by_nuts(Case(task.model, data, latent), NUM_WARMUP, NUM_DRAWS) | {"load": os.getloadavg()[0]}


def fit(draw: int, name: str, by: str) -> dict[str, Any]:
    """CPU-seconds of a first and a next run in this process, and moments of all unknowns."""
    task = TASKS[name]
    data, told = task.data(), []

    def run(_: int) -> tuple[Any, dict[str, Any]]:
        engine = ENGINES[by](task.model, progress_bar=False)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engine.run(random.key(0), *data)
            draws = engine.get_samples()
        told.extend(str(warning.message) for warning in warned)
        return engine, draws

    (engine, draws), first, later = first_and_next(run)
    moments = {}
    for site in draws:
        mean, sd = np.asarray(engine.posterior[site].mean), np.asarray(engine.posterior[site].sd)
        for place in np.ndindex(mean.shape):
            label = site + (str(list(place)) if place else "")
            moments[label] = {"mean": float(mean[place]), "sd": float(sd[place])}
    return {
        "first": first,
        "next": later,
        "messages": sorted({*told, *engine.diagnostics.messages}),
        "converged": bool(engine.diagnostics.converged),
        "moments": moments,
        "load": os.getloadavg()[0],
    }


def _reference(name: str) -> str:
    """Name of the chains; a model that is written in two ways has one posterior."""
    return f"{next(other for other, twin in TASKS.items() if twin.data is TASKS[name].data)} by NUTS"


def _fits(found: dict[str, list[Any]]) -> Iterator[tuple[str, str, Any, Any]]:
    """Model, engine, what it found, and what NUTS did."""
    for name, task in TASKS.items():
        for by in task.engines:
            for ours, theirs in zip(found[f"{name}, {by}"], found[_reference(name)], strict=False):
                yield name, by, ours, theirs


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, by, ours, theirs in _fits(found):
        task, gaps = TASKS[name], compare(theirs, ours)
        widest, least = max(gaps, key=lambda row: row[1]), min(gaps, key=lambda row: row[1])
        gap = max(gaps, key=lambda row: abs(row[3]))
        ratios = [f"{row[1]:.2f} ± {row[2]:.2f} ({row[0]})" for row in (least, widest)]
        is_timed = by == task.engines[0]
        now = f"{ours['first']:.1f} / {ours['next']:.1f}"
        times = [task.reported, task.earlier, now, task.wanted] if is_timed else ["", "", now, ""]
        cost = f"{theirs['seconds']:.0f} ({theirs['divergent']})" if is_timed else ""
        yield name, by, *times, f"{gap[3]:+.2f} ± {gap[4]:.2f} ({gap[0]})", *ratios, cost


def main() -> None:
    experiments: dict[str, Callable[[int], Any]] = {
        f"{name}, {by}": partial(fit, name=name, by=by) for name, task in TASKS.items() for by in task.engines
    }
    experiments |= {_reference(name): partial(chains_of, name=name) for name in TASKS}
    study = Study(__doc__, experiments, environment=COLD)
    found = study.run()
    loads = [one["load"] for kept in found.values() for one in kept]
    said = [
        f"- {name}, {by}: {message}"
        for name, by, ours, _ in _fits(found)
        for message in [*ours["messages"], *["It has not converged."] * (not ours["converged"])]
    ]
    lines = blocks(
        "# Two predictors in an observation, and a likelihood of the user's own",
        "CPU-seconds of a run with its draws: in a new process, with compilation, and again. Everything is learned, "
        "and hyperparameters are integrated over. Those `first reported` are of other data of these sizes, by nested "
        "integrals for all factors; those of `2026-11-29` by 320 nodes in the axes of the curvature. "
        f"Processes that wanted the {os.cpu_count()} cores: {min(loads):.0f} to {max(loads):.0f}.",
        "Over all unknowns, effects of groups among them: the largest gap of the means, in standard deviations, and "
        "the smallest and the largest ratio of standard deviations (the engine's over that of NUTS), with the Monte "
        f"Carlo error of NUTS: two chains of {NUM_WARMUP} + {NUM_DRAWS}, CPU-seconds (divergent transitions).",
        table(
            "model | engine | first reported | 2026-11-29 | now | wanted | gap of means "
            "| least sd ratio | largest sd ratio | NUTS",
            _rows(found),
        ),
        ["What the runs said:", "", *said] if said else [],
    )
    study.write("two-predictors", lines)


if __name__ == "__main__":
    main()
