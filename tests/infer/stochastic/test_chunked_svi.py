"""ChunkedSVI against updates written by hand, the published reference, and NumPyro's own SVI."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.infer.front.files.archive import read_archive, write_archive
from numpyro_ext.infer.stochastic import training
from numpyro_ext.infer.stochastic.chunks import batches_of_events, batches_of_rows
from numpyro_ext.infer.stochastic.fit import TrainingState
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import Predictor
from tests.compilations import compiled_programs
from tests.tiers import thorough

REFERENCE = json.loads((Path(__file__).parents[2] / "reference" / "ko-crnn.json").read_text())


def sequences(lists, num_items=6):
    lengths = np.array([len(one) for one in lists])
    items = np.array([item for one in lists for item in one], int)
    return SimpleNamespace(items=items, lengths=lengths, starts=np.cumsum(lengths) - lengths, num_items=num_items)


def gradients_alone():
    """Optimiser that moves nothing and adds gradients up."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), jax.tree.map(jnp.add, state, grads)),
    )


def reference_values(cell):
    names = {"Win": "W_in", "Wzi": "W_zi", "Wri": "W_ri", "Wout": "W_out", "Wh": "W_h", "Wzh": "W_zh", "Wrh": "W_rh"}

    def renamed(values):
        found = {names[name]: jnp.array(value) for name, value in values.items()}
        return {name: value[:, None] if value.ndim == 3 else value for name, value in found.items()}

    given = REFERENCE[cell]
    return given, renamed(given["params"]), renamed


@pytest.mark.parametrize("cell", ["tanh", "gru"])
def test_density_and_gradients_are_those_of_the_reference(cell):
    given, params, renamed = reference_values(cell)
    events, options = jnp.array(REFERENCE["sequences"]), {"num_users": 3, "num_items": 6, "width": 4, "cell": cell}

    def loss(params):
        args = (jnp.arange(3), events, jnp.ones(events.shape, bool), jnp.zeros((3, 4)))
        return -log_density(collaborative_rnn, args, options, params)[0]

    total, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(total, given["total_nll"], rtol=1e-12)
    for name, value in renamed(given["grad_total_nll"]).items():
        np.testing.assert_allclose(grads[name], value, atol=1e-11)


@pytest.mark.parametrize("cell", thorough("tanh", "gru"))
def test_chunks_have_the_truncated_gradient_of_the_reference(cell):
    given, params, renamed = reference_values(cell)
    first = {name: value[:1] if value.ndim == 4 else value for name, value in params.items()}
    log = sequences(REFERENCE["sequences"][:1])

    engine = ChunkedSVI(
        collaborative_rnn,
        optim=gradients_alone(),
        plate="users",
        batch_size=1,
        chunk=REFERENCE["chunk"],
        progress_bar=False,
    )
    state = engine.run(random.key(0), log, num_epochs=1, width=4, cell=cell).last_state
    tables = {name: first[name] for name in ("W_h", "W_zh", "W_rh") if name in first}
    shared = {name: value for name, value in first.items() if name not in tables}
    zeros = jax.tree.map(jnp.zeros_like, (state.parameters.shared_state, state.parameters.row_states))
    state = state._replace(parameters=type(state.parameters)(shared, tables, *zeros), epoch=0, losses=())
    fit = engine.run(random.key(0), log, num_epochs=1, width=4, cell=cell, init_state=state)
    grads = {**fit.last_state.parameters.shared_state, **fit.last_state.parameters.row_states}
    for name, value in renamed(given["user0_truncated_grad"]).items():
        np.testing.assert_allclose(grads[name], value[:1] if value.ndim == 4 else value, atol=1e-11)
    np.testing.assert_allclose(fit.losses[0] * 12, given["user0_nll"], rtol=1e-12)
    scores = fit.event_log_probabilities(log)
    np.testing.assert_allclose(scores, given["log_probs"][0], rtol=1e-12)
    following = [fit.next_log_probabilities(log.items[:n], user=0)[log.items[n]] for n in (0, 3, 4, 9)]
    np.testing.assert_allclose(following, scores[[0, 3, 4, 9]], rtol=1e-12)


