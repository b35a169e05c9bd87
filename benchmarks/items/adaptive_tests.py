"""Adaptive tests: ``python -m benchmarks.items.adaptive_tests WORK`` measures parts and writes the table.

Parts that ``--only`` may name are ``speed`` and ``speed of draws`` (a proposal and an answer), ``peers`` (2000
simulated tests beside ``catsim``), ``bank`` (errors of rules on a simulated bank), ``coverage`` (of intervals, with
items as points and as estimates) and ``people`` (Houlsby 2014, figure 8.12, on the IPIP Big Five). Seconds are those
of the processor.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.special import expit

from numpyro_ext.datasets import data_path
from numpyro_ext.design import expected_information_gain, maximum_information, random_scores
from numpyro_ext.infer import EP, AdaptiveQuadrature
from numpyro_ext.models import item_response
from numpyro_ext.psychometrics import AdaptiveTest, simulate_tests
from numpyro_ext.psychometrics.adaptive.bank import ItemBank
from numpyro_ext.psychometrics.adaptive.gaussian import GaussianBeliefs

from ..harness import ProgramLog, Study, blocks, cpu_seconds, table
from .many_people import two_parameter_logistic

_RULES = {"information": expected_information_gain, "Fisher": maximum_information, "random": random_scores}
_TRAITS = "ENACO"
_REVERSED = {"E": (2, 4, 6, 8, 10), "N": (2, 4), "A": (1, 3, 5, 7), "C": (2, 4, 6, 8), "O": (2, 4, 6)}
"""Items of the IPIP that speak against their trait."""
_BANKS = ("speed", 1, "items as points"), ("speed of draws", 5, "100 draws of the items")
"""Parts that are timed, what they should take in milliseconds, and what the items are."""


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


def speed(draw: int, num_draws: int) -> dict[str, Any]:
    """One test of 30 items from a bank of 1000, in a process of its own."""
    rng = np.random.default_rng(1)
    slope, intercept = _simulated_bank(1000)
    if num_draws > 1:
        slope = slope * np.exp(0.1 * rng.normal(size=(num_draws, 1000)))
        intercept = intercept + 0.2 * rng.normal(size=(num_draws, 1000))
    test = AdaptiveTest(_bank(slope, intercept), prior=(0.0, 1.0), stop={"num_items": 30})
    _, first = cpu_seconds(lambda: test.answer(test.propose(), 1))
    seconds = []
    with ProgramLog() as log:
        while not test.is_over:
            answer = int(rng.random() < 0.5)
            seconds.append(cpu_seconds(lambda: test.answer(test.propose(), answer))[1])  # noqa: B023
    middle, largest = float(np.median(seconds)), max(seconds)
    return {"first": first, "median": middle, "largest": largest, "compiled_later": log.num_programs}


def peers(draw: int, num_people: int = 2000, num_peer: int = 50) -> dict[str, Any]:
    """Tests of 30 items from a bank of 300; of catsim fewer people, as it takes them one by one."""
    slope, intercept = _simulated_bank(300)
    theta = np.random.default_rng(2).normal(size=num_people)
    answers = np.random.default_rng(3).random((num_people, 300)) < expit(slope * theta[:, None] + intercept)
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


def bank(draw: int) -> dict[str, Any]:
    """Root mean square error of 2000 people, bank of 200, after 1, 5, 10, 20 and 30 items."""
    slope, intercept = _simulated_bank(200)
    theta = np.random.default_rng(4).normal(size=2000)
    answers = np.random.default_rng(5).random((2000, 200)) < expit(slope * theta[:, None] + intercept)
    paths = simulate_tests(_bank(slope, intercept), answers, _RULES, prior=(0.0, 1.0), show_progress=False)
    error = np.sqrt(np.mean((paths["mean"].values - theta[:, None]) ** 2, 1))
    return {
        name: {str(step): float(error[i, step - 1]) for step in (1, 5, 10, 20, 30)} for i, name in enumerate(_RULES)
    }


def coverage(draw: int, num_repeats: int = 5) -> list[dict[str, Any]]:
    """Share of 90 % intervals that hold the trait, bank of 100 calibrated on few people, 500 people tested."""
    rows = []
    slope, intercept = _simulated_bank(100, 7)
    for size in (100, 300, 1000):
        for repeat in range(num_repeats):
            rng = np.random.default_rng((size, repeat))

            def ask(theta: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
                return (rng.random((len(theta), 100)) < expit(slope * theta[:, None] + intercept)).astype(int)

            model = partial(two_parameter_logistic, num_people=size, num_items=100)
            engine = AdaptiveQuadrature(model, num_samples=100, progress_bar=False)
            engine.run(jax.random.key(repeat), ask(rng.normal(size=size)))
            sites, draws_of = ("discrimination", "intercept"), engine.get_samples()
            estimates = [np.asarray(engine.hyper[site].mean) for site in sites]
            draws = [np.asarray(draws_of[site]) for site in sites]
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


def people(repeat: int) -> dict[str, Any]:
    """Five traits: 1500 people fit, 500 are asked, one item of each trait is held out."""
    table = np.genfromtxt(data_path("ipip-big5", "big5_first15000.csv.gz"), delimiter=",", skip_header=1)[:, 3:]
    table = table[(table > 0).all(1)].astype(int) - 1
    turned = [10 * _TRAITS.index(trait) + item - 1 for trait, items in _REVERSED.items() for item in items]
    table[:, turned] = 4 - table[:, turned]
    trait_of = np.repeat(np.arange(5), 10)
    rng = np.random.default_rng(repeat)
    chosen = table[rng.permutation(len(table))[:2000]]
    engine = EP(item_response, progress_bar=False)
    given = {"family": "graded", "pattern": np.eye(5, dtype=int)[trait_of], "correlated": True, "num_categories": 5}
    engine.run(jax.random.key(repeat), chosen[:1500], **given)
    names = "free_discrimination", "cutpoints", "trait_cholesky"
    slope, cuts, factor = (np.asarray(engine.hyper[name].value) for name in names)
    held_out = np.arange(5) * 10 + rng.integers(10, size=5)
    return {
        name: _questions(slope, cuts, trait_of, covariance, chosen[1500:], held_out)
        for name, covariance in (("independent", np.eye(5)), ("correlated", factor @ factor.T))
    }


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


def _page(parts: dict[str, list[Any]]) -> list[str]:
    """Rows of the parts that have been measured."""
    rows = []
    for name, limit, items in _BANKS:
        if parts[name]:
            run = {key: np.median([run[key] for run in parts[name]]) for key in parts[name][0]}
            middle, largest = 1e3 * run["median"], 1e3 * run["largest"]
            found = f"median {middle:.2f} ms, largest {largest:.2f} ms, {run['compiled_later']:.0f} compiled later"
            what = f"proposal and answer, bank of 1000, {items}"
            rows.append((what, f"≤ {limit} ms, no later compilation", found))
            rows.append(("the first in a new process, imports apart", "≤ 3 s", f"{run['first']:.2f} s"))
    for found in parts["peers"]:
        peer, catsim = found["catsim"]["seconds"], found["catsim"]
        for name in ("information", "Fisher"):
            own = found[name]
            rows.append((
                f"2000 simulated tests of 30 items, bank of 300, {name}",
                "≤ 0.3 × catsim",
                f"{own['seconds']:.2f} s against {peer:.0f} s ({own['seconds'] / peer:.4f} ×; catsim by "
                f"{catsim['people']} people); rmse {own['rmse']:.3f}, catsim {catsim['rmse']:.3f}",
            ))  # fmt: skip
    for error in parts["bank"]:
        below = 1.0 - error["Fisher"]["10"] / error["random"]["10"]
        ahead = error["information"]["5"] / error["Fisher"]["5"] - 1.0
        what = "one trait, bank of 200, 2000 people: Fisher against random in rmse at 10 items"
        rows.append((what, "≥ 25 % below", f"{100 * below:.0f} % below"))
        rows.append(("the same: information against Fisher at 5 items", "not behind", f"{100 * ahead:+.1f} % in rmse"))
    lines = blocks(
        "# Adaptive tests",
        table("what | target | measured", [*rows, *_people(parts["people"])]),
    )
    for found in parts["coverage"]:
        lines += ["", *_coverage(found)]
    for error in parts["bank"]:
        by_rule = ((name, *(f"{value:.3f}" for value in found.values())) for name, found in error.items())
        lines += ["", "Root mean square error by number of items, bank of 200:", ""]
        lines += table("rule | 1 | 5 | 10 | 20 | 30", by_rule)
    return lines


def _people(repeats: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Questions until the traits and the score of the whole pool are nearly reached, and paired ratios."""
    if not repeats:
        return
    numbers = {
        structure: {name: np.array([row[structure][name] for row in repeats]) for name in repeats[0][structure]}
        for structure in ("independent", "correlated")
    }
    for structure, found in numbers.items():
        words = [f"{name} {_mean(values[:, 0])} / {_mean(values[:, 1])}" for name, values in found.items()]
        what = f"people, {structure} traits, repeats: {len(repeats)}; questions until 0.9 in the traits / 90 % of the"
        yield f"{what} score", "", "; ".join(words)
    found = numbers["independent"]
    for place, peer, limit in ((0, "random", 0.65), (0, "Big Five", 0.65), (1, "random", 0.75)):
        ratio = (found["information"] / found[peer])[:, place].mean()
        what = f"questions by information until {('0.9 in the traits', '90 % of the score')[place]}, against {peer}"
        yield what, f"≤ {limit} ×", f"{ratio:.2f} ×: {'met' if ratio <= limit else 'missed'}"
    more = (numbers["correlated"]["information"] - found["information"]).mean(0)
    measured = f"{more[0]:+.1f} / {more[1]:+.1f}: {'met' if np.all(more <= 0.0) else 'missed'}"
    yield "correlated against independent traits, by information", "no more questions", measured


