"""Engines and NUTS on "No vehicles in the park", 51,953 answers of 2,409 people: a section of the scoreboard.

``python -m benchmarks.scores.park`` measures what ``results/scoreboard.json`` lacks and writes it there; names of
engines after it measure these alone. :mod:`benchmarks.scores.scoreboard` makes the page. The data are not part of the
project: ``NUMPYRO_EXT_DATA`` names their folder.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size

import numpyro_ext.infer as engines

from ..harness import SCOREBOARD, complete_scoreboard, first_and_next, in_words, make_nuts, run_chains, table_head

__all__ = ["measure", "park_section", "people_alone", "rule"]

ENGINES = {"EP": "EP", "Laplace": "LaplaceApproximation", "VG": "VariationalGaussian", "INLA": "INLA"}
SITES = ("level", "effects", "of_people", "of_questions", "questions", "people")
NUM_WARMUP, NUM_SAMPLES = 400, 800
HELD, EXACT = "all but people held", "AdaptiveQuadrature"
PEOPLE_KEPT = 200
"""Number of people whose moments stand in the results."""
Entry = dict[str, Any]


def rule(traits: np.ndarray, person: np.ndarray, question: np.ndarray, answer: Any = None) -> None:
    """Logistic model of whether a rule is broken, with effects of people and of questions."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.5))
    effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    of_people = numpyro.sample("of_people", dist.HalfNormal(1.0))
    of_questions = numpyro.sample("of_questions", dist.HalfNormal(2.0))
    people = numpyro.sample("people", dist.Normal(0.0, of_people).expand([int(person.max()) + 1]).to_event(1))
    questions = numpyro.sample(
        "questions", dist.Normal(0.0, of_questions).expand([int(question.max()) + 1]).to_event(1)
    )
    eta = level + traits @ effects + people[person] + questions[question]
    numpyro.sample("answer", dist.Bernoulli(logits=eta), obs=answer)


def people_alone(offset: np.ndarray, person: np.ndarray, answer: Any = None) -> None:
    """:func:`rule` with all but the effects of people known, which are then independent of one another."""
    of_people = numpyro.sample("of_people", dist.HalfNormal(1.0))
    people = numpyro.sample("people", dist.Normal(0.0, of_people).expand([int(person.max()) + 1]).to_event(1))
    numpyro.sample("answer", dist.Bernoulli(logits=offset + people[person]), obs=answer)


def data() -> tuple[np.ndarray, ...]:
    """Traits of who answers (male, white, both), person, question and answer, a row each."""
    with gzip.open(Path(os.environ["NUMPYRO_EXT_DATA"]) / "park-rule" / "park.csv.gz", "rt") as file:
        table = np.genfromtxt(file, delimiter=",", names=True)
    male, white = table["male"], table["white"]
    person, question = (np.unique(table[name], return_inverse=True)[1] for name in ("submission_id", "question_id"))
    return np.stack([male, white, male * white], 1), person, question, table["answer"].astype(int)


def _engine(name: str) -> Entry:
    engine, args = getattr(engines, ENGINES[name])(rule, progress_bar=False), data()

    def run(seed: int) -> dict[str, tuple[Any, Any]]:
        engine.run(random.key(seed), *args)
        return {site: (np.ravel(engine.posterior[site].mean), np.ravel(engine.posterior[site].sd)) for site in SITES}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        moments, first, later = first_and_next(run)
    return {
        "first": round(first, 1),
        "next": round(later, 1),
        "converged": bool(engine.diagnostics.converged),
        "messages": list(engine.diagnostics.messages),
        "mean": {site: np.round(mean, 5).tolist() for site, (mean, _) in moments.items()},
        "sd": {site: np.round(sd, 5).tolist() for site, (_, sd) in moments.items()},
    }