def regression(rows, x, y, *, num_rows):
    slope = numpyro.param("slope", jnp.array([0.5, -1.0]))
    with numpyro.plate("rows", num_rows, subsample_size=len(rows)):
        effect = numpyro.param("effect", jnp.linspace(-1.0, 1.0, 2 * num_rows).reshape(-1, 2), event_dim=1)
        numpyro.sample("y", dist.Normal(x @ slope + (x * effect).sum(-1), 1.0), obs=y)


def data(size=7):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 2))
    return x, x @ [1.0, 2.0] + rng.normal(size=size)


def by_hand(rule, x, y, num_epochs, batch_size, order_key):
    """Sum of squares by minibatches: each row and the shared part have states of their own."""
    size = len(y)
    effect, slope = np.linspace(-1, 1, 2 * size).reshape(-1, 2), np.array([0.5, -1.0])
    states: dict = {row: None for row in ["slope", *range(size)]}
    for epoch in range(num_epochs):
        uniform = np.asarray(random.uniform(random.fold_in(order_key, epoch), (2 * size,)))
        for batch in batches_of_rows(size, batch_size, uniform):
            rows = batch.users
            residual = y[rows] - x[rows] @ slope - (x[rows] * effect[rows]).sum(-1)
            grads = {row: -residual[k] * x[row] for k, row in enumerate(rows)}
            step, states["slope"] = rule(-(size / len(rows)) * residual @ x[rows], states["slope"])
            slope = slope + step
            for row, grad in grads.items():
                step, states[row] = rule(grad, states[row])
                effect[row] += step
    return effect, slope


def momentum(grad, state):
    velocity = grad + 0.9 * (0.0 if state is None else state)
    return -0.01 * velocity, velocity


def rmsprop(grad, state):
    mean = 0.9 * (0.0 if state is None else state) + 0.1 * grad**2
    return -0.01 * grad / np.sqrt(mean + 1e-8), mean


def adagrad(grad, state):
    total = (0.1 if state is None else state) + grad**2
    return -0.05 * grad / np.sqrt(total + 1e-7), total


def adam(grad, state):
    m, v, count = (0.0, 0.0, 0) if state is None else state
    m, v, count = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2, count + 1
    step = -0.05 * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
    return step, (m, v, count)


RULES = {
    "adam": (adam, optax.adam(0.05)),
    "momentum": (momentum, optax.sgd(0.01, momentum=0.9)),
    "rmsprop": (rmsprop, optax.rmsprop(0.01, decay=0.9, eps=1e-8)),
    "adagrad": (adagrad, optax.adagrad(0.05)),
}


@pytest.mark.parametrize("name", RULES)
def test_rows_move_by_their_own_gradients_and_states(name):
    # seven rows in batches of three: the last has one row
    rule, optim = RULES[name]
    x, y = data()
    engine = ChunkedSVI(regression, optim=optim, plate="rows", batch_size=3, progress_bar=False)
    fit = engine.run(random.key(1), (x, y), num_epochs=3, num_rows=7)
    effect, slope = by_hand(rule, x, y, 3, 3, fit.last_state.order_key)
    np.testing.assert_allclose(fit.params["effect"], effect, atol=1e-12)
    np.testing.assert_allclose(fit.params["slope"], slope, atol=1e-12)


def chain(users, events, mask, carry, *, num_users, num_items):
    """Logits of the next event are a bias of the user and what was carried from the event before."""
    shared = numpyro.param("shared", 0.1 * jnp.arange(num_items * num_items).reshape(num_items, num_items) / num_items)
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        bias = numpyro.param("bias", 0.1 * jnp.ones((num_users, 1, num_items)), event_dim=1)
        before = jnp.concatenate([carry[:, None], jax.nn.one_hot(events, num_items)[:, :-1]], 1)
        with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
            numpyro.sample("event", dist.Categorical(logits=bias + before @ shared), obs=events)
    last = jax.nn.one_hot(events, num_items)[:, -1]
    return jnp.where(mask.sum(1, keepdims=True) > 0, last, carry)


