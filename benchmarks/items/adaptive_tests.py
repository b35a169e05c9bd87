"""Adaptive tests: ``python -m benchmarks.items.adaptive_tests WORK`` measures parts and writes the table.

Parts that ``--only`` may name are ``speed`` and ``speed of draws`` (a proposal and an answer), ``peers`` (2000
simulated tests beside ``catsim``), ``bank`` (errors of rules on a simulated bank), ``coverage`` (of intervals, with
items as points and as estimates), ``people`` (Houlsby 2014, figure 8.12, on the IPIP Big Five) and ``drawn people``,
whose answers the fitted model has drawn. Seconds are those of the processor.
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

from ..harness import ProgramLog, Study, blocks, cpu_seconds, mean_and_error, summary, table, verdict
from .many_people import two_parameter_logistic

Errors = dict[str, dict[str, float]]
"""Root mean square errors by rule and number of items."""
_RULES = {"information": expected_information_gain, "Fisher": maximum_information, "random": random_scores}
_TRAITS = "ENACO"
_REVERSED = {"E": (2, 4, 6, 8, 10), "N": (2, 4), "A": (1, 3, 5, 7), "C": (2, 4, 6, 8), "O": (2, 4, 6)}
"""Items of the IPIP that speak against their trait."""
_UNTIL = "0.9 in the traits", "90 % of the score"
"""Criteria of a test that is long enough, in the order of what is kept."""
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


def bank(draw: int) -> Errors:
    """Root mean square error of 2000 people, a bank of 200, after 1, 5, 10, 20 and 30 items."""
    slope, intercept = _simulated_bank(200, draw)
    rng = np.random.default_rng((draw, 4))
    theta = rng.normal(size=2000)
    answers = rng.random((2000, 200)) < expit(slope * theta[:, None] + intercept)
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


def people(repeat: int, is_drawn: bool = False) -> dict[str, Any]:
    """Five traits: 1500 people fit, 500 are asked, one item of each trait is held out.

    :param is_drawn: whether those who are asked answer as the fitted model does, in the place of their own answers.
    """
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
    found = {}
    for name, root in (("independent", np.eye(5)), ("correlated", factor)):
        answers = chosen[1500:]
        if is_drawn:
            eta = slope * (rng.normal(size=(500, 5)) @ root.T)[:, trait_of]
            answers = (rng.random((500, 50, 1)) < expit(eta[..., None] - cuts)).sum(-1)
        found[name] = _questions(slope, cuts, trait_of, root @ root.T, answers, held_out)
    return found


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
    rows += _targets_of_bank(parts["bank"])
    rows += _targets_of_people(parts["people"])
    return blocks(
        "# Adaptive tests",
        table("what | target | measured", rows),
        _people(parts["people"], "Five traits of the Big Five"),
        _people(parts["drawn people"], "The same, with answers drawn from the fitted model"),
        _by_rule(parts["bank"]),
        *(_coverage(found) for found in parts["coverage"]),
    )


def _targets_of_bank(draws: list[Errors]) -> Iterator[tuple[str, str, str]]:
    """Rules against each other on simulated banks, paired."""
    if not draws:
        return

    def below(rule: str, peer: str, step: str) -> np.ndarray:
        return np.array([100.0 * (1.0 - error[rule][step] / error[peer][step]) for error in draws])

    gain, behind = below("Fisher", "random", "10"), -below("information", "Fisher", "5")
    error = summary(behind)
    what = f"one trait, bank of 200, 2000 people, draws: {len(draws)}; Fisher below random in rmse at 10 items"
    yield what, "≥ 25 %", f"{mean_and_error(gain)} %: {verdict(gain.mean() >= 25.0)}"
    # Of one draw there is no error, and any difference counts.
    is_level = error["mean"] <= np.nan_to_num(2.0 * error["standard_error"])
    what = "the same: information behind Fisher in rmse at 5 items"
    yield what, "not, by two standard errors", f"{mean_and_error(behind, '+', 2)} %: {verdict(is_level)}"


def _by_rule(draws: list[Errors]) -> list[str]:
    """Root mean square errors, means over draws."""
    if not draws:
        return []
    rows = (
        (rule, *(mean_and_error((error[rule][step] for error in draws), digits=3) for step in steps))
        for rule, steps in draws[0].items()
    )
    text = "Root mean square error of the trait by number of items, simulated banks of 200:"
    return blocks(text, table("rule | 1 | 5 | 10 | 20 | 30", rows))


def _numbers(repeats: list[dict[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Questions until each criterion by structure of the traits and by rule, one row for each repeat."""
    return {
        structure: {rule: np.array([row[structure][rule] for row in repeats]) for rule in by_rule}
        for structure, by_rule in repeats[0].items()
    }


def _targets_of_people(repeats: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Questions by information against those of other rules and structures, paired."""
    if not repeats:
        return
    numbers = _numbers(repeats)
    found = numbers["independent"]
    for place, peer, limit in ((0, "random", 0.65), (0, "Big Five", 0.65), (1, "random", 0.75)):
        ratio = (found["information"] / found[peer])[:, place]
        what = f"questions by information until {_UNTIL[place]}, against {peer}"
        yield what, f"≤ {limit} ×", f"{mean_and_error(ratio, digits=3)} ×: {verdict(ratio.mean() <= limit)}"
    for place, until in enumerate(_UNTIL):
        more = (numbers["correlated"]["information"] - found["information"])[:, place]
        what = f"questions by information until {until}, correlated against independent traits"
        yield what, "no more", f"{mean_and_error(more, '+', 2)}: {verdict(more.mean() <= 0.0)}"


def _people(repeats: list[dict[str, Any]], what: str) -> list[str]:
    """Questions by each rule, means over repeats, and the paired share that information needs of them until the traits
    are known."""
    if not repeats:
        return []
    rows = (
        (f"{structure} traits, {rule}", *map(_mean, values.T),
         mean_and_error((found["information"] / values)[:, 0], digits=3))
        for structure, found in _numbers(repeats).items()
        for rule, values in found.items()
    )  # fmt: skip
    text = f"{what}, repeats: {len(repeats)}; questions until the criterion is reached:"
    return blocks(text, table(f"rule | {' | '.join(_UNTIL)} | information as a share, first criterion", rows))


def _mean(values: np.ndarray) -> str:
    reached = np.isfinite(values)
    if reached.all():
        return mean_and_error(values)
    return f"> {np.nanmean(values):.1f} ({(~reached).sum()} not)"


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
        "drawn people": partial(people, is_drawn=True),
    }
    draws = dict.fromkeys(experiments, 1) | {
        "speed": 3,
        "speed of draws": 3,
        "bank": 10,
        "people": 10,
        "drawn people": 2,
    }
    study = Study(__doc__, experiments, draws=draws, environment={})
    found = study.run()
    study.write("adaptive-tests", _page(found))


if __name__ == "__main__":
    main()
