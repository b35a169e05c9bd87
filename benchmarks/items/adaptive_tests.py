"""Adaptive tests: ``python -m benchmarks.items.adaptive_tests WORK PART...`` measures parts and writes the table.

Parts are ``speed`` (a proposal and an answer, each bank in a new process), ``peers`` (2000 simulated tests beside
``catsim``), ``bank`` (errors of rules on a simulated bank), ``coverage`` (of intervals, with items as points and as
estimates) and ``people`` (Houlsby 2014, figure 8.12, on the IPIP Big Five). ``WORK`` keeps what each part has found, so
that the table is made of all parts that have run. Seconds are those of the processor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_ext.datasets import data_path
from numpyro_ext.design import expected_information_gain, maximum_information, random_scores
from numpyro_ext.psychometrics import AdaptiveTest, simulate_tests
from numpyro_ext.psychometrics.adaptive.bank import ItemBank
from numpyro_ext.psychometrics.adaptive.gaussian import GaussianBeliefs

from ..harness import table_head, write_report
from ..harness.repeats import begin, parser_of_work
from .marginal_likelihood import fit_graded, fit_two_parameter_logistic, trait_correlations

_RULES = {"information": expected_information_gain, "Fisher": maximum_information, "random": random_scores}
_TRAITS = "ENACO"


def _bank(slope: np.ndarray, intercept: np.ndarray) -> Any:
    """Response of 2PL items; of several draws with these on the first axis."""

    def response(theta: Any) -> dist.Distribution:
        front = (*slope.shape[:-1], *(1,) * theta.ndim, slope.shape[-1])
        a, d = (jnp.asarray(part).reshape(front) for part in (slope, intercept))
        return dist.Bernoulli(logits=a * theta[..., None] + d)

    return response


def _simulated_bank(num_items: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.exp(0.3 * rng.normal(size=num_items)), 1.2 * rng.normal(size=num_items)


def _speed(num_draws: int) -> dict[str, Any]:
    """One test of 30 items from a bank of 1000, in this process."""
    rng = np.random.default_rng(1)
    slope, intercept = _simulated_bank(1000)
    if num_draws > 1:
        slope = slope * np.exp(0.1 * rng.normal(size=(num_draws, 1000)))
        intercept = intercept + 0.2 * rng.normal(size=(num_draws, 1000))
    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if "backend_compile" in event else None
    )
    began = time.process_time()
    test = AdaptiveTest(_bank(slope, intercept), prior=(0.0, 1.0), stop={"num_items": 30})
    test.answer(test.propose(), 1)
    first, number, seconds = time.process_time() - began, len(compiled), []
    while not test.is_over:
        began = time.process_time()
        test.answer(test.propose(), int(rng.random() < 0.5))
        seconds.append(time.process_time() - began)
    return {
        "draws": num_draws,
        "first": first,
        "median": float(np.median(seconds)),
        "largest": max(seconds),
        "compiled_later": len(compiled) - number,
    }


def _in_new_process(num_draws: int) -> dict[str, Any]:
    code = (
        "import json, numpyro; numpyro.enable_x64(); from benchmarks.items.adaptive_tests import _speed; "
        f"print(json.dumps(_speed({num_draws})))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def speed() -> list[dict[str, Any]]:
    """Median of three processes for each bank."""
    rows = []
    for num_draws in (1, 100):
        runs = [_in_new_process(num_draws) for _ in range(3)]
        rows.append({name: float(np.median([run[name] for run in runs])) for name in runs[0]})
    return rows


def peers(num_people: int = 2000, num_peer: int = 50) -> dict[str, Any]:
    """Tests of 30 items from a bank of 300; of catsim fewer people, as it takes them one by one."""
    slope, intercept = _simulated_bank(300)
    theta = np.random.default_rng(2).normal(size=num_people)
    answers = np.random.default_rng(3).random((num_people, 300)) < 1 / (
        1 + np.exp(-(slope * theta[:, None] + intercept))
    )
    found: dict[str, Any] = {}
    for name in ("information", "Fisher"):
        began = time.process_time()
        paths = simulate_tests(
            _bank(slope, intercept), answers, {name: _RULES[name]}, prior=(0.0, 1.0), show_progress=False
        )
        found[name] = {
            "seconds": time.process_time() - began,
            "rmse": float(np.sqrt(np.mean((paths["mean"].values[0, :, -1] - theta) ** 2))),
        }
    from catsim.estimation import NumericalSearchEstimator
    from catsim.initialization import FixedPointInitializer
    from catsim.selection import MaxInfoSelector
    from catsim.simulation import Simulator
    from catsim.stopping import TestLengthStopper

    items = np.stack([slope, -intercept / slope, np.zeros(300), np.ones(300)], 1)
    simulator = Simulator(
        items,
        theta[:num_peer],
        FixedPointInitializer(0),
        MaxInfoSelector(),
        NumericalSearchEstimator(),
        TestLengthStopper(max_items=30),
        seed=0,
    )
    began = time.process_time()
    simulator.simulate()
    seconds = (time.process_time() - began) * num_people / num_peer
    estimates = np.array([path[-1] for path in simulator.estimations])
    rmse = float(np.sqrt(np.mean((estimates - theta[:num_peer]) ** 2)))
    found["catsim"] = {"seconds": seconds, "rmse": rmse, "people": num_peer}
    return found


def bank() -> dict[str, Any]:
    """Root mean square error of 2000 people, bank of 200, after 1, 5, 10, 20 and 30 items."""
    slope, intercept = _simulated_bank(200)
    theta = np.random.default_rng(4).normal(size=2000)
    answers = np.random.default_rng(5).random((2000, 200)) < 1 / (1 + np.exp(-(slope * theta[:, None] + intercept)))
    paths = simulate_tests(_bank(slope, intercept), answers, _RULES, prior=(0.0, 1.0), show_progress=False)
    error = np.sqrt(np.mean((paths["mean"].values - theta[:, None]) ** 2, 1))
    return {
        name: {str(step): float(error[i, step - 1]) for step in (1, 5, 10, 20, 30)} for i, name in enumerate(_RULES)
    }


def coverage(num_repeats: int = 5) -> list[dict[str, Any]]:
    """Share of 90 % intervals that hold the trait, bank of 100 calibrated on few people, 500 people tested."""
    rows = []
    slope, intercept = _simulated_bank(100, 7)
    for size in (100, 300, 1000):
        for repeat in range(num_repeats):
            rng = np.random.default_rng((size, repeat))

            def ask(theta: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
                return (rng.random((len(theta), 100)) < 1 / (1 + np.exp(-(slope * theta[:, None] + intercept)))).astype(
                    int
                )

            estimates, draws = fit_two_parameter_logistic(ask(rng.normal(size=size)), 100, repeat)
            theta = rng.normal(size=500)
            answers = ask(theta)
            for kind, items in (("point", estimates), ("posterior", draws)):
                paths = simulate_tests(
                    _bank(*items), answers, {"information": expected_information_gain}, prior=(0.0, 1.0),
                    num_items=30, show_progress=False,
                )  # fmt: skip
                away = paths["mean"].values[0] - theta[:, None]
                is_in = np.abs(away) < 1.645 * paths["sd"].values[0]
                at = {str(step): float(is_in[:, step - 1].mean()) for step in (5, 10, 20, 30)}
                rows.append({"size": size, "items": kind, "repeat": repeat, "coverage": at,
                             "rmse": float(np.sqrt(np.mean(away[:, -1] ** 2)))})  # fmt: skip
    return rows


def people(work: Path, num_repeats: int = 10, minutes: float = 20.0) -> list[dict[str, Any]]:
    """Five traits: 1500 people fit, 500 are asked, one item of each trait is held out."""
    path, end = work / "people.json", time.monotonic() + 60.0 * minutes
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    table = np.genfromtxt(data_path("ipip-big5", "big5_first15000.csv.gz"), delimiter=",", skip_header=1)[:, 3:]
    table = table[(table > 0).all(1)].astype(int) - 1
    trait_of = np.repeat(np.arange(5), 10)
    for repeat in range(len(rows), num_repeats):
        if time.monotonic() > end:
            break
        rng = np.random.default_rng(repeat)
        chosen = table[rng.permutation(len(table))[:2000]]
        fits, likelihoods = [], []
        for trait in range(5):
            fit, part = fit_graded(chosen[:1500, trait_of == trait], 5)
            fits.append(fit)
            likelihoods.append(part)
        slope, cuts = (np.concatenate(part) for part in zip(*fits, strict=True))
        correlations = trait_correlations(likelihoods)
        held_out = np.arange(5) * 10 + rng.integers(10, size=5)
        found = {}
        for name, covariance in (("independent", np.eye(5)), ("correlated", correlations)):
            found[name] = _questions(slope, cuts, trait_of, covariance, chosen[1500:], held_out)
        rows.append(found)
        path.write_text(json.dumps(rows))
        print(repeat, json.dumps(found), flush=True)
    return rows


def _questions(
    slope: np.ndarray,
    cuts: np.ndarray,
    trait_of: np.ndarray,
    covariance: np.ndarray,
    answers: np.ndarray,
    held_out: np.ndarray,
) -> dict[str, list[float]]:
    """Questions until traits correlate 0.9 with those of the whole pool, and until 90 % of its score is reached."""
    order = np.array([_TRAITS.index(letter) for letter in "OCEAN"])

    def response(theta: Any) -> dist.Distribution:
        return dist.OrderedLogistic(slope * theta[..., trait_of], cuts)

    def big_five(source: Any, *, rng_key: Any) -> dict[str, np.ndarray]:
        wanted = order[source.asked.sum(-1) % 5]
        draws = np.asarray(jax.random.uniform(rng_key, source.asked.shape))
        return {"response": np.where(trait_of == wanted[..., None], draws, draws - 2.0)}

    rules = {**_RULES, "Big Five": big_five}
    options: dict[str, Any] = {"prior": (np.zeros(5), covariance), "held_out": held_out, "show_progress": False}
    paths = simulate_tests(response, answers, rules, num_items=26, **options)
    # All of the pool at once.
    beliefs = GaussianBeliefs(ItemBank(response, np.zeros(5), covariance, is_scalar=False, has_draws=False))
    pool = answers.copy()
    pool[:, held_out] = -1
    posterior = beliefs.posterior(pool)
    p = np.take_along_axis(beliefs.predictive(posterior)[:, held_out], answers[:, held_out, None], -1)
    final, best = posterior.mean, np.exp(np.log(p).mean())
    found = {}
    for number, name in enumerate(rules):
        mean, score = paths["mean"].values[number], np.exp(paths["score"].values[number].mean(0))
        agree = [
            np.mean([np.corrcoef(mean[:, step, d], final[:, d])[0, 1] if np.ptp(mean[:, step, d]) > 0 else 0.0
                     for d in range(5)]) for step in range(mean.shape[1])
        ]  # fmt: skip
        found[name] = [_first(np.array(agree) >= 0.9), _first(score >= 0.9 * best)]
    return found


def _first(is_there: np.ndarray) -> float:
    return float(np.argmax(is_there) + 1) if is_there.any() else float("nan")


def _report(work: Path) -> None:
    """Write the table of the parts that have been measured."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(work.glob("*.json"))}
    lines = ["# Adaptive tests", "", *table_head("what | target | measured")]
    for row in parts.get("speed", []):
        limit = 1 if row["draws"] == 1 else 5
        items = "items as points" if row["draws"] == 1 else f"{row['draws']:.0f} draws of the items"
        middle, largest = 1e3 * row["median"], 1e3 * row["largest"]
        lines += [
            f"| proposal and answer, bank of 1000, {items} | ≤ {limit} ms, no later compilation | median {middle:.2f} "
            f"ms, largest {largest:.2f} ms, {row['compiled_later']:.0f} compiled later |",
            f"| the first in a new process, imports apart | ≤ 3 s | {row['first']:.2f} s |",
        ]
    if "peers" in parts:
        found, peer = parts["peers"], parts["peers"]["catsim"]["seconds"]
        for name in ("information", "Fisher"):
            lines.append(
                f"| 2000 simulated tests of 30 items, bank of 300, {name} | ≤ 0.3 × catsim | "
                f"{found[name]['seconds']:.2f} s against {peer:.0f} s ({found[name]['seconds'] / peer:.4f} ×; catsim "
                f"by {found['catsim']['people']} people); rmse {found[name]['rmse']:.3f}, catsim "
                f"{found['catsim']['rmse']:.3f} |"
            )
    if "bank" in parts:
        error = parts["bank"]
        below = 1.0 - error["Fisher"]["10"] / error["random"]["10"]
        ahead = error["information"]["5"] / error["Fisher"]["5"] - 1.0
        lines += [
            f"| one trait, bank of 200, 2000 people: Fisher against random in rmse at 10 items | ≥ 25 % below | "
            f"{100 * below:.0f} % below |",
            f"| the same: information against Fisher at 5 items | not behind | {100 * ahead:+.1f} % in rmse |",
        ]
    if "people" in parts:
        lines += _people(parts["people"])
    if "coverage" in parts:
        lines += ["", *_coverage(parts["coverage"])]
    if "bank" in parts:
        lines += ["", "Root mean square error by number of items, bank of 200:", ""]
        lines += table_head("rule | 1 | 5 | 10 | 20 | 30")
        for name, found in parts["bank"].items():
            lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in found.values())} |")
    write_report("adaptive-tests", lines, "items.adaptive_tests", remarks=work / "remarks.md")