LISTS = [[0, 1, 2, 0, 1], [2], [], [1, 1, 2, 1, 1, 1, 0], [0, 2]]


def chain_engine(**options):
    kept = {"optim": optax.adam(0.1), "plate": "users", "batch_size": 2, "chunk": 3, "progress_bar": False}
    return ChunkedSVI(chain, **{**kept, **options})


@pytest.fixture(scope="module")
def engine():
    return chain_engine()


def run(engine, log=None, **options):
    log = sequences(LISTS, 3) if log is None else log
    return engine.run(random.key(0), log, **{"num_epochs": 2, "carry": jnp.zeros(3), **options})


def test_every_checkpoint_resumes_to_the_bit_and_other_rows_stay(engine, tmp_path, monkeypatch):
    states = []

    def write(path, content):
        write_archive(tmp_path / str(len(states)), content)
        states.append(TrainingState.unpacked(read_archive(tmp_path / str(len(states)))["training"]))

    monkeypatch.setattr(training, "write_archive", write)
    fit = run(engine, checkpoint=tmp_path / "none", checkpoint_minutes=0.0)
    assert len(states) == 5  # two batches an epoch, and the end
    monkeypatch.undo()
    for state in states[:4]:
        again = run(engine, init_state=state)
        np.testing.assert_array_equal(again.losses, fit.losses)
        for name, value in fit.params.items():
            np.testing.assert_array_equal(again.params[name], value)
    # the user without events has moved nowhere, and one batch moves two users at most
    np.testing.assert_array_equal(fit.params["bias"][2], np.full((1, 3), 0.1))
    tables = [np.asarray(state.parameters.tables["bias"]) for state in states[:2]]
    assert ((tables[0] != 0.1).any((1, 2)).sum(), (tables[1] != tables[0]).any((1, 2)).sum()) == (2, 2)


def test_a_file_goes_on_where_it_ended(engine, tmp_path):
    fit = run(engine, checkpoint=tmp_path / "kept", num_epochs=1)
    longer = run(engine, checkpoint=tmp_path / "kept")
    whole = run(engine)
    assert (len(fit.losses), len(longer.losses)) == (1, 2)
    np.testing.assert_array_equal(longer.params["shared"], whole.params["shared"])
    longer.save(tmp_path / "fit")
    loaded = chain_engine().load(tmp_path / "fit")
    log = sequences(LISTS, 3)
    np.testing.assert_array_equal(loaded.event_log_probabilities(log), whole.event_log_probabilities(log))
    np.testing.assert_array_equal(run(engine, init_state=loaded.last_state, num_epochs=3).losses[:2], whole.losses)


_KILLED = """
import sys
from pathlib import Path
from tests.infer.stochastic.test_chunked_svi import chain_engine, run
run(chain_engine(), checkpoint=Path(sys.argv[1]), checkpoint_minutes=0.0, num_epochs=100_000)
"""


@pytest.mark.thorough
def test_a_process_that_is_killed_goes_on_from_its_last_checkpoint_to_the_bit(engine, tmp_path):
    path, seen = tmp_path / "kept", set()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for name in ("enable_x64", "disable_most_optimizations"):  # the same programs as here
        environment[f"JAX_{name.upper()}"] = str(jax.config.read(f"jax_{name}"))
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(path)], env=environment) as process:
        while len(seen) < 3 and process.poll() is None:
            if path.exists():
                seen.add(path.read_bytes())
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    state = TrainingState.unpacked(read_archive(path)["training"])
    num_epochs = state.epoch + 2
    assert state.epoch + state.batch > 0 and num_epochs < 100_000
    again, whole = run(engine, checkpoint=path, num_epochs=num_epochs), run(engine, num_epochs=num_epochs)
    assert again.last_state.epoch == whole.last_state.epoch == num_epochs
    np.testing.assert_array_equal(again.losses, whole.losses)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(again.params[name], value)


