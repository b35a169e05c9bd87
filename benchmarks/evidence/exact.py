"""Exact draws in the coordinates of a fit beside NUTS on the model as written and non-centred.

``python -m benchmarks.evidence.exact WORK`` writes ``results/<date>-exact.md``, and goes on where it was stopped;
``--only`` names models. One chain of NUTS, the four of ``sample_exactly``; the smallest effective sample size of the
latent sites, over the CPU-seconds of a run that compiles nothing, warm-up included. The next fit is in the seconds of
its coordinates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer.reparam import LocScaleReparam

from numpyro_ext import keep_compiled_programs, models
from numpyro_ext.datasets import load_coal_mining_counts
from numpyro_ext.infer import EP
from tests import gallery

from ..harness import SCOREBOARD, CompiledNuts, Study, blocks, cpu_seconds, first_and_next, table
from ..scores import park
from .exact_costs import COSTS, cost_lines, cox_process

WARMUP, NUM_SAMPLES = 500, 1000
NUM_CHAINS, WARMUP_IN_COORDINATES = 4, 200
COORDINATES = "in the coordinates of EP"
Model = Callable[..., None]


def _effects(name: str, center: Any, scale: Any, number: int, is_centred: bool) -> Any:
    """Independent normal effects, as one site or as a location and scale of standard ones."""
    if is_centred:
        return numpyro.sample(name, dist.Normal(center, scale).expand([number]).to_event(1))
    return center + scale * numpyro.sample(name, dist.Normal(0, 1).expand([number]).to_event(1))


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


def salamanders(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Matings of 60 females and 60 males, six of each, of two kinds that answer to their own, yes or no."""
    rng = np.random.default_rng(4)
    female = np.repeat(np.arange(60), 6)
    male = (female + 10 * np.tile(np.arange(6), 60)) % 60
    kinds = np.stack([female < 30, male < 30, (female < 30) & (male < 30)], 1).astype(float)
    eta = 0.3 + kinds @ np.array([-1.0, -0.5, 1.5]) + rng.normal(size=60)[female] + rng.normal(size=60)[male]

    def model(kinds: Any, female: Any, male: Any, mated: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        effects = numpyro.sample("effects", dist.Normal(0, 2).expand([3]).to_event(1))
        females = _effects("females", 0.0, numpyro.sample("of_females", dist.HalfNormal(1)), 60, is_centred)
        males = _effects("males", 0.0, numpyro.sample("of_males", dist.HalfNormal(1)), 60, is_centred)
        eta = level + kinds @ effects + females[female] + males[male]
        numpyro.sample("mated", dist.Bernoulli(logits=eta), obs=mated)

    return model, (kinds, female, male, rng.binomial(1, 1 / (1 + np.exp(-eta))))


def coal_mining(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Disasters in 50 stretches of time, the length, the scale and the mean of their log rate learned."""
    found = load_coal_mining_counts(50)
    return partial(models.cox_process, nonlinearity="exponential", centered=is_centred), (found.centres, found.counts)


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
    "eight schools": of_gallery("eight_schools", "theta"),
    "Poisson intercepts, 60 groups": intercepts,
    "crossed logistic, 40 x 15": crossed,
    "salamanders, 60 x 60": salamanders,
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
    "Cox process, 40 points": partial(cox_process, 40),
    "coal mining, 50 counts": coal_mining,
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


def _smallest(draws: Mapping[str, np.ndarray]) -> list[float]:
    """Smallest effective sample sizes of the sites, and of their squares about the means, which are their variances."""
    with np.errstate(all="ignore"):  # constants have none
        sizes = [effective_sample_size(v) for v in draws.values()]
        squares = [effective_sample_size(np.square(v - v.mean((0, 1)))) for v in draws.values()]
        return [min(float(np.nanmin(v)) for v in of) for of in (sizes, squares)]


def _figures(draws: Mapping[str, np.ndarray], gradients: int, seconds: float, rest: Sequence[float]) -> list[float]:
    smallest, of_squares = _smallest(draws)
    return [smallest, of_squares, 1000 * smallest / gradients, smallest / seconds, *rest]


def measure(model: Model, args: tuple[Any, ...]) -> list[float]:
    """Effective draws of one chain of NUTS, of squares too, per 1000 gradients and per CPU-second of sampling,
    its divergences, and CPU-seconds of compilation; no fit goes before it."""
    nuts = CompiledNuts(model, WARMUP, NUM_SAMPLES, *args)
    chains = nuts.run(1)
    return _figures(chains.draws, chains.gradients, chains.seconds, [chains.divergent, nuts.compilation, np.nan])


def measure_exact(engine: EP, args: tuple[Any, ...], fit: float) -> list[float]:
    """The same of ``engine.sample_exactly``, whose next run has the seconds of the next fit too, and these alone."""
    exact, first = cpu_seconds(engine.sample_exactly, random.key(0), NUM_SAMPLES, num_chains=NUM_CHAINS)
    exact.post_warmup_state = None
    _, later = cpu_seconds(exact.run, random.key(1), *args)
    draws = {name: np.asarray(values) for name, values in exact.get_samples(group_by_chain=True).items()}
    gradients = int(np.sum(exact.get_extra_fields()["num_steps"]))
    return _figures(draws, gradients, later + fit, [exact.num_diverging, first - later, fit])


def compare_park(draw: int) -> dict[str, Any]:
    """The park in these coordinates, beside the run of NUTS that the scoreboard keeps."""
    args = park.data()
    engine = EP(park.rule, progress_bar=False)
    _, _, fit = first_and_next(lambda _: engine.run(random.key(0), *args))
    kept = json.loads(SCOREBOARD.read_text())["park"]["NUTS"]
    sizes = [min(map(min, kept[key].values())) for key in ("effective", "effective_of_squares")]
    rates = [1000 * sizes[0] / kept["steps"], sizes[0] / kept["first"]]
    return {
        "ways": {
            "as written": [*sizes, *rates, kept["divergences"], np.nan, np.nan],
            COORDINATES: measure_exact(engine, args, fit),
        }
    }


def compare(draw: int, name: str) -> dict[str, Any]:
    """Figures of NUTS on two ways to write a model, and in the coordinates of EP; or why there are none."""
    model, args = MODELS[name](True)
    try:
        engine = EP(model, progress_bar=False)
        _, _, fit = first_and_next(lambda _: engine.run(random.key(0), *args))
        within = measure_exact(engine, args, fit)
        found = {"as written": measure(model, args)}
        if name not in ONE_FORM:
            found["non-centred"] = measure(*MODELS[name](False))
        found[COORDINATES] = within
    except (ValueError, ArithmeticError, RuntimeError) as error:  # it stands among the losses
        return {"failed": " ".join(f"{type(error).__name__}: {error}".split())}
    return {"ways": found}


COMPARED = {name: partial(compare, name=name) for name in MODELS} | {"park": compare_park}
"""Experiments by name."""


def _rate(number: float, digits: int) -> str:
    """So many digits behind the point, and more of small numbers, so that none is shown as zero."""
    return f"{number:.{digits}f}" if number >= 1.0 else f"{number:.1g}"


def page(found: dict[str, list[Any]]) -> list[str]:
    """Lines of the report: the table, and the rows that are lost."""
    failed = {name: each["failed"] for name in COMPARED for each in found[name] if "failed" in each}
    ways = {name: each["ways"] for name in COMPARED for each in found[name] if "ways" in each}
    gains = {name: {way: of[COORDINATES][3] / row[3] for way, row in of.items()} for name, of in ways.items()}
    rows = (
        (
            *(name, way, f"{of[0]:.0f}", f"{of[1]:.0f}", _rate(of[2], 1), _rate(of[3], 0), of[4]),
            *("-" if np.isnan(of[5]) else f"{of[5]:.1f}", "-" if np.isnan(of[6]) else f"{of[6]:.2f}"),
            _rate(gains[name][way], 1),
        )
        for name in ways
        for way, of in ways[name].items()
    )
    losses = [f"{name}, {way} ({gain:.1f})" for name in gains for way, gain in gains[name].items() if gain < 1.0]
    missing = [name for name in COMPARED if not found[name]]
    written = [of["as written"] for of in gains.values()]
    best = [min(gain for way, gain in of.items() if way != COORDINATES) for of in gains.values()]
    return blocks(
        "# Exact draws in the coordinates of a fit",
        f"NUTS: one chain of {WARMUP} + {NUM_SAMPLES} steps; in the coordinates of EP `sample_exactly` with "
        f"{NUM_CHAINS} chains of {WARMUP_IN_COORDINATES} + {NUM_SAMPLES}. CPU-seconds are those of sampling by a "
        "compiled program, with warm-up; in the coordinates of EP with its next fit. `MCMC` compiles this program in "
        "each of its runs (NumPyro 0.22), which takes the seconds of the column of compilation, with the first state. "
        "Effective sizes are the smallest of all latent and deterministic sites; of squares they are what standard "
        "deviations rest on. Gain: effective draws a CPU-second in these coordinates over those of the row. Models "
        "without a row non-centred are so as written, or have no locations and scales to take out; NUTS in the park is "
        "the run of the scoreboard.",
        table(
            "model | draws | smallest ESS | of squares | per 1000 gradients | per CPU-second | divergences | "
            "compiled, s | next fit, s | gain",
            rows,
        ),
        f"Median gain over the model as written {np.median(written):.1f}, over the better of its forms "
        f"{np.median(best):.1f}; at least 10 times as written on {sum(g >= 10 for g in written)} of "
        f"{len(written)} models.",
        [
            f"Losses (fewer effective draws a CPU-second than in the row): {'; '.join(losses) or 'none'}.",
            *(f"No coordinates: {name}. {reason}" for name, reason in failed.items()),
            *([f"Not measured: {', '.join(missing)}."] if missing else []),
        ],
        *cost_lines(found),
    )


def main() -> None:
    """Measure what ``WORK`` lacks, and write the page."""
    keep_compiled_programs(False)
    study = Study(__doc__, COMPARED | COSTS)
    study.write("exact", page(study.run()))


if __name__ == "__main__":
    main()
