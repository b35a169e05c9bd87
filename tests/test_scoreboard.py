"""The page of the scoreboard: made from its results, with every loss in its list."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from benchmarks.scores import insteval, park, scoreboard, simulations
from benchmarks.scores.posteriordb_models import POSTERIORS


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
    losses = page.split("### Losses")[1]
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


def test_simulations_are_listed_with_their_losses():
    cells = [cell for cell in simulations.CELLS if not cell.has_slopes][:2]
    assert len({cell.name for cell in simulations.CELLS}) == 24
    quantities = list(cells[0].truth)
    entries = {
        cell.name: {
            "sets": 100,
            "refused": 0,
            "converged": converged,
            "first": 3.0,
            "milliseconds": milliseconds,
            "rmse": dict.fromkeys(quantities, [0.2, 0.01]),
            "covered": dict.fromkeys(quantities, 90) | {"time": time},
        }
        for cell, converged, milliseconds, time in zip(cells, (100, 98), (15, 30), (83, 60), strict=True)
    }
    page = simulations.simulations_section(entries, {"date": "today"})
    assert f"- {cells[0].name}: time 83 %." in page  # outside, within two Monte Carlo errors
    assert f"- {cells[1].name}: time 60 %*, 2 of 100 fits not converged." in page
    assert "kept in 1 of 2 cells" in page and "198 of 200 fits converged" in page
    assert "time 71.5 % (3.2 %)" in page and f"; {simulations.CELLS[-1].name}." in page
    del entries[cells[1].name]["milliseconds"]  # to be measured again
    page = simulations.simulations_section(entries, {})
    assert "kept in 1 of 1 cells" in page and f"the time of {cells[1].name}." in page
    assert simulations.simulations_section({}, {}) == ""


def test_density_of_deviations_is_that_of_their_draws():
    prior = simulations.Deviations()
    log_value = np.linspace(-9.0, 3.5, 400)
    value = np.exp(log_value)
    pairs = jnp.stack(jnp.meshgrid(value, value, indexing="ij"), -1)
    mass = np.exp(prior.log_prob(pairs)) * value[:, None] * value * (log_value[1] - log_value[0]) ** 2
    np.testing.assert_allclose(mass.sum(), 1.0, atol=2e-3)
    draws = np.asarray(prior.sample(random.key(0), (40_000,)))
    for bound in (0.3, 1.0, 2.0):
        error = 4.0 * 0.5 / np.sqrt(len(draws))
        np.testing.assert_allclose((draws < bound).mean(0), mass[value < bound].sum(), atol=error + 5e-3)
    # half the sum of squares is the square of an exponential variate
    np.testing.assert_allclose(np.sqrt(np.mean(draws**2, -1)).mean(), 1.0, atol=4.0 / np.sqrt(len(draws)))


def test_gaps_of_the_park_are_told_beside_the_errors_of_nuts():
    blank = {site: [0.0, 0.0] for site in park.SITES}
    nuts = {
        "mean": blank,
        "sd": {site: [1.0, 1.0] for site in blank},
        "effective": {site: [400.0, 100.0] for site in blank},
        "effective_of_squares": {site: [200.0, 200.0] for site in blank},
        "first": 60.0,
        "steps": 1000,
        "divergences": 0,
    }
    own = {"first": 3.0, "next": 1.0, "converged": True, "messages": []}
    poor = own | {"mean": blank | {"effects": [0.2, -0.25]}, "sd": nuts["sd"] | {"level": [1.0, 0.5]}}
    page = park.park_section({"NUTS": nuts, "EP": own | {"mean": blank, "sd": nuts["sd"]}, "VG": poor}, {})
    assert "| -0.25 (0.10); 1.00 (0.05) |" in page
    losses = page.split("### Losses")[1]
    assert "- VG, `effects`: 1 of 2 means off, the farthest by -0.25 sd." in losses
    assert "- VG, `level`: 1 of 2 standard deviations off, the farthest times 0.50." in losses
    assert "- EP" not in losses and "Not run: Laplace, INLA." in losses
    assert park.park_section({"EP": own}, {}) == ""


def test_deviations_far_from_published_ones_are_lost():
    moments = {site: [value, 0.01] for site, value in insteval.MAXIMUM.items()}
    found = {"moments": moments, "first": 3.0, "next": 0.1, "converged": True, "messages": []}
    environment = {"date": "today"}
    assert "from the estimate: none." in insteval.insteval_section({"Laplace": found}, environment)
    far = moments | {"noise": [insteval.MAXIMUM["noise"] - 0.02, 0.01]}
    page = insteval.insteval_section({"Laplace": found | {"moments": far, "converged": False}}, environment)
    assert "- Laplace, `noise`: -2.00 sd." in page and "has not converged" in page
    assert insteval.insteval_section({}, environment) == ""


def test_an_engine_without_an_answer_is_a_loss_of_the_park():
    results = json.loads(scoreboard.RESULTS.read_text())
    entries = {"NUTS": results["park"]["NUTS"], "INLA": {"failed": "no memory"}}
    page = park.park_section(entries, {"date": "today"})
    assert "- INLA: no memory." in page and "Not run: EP, Laplace, VG." in page