def test_scores_and_stops_by_validation(engine):
    log = sequences(LISTS, 3)
    later = sequences([[2, 2], [0], [], [1], []], 3)  # unlike the training, so that it overfits
    split = SimpleNamespace(train=log, validation=later, test=sequences([[0], [], [1], [2, 2], []], 3))
    fit = run(chain_engine(optim=optax.adam(1.0)), split, num_epochs=30, patience=3)
    errors = fit.validation_errors
    assert isinstance(fit, Predictor)  # for mixtures with counts and comparisons
    assert fit.stopped == "patience" and len(errors) == fit.best_epoch + 3 < 30
    assert errors.argmin() + 1 == fit.best_epoch

    def predictive(user, history, following):
        logits = np.asarray(fit.params["bias"])[user, 0] + 0.0 * np.zeros(3)
        total, items = [], [*history, *following]
        for place in range(len(history), len(items)):
            shared = np.asarray(fit.params["shared"])[items[place - 1]] if place else 0.0
            total.append((logits + shared - np.logaddexp.reduce(logits + shared))[items[place]])
        return total

    by_user = [predictive(u, a, b) for u, (a, b) in enumerate(zip(LISTS, ([2, 2], [0], [], [1], []), strict=True))]
    np.testing.assert_allclose(min(errors), -np.mean([np.mean(one) for one in by_user if one]), rtol=1e-12)
    expected = [*predictive(0, [*LISTS[0], 2, 2], [0]), *predictive(2, [], [1]), *predictive(3, [*LISTS[3], 1], [2, 2])]
    np.testing.assert_allclose(fit.log_predictive(split), expected, rtol=1e-12)
    # the state of the chain is its last event, and nothing before the first
    np.testing.assert_array_equal(fit.states(split), [*np.eye(3)[[2]], np.zeros(3), *np.eye(3)[[1, 2]]])


def test_an_interrupt_keeps_what_there_is(engine, monkeypatch):
    shown = training.Training._progress

    def interrupted(self):
        if self.state.epoch == 1:
            signal.raise_signal(signal.SIGINT)
        return shown(self)

    monkeypatch.setattr(training.Training, "_progress", interrupted)
    with pytest.warns(UserWarning, match="interrupted in epoch 2"):
        fit = run(engine, num_epochs=9)
    assert fit.stopped == "interrupted" and (fit.last_state.epoch, fit.last_state.batch) == (1, 1)
    monkeypatch.undo()
    np.testing.assert_array_equal(run(engine, init_state=fit.last_state).losses, run(engine).losses)


def test_losses_that_are_not_finite_are_not_taken():
    def model(rows, y, *, num_rows):
        scale = numpyro.param("scale", jnp.array(0.1))
        with numpyro.plate("rows", num_rows, subsample_size=len(rows)):
            numpyro.sample("y", dist.Normal(0.0, jnp.sqrt(scale), validate_args=False), obs=y)

    engine = ChunkedSVI(model, optim=optax.sgd(1e3), plate="rows", batch_size=2, progress_bar=False)
    with pytest.warns(UserWarning, match="not finite"):
        fit = engine.run(random.key(0), np.zeros(4), num_epochs=9, num_rows=4)
    assert fit.stopped == "not finite" and "3 losses" in fit.notes[0]
    assert fit.last_state.rate == 0.125 and np.isfinite(fit.params["scale"])