def _people(rows: list[dict[str, Any]]) -> list[str]:
    """Questions until the traits and the score of the whole pool are nearly reached, and paired ratios."""
    numbers = {
        structure: {name: np.array([row[structure][name] for row in rows]) for name in rows[0][structure]}
        for structure in ("independent", "correlated")
    }
    lines = []
    for structure, found in numbers.items():
        words = [f"{name} {_mean(values[:, 0])} / {_mean(values[:, 1])}" for name, values in found.items()]
        lines.append(
            f"| people, {structure} traits, repeats: {len(rows)}; questions until 0.9 in the traits / 90 % of the "
            f"score | | {'; '.join(words)} |"
        )
    found = numbers["independent"]
    for place, peer, limit in ((0, "random", 0.65), (0, "Big Five", 0.65), (1, "random", 0.75)):
        ratio = (found["information"] / found[peer])[:, place].mean()
        what = "90 % of the score" if place else "0.9 in the traits"
        verdict = "met" if ratio <= limit else "missed"
        lines.append(
            f"| questions by information until {what}, against {peer} | ≤ {limit} × | {ratio:.2f} ×: {verdict} |"
        )
    more = (numbers["correlated"]["information"] - found["information"]).mean(0)
    verdict = "met" if np.all(more <= 0.0) else "missed"
    lines.append(
        f"| correlated against independent traits, by information | no more questions "
        f"| {more[0]:+.1f} / {more[1]:+.1f}: {verdict} |"
    )
    return lines


