"""ChunkedSVI with people integrated out, against quadrature, differences, and the formula written by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.infer.stochastic.personal.laplace import LaplaceProgram, covariance_root
from numpyro_ext.infer.stochastic.personal.peaks import Peaks, inverse_curvature
from numpyro_ext.infer.stochastic.personal.people import Given, Mode, Slopes, _evidence
from numpyro_ext.infer.stochastic.personal.person import Person
from numpyro_ext.infer.stochastic.personal.spread import even_draws, spread_points
from numpyro_ext.infer.stochastic.setting import Setting
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences, EventSplit
from tests.monte_carlo import NUM_ERRORS

NUM_ITEMS, SGD = 4, optax.sgd(0.0)


def tastes(users, events, mask, carry, *, num_users, num_items, rank):
    """Items by taste, with numbers that bend, so that the Gauss-Newton curvature is not the Hessian."""
    base = numpyro.param("base", jnp.linspace(-0.5, 0.5, num_items))
    loadings = numpyro.param("loadings", jnp.cos(jnp.arange(rank * num_items)).reshape(rank, num_items))
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))[:, 0]
        logits = base + (bent(taste) @ loadings)[:, None]
        with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
            numpyro.sample("event", dist.Categorical(logits=logits), obs=events)
    return carry


def bent(numbers):
    return 3 * jnp.tanh(numbers / 3)


def engine_of(optim, model=tastes, **options):
    options = {"batch_size": 2, "chunk": 16, **options}
    return ChunkedSVI(model, optim=optim, plate="users", local="laplace", progress_bar=False, **options)


def people(lengths=(30, 1, 17, 0, 40)):
    rng = np.random.default_rng(1)
    labels = np.arange(NUM_ITEMS)
    lists = [rng.choice(labels, size=n, p=rng.dirichlet(np.ones(NUM_ITEMS))) for n in lengths]
    return EventSequences.from_lists([labels, *lists])  # all items have events


def curvature(numbers, count, base, loadings):
    p = jax.nn.softmax(base + bent(numbers) @ loadings)
    J = loadings.T * (1 - jnp.tanh(numbers / 3) ** 2)
    return jnp.eye(len(numbers)) + count.sum() * J.T @ (jnp.diag(p) - jnp.outer(p, p)) @ J


@jax.jit
def by_hand(counts, base, loadings):
    """Laplace evidence of each person and her mode, by Newton steps on the counts."""

    def density(numbers, count):
        return count @ jax.nn.log_softmax(base + bent(numbers) @ loadings) - 0.5 * numbers @ numbers

    def one(count):
        def step(_, numbers):
            at = curvature(numbers, count, base, loadings)
            return numbers + jnp.linalg.solve(at, jax.grad(density)(numbers, count))

        numbers = jax.lax.fori_loop(0, 40, step, jnp.zeros(len(loadings)))
        logdet = jnp.linalg.slogdet(curvature(numbers, count, base, loadings))[1]
        return density(numbers, count) - 0.5 * logdet, numbers

    return jax.vmap(one)(counts)


def by_quadrature(counts, base, loadings):
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    rank = len(loadings)
    points = np.stack(np.meshgrid(*[nodes] * rank), -1).reshape(-1, rank)
    weight = np.prod(np.stack(np.meshgrid(*[weights / weights.sum()] * rank), -1).reshape(-1, rank), -1)
    logs = np.asarray(jax.nn.log_softmax(base + bent(points) @ loadings))
    return np.log(weight @ np.exp(logs @ counts.T))


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 2])
def test_the_loss_is_the_laplace_evidence_with_its_whole_gradient(rank):
    """Loss against the formula and quadrature, gradient against differences of the formula."""
    log = people()
    base = jnp.linspace(-0.5, 0.5, NUM_ITEMS)
    loadings = jnp.cos(jnp.arange(rank * NUM_ITEMS)).reshape(rank, NUM_ITEMS)
    counts = np.stack([np.bincount(log[u], minlength=NUM_ITEMS) for u in range(len(log))]).astype(float)
    evidence, modes = by_hand(counts, base, loadings)
    np.testing.assert_allclose(evidence, by_quadrature(counts, base, loadings), rtol=0, atol=0.1)
    added = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), jax.tree.map(jnp.add, state, grads)),
    )
    engine = engine_of(added, batch_size=len(log))
    fit = engine.run(random.key(0), log, num_epochs=1, rank=rank, carry=jnp.zeros(()))
    np.testing.assert_allclose(fit.losses[0] * log.items.size, -evidence.sum(), rtol=1e-9)
    np.testing.assert_allclose(fit.params["taste_mean"][:, 0], modes, atol=1e-6)
    assert not fit.notes[1:] and "1 users have no training events" in fit.notes[0]
    # five of six people have events, and stand for all
    grads, step = fit.last_state.parameters.shared_state, 1e-4
    for item in range(NUM_ITEMS):
        shift = step * jnp.eye(NUM_ITEMS)[item]
        for name, up, down in (
            ("base", (base + shift, loadings), (base - shift, loadings)),
            ("loadings", (base, loadings.at[0].add(shift)), (base, loadings.at[0].add(-shift))),
        ):
            slope = (by_hand(counts, *up)[0].sum() - by_hand(counts, *down)[0].sum()) / (2 * step)
            got = grads[name][item] if name == "base" else grads[name][0, item]
            np.testing.assert_allclose(got, -6 / 5 * slope, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_what_people_share_is_learned_and_a_scale_is_not_shrunk():
    """Spread of a taste: the evidence is near the truth, where points of each person would run away."""
    rng = np.random.default_rng(0)
    strength = 1.5 * rng.normal(size=200)
    lists = [(rng.random(12) < 1 / (1 + np.exp(-s))).astype(int) for s in strength]

    def model(users, events, mask, carry, *, num_users, num_items):
        spread = numpyro.param("spread", jnp.array(0.3), constraint=dist.constraints.positive)
        with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
            one = numpyro.sample("one", dist.Normal(0.0, 1.0))
            logits = jnp.stack([jnp.zeros_like(one), spread * one], -1)
            with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
                numpyro.sample("event", dist.Categorical(logits=logits), obs=events)
        return carry

    log = EventSequences.from_lists(lists)
    engine = engine_of(optax.adam(0.03), model, batch_size=50)
    fit = engine.run(random.key(0), log, num_epochs=60, carry=jnp.zeros(()))
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    ones = np.array([sum(one) for one in lists])

    def minus_evidence(spread):
        logs = -np.logaddexp(0, -spread * nodes)[:, None] * ones - np.logaddexp(0, spread * nodes)[:, None] * (
            12 - ones
        )
        return -np.log(weights @ np.exp(logs) / weights.sum()).sum()

    grid = np.linspace(0.5, 3, 251)
    best = grid[np.argmin([minus_evidence(s) for s in grid])]
    np.testing.assert_allclose(fit.params["spread"], best, rtol=0.05)
    # the guide of the tables has the Gaussians of folding in
    person = fit.fold_in(log[7])
    np.testing.assert_allclose(fit.params["one_mean"][7, 0], person.mode, atol=1e-5)
    np.testing.assert_allclose(fit.params["one_root"][7, 0, 0] ** 2, person.covariance_at_mode[0], rtol=1e-5)
    # a validation is scored at the modes
    later = EventSequences.from_lists([[u % 2] for u in range(200)])
    split = SimpleNamespace(train=log, validation=later)
    again = engine.run(random.key(0), split, num_epochs=1, init_params=fit.params, carry=jnp.zeros(()))
    assert again.losses[0] < fit.losses[0]
    state = again.last_state.parameters
    strengths = np.exp(state.shared["spread"]) * np.ravel(state.tables["one_mean"])
    expected = np.logaddexp(0, np.where(np.arange(200) % 2, -1, 1) * strengths).mean()
    np.testing.assert_allclose(again.validation_errors, expected, rtol=1e-6)


def test_what_cannot_be_integrated_is_named():
    log = people((5, 6))
    with pytest.raises(ValueError, match='too much for a full Gaussian.*personal="low-rank"'):
        engine_of(optax.adam(0.1), collaborative_rnn).run(
            random.key(0), log, num_epochs=1, width=9, personal="deviation"
        )
    with pytest.raises(ValueError, match=r"needs one latent site in the plate 'users'.*the model has \[\]"):
        engine_of(optax.adam(0.1), collaborative_rnn).run(random.key(0), log, num_epochs=1, width=2, personal="none")
    with pytest.raises(ValueError, match='local is None or "laplace"'):
        ChunkedSVI(tastes, optim=optax.adam(0.1), plate="users", batch_size=2, local="map")
    with pytest.raises(ValueError, match="neither guide nor loss"):
        ChunkedSVI(tastes, tastes, optax.adam(0.1), plate="users", batch_size=2, chunk=2, local="laplace")
    with pytest.raises(ValueError, match="init_params has 'bases', and the parameters are 'base'"):
        engine_of(optax.adam(0.1)).run(
            random.key(0), log, num_epochs=1, rank=1, carry=jnp.zeros(()), init_params={"bases": np.zeros(4)}
        )
    with pytest.raises(ValueError, match=r"'base' with the shape \(5,\), and the model has it with \(4,\)"):
        engine_of(optax.adam(0.1)).run(
            random.key(0), log, num_epochs=1, rank=1, carry=jnp.zeros(()), init_params={"base": np.zeros(5)}
        )


@pytest.mark.thorough
def test_modes_are_found_where_gauss_newton_is_slow():
    """Events that a network of large weights does not explain: steps without second derivatives creep or circle."""
    items = np.random.default_rng(0).integers(0, 4, (24, 16))
    options = {"width": 3, "personal": "low-rank", "rank": 2}
    engine = engine_of(optax.sgd(0.0), collaborative_rnn)
    first = engine.run(random.key(0), EventSequences.from_lists(items[:2]), num_epochs=1, **options)
    large = {name: (10.0 if "basis" in name else 3.0) * value for name, value in first.params.items()}
    log = EventSequences.from_lists(items[:2])
    fit = engine.run(random.key(0), log, num_epochs=1, init_params=large, **options)
    people = fit.fold_in(list(items))
    assert all(person.converged for person in people)

    def density(numbers):
        return people[0].look(numbers[None])[1][0]

    np.testing.assert_allclose(jax.grad(density)(jnp.asarray(people[0].mode)), 0.0, atol=1e-4)
    assert np.linalg.eigvalsh(jax.hessian(density)(jnp.asarray(people[0].mode))).max() < 0


def turns(users, events, mask, carry, *, num_users, num_items, sees_others=False):
    """Items by a state that the events turn, and by the last event, which the carry has as an integer."""
    state, last = carry
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([2]).to_event(1))[:, 0]

        def step(carry, event):
            state, last = carry
            logits = jnp.sin(state[:, None] * jnp.arange(num_items)) + taste[:, :1] * (last[:, None] == 1)
            return (jnp.tanh(taste[:, 1] * state + taste[:, 0] * event), event), logits

        carry, logits = jax.lax.scan(step, (state, last), events.T)
        logits = jnp.swapaxes(logits, 0, 1)
        logits = logits * (1 + taste[:, :1, None] * events.sum(1)[:, None, None]) if sees_others else logits
        with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
            numpyro.sample("event", dist.Categorical(logits=logits), obs=events)
    return carry


GRU = {"width": 2, "personal": "low-rank", "rank": 2, "cell": "gru", "num_items": 5}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "options", "carry", "is_stepwise"),
    [
        (turns, {"num_items": 4}, (jnp.array(0.3), jnp.array(0)), True),
        (turns, {"num_items": 4, "sees_others": True}, (jnp.array(0.3), jnp.array(0)), False),
        (collaborative_rnn, GRU, jnp.zeros(2), True),
        (collaborative_rnn, {**GRU, "pointer": True}, (jnp.zeros(2), jnp.zeros(5)), False),
    ],
)
def test_the_curvature_is_the_hessian_of_the_density(model, options, carry, is_stepwise):
    items, mask = jnp.array([1, 3, 0, 1, 1, 2, 0, 0]), jnp.arange(8) < 6
    setting, program = Setting.of({"num_users": 1, **options}, carry, 1), LaplaceProgram(model, SGD, "users", 8)
    args = (items[None], mask[None], jax.tree.map(lambda x: x[None], carry))
    first = program.init(random.key(0), 1, jnp.arange(1), args, setting, None)
    person, given, numbers = program.people, Given(program.constrained(first), setting), jnp.array([0.5, -0.8])
    assert person.is_stepwise is is_stepwise
    precision = person._slopes(numbers, given, items, mask).precision
    found = jax.jit(person._curvature)(numbers, precision, given, items, mask)
    np.testing.assert_allclose(found, -jax.hessian(person._density)(numbers, given, items, mask), rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("has_ended", [True, False])
def test_the_evidence_of_a_search_that_has_not_ended_is_that_of_its_end(has_ended, monkeypatch):
    """A Newton step moves nothing where a search has ended, and may lead anywhere where it has not."""
    items, mask, carry = jnp.array([1, 3, 0, 1]), jnp.ones(4, bool), (jnp.array(0.3), jnp.array(0))
    setting, program = Setting.of({"num_users": 1, "num_items": 4}, carry, 1), LaplaceProgram(turns, SGD, "users", 4)
    args = (items[None], mask[None], jax.tree.map(lambda x: x[None], carry))
    first = program.init(random.key(0), 1, jnp.arange(1), args, setting, None)
    person, given, numbers = program.people, Given(program.constrained(first), setting), jnp.array([0.5, -0.8])
    at = jax.jit(person._slopes)(numbers, given, items, mask)
    end = Mode(numbers, at.precision, _evidence(at), jnp.array(60), jnp.array(has_ended))
    monkeypatch.setattr(person, "mode", lambda *args: end)
    found = jax.jit(lambda: person.evidence(given, numbers, items, jnp.array(4))[0])()
    assert (abs(found - end.log_evidence) < 1e-9) is not has_ended, (found, end.log_evidence)


@pytest.mark.thorough
def test_slopes_in_single_precision_are_those_of_autodiff():
    """Sums over many items for several numbers, which jaxlib 0.10.2 gets wrong in single precision alone."""
    options = {"num_users": 1, "num_items": 922, "width": 2, "personal": "low-rank", "rank": 4}
    rng = np.random.default_rng(0)
    items = rng.integers(0, 922, 32).astype(np.int32)
    with jax.enable_x64(False):
        items, mask = jnp.asarray(items), jnp.arange(32) < 30
        program = LaplaceProgram(collaborative_rnn, optax.sgd(0.0), "users", 32)
        setting, carry = Setting.of(options, jnp.zeros(2), 1), jnp.zeros((1, 2))
        first = program.init(random.key(0), 1, jnp.arange(1), (items[None], mask[None], carry), setting)
        given, numbers = Given(program.constrained(first), setting), jnp.array([0.5, -1.0, 0.2, 1.0])
        found = jax.jit(program.people._slopes)(numbers, given, items, mask)
        gradient = jax.jit(jax.grad(program.people._density))(numbers, given, items, mask)
    assert found.gradient.dtype == jnp.float32
    np.testing.assert_allclose(found.gradient, gradient, atol=1e-4)


def test_even_draws_are_uniform_and_leave_no_gaps():
    draws = even_draws(np.random.default_rng(0), 64, 5)
    assert (np.sort((draws * 64).astype(int), 0) == np.arange(64)[:, None]).all()  # one in each of 64 cells
    np.testing.assert_array_equal(even_draws(np.random.default_rng(0), 50, 5), draws[:50])
    assert even_draws(np.random.default_rng(0), 2, 1).shape == (2, 1)
    many = np.array([even_draws(np.random.default_rng(seed), 3, 4) for seed in range(2000)])
    assert (many > 0).all() and (many < 1).all()
    error = NUM_ERRORS / np.sqrt(2000)
    np.testing.assert_allclose(many.mean(0), 0.5, rtol=0, atol=error * 12**-0.5)
    np.testing.assert_allclose((many**2).mean(0), 1 / 3, rtol=0, atol=error * (1 / 5 - 1 / 9) ** 0.5)


def test_few_even_draws_do_for_many_independent_ones():
    """Four numbers of which a few events tell little: errors of 64 draws against quadrature, over many keys."""
    slopes, count = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6))), jnp.array([1.0, 0, 2, 0, 0, 1])

    def look(draws):
        logs = jax.nn.log_softmax(draws @ slopes)
        return logs, logs @ count - 0.5 * (draws**2).sum(1)

    mode = jnp.zeros(4)
    for _ in range(30):
        p = jax.nn.softmax(mode @ slopes)
        precision = jnp.eye(4) + 4 * ((slopes * p) @ slopes.T - jnp.outer(slopes @ p, slopes @ p))
        mode += jnp.linalg.solve(precision, slopes @ (count - 4 * p) - mode)
    mode, covariance = np.asarray(mode), np.linalg.inv(precision)
    person = Person(mode, covariance, 0.0, True, 0, look, Peaks(mode[None], covariance[None], np.ones(1)))
    nodes, weights = np.polynomial.hermite_e.hermegauss(16)
    points, weights = (np.stack(np.meshgrid(*[one] * 4), -1).reshape(-1, 4) for one in (nodes, weights))
    logs, _ = look(points)
    weights = weights.prod(1) * np.exp(logs @ count)
    exact = weights @ np.exp(logs) / weights.sum()
    found = np.array([person.next_probabilities(rng_key=random.key(seed)) for seed in range(40)])
    rms = np.sqrt(((found - exact) ** 2).mean(0))
    # of as many independent draws of the posterior itself
    independent = np.sqrt((weights @ (np.exp(logs) - exact) ** 2) / weights.sum() / 64)
    assert np.sqrt(np.mean((rms / independent) ** 2)) < 0.6, rms / independent
    # weights that add up to one leave a bias of the order of a variance
    np.testing.assert_array_less(abs(found.mean(0) - exact), NUM_ERRORS * rms / np.sqrt(40) + rms**2 / exact)


def person_of(density):
    def look(draws):
        return jnp.stack([draws[:, 0], -draws[:, 0]], 1), density(draws)

    mode, covariance = np.zeros(2), 0.01 * np.eye(2)
    return Person(mode, covariance, 0.0, True, 0, look, Peaks(mode[None], covariance[None], np.ones(1)))


def test_a_curvature_in_single_precision_has_an_inverse():
    steep = np.array([1e4, -2e4, 3e4])
    precision = np.eye(3, dtype=np.float32) + np.outer(steep, steep).astype(np.float32)  # one has no digits left
    covariance = inverse_curvature(precision)
    assert np.linalg.cholesky(covariance).shape == (3, 3)
    with jax.enable_x64(False):
        root = covariance_root(jnp.asarray(precision))
        evidence = _evidence(Slopes(jnp.zeros(()), jnp.zeros(3), jnp.asarray(precision)))
    assert (np.triu(root, 1) == 0).all() and (np.diag(root) > 0).all()
    np.testing.assert_allclose(evidence, -0.5 * np.log1p(steep @ steep), rtol=1e-5)
    np.testing.assert_allclose(root @ root.T, covariance, atol=1e-6)
    across = np.array([2.0, 1.0, 0.0]) / 5**0.5
    np.testing.assert_allclose(across @ covariance @ across, 1.0, rtol=1e-6)
    with pytest.raises(FloatingPointError, match="not finite: the network overflows"):
        inverse_curvature(np.full((2, 2), np.nan))


def test_draws_of_a_person_reach_what_the_curvature_at_her_mode_does_not_see():
    person = person_of(lambda draws: -0.5 * (draws**2).sum(1))
    np.testing.assert_allclose(person.mean, 0.0, atol=0.25)  # of which a quarter of the draws tell
    np.testing.assert_allclose(person.covariance, np.eye(2), atol=0.35)
    far = person_of(lambda draws: -0.5 * ((draws - 9.0) ** 2).sum(1) / 0.01)
    with pytest.warns(UserWarning, match="far from the Gaussian at its mode, .*Pareto k-hat .*NUTS for the latent"):
        far.next_probabilities()


def test_draws_are_around_all_modes_that_are_known():
    """Two normal distributions, of which draws around the one do not see the other."""
    places, shares = np.array([[2.0, 0.0], [-1.0, 3.0]]), np.array([0.3, 0.7])

    def look(draws):
        square = ((draws[:, None] - places) ** 2).sum(-1) / 0.01
        return jnp.stack([draws[:, 0], -draws[:, 0]], 1), jax.nn.logsumexp(-0.5 * square, axis=1, b=shares)

    flat = 0.01 * np.eye(2)
    modes = Peaks(places, np.stack([flat, flat]), np.array([0.5, 0.5]))
    both = Person(places[0], flat, 0.0, True, 0, look, modes)
    alone = Person(places[0], flat, 0.0, True, 0, look, Peaks(places[:1], flat[None], np.ones(1)))
    mean = shares @ places
    exact = flat + (shares[:, None] * (places - mean)).T @ (places - mean)
    error = NUM_ERRORS * np.sqrt(np.diag(exact) / 500)  # of 768 draws around the modes
    assert (np.abs(both.mean - mean) < error).all() and (np.abs(alone.mean - mean) > 5 * error).any()
    np.testing.assert_allclose(both.covariance, exact, atol=0.5)


def test_ends_of_searches_are_one_mode_each():
    means, precisions = np.array([[0.0, 0.0], [3.0, 0.0], [0.01, 0.0], [5.0, 5.0]]), np.tile(4 * np.eye(2), (4, 1, 1))
    logs, ended = np.array([-2.0, -1.0, -2.0, 4.0]), np.array([True, True, True, False])
    modes, evidence = Peaks.of(means, precisions, logs, ended)
    np.testing.assert_array_equal(modes.means, means[[1, 0]])
    np.testing.assert_allclose([evidence, *modes.shares * np.exp(evidence)], [evidence, np.exp(-1.0), np.exp(-2.0)])
    alone, evidence = Peaks.of(means, precisions, logs, np.zeros(4, bool))
    np.testing.assert_array_equal(alone.means, means[3:])
    assert evidence == 4.0 and alone.shares == [1.0]
    np.testing.assert_array_equal(spread_points(1, 3), np.zeros((1, 3)))
    points = spread_points(400, 3)
    np.testing.assert_allclose(points.mean(0), 0.0, atol=0.05)
    np.testing.assert_allclose(np.cov(points.T), np.eye(3), atol=0.1)


@pytest.mark.slow
def test_two_numbers_of_a_person_of_ten_events_are_better_than_a_matrix():
    """Two groups with chains of their own: networks of width 8 on ten events of each of 40 people."""
    rng = np.random.default_rng(0)
    chains = rng.dirichlet(np.full(20, 0.1), (2, 20))[np.arange(40) % 2]
    items = np.zeros((40, 63), int)
    items[:, 0] = rng.integers(20, size=40)
    for place in range(1, 63):
        rows = chains[np.arange(40), items[:, place - 1]].cumsum(-1)
        items[:, place] = np.minimum((rng.random((40, 1)) > rows).sum(-1), 19)

    def part(start, stop):
        return EventSequences(items[:, start:stop].ravel(), np.full(40, stop - start), np.arange(20), np.arange(40))

    split = EventSplit(part(0, 10), part(10, 13), part(13, 63))
    true = -np.log(chains[np.arange(40)[:, None], items[:, 12:-1], items[:, 13:]]).mean()
    run = {"num_epochs": 200, "patience": 25, "width": 8}

    def fit(rate, local=None, **options):
        kept = {"plate": "users", "batch_size": 20, "chunk": 16, "progress_bar": False}
        engine = ChunkedSVI(collaborative_rnn, optim=optax.adam(rate), local=local, **kept)
        return engine.run(random.key(0), split, **run, **options)

    matrices, pooled = fit(0.03, personal="full"), fit(0.03, personal="none")
    numbers = fit(0.01, "laplace", personal="low-rank", rank=2, init_params=pooled.params)
    errors = [-found.log_predictive(split).mean() for found in (matrices, numbers)]
    assert true < errors[1] < errors[0] - 0.1, (true, errors)