def test_a_loss_that_grows_is_told():
    def model(rows, y, *, num_rows):
        mean = numpyro.param("mean", jnp.array(0.1))
        with numpyro.plate("rows", num_rows, subsample_size=len(rows)):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    engine = ChunkedSVI(model, optim=optax.sgd(3.0), plate="rows", batch_size=2, progress_bar=False)
    with pytest.warns(UserWarning, match="training diverges; try a smaller rate"):
        fit = engine.run(random.key(0), np.zeros(4), num_epochs=4, num_rows=4)
    assert fit.notes[0].startswith("the loss of epoch 4 is ") and np.isfinite(fit.losses).all()
    assert engine.run(random.key(0), np.zeros(4), num_epochs=1, num_rows=4).notes == ()  # of one nothing is known


def personal_means(users, events, mask, carry, *, num_users, num_items):
    spread = numpyro.param("spread", jnp.array(0.7), constraint=constraints.positive)
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        logit = numpyro.sample("logit", dist.Normal(level, spread))
        with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
            numpyro.sample("event", dist.Bernoulli(logits=logit), obs=events)
    return carry


def points(users, events, mask, carry, *, num_users, num_items):
    numpyro.sample("level", dist.Delta(numpyro.param("level_at", jnp.array(0.3))))
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        at = numpyro.param("logit_at", jnp.linspace(-1.0, 1.0, num_users)[:, None], event_dim=0)
        numpyro.sample("logit", dist.Delta(at))


@pytest.mark.thorough
def test_priors_count_once_over_the_chunks_of_a_batch():
    # all users in one batch: gradients of its chunks add up to the gradient of the whole bound
    lists = [[0, 1, 1, 0, 1], [1], [1, 1, 1, 0, 1, 1, 1]]
    engine = ChunkedSVI(
        personal_means, points, gradients_alone(), plate="users", batch_size=3, chunk=2, progress_bar=False
    )
    fit = engine.run(random.key(0), sequences(lists, 2), num_epochs=1, carry=jnp.zeros(()))

    def bound(level, logit, log_spread):
        prior = dist.Normal(0, 2).log_prob(level) + dist.Normal(level, jnp.exp(log_spread)).log_prob(logit).sum()
        return -prior - sum(
            dist.Bernoulli(logits=logit[u]).log_prob(jnp.array(one)).sum() for u, one in enumerate(lists)
        )

    value, grads = jax.value_and_grad(bound, (0, 1, 2))(0.3, jnp.linspace(-1.0, 1.0, 3), np.log(0.7))
    state = fit.last_state.parameters
    np.testing.assert_allclose(fit.losses[0] * 13, value, rtol=1e-12)
    np.testing.assert_allclose(state.shared_state["level_at"], grads[0], rtol=1e-12)
    np.testing.assert_allclose(state.row_states["logit_at"][:, 0], grads[1], rtol=1e-12)
    np.testing.assert_allclose(state.shared_state["spread"], grads[2], rtol=1e-12)


def test_a_run_on_other_data_of_this_size_compiles_nothing(engine):
    run(engine, num_epochs=3, init_state=run(engine).last_state)
    with compiled_programs() as names:
        fit = run(engine, sequences([one[::-1] for one in LISTS], 3), init_params={"shared": jnp.ones((3, 3))})
        names.clear()  # values to begin at are one argument more
        run(engine, sequences([one[::-1] for one in LISTS], 3))
        run(engine, sequences([one[::-1] for one in LISTS], 3), num_epochs=3, init_state=fit.last_state)
    assert not names


def test_fits_of_one_engine_do_not_disturb_each_other(engine):
    log, other = sequences(LISTS, 3), sequences([[0, 1], [2, 2, 1]], 3)
    first = run(engine, log)
    before = first.event_log_probabilities(log)
    second = run(engine, other)
    np.testing.assert_array_equal(first.event_log_probabilities(log), before)
    assert second.params["bias"].shape == (2, 1, 3)
    with pytest.raises(ValueError, match="the fit has 2 users; these are 5"):
        second.event_log_probabilities(log)
    with pytest.raises(ValueError, match="are personal; give user="):
        first.next_log_probabilities([0, 1])
    with pytest.raises(ValueError, match="'bias' is a free parameter of each user"):
        first.fold_in([0, 1])


