"""Contents of the pictures of a test."""

import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_ext.design import draws_of
from numpyro_ext.models import item_response
from numpyro_ext.psychometrics import plot_curves, plot_information, plot_person_item_map

matplotlib.use("Agg")
SLOPE, CUTS = np.array([1.0, 1.5]), np.array([[-1.0, 1.0], [0.0, 1.5]])


@pytest.fixture(scope="module")
def source():
    rng = np.random.default_rng(0)
    samples = {"discrimination": np.tile(SLOPE, (3, 1)), "cutpoints": np.tile(CUTS, (3, 1, 1)),
               "trait": np.tile(rng.normal(size=30), (3, 1))}  # fmt: skip
    return draws_of(samples, model=item_response, args=(rng.integers(0, 3, (30, 2)),), kwargs={"family": "graded"})


@pytest.mark.thorough
def test_curves_are_the_probabilities(source):
    theta = np.linspace(-2, 2, 9)
    axes = plot_curves(source, items=[1], theta=theta, draws=2)
    lines = axes[0].get_lines()
    assert len(lines) == 3 * (1 + 2) and axes[0].get_title() == "item 1"
    np.testing.assert_allclose(lines[0].get_ydata(), 1 / (1 + np.exp(1.5 * theta)))  # cutpoint 0
    with pytest.raises(ValueError, match="There is no item 5: items are 0 to 1"):
        plot_curves(source, items=[5])
    matplotlib.pyplot.close("all")


def test_information_is_the_sum_of_the_items():
    theta = np.linspace(-1, 1, 5)
    axis = plot_information(lambda t: dist.Bernoulli(logits=jnp.asarray(SLOPE) * t[..., None]), theta=theta)
    p = 1 / (1 + np.exp(-SLOPE * theta[:, None]))
    np.testing.assert_allclose(axis.get_lines()[0].get_ydata(), np.sum(SLOPE**2 * p * (1 - p), 1))
    matplotlib.pyplot.close("all")


@pytest.mark.thorough
def test_items_stand_where_the_expected_score_crosses_halves(source):
    axis = plot_person_item_map(source)
    places = {
        tick.get_text(): line.get_xdata() for tick, line in zip(axis.get_yticklabels(), axis.get_lines(), strict=True)
    }
    cut = np.array(CUTS)
    for item in range(2):
        for half, place in zip((0.5, 1.5), places[f"item {item}"], strict=True):
            np.testing.assert_allclose(np.sum(1 / (1 + np.exp(cut[item] - SLOPE[item] * place))), half, atol=1e-3)
    matplotlib.pyplot.close("all")
