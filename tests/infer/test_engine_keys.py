"""Compiled programs belong to one class of engine and one set of options, whatever key an algorithm gives itself."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from docs.extending.new_engine import ExactGaussian
from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.front.options import option_key
from numpyro_ext.structure import read_latent_gaussian
from tests.compilations import compiled_programs

Y = np.array([0.4, -0.2, 1.1])


def model(y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def other_model(y):
    model(y)


def log_evidence_of(engine, **options):
    engine.run(jax.random.key(0), Y, **options)
    return float(engine.log_evidence)


EXACT = float(dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + jnp.ones((3, 3))).log_prob(Y))
"""The log evidence in closed form."""
TOL = 1e-8 if jax.config.jax_enable_x64 else 1e-4


class Penalised(LaplaceApproximation):
    """An engine of a user, who gives all algorithms one key."""

    def __init__(self, model, *, penalty=0.0, **options):
        super().__init__(model, **options)
        self.penalty = penalty

    def algorithm(self, reading):
        base = super().algorithm(reading)

        def log_evidence(form, state):
            return base.log_evidence(form, state) - jnp.sum(jnp.asarray(self.penalty))

        return base._replace(log_evidence=log_evidence, key=("mine",))


class Shifted(ExactGaussian):
    """With the key of its base class."""

    def algorithm(self, reading):
        base = super().algorithm(reading)
        return base._replace(log_evidence=lambda form, state: base.log_evidence(form, state) + 7.0)


@pytest.mark.float32
def test_engines_of_other_options_report_their_own_numbers():
    free = Penalised(model)
    assert log_evidence_of(free) == pytest.approx(EXACT, abs=TOL)
    assert log_evidence_of(Penalised(model, penalty=100.0)) == pytest.approx(EXACT - 100.0, rel=1e-6)
    # Nor is the state of one taken for that of the other.
    continued = log_evidence_of(Penalised(model, penalty=50.0), init_state=free.last_state)
    assert continued == pytest.approx(EXACT - 50.0, rel=1e-6)
    with compiled_programs() as names:
        assert log_evidence_of(Penalised(model, penalty=100.0)) == pytest.approx(EXACT - 100.0, rel=1e-6)
    assert names == []


def test_engines_of_other_classes_report_their_own_numbers():
    assert log_evidence_of(ExactGaussian(model)) == pytest.approx(EXACT, abs=TOL)
    assert log_evidence_of(Shifted(model)) == pytest.approx(EXACT + 7.0, abs=TOL)


def test_an_option_that_is_set_anew_does_not_reach_functions_made_before():
    reading = read_latent_gaussian(model, (Y,), check=False)
    engine = Penalised(model, penalty=1.0)
    before = engine.bound_algorithm(reading)
    engine.penalty = np.full(2, 3.0)
    after = engine.bound_algorithm(reading)
    assert before.key != after.key
    form = reading.form({}, reading.data)
    state = before.init(form)
    difference = before.log_evidence(form, state) - after.log_evidence(form, state)
    assert float(difference) == pytest.approx(5.0, abs=TOL)


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        (EP, {"power": 0.5}),
        (LaplaceApproximation, {}),
        (VariationalGaussian, {"covariance": "diagonal"}),
        (INLA, {}),
        (Penalised, {"penalty": [1.0]}),
    ],
)
def test_keys_hold_options_of_the_algorithm_and_nothing_else(engine, changes):
    reading = read_latent_gaussian(model, (Y,), check=False)
    key = engine(model).bound_algorithm(reading).key
    # What is no part of the algorithm, or is data of its programs, compiles nothing.
    others = {"num_samples": 7, "progress_bar": False, "init_values": {"scale": 2.0}, "hyper_values": {"scale": 1.0}}
    others |= {"grid_step": 0.5} if engine is INLA else {}
    assert engine(other_model, **others).bound_algorithm(reading).key == key
    if changes:
        assert engine(model, **changes).bound_algorithm(reading).key != key


TABLE = pd.DataFrame({"a": [1.0, 2.0]})


@pytest.mark.parametrize(
    ("value", "equal", "other"),
    [
        (1, 1, 1.0),
        (True, True, 1),
        ([1, "a"], [1, "a"], (1, "a")),
        ({"a": np.ones(3)}, {"a": np.ones(3)}, {"a": jnp.ones(3)}),
        (np.zeros(2), np.zeros(2), np.zeros(2, np.float32)),
        (TABLE, TABLE.copy(), TABLE + 1.0),
        (jax.random.key(0), jax.random.key(0), jax.random.key(1)),
        ({1, 2}, {2, 1}, {1}),
        ({"a": 1, 2: "b"}, None, {"a": 1, 2: "b"}),
        (np.array([None, "a"]), None, np.array([None, "a"])),
        (model, model, other_model),
    ],
    ids=lambda value: type(value).__name__,
)
def test_options_are_equal_by_what_they_hold(value, equal, other):
    assert option_key(value) == option_key(value if equal is None else equal)
    assert hash(option_key(value)) == hash(option_key(value if equal is None else equal))
    assert option_key(value) != option_key(other)
