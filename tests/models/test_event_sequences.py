"""Collaborative recurrent network: what its personal parts add to a pooled one."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.handlers import scale, seed, substitute, trace
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.infer.stochastic.personal.people import Given
from numpyro_ext.models import collaborative_rnn
from tests.compilations import compiled_programs
from tests.monte_carlo import NUM_ERRORS

SIZES = {"num_users": 3, "num_items": 5, "width": 2}
EVENTS = jnp.array([[0, 1, 2, 3], [4, 3, 0, 0]])
MASK = jnp.array([[True] * 4, [True, True, False, False]])
ARGUMENTS = (jnp.array([2, 0]), EVENTS, MASK, jnp.zeros((2, 2)))


@pytest.mark.parametrize("cell", ["tanh", "gru"])
@pytest.mark.parametrize("candidate", ["tanh", "logistic"])
def test_matrices_of_all_personal_parts_act_as_free_ones(cell, candidate):
    """Each kind, at its own values, has the density of free matrices that are their sums, for rows out of order."""

    def sites(values, **options):
        model = substitute(seed(collaborative_rnn, 0), values)
        found = trace(model).get_trace(*ARGUMENTS, **SIZES, cell=cell, candidate=candidate, rank=2, **options)
        return {name: site for name, site in found.items() if site["type"] != "plate"}

    for personal in ("none", "deviation", "low-rank"):
        own = sites({"W_out_basis": jnp.zeros((2, 5))}, personal=personal)
        values = {name: site["value"] for name, site in own.items()}
        free = {name: values[name] for name in ("W_in", "W_out", "W_zi", "W_ri") if name in values}
        for gate in ["h"] if cell == "tanh" else ["h", "zh", "rh"]:
            matrices = jnp.broadcast_to(values[f"W_{gate}"], (2, 1, 2, 2))
            if personal == "deviation":
                matrices = matrices + values[f"W_{gate}_deviation"]
            if personal == "low-rank":
                basis = values[f"W_{gate}_basis"]
                matrices = matrices + jnp.einsum("uak,kij->uaij", values["coefficients"], basis)
            free[f"W_{gate}"] = jnp.zeros((3, 1, 2, 2)).at[jnp.array([2, 0])].set(matrices)
        full = sites(free, personal="full")
        log_probs = [run["event"]["fn"].log_prob(EVENTS) for run in (own, full)]
        np.testing.assert_allclose(*log_probs, rtol=1e-5)


def test_gradients_are_those_of_back_propagation_by_hand():
    """Ko (2017, section 3.3) from the last event of a chunk to its first, with the state before the chunk held."""
    rng = np.random.default_rng(0)
    values = {"W_in": rng.normal(size=(2, 5)), "W_out": rng.normal(size=(5, 2)), "W_h": rng.normal(size=(3, 1, 2, 2))}
    users, events, mask, _ = ARGUMENTS
    start = rng.normal(size=(2, 2))

    def total(values):
        model = substitute(seed(collaborative_rnn, 0), values)
        return log_density(model, (users, events, mask, jnp.asarray(start)), SIZES, {})[0]

    found = jax.jit(jax.grad(total))({name: jnp.asarray(value) for name, value in values.items()})
    wanted = {name: np.zeros_like(value) for name, value in values.items()}
    for user, items, number, h in zip(
        np.asarray(users), np.asarray(events), np.asarray(mask).sum(1), start, strict=True
    ):
        states = [h]
        for item in items[: number - 1]:  # the last event is scored and not taken in
            states.append(np.tanh(values["W_h"][user, 0] @ states[-1] + values["W_in"][:, item]))
        after = np.zeros(2)
        for t in reversed(range(number)):
            mass = np.exp(values["W_out"] @ states[t])
            error = np.eye(5)[items[t]] - mass / mass.sum()
            wanted["W_out"] += np.outer(error, states[t])
            if t == 0:
                break
            after = (1.0 - states[t] ** 2) * (values["W_out"].T @ error + values["W_h"][user, 0].T @ after)
            wanted["W_h"][user, 0] += np.outer(after, states[t - 1])
            wanted["W_in"][:, items[t - 1]] += after
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], 1.5 * value, rtol=1e-12, atol=1e-14)  # two users stand for three


@pytest.mark.thorough
def test_the_gate_mixes_the_network_with_the_persons_own_counts():
    """Density by hand, event by event, at once and in chunks that hand the counts on."""
    options = {**SIZES, "personal": "none", "pointer": True}
    values = {"pointer_weights": jnp.array([2.0, -1.0]), "pointer_offset": 0.3, "pointer_power": 0.7}
    zeros = (jnp.zeros((2, 2)), jnp.zeros((2, 5)))

    def run(events, mask, carry):
        model = substitute(seed(collaborative_rnn, 0), values)
        sites = trace(model).get_trace(jnp.array([2, 0]), events, mask, carry, **options)
        return sites, substitute(seed(model, 0), values)(jnp.array([2, 0]), events, mask, carry, **options)

    sites, (_, counts) = run(EVENTS, MASK, zeros)
    found = sites["event"]["fn"].log_prob(EVENTS)
    np.testing.assert_array_equal(counts, [[1, 1, 1, 1, 0], [0, 0, 0, 1, 1]])
    np.testing.assert_allclose(jnp.exp(sites["event"]["fn"].base_dist.logits).sum(-1), 1.0, rtol=1e-6)
    W_h, W_in, W_out = (np.asarray(sites[name]["value"]) for name in ("W_h", "W_in", "W_out"))
    events = [[0, 1, 2, 3], [4, 3]]
    for row, items in enumerate(events):
        state, own = np.zeros(2), np.zeros(5)
        for place, item in enumerate(items):
            network = np.exp(W_out @ state) / np.exp(W_out @ state).sum()
            total = own.sum()
            weight = np.exp(state @ [2.0, -1.0] + 0.3)
            gate = weight / (weight + total**0.7)
            expected = gate * network + (1 - gate) * own / max(total, 1)
            np.testing.assert_allclose(found[row, place], np.log(expected[item]), rtol=1e-5)
            state = np.tanh(W_h @ state + W_in[:, item])
            own[item] += 1
    _, carry = run(EVENTS[:, :1], MASK[:, :1], zeros)
    later = run(EVENTS[:, 1:], MASK[:, 1:], carry)[0]["event"]["fn"].log_prob(EVENTS[:, 1:])
    np.testing.assert_allclose(later, found[:, 1:], rtol=1e-5)
    with pytest.raises(ValueError, match="the carry has the counts"):
        collaborative_rnn(*ARGUMENTS, **SIZES, pointer=True)


def test_options_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match="personal is one of .*low-rank.*; got 'some'"):
        collaborative_rnn(*ARGUMENTS, **SIZES, personal="some")


@pytest.fixture(scope="module")
def low_rank():
    rng = np.random.default_rng(0)
    log = SimpleNamespace(
        items=rng.integers(0, 4, 30), starts=np.array([0, 10, 20]), lengths=np.full(3, 10), num_items=4
    )
    engine = ChunkedSVI(
        collaborative_rnn,
        AutoNormal(collaborative_rnn, init_scale=0.1),
        optax.adam(0.05),
        plate="users",
        batch_size=3,
        chunk=10,
        progress_bar=False,
    )
    return engine.run(random.key(0), log, num_epochs=30, width=3, personal="low-rank", rank=2)


@pytest.mark.thorough
def test_someone_new_has_the_posterior_of_the_model(low_rank):
    history = np.array([0, 1, 1, 3, 0, 0, 2])
    options = {"num_users": 3, "num_items": 4, "width": 3, "personal": "low-rank", "rank": 2}
    args = (jnp.array([0]), np.append(history, 0)[None], jnp.arange(8)[None] < 7, jnp.zeros((1, 3)))

    def given(numbers):
        return {**low_rank.params, "coefficients": jnp.zeros((1, 1, 2)).at[0, 0].set(numbers)}

    @jax.jit
    def density(numbers):
        with scale(scale=1 / 3):  # one user of three stands for all in the plate
            return log_density(collaborative_rnn, args, options, given(numbers))[0]

    @jax.jit
    def logits(numbers):
        found = trace(substitute(seed(collaborative_rnn, 0), given(numbers))).get_trace(*args, **options)
        return found["event"]["fn"].base_dist.logits[0]

    nobody, person = low_rank.fold_in([[], [*history, 9]])
    shared = Given(low_rank.params, low_rank._setting)
    for most_cells in (1, 8 * 16 * 4):  # one after the other, and eight side by side
        histories = [np.asarray(part, int) for part in (history, [], history[:3], history)]
        rows = low_rank._personal.people(shared, histories, [0] * 4, 1, most_cells)
        np.testing.assert_allclose([rows[k].mode for k in (0, 1, 3)], [person.mode, [0.0, 0.0], person.mode], atol=1e-9)
        assert len(rows) == 4 and np.abs(rows[2].mode - person.mode).max() > 0.01
    with pytest.raises(ValueError, match="indices of items.*Labels have their index in EventSequences.item_labels"):
        low_rank.fold_in(["tea", "milk"])
    with pytest.raises(ValueError, match="num_starts is an integer from 1; got 0"):
        low_rank.fold_in(history, num_starts=0)
    searched = low_rank.fold_in([history, history[:3]], num_starts=4)
    others = [low_rank.fold_in(history, num_starts=4), low_rank.fold_in(history[:3], num_starts=4)]
    for one, other in zip(searched, others, strict=True):  # this posterior has one mode
        assert one.converged and len(one.modes.means) == 1
        np.testing.assert_allclose(one.mode, other.mode, atol=1e-6)
        np.testing.assert_allclose(one.log_evidence, other.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(searched[0].mode, person.mode, atol=1e-5)
    for number in (1, 0, -1, 2.0):
        with pytest.raises(ValueError, match="num_draws is an integer from 2"):
            person.next_probabilities(number)
    with pytest.raises(ValueError, match="num_draws is an integer from 1"):
        low_rank.next_log_probabilities(history, user=0, num_draws=0)
    assert person.converged and (nobody.num_dropped, person.num_dropped) == (0, 1)
    np.testing.assert_array_equal(nobody.mode, 0.0)
    np.testing.assert_allclose(nobody.covariance_at_mode, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(nobody.log_evidence, 0.0, atol=1e-12)

    mode = jnp.asarray(person.mode)
    np.testing.assert_allclose(jax.grad(density)(mode), 0.0, atol=1e-6)
    slopes, probabilities = np.asarray(jax.jacobian(logits)(mode)), np.asarray(jax.nn.softmax(logits(mode)))
    curvature = np.eye(2)
    for J, p in list(zip(slopes, probabilities, strict=True))[:7]:
        curvature += J.T @ (np.diag(p) - np.outer(p, p)) @ J
    np.testing.assert_allclose(person.covariance_at_mode, np.linalg.inv(curvature), rtol=1e-6)
    evidence = density(mode) + np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(curvature)[1]
    np.testing.assert_allclose(person.log_evidence, evidence, rtol=1e-10)

    # The posterior on a lattice.
    line = np.linspace(-6.0, 6.0, 49)
    points = np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)
    logs = np.asarray(jax.lax.map(density, jnp.asarray(points), batch_size=500))
    mass = np.exp(logs - logs.max())
    mass /= mass.sum()
    each = np.asarray(jax.nn.softmax(jax.lax.map(lambda one: logits(one)[7], jnp.asarray(points), batch_size=500)))
    mean = mass @ points
    covariance = np.einsum("p,pi,pj->ij", mass, points - mean, points - mean)
    sd, spread = np.sqrt(np.diag(covariance)), np.sqrt(mass @ (each - mass @ each) ** 2)
    np.testing.assert_allclose((person.mean - mean) / sd, 0.0, atol=0.11)  # three errors of 700 draws
    np.testing.assert_allclose(np.sqrt(np.diag(person.covariance)) / sd, 1.0, rtol=0.08)  # three errors of 700 draws
    # for which the Gaussian at the mode is not good enough
    assert (np.abs(mode - mean) / sd > 0.14).all() and person.covariance_at_mode[0, 0] ** 0.5 / sd[0] < 0.9
    found = person.next_probabilities(2000)
    np.testing.assert_array_less(np.abs(found - mass @ each), NUM_ERRORS * spread / 1500**0.5)


@pytest.mark.thorough
def test_many_people_are_those_one_by_one_and_other_histories_compile_nothing(low_rank):
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 4, number) for number in [*range(16), *range(20, 120, 5)]]
    order = rng.permutation(len(histories) * 3)  # enough short ones to be padded apart from the long ones
    many = low_rank.fold_in([histories[k % len(histories)] for k in order])
    with compiled_programs() as names:
        again = low_rank.fold_in([histories[k % len(histories)][::-1] for k in order[:-1]])
    assert not names and len(again) == len(many) - 1
    alone = [low_rank.fold_in(history) for history in histories]
    with compiled_programs() as names:
        others = [low_rank.fold_in(history[: len(history) // 2 + 1]) for history in histories]
    assert not names and len(others) == len(alone)
    for k, person in zip(order, many, strict=True):
        one = alone[k % len(histories)]
        assert person.converged and one.converged
        np.testing.assert_allclose(person.mode, one.mode, atol=1e-5)
        np.testing.assert_allclose(person.covariance_at_mode, one.covariance_at_mode, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(person.log_evidence, one.log_evidence, rtol=1e-6, atol=1e-6)