def _mean(values: np.ndarray) -> str:
    reached = np.isfinite(values)
    return f"{values[reached].mean():.1f}" if reached.all() else f"> {np.nanmean(values):.1f} ({(~reached).sum()} not)"


def _coverage(rows: list[dict[str, Any]]) -> list[str]:
    """Coverage of 90 % intervals, mean over repeats, by people of the calibration and number of items."""

    def row(size: int, kind: str) -> tuple[Any, ...]:
        chosen = [row for row in rows if row["size"] == size and row["items"] == kind]
        shares = [np.mean([row["coverage"][step] for row in chosen]) for step in ("5", "10", "20", "30")]
        return size, kind, *(f"{share:.3f}" for share in shares), f"{np.mean([row['rmse'] for row in chosen]):.3f}"

    cases = itertools.product(sorted({row["size"] for row in rows}), ("point", "posterior"))
    return blocks(
        "Coverage of 90 % intervals of the trait after 5, 10, 20 and 30 items chosen by information from a bank of "
        "100, and root mean square error after 30:",
        table("calibrated on | items | 5 | 10 | 20 | 30 | rmse", (row(*case) for case in cases)),
    )


def main() -> None:
    """Measure, each part in a process of its own, and write the page of all parts that have run."""
    experiments: dict[str, Callable[[int], Any]] = {
        "speed": partial(speed, num_draws=1),
        "speed of draws": partial(speed, num_draws=100),
        "peers": peers,
        "bank": bank,
        "coverage": coverage,
        "people": people,
    }
    draws = dict.fromkeys(experiments, 1) | {"speed": 3, "speed of draws": 3, "people": 10}
    study = Study(__doc__, experiments, draws=draws, environment={})
    found = study.run()
    study.write("adaptive-tests", _page(found))


if __name__ == "__main__":
    main()