@pytest.mark.thorough
@pytest.mark.parametrize("is_topics", [False, True])
def test_minibatches_are_those_of_svi_on_whole_tables(is_topics):
    """Poisson factorisation, or topics, with an autoguide: the same batches and draws under NumPyro's SVI give the same
    tables."""
    rng = np.random.default_rng(3)
    counts = rng.poisson(np.exp(rng.normal(size=(20, 2)) @ rng.normal(size=(2, 6)) * 0.5))

    def model(rows, counts, *, num_rows):
        loadings = numpyro.sample("loadings", dist.Normal(0.0, 1.0).expand([2, 6]).to_event(2))
        with numpyro.plate("rows", num_rows, subsample_size=len(rows), dim=-1):
            factors = numpyro.sample("factors", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            if is_topics:
                words = jax.nn.softmax(factors) @ jax.nn.softmax(loadings)
                numpyro.sample("counts", dist.Multinomial(counts.sum(1), words), obs=counts)
            else:
                numpyro.sample("counts", dist.Poisson(jnp.exp(factors @ loadings)).to_event(1), obs=counts)

    start = init_to_value(values={"loadings": jnp.linspace(-1.0, 1.0, 12).reshape(2, 6), "factors": jnp.ones((5, 2))})
    guides = [AutoNormal(model, init_loc_fn=start) for _ in range(2)]
    engine = ChunkedSVI(model, guides[0], optax.sgd(1e-3), plate="rows", batch_size=5, progress_bar=False)
    fit = engine.run(random.key(0), counts, num_epochs=2, num_rows=20)

    # the plate scales gradients by four, which rows of tables do not take
    kinds = {"rows": optax.sgd(1e-3 * 5 / 20), "shared": optax.sgd(1e-3)}
    optim = optax.multi_transform(
        kinds, lambda params: {name: "rows" if name.startswith("factors") else "shared" for name in params}
    )
    svi = SVI(model, guides[1], optim, Trace_ELBO())
    state = svi.init(random.key(0), jnp.arange(5), counts[:5], num_rows=20)
    state = state._replace(rng_key=random.split(random.key(0), 3)[2])

    @jax.jit
    def step(state, rows):
        svi.model, svi.guide = (numpyro.handlers.substitute(fn, data={"rows": rows}) for fn in (model, guides[1]))
        return svi.update(state, rows, jnp.asarray(counts)[rows], num_rows=20)

    for epoch in range(2):
        uniform = np.asarray(random.uniform(random.fold_in(fit.last_state.order_key, epoch), (40,)))
        losses = []
        for batch in batches_of_rows(20, 5, uniform):
            state, loss = step(state, jnp.asarray(batch.users))
            losses.append(loss)
        np.testing.assert_allclose(fit.losses[epoch], np.mean(losses) / 20, rtol=1e-12)
    for name, value in svi.get_params(state).items():
        np.testing.assert_allclose(fit.params[name], value, rtol=1e-10)


def test_a_fresh_guide_begins_at_given_parameters():
    """An autoguide keeps what it is begun with, which must be arrays; wrong shapes are named all the same."""

    def model(rows, values, *, num_rows):
        level = numpyro.param("level", jnp.zeros(2))
        with numpyro.plate("rows", num_rows, subsample_size=len(rows), dim=-1):
            own = numpyro.sample("own", dist.Normal(0.0, 1.0))
            numpyro.sample("values", dist.Normal(level[0] + own, 1.0), obs=values)

    def begun(level):
        options = {"plate": "rows", "batch_size": 2, "progress_bar": False}
        engine = ChunkedSVI(model, AutoNormal(model, init_scale=0.3), optax.sgd(0.0), **options)
        return engine.run(random.key(0), np.arange(5.0), num_epochs=1, num_rows=5, init_params={"level": level})

    fit = begun(np.array([3.0, 4.0]))
    np.testing.assert_array_equal(fit.params["level"], [3.0, 4.0])
    np.testing.assert_allclose(fit.params["own_auto_scale"], np.full(5, 0.3))
    with pytest.raises(ValueError, match=r"'level' with the shape \(3,\), and the model has it with \(2,\)"):
        begun(np.zeros(3))


def test_batches_hold_like_lengths_in_few_shapes():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 400, 103)
    found = batches_of_events(lengths, 20, 64, rng.random(206))
    users = np.concatenate([batch.users for batch in found])
    np.testing.assert_array_equal(np.sort(users), np.flatnonzero(lengths))
    for batch in found:
        assert lengths[batch.users].max() <= batch.width * batch.num_chunks
    assert len({(len(batch.users), batch.width) for batch in found}) <= 4
    padded = sum(len(batch.users) * batch.width * batch.num_chunks for batch in found)
    assert padded < 1.35 * lengths.sum()


