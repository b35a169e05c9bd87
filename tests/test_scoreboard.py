"""The page of the scoreboard: made from its results, with every loss in its list."""

import json

import pytest

from benchmarks import scoreboard
from benchmarks.posteriordb_models import POSTERIORS


def entry(gap=0.01, ratio=1.0, **options):
    fields = {"gap_at": "mu", "ratio_at": "tau", "first": 3.0, "next": 0.1, "converged": True, "messages": []}
    return {"gap": gap, "ratio": ratio, **fields, **options}


def test_page_is_made_from_the_results():
    results = json.loads(scoreboard.RESULTS.read_text())
    assert scoreboard.DOCUMENT.read_text() == scoreboard.page_of(results)
    assert set(results["posteriors"]) <= set(POSTERIORS)


def test_losses_are_listed_with_their_reasons():
    first, second, third, *_ = POSTERIORS
    fits = {
        first: {"EP": entry(), "Laplace": entry(gap=-0.3, agreement="off")},
        second: {
            "EP": entry(ratio=0.5, agreement="unknown"),
            "Laplace": {"refused": "Error: no such\nform"},
        },
        third: {"EP": entry(converged=False, messages=["It stopped early."])},
    }
    page = scoreboard.page_of({"posteriors": fits, "posteriors_environment": {"date": "today"}})
    losses = page.split("## Losses")[1]
    assert f"- **{first}**, Laplace: mean of `mu` -0.30 sd" in losses and f"**{first}**, EP" not in losses
    assert "times 0.50. **Not told.**" in losses and "refused. Error: no such form" in losses
    assert "“It stopped early.”" in losses
    assert "4 of 5 fits" in losses and "3 that have an answer" in losses and "2 are told" in losses.replace("\n", " ")
    assert f"INLA on {len(POSTERIORS)}" in losses


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"EP": entry(gap=0.01), "VG": entry(gap=0.015, next=0.05)}, "VG"),  # a tie, which the seconds decide
        ({"EP": entry(gap=0.01), "VG": entry(gap=0.05, next=0.05)}, "EP"),
        ({"EP": entry(converged=False), "VG": {"refused": "Error"}}, "none"),
    ],
)
def test_winner_is_nearest_then_fastest(entries, expected):
    assert scoreboard.winner(entries) == expected


def test_gaps_are_those_of_the_worst_element():
    reference = {name: {"mean": 1.0, "sd": 2.0, "mcse": 0.02} for name in ("mu", "beta[1]", "beta[2]")}
    found = scoreboard._gaps({"mu": (1.0, 2.0), "beta": ([1.0, 0.0], [1.0, 2.5])}, reference)
    assert found == {"gap": -0.5, "gap_at": "beta[2]", "gap_error": 0.01, "ratio": 0.5, "ratio_at": "beta[1]"}
