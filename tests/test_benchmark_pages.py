"""Pages of studies are written from what their folders keep: made-up findings of the right form make a whole page."""

import importlib
import json
import sys

import numpy as np
import pytest

from benchmarks.harness import pages

RANDOM = np.random.default_rng(0)
RULES = ("information", "Fisher", "random")
TASTES = ("GPitem", "VU, D = 1", "VU, D = 2", "GPVU, D = 2")


def some(*keys, **fixed):
    return {key: float(RANDOM.random()) for key in keys} | fixed


def fit(**fixed):
    return some("loss", "error", "evidence", "validation", "sigma", "seconds", converged=1.0, **fixed)


def ranks(*sites):
    found = {site: RANDOM.integers(0, 400, (5, 3)).tolist() for site in sites}
    return {"seconds": 1.0, "ranks": found, "converged": [True] * 5, "errors": [], "warnings": []}


def elicitation(study):
    return {name: [{rule: [0.5, 0.4] for rule in study._ACQUISITIONS}] * 2 for name in study.CASES}


def models(study):
    systems = {name: fit(scale=2.0) for name in study.SYSTEMS}
    surface = {"evidence": RANDOM.random((5, 5)).tolist(), "converged": np.ones((5, 5)).tolist()}
    return {name: [systems, systems] for name in study.DATA} | {"surface": [surface]}


def held_out(study):
    sushi, thesis = study.sushi, study.thesis
    integrated = fit(scale=1.0, mean_scale=1.0, effective=20.0)
    ends = [name + end for name in thesis._THESIS for end in ("", ", no b")]
    return {
        "sushi_a": [{name: fit() for name in TASTES}] * 2,
        "sushi_a_integrated": [dict.fromkeys((sushi._BY_BOUND, sushi._SAMPLED), integrated)] * 2,
        "sushi_a_thesis": [{name: fit(rank=1.0, iterations=2.0) for name in ends}] * 2,
    }


def adaptive_tests(study):
    bank = {rule: {step: 0.5 for step in ("1", "5", "10", "20", "30")} for rule in RULES}
    shares = {"size": 100, "coverage": dict.fromkeys(("5", "10", "20", "30"), 0.9), "rmse": 0.3}
    people = {kind: dict.fromkeys((*RULES, "Big Five"), [3.0, 4.0]) for kind in ("independent", "correlated")}
    return {
        "speed": [some("first", "median", "largest", compiled_later=0)],
        "bank": [bank],
        "coverage": [[shares | {"items": items} for items in ("point", "posterior")]],
        "people": [people] * 2,
    }


def exact(study):
    name, failed, *_ = study.MODELS
    rates = {"as written": 50.0, study.COORDINATES: 25.0, study.OPTIMUM: 20.0}
    ways = {way: [100.0, 80.0, 3.0, rate, 0, 2.0, 0.1] for way, rate in rates.items()}
    return {name: [{"ways": ways}], failed: [{"failed": "ValueError: no"}]}


def spreads(study):
    reference = {"b": {"mean": 1.0, "sd": 2.0, "mean_error": 0.1, "sd_error": 0.02}}
    chains = {"seconds": 9.0, "divergent": 3, "moments": reference}
    ours = some("first", "next", "evidence", converged=False, messages=["no"], distinct=7)
    ours["moments"] = {"b": {"mean": 2.0, "sd": 1.0}}
    names = "the same by `numpyro.factor`, EP", "Weibull, effects on shape and scale by NUTS"
    return dict(zip(names, ([ours], [chains]), strict=True))


def crossed(study):
    row = {"first": 9.0, "next": 1.0, "predict": 0.5, "memory": 0.4, "converged": True, "moments": [[0.3, 0.02]]}
    return {"5000, logistic, Laplace": [row]}


def quadrature(study):
    row = some("first", "next", "floor", log_likelihood=-2466.5534, nodes=73, evaluations=19, converged=True)
    return {"LSAT6, 2PL": [row]}


def active(study):
    strategies = {"information": [0.01, 76.0], "one-step risk": [0.05, None], "MonteCarloEER": [0.5, None]}
    return {"labels of the noisy block": [strategies, strategies | {"information": [0.01, 78.0]}]}


def newcomers(study):
    curves = {"log_likelihood": np.zeros((2, 11, 2)).tolist(), "error": np.ones((2, 11, 2)).tolist()}
    one = curves | {"strategies": ["information, 100 draws", "random"], "seconds_of": [0.1, 0.2], "steps": 3}
    one |= {"lost": {rule: [0.1, 0.2] for rule in study._RULES}, "converged": False, "newcomers": 5, "ratings": 50}
    return {"HOMF-U": [one, one], "round": [{"seconds": [2.0, 1.0], "load": 3.0}]}


