"""Exact draws in the coordinates of a fit beside NUTS on the model as written and non-centred.

``python -m benchmarks.evidence.exact`` writes ``results/<date>-exact.md`` as each model ends, and goes on where it was
stopped; names of models after it measure these alone. One chain each; the smallest effective sample size of the latent
sites, over the CPU-seconds of a run that compiles nothing, warm-up included. The fit itself is in the seconds of its
coordinates.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

from numpyro_ext import keep_compiled_programs
from numpyro_ext.infer import EP, PosteriorReparam
from tests import gallery

from ..harness import run_environment, write_report

NUM_SAMPLES = 500
WARMUP, WARMUP_IN_COORDINATES = 500, 200
COORDINATES = "in the coordinates of EP"
RESULTS = Path(__file__).parents[1] / "results"
Model = Callable[..., None]


def _effects(name: str, center: Any, scale: Any, number: int, is_centred: bool) -> Any:
    """Independent normal effects, as one site or as a location and scale of standard ones."""
    if is_centred:
        return numpyro.sample(name, dist.Normal(center, scale).expand([number]).to_event(1))
    return center + scale * numpyro.sample(name, dist.Normal(0, 1).expand([number]).to_event(1))


def eight_schools(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Gains of coaching in eight schools (Rubin 1981)."""

    def model(error: Any, gain: Any) -> None:
        mean, scale = numpyro.sample("mean", dist.Normal(0, 5)), numpyro.sample("scale", dist.HalfCauchy(5))
        effect = _effects("effect", mean, scale, 8, is_centred)
        numpyro.sample("gain", dist.Normal(effect, error), obs=gain)

    return model, (jnp.array([15, 10, 16, 11, 9, 11, 10, 18]), jnp.array([28, 8, -3, 7, -1, 1, 18, 12]))