def _mean(values: np.ndarray) -> str:
    reached = np.isfinite(values)
    return f"{values[reached].mean():.1f}" if reached.all() else f"> {np.nanmean(values):.1f} ({(~reached).sum()} not)"


def _coverage(rows: list[dict[str, Any]]) -> list[str]:
    """Coverage of 90 % intervals, mean over repeats, by people of the calibration and number of items."""
    lines = [
        "Coverage of 90 % intervals of the trait after 5, 10, 20 and 30 items chosen by information from a bank of "
        "100, and root mean square error after 30:",
        "",
        *table_head("calibrated on | items | 5 | 10 | 20 | 30 | rmse"),
    ]
    for size in sorted({row["size"] for row in rows}):
        for kind in ("point", "posterior"):
            chosen = [row for row in rows if row["size"] == size and row["items"] == kind]
            shares = [np.mean([row["coverage"][step] for row in chosen]) for step in ("5", "10", "20", "30")]
            error = np.mean([row["rmse"] for row in chosen])
            lines.append(f"| {size} | {kind} | {' | '.join(f'{share:.3f}' for share in shares)} | {error:.3f} |")
    return lines


def main() -> None:
    """Measure the parts that are named, and keep what they found as ``WORK/<part>.json``."""
    parser = parser_of_work(__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--minutes", type=float, default=20.0)
    given = begin(parser)
    measures: dict[str, Callable[[], Any]] = {"speed": speed, "peers": peers, "bank": bank, "coverage": coverage}
    unknown = set(given.parts) - {*measures, "people"}
    if unknown:
        parser.error(f"no such parts: {sorted(unknown)}")
    for part in given.parts:
        found = people(given.work, minutes=given.minutes) if part == "people" else measures[part]()
        (given.work / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(part, json.dumps(found), flush=True)
    _report(given.work)


if __name__ == "__main__":
    main()
