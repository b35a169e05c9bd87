"""Tables of local parameters on the host: the numbers of tables on the device, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer.autoguide import AutoNormal

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.infer.stochastic import devices
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences
from tests.infer.stochastic.chunked_devices import slopes
from tests.infer.stochastic.test_chunked_svi import LISTS, chain_engine, run, sequences


def check_equal(one, other):
    """Parameters, states and scores of two fits are equal to the bit, and those of the second are on the host."""
    for name, value in one.params.items():
        np.testing.assert_array_equal(other.params[name], value)
    states = [fit.last_state.packed() for fit in (one, other)]
    for state in states:
        state["key"], state["order_key"] = map(random.key_data, (state["key"], state["order_key"]))
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for value, found in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(found, value)
    kept = other.last_state.parameters
    assert all(type(table) is np.ndarray for table in jax.tree.leaves((kept.tables, kept.row_states)))


@pytest.mark.thorough
def test_sequences_have_the_numbers_of_the_device(engine, split, tmp_path):
    host = chain_engine(optim=optax.adam(0.6), tables="host")
    fit, found = run(engine, split, num_epochs=4), run(host, split, num_epochs=4)
    check_equal(fit, found)
    assert 0 < found.best_epoch < 4  # the best is a copy, which later steps do not write into
    np.testing.assert_array_equal(found.log_predictive(split), fit.log_predictive(split))
    np.testing.assert_array_equal(found.states(split), fit.states(split))
    for user in (0, 4):
        found_next = found.next_log_probabilities([0, 1], user=user)
        np.testing.assert_array_equal(found_next, fit.next_log_probabilities([0, 1], user=user))
    # one goes on from the other, and from a file; a run leaves what it began from as it was
    early, before = run(host, split, num_epochs=1), run(engine, split, num_epochs=1)
    kept = np.array(early.last_state.parameters.tables["bias"])
    check_equal(fit, run(host, split, num_epochs=4, init_state=before.last_state))
    check_equal(run(engine, split, num_epochs=4, init_state=early.last_state), found)
    check_equal(fit, run(host, split, num_epochs=4, init_state=early.last_state))
    np.testing.assert_array_equal(early.last_state.parameters.tables["bias"], kept)
    for num_epochs in (1, 4):
        again = run(host, split, num_epochs=num_epochs, checkpoint=tmp_path / "checkpoint")
    check_equal(fit, again)
    again.save(tmp_path / "fit")
    loaded = chain_engine(optim=optax.adam(0.6), tables="host").load(tmp_path / "fit")
    np.testing.assert_array_equal(loaded.log_predictive(split), fit.log_predictive(split))


@pytest.mark.thorough
def test_rows_of_a_guide_have_the_numbers_of_the_device():
    y = np.random.default_rng(0).normal(size=(2, 10))

    def fit(tables):
        options = {"optim": optax.adam(0.05), "plate": "rows", "batch_size": 4, "progress_bar": False}
        engine = ChunkedSVI(slopes, AutoNormal(slopes), tables=tables, **options)
        return engine.run(random.key(1), tuple(y), num_epochs=3, num_rows=10)

    check_equal(fit("device"), fit("host"))


def test_states_of_an_optimiser_are_made_in_parts():
    tables = {"a": np.arange(10.0).reshape(10, 1), "b": np.arange(20.0).reshape(10, 2)}

    def states_of(rows):
        return jax.tree.map(lambda x: (2.0 * x, jnp.ones(len(x), int)), rows)

    for found, expected in zip(
        jax.tree.leaves(devices.Host(rows_at_once=4).states(states_of, tables)),
        jax.tree.leaves(states_of(tables)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


def test_tables_with_rows_on_another_axis_and_bounds():
    def model(shops, sales, *, num_shops):
        with numpyro.plate("shops", num_shops, dim=-1, subsample_size=len(shops)), numpyro.plate("days", 2, dim=-2):
            start, positive = 2.0 * jnp.ones((2, num_shops)), dist.constraints.positive
            rate = numpyro.param("rate", start, constraint=positive, event_dim=0)
            numpyro.sample("sales", dist.Poisson(rate), obs=sales.T)

    sales, fits = np.random.default_rng(0).poisson(3.0, (5, 2)), []
    for tables in ("device", "host"):
        options = {"optim": optax.adam(0.1), "plate": "shops", "batch_size": 2, "progress_bar": False}
        fits.append(ChunkedSVI(model, tables=tables, **options).run(random.key(0), sales, num_epochs=3, num_shops=5))
    for name, value in fits[0].params.items():
        np.testing.assert_array_equal(fits[1].params[name], value)
    assert fits[1].params["rate"].shape == (2, 5) and fits[1].last_state.parameters.tables["rate"].shape == (5, 2)


@pytest.mark.thorough
def test_people_integrated_out_have_the_numbers_of_the_device():
    lists = [[0, 1, 2, 0, 1, 2, 0], [2, 1, 0, 2, 1], [1], [0, 1, 2, 0, 1], [2, 1, 0, 2], [1, 0]]
    split, fits = EventSequences.from_lists(lists).split(least=1), []
    for tables in ("device", "host"):
        options = {"optim": optax.adam(0.05), "plate": "users", "batch_size": 2, "chunk": 4, "progress_bar": False}
        engine = ChunkedSVI(collaborative_rnn, local="laplace", tables=tables, **options)
        fits.append(engine.run(random.key(0), split, num_epochs=3, width=3, personal="low-rank", rank=2))
    check_equal(*fits)
    np.testing.assert_array_equal(fits[1].log_predictive(split), fits[0].log_predictive(split))
    people = [fit.fold_in([0, 1, 2]) for fit in fits]
    np.testing.assert_array_equal(people[1].mode, people[0].mode)


def test_places_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match='tables is "device" or "host"'):
        chain_engine(tables="disk")
    with pytest.raises(ValueError, match="with devices= each device has its rows"):
        chain_engine(tables="host", devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def engine():
    return chain_engine(optim=optax.adam(0.6))


@pytest.fixture(scope="module")
def split():
    names = ("train", "validation", "test")
    lists = (LISTS, [[2, 2], [0], [], [1], []], [[0], [], [1], [2, 2], []])
    return type("Split", (), {name: sequences(one, 3) for name, one in zip(names, lists, strict=True)})