def closed_updates(study):
    found = {"speeds": 4, "divided": 5, "rankings": 7, "pairs": 5}
    return {name: [[[str(column) for column in range(number)]]] for name, number in found.items()}


def chain_groups(study):
    return {"low rank": [np.arange(10.0).tolist()], "few events": [[1.0, 3.0, 2.0, 1.5]]}


def many_people(study):
    return {"fitted": [["people", "at most 2 min", "51 s"]]}


def ratings(study):
    fits = [{"log_likelihood": -1.2, "error": 0.9, "seconds": 30.0, "load": 2.0}] * 2
    return {"HOMF": [one | {"iterations": 40, "converged": True} for one in fits], "BMM": fits}


def pairs(study):
    """Sweeps of a microsecond a pair and two a vector, of the sizes that the plan is made from."""

    def one(name):
        number, *vectors = study._SIZES[name]
        seconds = 1e-6 * number + 2e-6 * sum(vectors)
        return [{"float32": {"seconds": seconds, "held": 50 * number, "peak": 100 * number, "compile": 9.0}}]

    loads = {f"{mean} {number}": [1.0, 1.1] for mean in (10, 100) for number in (4, 16, 64, 256)}
    return {
        **{name: one(name) for name in ("1e6", "1e6, few users")},
        "scipy": [{"whole": 2.0, "products": 1.0}],
        "exchange": [{"bytes": 2_000_000, "devices": 4, "items": 1_000}],
        "loads": [loads],
    }


STUDIES = {
    "preferences.elicitation": (elicitation, "| synthetic | alone | 2 | 0.500 ± 0.0000 | 0.400 ± 0.0000 |"),
    "preferences.models": (models, "Maximum at log lengths in {0, 0.5}"),
    "preferences.held_out": (held_out, "| GPitem-EP | 0.875 |"),
    "items.adaptive_tests": (adaptive_tests, "| correlated traits, Big Five | 3.0 ± 0.0 | 4.0 ± 0.0 | 1.000 ± 0.000 |"),
    "evidence.calibration": (
        lambda _: {"preferences": [ranks("own")], "items drawn": [ranks("trait")] * 2},
        "10 fitted, 0 not converged",
    ),
    "evidence.exact": (exact, "as written (0.5, at the optimum 0.4)."),
    "evidence.spreads": (spreads, "| 10 / 1 | +0.50 ± 0.05 (b) | 0.50 ± 0.02 (b) |"),
    "queries.peers": (active, "| MonteCarloEER | 0.5000 | 0.100 |"),
    "runs.crossed": (
        crossed,
        "| 9.0 | 1.0 | 8 / 1.5 | lme4 0.6, glmmTMB 1.5, GPBoost 0.8 | 0.5 | 0.40 | yes | 0.300 ± 0.020 |",
    ),
    "matrices.cold_start": (newcomers, "| HOMF-U | random | 4 | 0.0 ± 0.0 | -928 |"),
    "matrices.closed_updates": (closed_updates, "| 0 | 1 | 2 | 3 | 4 | 5 | 6 |"),
    "sequences.chain_groups": (chain_groups, "| 1.000 | 3.000 | 2.000 | 1.500 | -1.500 |"),
    "items.many_people": (many_people, "| people | at most 2 min | 51 s |"),
    "matrices.ratings": (ratings, "| BMM | 2 | -1.2000 ± 0.0000 | +0.0000 ± 0.0000 | -1.493 |"),
    "matrices.pairs": (pairs, "| core-seconds a sweep | 1020 |"),
    "items.quadrature": (quadrature, "| -2466.5534 | +1.0e-01 | yes |"),
}


@pytest.mark.parametrize("name", STUDIES)
def test_page_is_made_of_what_is_kept(name, tmp_path, monkeypatch):
    study = importlib.import_module(f"benchmarks.{name}")
    findings, expected = STUDIES[name]
    for experiment, draws in findings(study).items():
        for draw, found in enumerate(draws):
            (tmp_path / f"{experiment}-{draw}.json").write_text(json.dumps(found))
    monkeypatch.setattr(pages, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(study, "keep_compiled_programs", lambda folder: None, raising=False)
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path), "--write"])
    study.main()
    assert expected in "\n".join(page.read_text() for page in tmp_path.glob("*.md"))