def _nuts() -> Entry:
    chains = run_chains(make_nuts(rule, NUM_WARMUP, NUM_SAMPLES), 0, *data())
    draws = {site: chains.draws[site].reshape(1, NUM_SAMPLES, -1) for site in SITES}
    sizes = {site: effective_sample_size(values) for site, values in draws.items()}
    # of squares about the mean, whose mean is the variance
    squares = {site: effective_sample_size((v - v.mean(1, keepdims=True)) ** 2) for site, v in draws.items()}
    return {
        "first": round(chains.seconds, 1),
        "steps": chains.gradients,
        "divergences": chains.divergent,
        "mean": {site: np.round(v.mean((0, 1)), 5).tolist() for site, v in draws.items()},
        "sd": {site: np.round(v.std((0, 1)), 5).tolist() for site, v in draws.items()},
        "effective": {site: np.round(v, 1).tolist() for site, v in sizes.items()},
        "effective_of_squares": {site: np.round(v, 1).tolist() for site, v in squares.items()},
    }


def _held(means: Mapping[str, Sequence[float]]) -> Entry:
    """Mean and standard deviation of ``of_people`` where all but people is held at these means, by EP and exactly, and
    by how much the log evidence of EP is too small two standard deviations to either side."""
    traits, person, question, answer = data()
    offset = means["level"][0] + traits @ np.array(means["effects"]) + np.array(means["questions"])[question]

    def run(name: str, **options: Any) -> Any:
        engine = getattr(engines, name)(people_alone, progress_bar=False, **options)
        engine.run(random.key(0), offset, person, answer)
        return engine

    marginals = {name: run(name).posterior["of_people"] for name in (EXACT, "EP")}
    found: Entry = {name: [round(float(m.mean), 5), round(float(m.sd), 5)] for name, m in marginals.items()}
    exact, sd = found[EXACT]
    given = [{"hyper_values": {"of_people": exact + shift * sd}} for shift in (-2.0, 2.0)]
    evidence = [[float(run(name, **options).log_evidence) for options in given] for name in (EXACT, "EP")]
    return found | {"too_small": np.round(np.subtract(*evidence), 3).tolist()}


def measure(name: str) -> Entry:
    """Moments by site of one engine, or of NUTS, and its CPU-seconds; or :func:`_held`, at the means of EP."""
    if name == HELD:
        return _held(json.loads(SCOREBOARD.read_text())["park"]["EP"]["mean"])
    entry = _nuts() if name == "NUTS" else _engine(name)
    for found in entry.values():
        if isinstance(found, dict):
            found["people"] = found["people"][:PEOPLE_KEPT]
    return entry


def _cell(entry: Entry, nuts: Entry, site: str) -> str:
    """Gap of means where it is largest, in standard deviations of NUTS, and the farthest ratio, each with its error."""
    mean, sd = np.array(nuts["mean"][site]), np.array(nuts["sd"][site])
    gap = (np.array(entry["mean"][site]) - mean) / sd
    ratio = np.array(entry["sd"][site]) / sd
    at, far = int(np.argmax(np.abs(gap))), int(np.argmax(np.abs(np.log(ratio))))
    of_gap = 1.0 / np.sqrt(nuts["effective"][site][at])
    of_ratio = ratio[far] / np.sqrt(2.0 * nuts["effective_of_squares"][site][far])
    return f"{gap[at]:+.2f} ({of_gap:.2f}); {ratio[far]:.2f} ({of_ratio:.2f})"


def _typical(entry: Entry, nuts: Entry, site: str) -> str:
    """Root mean square of gaps, beside what the errors of NUTS alone would make it."""
    gap = (np.array(entry["mean"][site]) - np.array(nuts["mean"][site])) / np.array(nuts["sd"][site])
    noise = np.sqrt(np.mean(1.0 / np.array(nuts["effective"][site])))
    return f"{np.sqrt(np.mean(gap**2)):.3f} ({noise:.3f})"