def no_event_dim(rows, y, *, num_rows):
    with numpyro.plate("rows", num_rows, subsample_size=len(rows)):
        mean = numpyro.param("mean", jnp.zeros(num_rows))
        numpyro.sample("y", dist.Normal(mean[rows], 1.0), obs=y)


def other_plate(rows, y, *, num_rows):
    with numpyro.plate("rows", num_rows, subsample_size=len(rows)), numpyro.plate("others", 5, 2, dim=-2):
        numpyro.param("mean", jnp.zeros((5, num_rows)), event_dim=0)


def without_carry(users, events, mask, carry, **kwargs):
    chain(users, events, mask, carry, **kwargs)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (no_event_dim, r"numpyro.param\('mean', ..., event_dim=0\)"),
        (other_plate, "only one plate can come in batches"),
        (lambda rows, y, num_rows: numpyro.param("mean", 0.0), "no plate 'rows'"),
        (lambda rows, y, num_rows: None, "nothing to train"),
        (
            lambda rows, y, num_rows: numpyro.sample("mean", dist.Normal()),
            r"latent sites \(mean\) and there is no guide",
        ),
        (lambda rows, y, num_rows: no_event_dim(rows, y, num_rows=9), "has 9 rows, and the data have 4"),
    ],
)
def test_models_that_cannot_come_in_batches_are_refused(model, message):
    engine = ChunkedSVI(model, optim=optax.sgd(0.1), plate="rows", batch_size=2)
    with pytest.raises(ValueError, match=message):
        engine.run(random.key(0), np.zeros(4), num_epochs=1, num_rows=4)


def test_a_model_without_carry_is_told_what_to_return():
    forgetful = ChunkedSVI(without_carry, optim=optax.sgd(0.1), plate="users", batch_size=2, chunk=3)
    with pytest.raises(ValueError, match="it returned nothing. End the model with `return carry`"):
        run(forgetful)
    shorter = ChunkedSVI(
        lambda *args, **kwargs: chain(*args, **kwargs)[:, :2],
        optim=optax.sgd(0.1),
        plate="users",
        batch_size=2,
        chunk=3,
    )
    with pytest.raises(ValueError, match=r"the shapes that it was given, \(2, 3\); it returned \(2, 2\)"):
        run(shorter)


@pytest.mark.thorough
def test_parameters_of_another_width_are_refused_and_chunks_may_be_of_one_event_or_of_more_than_all():
    log = sequences([[0, 1, 2, 0, 1], [1, 0], [2]], 3)

    def trained(chunk, **options):
        engine = ChunkedSVI(
            collaborative_rnn, optim=optax.sgd(0.0), plate="users", batch_size=2, chunk=chunk, progress_bar=False
        )
        return engine.run(random.key(0), log, num_epochs=1, personal="none", **options)

    alone, whole = trained(1, width=2), trained(100, width=2)
    np.testing.assert_allclose(alone.losses, whole.losses, rtol=1e-9)
    with pytest.raises(ValueError, match=r"'W_h' with the shape \(2, 2\), and the model has it with \(3, 3\)"):
        trained(4, width=3, init_params={"W_h": whole.params["W_h"]})
    with pytest.raises(ValueError, match="another model, optimiser or number of rows"):
        trained(100, width=3, init_state=whole.last_state)


