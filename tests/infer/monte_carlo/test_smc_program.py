"""A sampler as pure functions: runs and updates inside ``scan``, ``map`` and ``vmap`` are those of SMC itself."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro import handlers
from scipy.stats import multivariate_normal

from numpyro_ext.infer import SMC
from numpyro_ext.structure import ModelStructureError
from tests.infer.front.test_compiled_programs import compiled_programs

KEY = random.key(3)
Y = np.random.default_rng(0).normal(1.0, 1.0, 12)


def level_model(y, seen=True, scale=1.0):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(level, scale), obs=y)


def exact(y):
    return multivariate_normal.logpdf(y, np.zeros(len(y)), np.eye(len(y)) + 1.0)


@pytest.fixture(scope="module")
def sampler():
    return SMC(level_model, num_particles=400, kernel="random-walk", progress_bar=False)


@pytest.fixture(scope="module")
def program(sampler):
    made = sampler.program(Y, np.zeros(12, bool))
    assert list(made.changing) == ["y", "seen"]  # scale is no array
    return made


@pytest.mark.thorough
def test_runs_and_updates_are_those_of_the_sampler(sampler, program):
    few, many = np.arange(12) < 3, np.arange(12) < 11
    sampler.run(KEY, Y, few)
    state = program.init(KEY, {"seen": few})
    np.testing.assert_allclose(state.log_evidence, sampler.log_evidence, atol=1e-12)
    sampler.update(Y, many)
    state = program.update({"seen": many}, state)
    assert bool(state.converged) and sampler.diagnostics.converged
    np.testing.assert_allclose(state.log_evidence, sampler.log_evidence, atol=1e-12)
    np.testing.assert_allclose(state.standard_error, sampler.log_evidence.standard_error, atol=1e-12)
    np.testing.assert_allclose(state.weights, sampler.weights, atol=1e-12)
    np.testing.assert_allclose(program.particles(state)["level"], sampler.particles["level"], atol=1e-12)
    assert int(state.num_evaluations) == int(sampler.history.num_evaluations.sum())
    with compiled_programs() as names:
        other = program.update({"y": Y + 0.1, "seen": few}, state)
    assert names == []
    assert abs(other.log_evidence - exact(Y[:3] + 0.1)) < 4.0 * other.standard_error


@pytest.mark.thorough
@pytest.mark.parametrize("over", [lax.map, pytest.param(lambda f, x: jax.vmap(f)(x), marks=pytest.mark.thorough)])
def test_experiments_side_by_side(program, over):
    """Each sees its own data, one by one, and its running evidences are right."""
    data = np.random.default_rng(1).normal(0.5, 1.0, (6, 12))

    def experiment(inputs):
        key, y = inputs

        def look(state, number):
            state = program.update({"y": y, "seen": jnp.arange(12) <= number}, state)
            return state, (state.log_evidence, state.standard_error, state.weights @ program.particles(state)["level"])

        state, found = lax.scan(look, program.init(key, {"y": y}), jnp.arange(12))
        return found, state.converged

    (evidences, errors, means), converged = jax.jit(lambda inputs: over(experiment, inputs))(
        (random.split(KEY, 6), jnp.asarray(data))
    )
    assert converged.all()
    ends = (0, 3, 11)
    wrong = np.array([[evidences[i, k] - exact(y[: k + 1]) for k in ends] for i, y in enumerate(data)])
    assert np.all(np.abs(wrong) < 4.0 * errors[:, ends])
    assert np.max(errors) < 0.2
    # half of the particles at least, one posterior deviation
    np.testing.assert_allclose(means[:, -1], data.sum(1) / 13.0, atol=4.0 / np.sqrt(13.0 * 200.0))


@pytest.mark.thorough
def test_data_that_no_particle_explains_are_told(program):
    state = program.init(KEY, {"y": Y * np.nan, "seen": np.ones(12, bool)})
    assert not bool(state.converged)
    assert not bool(program.update({"seen": np.arange(12) < 3}, state).converged)


def counts(number, y):
    level = numpyro.sample("level", dist.Normal(0, 1).expand([int(number)]).to_event(1))
    numpyro.sample("y", dist.Normal(level.sum(), 1), obs=y)


def wide(y, width):
    level = numpyro.sample("level", dist.Normal(0, width))
    numpyro.sample("y", dist.Normal(level, 1), obs=y)


def lengths(sizes, y):
    level = numpyro.sample("level", dist.Normal(0, 1).expand([len(sizes)]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.repeat(level, np.asarray(sizes)), 1), obs=y)


def test_arrays_that_decide_lengths_stay_what_they_are():
    made = SMC(lengths, num_particles=50, kernel="random-walk", progress_bar=False).program([4, 8], Y)
    assert list(made.changing) == ["y"]


def test_what_cannot_change_is_refused_by_name(program):
    with pytest.raises(ModelStructureError, match="needs the values of 'number'"):
        SMC(counts).program(3, Y, changing=("number", "y"))
    with pytest.raises(ModelStructureError, match="changing= names 'x'"):
        SMC(level_model).program(Y, changing="x")
    with pytest.raises(ValueError, match="'seen' was read as bool"):
        program.init(KEY, {"seen": np.ones(5, bool)})
    with pytest.raises(TypeError, match="random key comes first"):
        program.init({"y": Y})
    with pytest.raises(ValueError, match="devices"):
        SMC(level_model, devices=jax.devices()).program(Y, changing="y")
    made = SMC(wide, num_particles=200, kernel="random-walk", progress_bar=False).program(
        Y, 1.0, changing=("y", "width")
    )
    state = made.init(KEY, {"width": 2.0})
    expected = multivariate_normal.logpdf(Y, np.zeros(12), np.eye(12) + 4.0)
    assert abs(state.log_evidence - expected) < 4.0 * state.standard_error
    with pytest.raises(ValueError, match="Priors of this model depend on y or width"):
        made.update({"width": 1.0}, state)