def intercepts(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Four Poisson counts in each of 60 groups."""
    rng, group = np.random.default_rng(1), np.arange(240) % 60

    def model(group: Any, counts: Any) -> None:
        level, scale = numpyro.sample("level", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
        effect = _effects("effect", level, scale, 60, is_centred)
        numpyro.sample("counts", dist.Poisson(jnp.exp(effect[group])), obs=counts)

    return model, (group, rng.poisson(np.exp(0.3 + 0.8 * rng.normal(size=60))[group]))


def crossed(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Answers of 40 people to 15 items, yes or no."""
    rng, person, item = np.random.default_rng(2), np.repeat(np.arange(40), 15), np.tile(np.arange(15), 40)
    eta = 0.3 + rng.normal(size=40)[person] + 0.6 * rng.normal(size=15)[item]

    def model(person: Any, item: Any, answer: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        people = _effects("people", 0.0, numpyro.sample("of_people", dist.HalfNormal(1)), 40, is_centred)
        items = _effects("items", 0.0, numpyro.sample("of_items", dist.HalfNormal(1)), 15, is_centred)
        numpyro.sample("answer", dist.Bernoulli(logits=level + people[person] + items[item]), obs=answer)

    return model, (person, item, rng.binomial(1, 1 / (1 + np.exp(-eta))))


def cox_process(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Counts at 40 points, the length and the scale of their log rate learned."""
    t = np.arange(40.0)

    def model(t: Any, counts: Any) -> None:
        scale, length = numpyro.sample("scale", dist.HalfNormal(1)), numpyro.sample("length", dist.LogNormal(2, 0.5))
        kernel = scale**2 * jnp.exp(-0.5 * ((t[:, None] - t) / length) ** 2) + 1e-6 * jnp.eye(t.size)
        if is_centred:
            f = numpyro.sample("f", dist.MultivariateNormal(jnp.full(t.size, 0.5), kernel))
        else:
            white = numpyro.sample("f", dist.Normal(0, 1).expand([t.size]).to_event(1))
            f = 0.5 + jnp.linalg.cholesky(kernel) @ white
        numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    return model, (t, np.random.default_rng(3).poisson(np.exp(0.5 + np.sin(t / 8))))


def volatility(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Returns whose log scale walks, as in the gallery."""
    published = gallery.MODELS["stochastic_volatility"]

    def from_steps(returns: Any) -> None:
        step = numpyro.sample("sigma", dist.Exponential(50.0))
        white = numpyro.sample("s", dist.Normal(0, 1).expand([len(returns)]).to_event(1))
        nu = numpyro.sample("nu", dist.Exponential(0.1))
        numpyro.sample("r", dist.StudentT(nu, 0.0, jnp.exp(step * jnp.cumsum(white))), obs=returns)

    return published.model if is_centred else from_steps, published.data()


def of_gallery(name: str, *centred: str) -> Callable[[bool], tuple[Model, tuple[Any, ...]]]:
    """A published model and its data.

    :param centred: sites whose locations and scales are taken out where it is non-centred.
    """
    published = gallery.MODELS[name]
    decentred = handlers.reparam(published.model, config={site: LocScaleReparam(0.0) for site in centred})
    return lambda is_centred: (published.model if is_centred else decentred, published.data())


MODELS = {
    "eight schools": eight_schools,
    "Poisson intercepts, 60 groups": intercepts,
    "crossed logistic, 40 x 15": crossed,
    "radon with slopes": of_gallery("radon", "a"),
    "seeds": of_gallery("seeds", "b"),
    "epilepsy": of_gallery("epilepsy", "b_subject", "b_visit"),
    "two-parameter logistic": of_gallery("two_parameter_logistic"),
    "BYM2": of_gallery("besag_york_mollie_2"),
    "stochastic volatility": volatility,
    "horseshoe regression": of_gallery("horseshoe"),
    "Hilbert space process": of_gallery("hilbert_space_matern"),
    "ordinal, cut points": of_gallery("ordinal_regression"),
    "Student-t regression": of_gallery("robust_regression"),
    "Cox process, 40 points": cox_process,
}
ONE_FORM = {
    "two-parameter logistic",
    "BYM2",
    "horseshoe regression",
    "Hilbert space process",
    "ordinal, cut points",
    "Student-t regression",
}
"""Models without locations and scales to take out: as written they are non-centred."""


class Measured(NamedTuple):
    """A run that compiled nothing."""

    effective: float
    seconds: float
    gradients: int
    diverging: int

    @property
    def rate(self) -> float:
        """Effective draws a CPU-second."""
        return self.effective / self.seconds

    def cells(self) -> list[str]:
        """Effective draws, per 1000 gradients, per CPU-second, and divergences."""
        per_step = 1000 * self.effective / self.gradients
        return [f"{self.effective:.0f}", f"{per_step:.1f}", f"{self.rate:.0f}", str(self.diverging)]


def measure(model: Model, args: tuple[Any, ...], num_warmup: int, extra: float = 0.0, **options: Any) -> Measured:
    """The second of two runs, the first of which compiles.

    :param float extra: CPU-seconds of what was done before.
    """
    mcmc = MCMC(NUTS(model, **options), num_warmup=num_warmup, num_samples=NUM_SAMPLES, progress_bar=False)
    for seed in (1, 2):
        started = time.process_time()
        mcmc.run(random.key(seed), *args, extra_fields=("num_steps",))
        jax.block_until_ready(mcmc.get_samples())
        seconds = time.process_time() - started
    draws, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields()
    with np.errstate(all="ignore"):  # constants have none
        smallest = min(float(np.nanmin(effective_sample_size(np.asarray(values)))) for values in draws.values())
    steps = int(fields["num_steps"].sum())
    return Measured(smallest, seconds + extra, steps, int(fields["diverging"].sum()))


def rows_of(name: str) -> list[list[str]]:
    """Rows of one model: NUTS on two ways to write it, and in the coordinates of EP."""
    model, args = MODELS[name](True)
    engine = EP(model, progress_bar=False)
    for _ in range(2):
        started = time.process_time()
        engine.run(random.key(0), *args)
        reparam = PosteriorReparam(engine)
        seconds = time.process_time() - started
    found = {"as written": measure(model, args, WARMUP)}
    if name not in ONE_FORM:
        found["non-centred"] = measure(*MODELS[name](False), WARMUP)
    found[COORDINATES] = measure(reparam.reparam(), args, WARMUP_IN_COORDINATES, seconds, adapt_mass_matrix=False)
    best = found[COORDINATES].rate
    return [[name, way, *one.cells(), f"{best / one.rate:.1f}"] for way, one in found.items()]


def _rank_of_gains(rows: Iterable[list[str]]) -> str:
    """Sentence on the gains over NUTS as written, and over the better of its forms."""
    by_model: dict[str, list[float]] = {}
    for name, way, *_, gain in rows:
        if way != COORDINATES:
            by_model.setdefault(name, []).append(float(gain))
    written, best = [gains[0] for gains in by_model.values()], [min(gains) for gains in by_model.values()]
    return (
        f"Median gain over the model as written {np.median(written):.1f}, over the better of its forms "
        f"{np.median(best):.1f}; at least 10 times as written on {sum(g >= 10 for g in written)} of "
        f"{len(written)} models."
    )


def report_of(rows: list[list[str]], failed: dict[str, str]) -> list[str]:
    """Lines of the report: the table, and the rows that are lost."""
    header = ["model", "NUTS", "smallest ESS of 500", "per 1000 gradients", "per CPU-second", "divergences", "gain"]
    best = {row[0]: float(row[4]) for row in rows if row[1] == COORDINATES}
    losses = [f"{row[0]}, {row[1]} ({row[-1]})" for row in rows if best[row[0]] < float(row[4])]
    missing = [name for name in MODELS if name not in {*best, *failed}]
    return [
        "# Exact draws in the coordinates of a fit",
        "",
        f"One chain: {WARMUP} + {NUM_SAMPLES} steps of NUTS; in these of EP {WARMUP_IN_COORDINATES} + the same.",
        "CPU-seconds are those of a next run, which compiles nothing, with warm-up; in the coordinates of EP with its",
        "next fit. Gain: effective draws a CPU-second in these coordinates over those of the row. Models without a row",
        "non-centred are so as written, or have no locations and scales to take out.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        _rank_of_gains(rows),
        "",
        f"Losses (fewer effective draws a CPU-second than in the row): {'; '.join(losses) or 'none'}.",
        *(f"No coordinates: {name}. {reason}" for name, reason in failed.items()),
        *([f"Not measured: {', '.join(missing)}."] if missing else []),
    ]


def main(names: list[str]) -> None:
    """Measure what the results of today lack, and write them as each model ends."""
    numpyro.enable_x64()
    keep_compiled_programs(False)
    path = RESULTS / f"{run_environment()['date']}-exact.json"
    data = json.loads(path.read_text()) if path.exists() else {"rows": [], "failed": {}}
    rows, failed = data["rows"], data["failed"]
    for name in names or MODELS:
        if name in {*(row[0] for row in rows), *failed}:
            continue
        try:
            found = rows_of(name)
            print(*(" | ".join(row) for row in found), sep="\n", flush=True)
            rows += found
        except (ValueError, NotImplementedError) as error:  # it stands among the losses
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())
            print(name, failed[name], flush=True)
        if rows:
            write_report("exact", report_of(rows, failed), data={"rows": rows, "failed": failed})
        jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1:])