def test_optimisers_and_options_that_cannot_work_are_refused(engine):
    with pytest.raises(ValueError, match="clip each value"):
        run(chain_engine(optim=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))))
    assert run(chain_engine(optim=optax.sgd(1e300)), num_epochs=1).losses[0] > 0  # too long, but of one row alone
    with pytest.raises(TypeError, match="optax optimiser"):
        ChunkedSVI(regression, optim=numpyro.optim.Adam(0.1), plate="rows", batch_size=2)
    with pytest.raises(TypeError, match="cannot be called within jax.jit"):
        jax.jit(lambda y: engine.run(random.key(0), y, num_epochs=1).params)(np.zeros(4))
    with pytest.raises(ValueError, match="batch_size is a positive integer"):
        ChunkedSVI(regression, optim=optax.sgd(0.1), plate="rows", batch_size=2.5)
    with pytest.raises(ValueError, match="one particle"):
        chain_engine(loss=Trace_ELBO(num_particles=2))
    with pytest.raises(ValueError, match="patience needs a validation"):
        run(engine, patience=2)
    with pytest.raises(ValueError, match="give the carry of one user"):
        run(engine, carry=None)
    with pytest.raises(ValueError, match="a run on other data of this size"):
        run(engine, init_state=run(engine, sequences([one[::-1] for one in LISTS], 3)).last_state)
    with pytest.raises(ValueError, match="another model, optimiser or number of rows"):
        run(engine, init_state=run(engine, sequences([[0, 1], [1]], 3)).last_state)


def test_long_first_steps_are_warned_of_and_are_as_long_as_told(recwarn):
    """The length that is told against the steps of optax itself; what begins with bias corrected is not told of."""

    def steps(optim, number):
        value = {"one": jnp.ones(())}
        state, found = optim.init(value), []
        for _ in range(number):
            step, state = optim.update({"one": jnp.array(0.3)}, state, value)
            found.append(float(step["one"]))
        return found

    slow = optax.chain(optax.clip(1.0), optax.rmsprop(0.01, decay=0.997))
    first, *_, last = steps(slow, 3000)
    assert round(first / last) == 18
    for optim in (*(rule for _, rule in RULES.values()), optax.rmsprop(0.01, decay=0.997, bias_correction=True)):
        chain_engine(optim=optim)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="are 18 times as long as later ones.*bias_correction=True"):
        chain_engine(optim=slow)


def test_data_that_are_no_sequences_are_refused(engine):
    with pytest.raises(TypeError, match="EventSequences"):
        run(engine, np.zeros((3, 4)))
    for log, message in (
        (sequences([[0, 3]], 3), "items are 0 to 2; these are 0 to 3"),
        (sequences([[0, -1]], 3), "these are -1 to 0"),
        (sequences([[], []], 3), "no training events"),
        (SimpleNamespace(**{**vars(sequences(LISTS)), "items": np.zeros(15)}), "vector of integers"),
        (SimpleNamespace(**{**vars(sequences(LISTS)), "starts": np.array([0, 5, 6, 6, 14])}), "do not fit"),
        (SimpleNamespace(train=sequences(LISTS, 3), validation=sequences([[]] * 5, 3)), "no validation events"),
    ):
        with pytest.raises(ValueError, match=message):
            run(engine, log)
    rows = ChunkedSVI(regression, optim=optax.sgd(0.1), plate="rows", batch_size=2)
    with pytest.raises(TypeError, match="arrays of numbers"):
        rows.run(random.key(0), np.array(["a", "b"]), num_epochs=1)
    with pytest.raises(ValueError, match="one row for each member"):
        rows.run(random.key(0), (np.zeros(3), np.zeros(4)), num_epochs=1)
