"""Acquisitions side by side, and pictures of what they do."""

import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import (
    Phase,
    SequentialDesign,
    compare_acquisitions,
    expected_information_gain,
    plot_information,
    plot_learning_curves,
    plot_queries,
    predictive_entropy,
    random_scores,
)
from numpyro_ext.infer import EP

matplotlib.use("Agg")
NUM_POOL, NUM_TEST = 80, 60


def classifier(x, y=None, labelled=True):
    distance = jnp.sum(jnp.square(x[:, None] - x), -1)
    f = numpyro.sample(
        "f", dist.MultivariateNormal(jnp.zeros(len(x)), 9.0 * jnp.exp(-0.5 * distance) + 1e-6 * jnp.eye(len(x)))
    )
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def noisy_block(rng_key, num_clean=(50, 54), num_noisy=(30, 6)):
    """Two classes with a block of coin flips between them; the pool first, the test observations after it."""
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    parts = []
    for clean, noisy in zip(num_clean, num_noisy, strict=True):
        x = rng.uniform(-3.0, 3.0, (6 * clean, 2))
        x = x[np.abs(x[:, 0]) >= 0.4][:clean]
        parts += [(x, x[:, 0] > 0.0), (rng.uniform(-0.4, 0.4, (noisy, 2)), rng.integers(0, 2, noisy))]
    return {"x": np.concatenate([x for x, _ in parts]), "y": np.concatenate([y for _, y in parts]).astype(int)}


IS_TEST = np.arange(NUM_POOL + NUM_TEST) >= NUM_POOL


@pytest.fixture(scope="module")
def compared():
    acquisitions = {"gain": expected_information_gain, "entropy": predictive_entropy, "random": random_scores}
    engine = EP(classifier, progress_bar=False)
    return compare_acquisitions(
        engine,
        random.key(0),
        noisy_block,
        acquisitions,
        num_labels=30,
        num_repeats=4,
        test=IS_TEST,
        show_progress=False,
    )


@pytest.mark.thorough
def test_information_does_not_ask_what_nobody_knows(compared):
    area = compared["area"].mean("repeat")
    assert area.sel(acquisition="gain") > area.sel(acquisition="entropy") + 0.02
    assert area.sel(acquisition="gain") > area.sel(acquisition="random") + 0.02
    first = compared["score"].isel(num_observed=0)
    np.testing.assert_allclose(first.sel(acquisition="gain"), first.sel(acquisition="random"))
    assert compared["num_observed"].values.tolist() == list(range(5, 36))
    assert np.all(compared["seconds"] > 0.0)


@pytest.mark.slow
def test_noisy_block_as_in_the_source():
    """Pools of 194 with 80 coin flips, test sets of 250 with 25: by 4 points over entropy and random labels."""

    def data(key):
        return noisy_block(key, (114, 225), (80, 25))

    acquisitions = {"gain": expected_information_gain, "entropy": predictive_entropy, "random": random_scores}
    engine = EP(classifier, progress_bar=False)
    found = compare_acquisitions(
        engine, random.key(0), data, acquisitions, num_labels=60, num_repeats=16, test=np.arange(444) >= 194
    )
    area = 100.0 * found["area"]
    for other in ("entropy", "random"):
        gap = (area.sel(acquisition="gain") - area.sel(acquisition=other)).values
        assert gap.mean() >= 4.0, (other, gap.mean(), gap.std(ddof=1) / 4.0)


@pytest.mark.thorough
def test_pictures_show_what_was_found(compared):
    axis = plot_learning_curves(compared)
    assert len(axis.get_lines()) == 3 and len(axis.collections) == 3
    data = noisy_block(random.key(1))
    engine = EP(classifier, progress_bar=False)
    first = np.arange(len(data["y"])) < 4
    engine.run(random.key(0), data["x"], data["y"], first)
    design = SequentialDesign(engine)
    design.observe([20, 30], data["y"][[20, 30]])
    axis = plot_queries(data["x"], design)
    pool, start, asked = axis.collections
    assert (len(pool.get_offsets()), len(start.get_offsets()), len(asked.get_offsets())) == (len(data["y"]), 4, 2)
    with pytest.raises(ValueError, match=r"shape \(n, 2\)"):
        plot_queries(data["x"][:, 0], design)
    entropy, gain = predictive_entropy(engine)["y"][4:], expected_information_gain(engine)["y"][4:]
    assert plot_information(data["x"][4:, 0], entropy, gain).get_ylim()[0] == 0.0
    matplotlib.pyplot.close("all")