def park_section(entries: Mapping[str, Entry], environment: Mapping[str, str]) -> str:
    """Section of the page; nothing if NUTS has not run."""
    nuts = entries.get("NUTS")
    if nuts is None:
        return ""
    rows, lost = [], []
    for name in ENGINES:
        if "failed" in entries.get(name, {}):
            lost.append(f"- {name}: {entries[name]['failed']}.")
        elif name in entries:
            entry = entries[name]
            cells = [_cell(entry, nuts, site) for site in SITES[:-1]]
            gaps = _typical(entry, nuts, "people")
            rows.append(f"| {' | '.join([name, *cells, gaps, str(entry['first']), str(entry['next'])])} |")
            if not entry["converged"]:
                lost.append(f"- {name} has not converged: {' '.join(entry['messages'])}")
            lost += [f"- {name}, `{site}`: {reason}." for site in SITES[:-1] for reason in _clear(entry, nuts, site)]
    smallest = min(float(np.min(nuts["effective"][site])) for site in SITES)
    heads = " | ".join(["engine", *(f"`{site}`" for site in SITES[:-1]), "`people`, rms gap", "first, s", "next, s"])
    missing = [name for name in ENGINES if name not in entries]
    return f"""
## No vehicles in the park

51,953 answers of 2,409 people to 27 questions, whether a rule is broken (Gelman and Vehtari,
[Bayesian Workflow](https://github.com/avehtari/Bayesian-Workflow)): a logistic model with traits of people (male,
white, both) and effects of people and of questions, `benchmarks/scores/park.py`. The judge is NUTS on the same
function:
{NUM_WARMUP} + {NUM_SAMPLES} steps of one chain, {nuts["steps"]} gradients after warm-up, {nuts["divergences"]}
divergences, {nuts["first"]:.0f} CPU-seconds with compilation, smallest effective sample size {smallest:.0f}. A cell has
the gap of means where it is largest in a site, in standard deviations of NUTS, and the ratio of standard deviations
that is farthest from one; in brackets the Monte Carlo errors there. For the first {PEOPLE_KEPT} people it is
the root mean square of gaps, and what the errors of NUTS alone would make it. Beside the runs of Laplace, VG and INLA
ran ten to twenty other processes.

{chr(10).join([*table_head(heads), *rows])}

### Losses in the park

These are off by more than three Monte Carlo errors and 0.1 sd or 10 %:

{chr(10).join(lost) or "None."}
{_reason(entries.get(HELD))}
Not run: {", ".join(missing) or "none"}.

Measured by `python -m benchmarks.scores.park`: {in_words(environment)}.
"""


def _reason(held: Entry | None) -> str:
    """Words on the gap of EP in ``of_people``; none where it was not looked into."""
    if held is None:
        return ""
    (mean, _), (exact, sd), (below, above) = held["EP"], held[EXACT], held["too_small"]
    return f"""
The gap of EP in `of_people` is EP's own. With level, effects and questions held at its means, people are independent of
one another and `{EXACT}` is exact: the mean of `of_people` is {exact:.3f} by quadrature and {mean:.3f} by
EP, {(mean - exact) / sd:+.2f} sd. The log evidence of EP is too small for binary answers of which each person gave
some twenty, by {below:.2f} nats two standard deviations below the mean and by {above:.2f} above it: more
where effects are wide, which draws the scale to smaller values.
"""


def _clear(entry: Entry, nuts: Entry, site: str) -> list[str]:
    """Sentences on elements that are off by more than the errors of NUTS."""
    sd = np.array(nuts["sd"][site])
    gap = (np.array(entry["mean"][site]) - np.array(nuts["mean"][site])) / sd
    ratio = np.log(np.array(entry["sd"][site]) / sd)
    of_gap = 1.0 / np.sqrt(np.array(nuts["effective"][site]))
    of_ratio = 1.0 / np.sqrt(2.0 * np.array(nuts["effective_of_squares"][site]))
    off = int(np.sum(np.abs(gap) > np.maximum(0.1, 3.0 * of_gap)))
    wide = int(np.sum(np.abs(ratio) > np.maximum(np.log(1.1), 3.0 * of_ratio)))
    said = [f"{off} of {gap.size} means off, the farthest by {gap[np.argmax(np.abs(gap))]:+.2f} sd"] if off else []
    if wide:
        farthest = np.exp(ratio[np.argmax(np.abs(ratio))])
        said.append(f"{wide} of {ratio.size} standard deviations off, the farthest times {farthest:.2f}")
    return said


def main(names: Sequence[str]) -> None:
    """Measure what the results lack, and write each as it ends."""
    complete_scoreboard("park", names or [*ENGINES, "NUTS", HELD], measure)


if __name__ == "__main__":
    main(sys.argv[1:])
