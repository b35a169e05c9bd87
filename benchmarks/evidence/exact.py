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
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size

from numpyro_ext import keep_compiled_programs, models
from numpyro_ext.datasets import load_coal_mining_counts
from numpyro_ext.infer import EP
from tests import gallery

from ..harness import SCOREBOARD, CompiledNuts, Study, blocks, cpu_seconds, decentred, table
from ..scores import park
from .exact_costs import COSTS, cost_lines, cox_process, effects, intercepts

WARMUP, NUM_SAMPLES = 500, 1000
NUM_CHAINS, WARMUP_IN_COORDINATES = 4, 200
NUM_RUNS, LONG_RUN = 5, 3.0
"""Runs with different keys, and CPU-seconds of the first from which on it is the only one."""
COORDINATES, OPTIMUM = "in the coordinates of EP", "of EP, hyperparameters at their optimum"
FITS: dict[str, dict[str, Any]] = {COORDINATES: {}, OPTIMUM: {"integrate": "none"}}
"""Options of the engine by coordinates: chains need no integral over hyperparameters, which takes most of a fit."""
Model = Callable[..., None]


def crossed(is_centred: bool) -> tuple[Model, tuple[Any, ...]]:
    """Answers of 40 people to 15 items, yes or no."""
    rng, person, item = np.random.default_rng(2), np.repeat(np.arange(40), 15), np.tile(np.arange(15), 40)
    eta = 0.3 + rng.normal(size=40)[person] + 0.6 * rng.normal(size=15)[item]

    def model(person: Any, item: Any, answer: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        people = effects("people", 0.0, numpyro.sample("of_people", dist.HalfNormal(1)), 40, is_centred)
        items = effects("items", 0.0, numpyro.sample("of_items", dist.HalfNormal(1)), 15, is_centred)
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
        females = effects("females", 0.0, numpyro.sample("of_females", dist.HalfNormal(1)), 60, is_centred)
        males = effects("males", 0.0, numpyro.sample("of_males", dist.HalfNormal(1)), 60, is_centred)
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


def of_gallery(name: str) -> Callable[[bool], tuple[Model, tuple[Any, ...]]]:
    """A published model and its data."""
    published = gallery.MODELS[name]
    return lambda is_centred: (published.model if is_centred else decentred(published.model), published.data())


MODELS = {
    "eight schools": of_gallery("eight_schools"),
    "Poisson intercepts, 60 groups": partial(intercepts, 60),
    "crossed logistic, 40 x 15": crossed,
    "salamanders, 60 x 60": salamanders,
    "radon with slopes": of_gallery("radon"),
    "seeds": of_gallery("seeds"),
    "epilepsy": of_gallery("epilepsy"),
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


class Way(NamedTuple):
    """A compiled way to draw."""

    draw: Callable[[int], Sequence[float]]
    """From the number of a key to smallest effective sizes, of squares too, gradients, divergences and CPU-seconds of
    the draws, and of a next fit where one goes before them."""
    first: float
    """CPU-seconds of compilation and of the first state; of draws with them where a fit goes before."""


def by_nuts(model: Model, args: tuple[Any, ...]) -> Way:
    """One chain of NUTS."""
    nuts = CompiledNuts(model, WARMUP, NUM_SAMPLES, *args)

    def draw(number: int) -> Sequence[float]:
        found = nuts.run(number)
        return *_smallest(found.draws), found.gradients, found.divergent, found.seconds

    return Way(draw, nuts.compilation)


def by_fit(model: Model, args: tuple[Any, ...], **options: Any) -> Way:
    """A fit and ``engine.sample_exactly``.

    :param options: of the engine.
    """
    engine = EP(model, progress_bar=False, **options)
    engine.run(random.key(0), *args)
    exact, first = cpu_seconds(engine.sample_exactly, random.key(0), NUM_SAMPLES, num_chains=NUM_CHAINS)

    def draw(number: int) -> Sequence[float]:
        exact.post_warmup_state = None
        _, fit = cpu_seconds(engine.run, random.key(0), *args)
        _, seconds = cpu_seconds(exact.run, random.key(number), *args)
        draws = {name: np.asarray(values) for name, values in exact.get_samples(group_by_chain=True).items()}
        gradients = int(np.sum(exact.get_extra_fields()["num_steps"]))
        return *_smallest(draws), gradients, exact.num_diverging, seconds, fit

    return Way(draw, first)


def in_turn(ways: Mapping[str, Way]) -> dict[str, list[float]]:
    """Figures of ways that run one after the other, again and again, so that all have the same load.

    Medians of the runs: effective draws, of squares too, per 1000 gradients, and per CPU-second, of which the least
    count; divergences, and CPU-seconds of compilation and of the next fit.
    """
    runs: dict[str, list[Sequence[float]]] = {name: [] for name in ways}
    for number in range(NUM_RUNS):
        for name, way in ways.items():
            if not number or runs[name][0][4] < LONG_RUN:
                runs[name].append(way.draw(number + 1))
    found = {}
    for name, way in ways.items():
        figures = np.array(runs[name], float)
        smallest, of_squares, gradients, divergent = np.median(figures[:, :4], axis=0).tolist()
        seconds, *fits = figures[:, 4:].min(axis=0).tolist()
        rates = [1000 * smallest / gradients, smallest / (seconds + sum(fits))]
        compilation = way.first - seconds if fits else way.first
        found[name] = [smallest, of_squares, *rates, round(divergent), compilation, *(fits or [np.nan])]
    return found


def compare_park(draw: int) -> dict[str, Any]:
    """The park in these coordinates, beside the run of NUTS that the scoreboard keeps."""
    args = park.data()
    kept = json.loads(SCOREBOARD.read_text())["park"]["NUTS"]
    sizes = [min(map(min, kept[key].values())) for key in ("effective", "effective_of_squares")]
    rates = [1000 * sizes[0] / kept["steps"], sizes[0] / kept["first"]]
    return {
        "ways": {
            "as written": [*sizes, *rates, kept["divergences"], np.nan, np.nan],
            **in_turn({name: by_fit(park.rule, args, **options) for name, options in FITS.items()}),
        }
    }


def compare(draw: int, name: str) -> dict[str, Any]:
    """Figures of NUTS on two ways to write a model, and in the coordinates of EP; or why there are none."""
    model, args = MODELS[name](True)
    try:
        in_coordinates = {way: by_fit(model, args, **options) for way, options in FITS.items()}
        ways = {"as written": by_nuts(model, args)}
        if name not in ONE_FORM:
            ways["non-centred"] = by_nuts(*MODELS[name](False))
        found = in_turn(ways | in_coordinates)
    except (ValueError, ArithmeticError, RuntimeError) as error:  # it stands among the losses
        return {"failed": " ".join(f"{type(error).__name__}: {error}".split())}
    return {"ways": found}


COMPARED = {name: partial(compare, name=name) for name in MODELS} | {"park": compare_park}
"""Experiments by name."""


def _rate(number: float, digits: int) -> str:
    """So many digits behind the point, and more of small numbers, so that none is shown as zero."""
    return f"{number:.{digits}f}" if number >= 1.0 else f"{number:.1g}"


def _medians(gains: Mapping[str, Mapping[str, float]]) -> str:
    """Words on the gains of all models."""
    written = [of["as written"] for of in gains.values()]
    best = [min(gain for way, gain in of.items() if way not in FITS) for of in gains.values()]
    return (
        f"median gain over the model as written {np.median(written):.1f}, over the better of its forms "
        f"{np.median(best):.1f}; at least 10 times as written on {sum(g >= 10 for g in written)} of "
        f"{len(written)} models"
    )


def page(found: dict[str, list[Any]]) -> list[str]:
    """Lines of the report: the table, and the rows that are lost."""
    failed = {name: each["failed"] for name in COMPARED for each in found[name] if "failed" in each}
    ways = {name: each["ways"] for name in COMPARED for each in found[name] if "ways" in each}
    gains, of_optimum = (
        {name: {way: of[fit][3] / row[3] for way, row in of.items()} for name, of in ways.items()} for fit in FITS
    )
    rows = (
        (
            *(name, way, f"{of[0]:.0f}", f"{of[1]:.0f}", _rate(of[2], 1), _rate(of[3], 0), of[4]),
            *("-" if np.isnan(of[5]) else f"{of[5]:.1f}", "-" if np.isnan(of[6]) else f"{of[6]:.2f}"),
            *(_rate(of_fit[name][way], 1) for of_fit in (gains, of_optimum)),
        )
        for name in ways
        for way, of in ways[name].items()
    )
    losses = [
        f"{name}, {way} ({gain:.1f}, at the optimum {of_optimum[name][way]:.1f})"
        for name in gains
        for way, gain in gains[name].items()
        if gain < 1.0 and way not in FITS
    ]
    missing = [name for name in COMPARED if not found[name]]
    medians = [_medians(of) for of in (gains, of_optimum)]
    return blocks(
        "# Exact draws in the coordinates of a fit",
        f"NUTS: one chain of {WARMUP} + {NUM_SAMPLES} steps; in the coordinates of EP `sample_exactly` with "
        f"{NUM_CHAINS} chains of {WARMUP_IN_COORDINATES} + {NUM_SAMPLES}. CPU-seconds are those of sampling by a "
        f"compiled program, with warm-up; in the coordinates of EP those of the next fit count too. Ways take turns, "
        f"{NUM_RUNS} times with different keys where a run takes less than {LONG_RUN:.0f} seconds: effective sizes are "
        "medians, seconds the least. `MCMC` compiles this program in each of its runs (NumPyro 0.22), which takes the "
        "seconds of the column of compilation, with the first state. "
        "Effective sizes are the smallest of all latent and deterministic sites; of squares they are what standard "
        "deviations rest on. Gain: effective draws a CPU-second in these coordinates over those of the row; at the "
        "optimum those of a fit that does not integrate over hyperparameters, of which chains have no need. Models "
        "without a row non-centred are so as written, or have no locations and scales to take out; NUTS in the park is "
        "the run of the scoreboard.",
        table(
            "model | draws | smallest ESS | of squares | per 1000 gradients | per CPU-second | divergences | "
            "compiled, s | next fit, s | gain | gain at the optimum",
            rows,
        ),
        f'Of EP as it is: {medians[0]}. With `integrate="none"`: {medians[1]}.',
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