def wave(x, y=None, labelled=True):
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    kernel = jnp.exp(-0.5 * jnp.square((x[:, None] - x) / length))
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel + 1e-8 * jnp.eye(x.size)))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("keeps", [False, True])
def test_phases_learn_hyperparameters_first(keeps):
    rng = np.random.default_rng(0)
    x = rng.uniform(-4.0, 4.0, 48)
    data = {"x": x, "y": np.sin(2.0 * x) + 0.1 * rng.normal(size=x.size)}
    seen, noises = [], []

    def of_length(source, **options):
        assert isinstance(source, EP)
        seen.append(np.asarray(source._run.reading.known_mask("y")))
        noises.append(float(source.hyper["noise"].mode))
        return expected_information_gain(source, focus="length", hyper="mgp", **options)

    def of_field(source, **options):
        outlook = source.outlooks()["y"]
        seen.append(~outlook.is_candidate)
        noises.append(np.unique(outlook.potential.scale))
        return predictive_entropy(source, **options)

    found = compare_acquisitions(
        EP(wave, progress_bar=False),
        random.key(0),
        data,
        {"both": [of_length, of_field]},
        phases=[Phase(4, learns=True), Phase(3, keeps=keeps, share=2.0)],
        num_initial=2,
        num_repeats=1,
        test=0.25,
        show_progress=False,
    )
    before = 6 if keeps else 0
    assert found["phase"].values.tolist() == [0] * 5 + [1] * 4
    assert found["num_observed"].values.tolist() == [2, 3, 4, 5, 6, *range(before + 2, before + 6)]
    assert [int(mask.sum()) for mask in seen] == [2, 3, 4, 5, *range(before + 2, before + 5)]
    assert np.sum(seen[3] & seen[4]) == (5 if keeps else 0)  # pools of their own
    assert len(set(noises[:4])) == 4 and all(np.array_equal(noises[4], other) for other in noises[4:])
    np.testing.assert_allclose(found["area"], found["score"].isel(step=slice(5, None)).mean("step"))
    assert np.all((found["error"] > 0.0) & (found["error"] < 2.0))
    assert np.isfinite(found["score"]).all() and len(noises[4]) == 1


def test_what_a_protocol_needs_is_said():
    engine, data = EP(classifier, progress_bar=False), noisy_block(random.key(0))
    for options, message in (
        ({"num_labels": 200}, "too few for 5 first and 200 further labels"),
        ({"data": {"x": data["x"]}}, "data has no 'y', but"),
        ({"observations": "z"}, r"arguments of the model are \['x', 'y', 'labelled'\]: observations='z' is none"),
        ({"mask": "seen"}, "mask='seen' is none"),
        ({"test": np.ones(3, bool)}, r"test has the shape \(3,\)"),
        ({"num_repeats": 0}, "num_repeats must be an integer"),
        ({"acquisitions": {}}, "acquisitions names no score"),
        ({"phases": []}, "phases names none"),
        ({"phases": [Phase(5), Phase(90)]}, "too few for 5 first and 90 further labels"),
        ({"phases": [Phase(5, share=0.0)]}, "The share of a phase must be positive"),
        ({"phases": [Phase(5), Phase(5)], "acquisitions": {"one": [random_scores]}}, "'one' needs a score for each"),
        ({"data": {**data, "labelled": True}}, "leave it out, it is made here"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_acquisitions(engine, random.key(0), **{"data": data, "show_progress": False, **options})


@pytest.mark.thorough
def test_an_interrupt_leaves_what_was_done():
    calls = []

    def impatient(source, *args, **kwargs):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return predictive_entropy(source, *args, **kwargs)

    engine = EP(classifier, progress_bar=False)
    with pytest.warns(UserWarning, match="interrupted after 1 of 2 repeats"):
        found = compare_acquisitions(
            engine, random.key(0), noisy_block, {"own": impatient}, num_labels=4, num_repeats=2, test=IS_TEST
        )
    assert np.isfinite(found["score"].values[0, 0]).all() and np.isnan(found["score"].values[0, 1]).all()
