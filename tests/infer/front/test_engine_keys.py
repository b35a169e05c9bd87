"""Compiled programs belong to one algorithm and one set of its options."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from docs.extending.new_engine import Exact, ExactGaussian
from numpyro_ext.infer import (
    EP,
    INLA,
    Algorithm,
    ExpectationPropagation,
    Laplace,
    LaplaceApproximation,
    NaturalGradient,
    VariationalGaussian,
)
from numpyro_ext.infer.front.options import option_key
from numpyro_ext.structure import read_latent_gaussian
from numpyro_ext.structure.program.captured import stable_text
from tests.compilations import compiled_programs
from tests.tiers import few

Y = np.array([0.4, -0.2, 1.1])


def model(y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def other_model(y):
    model(y)


READING = read_latent_gaussian(model, (Y,), check=False)


def log_evidence_of(engine, **options):
    engine.run(jax.random.key(0), Y, **options)
    return float(engine.log_evidence)


EXACT = float(dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + jnp.ones((3, 3))).log_prob(Y))
"""The log evidence in closed form."""
TOL = 1e-8 if jax.config.jax_enable_x64 else 1e-4


@dataclass(frozen=True)
class PenalisedLaplace(Laplace):
    """Laplace's method less a penalty, a number or several."""

    penalty: Any = 0.0

    @property
    def is_exact_for_gaussian(self):
        return False

    def log_evidence(self, form, state):
        return super().log_evidence(form, state) - jnp.sum(jnp.asarray(self.penalty))


class WithPenalty:
    """The constructor of an engine with an option of a user."""

    def __init__(self, model, *, penalty=0.0, **options):
        super().__init__(model, **options)
        self.penalty = penalty


class Penalised(WithPenalty, LaplaceApproximation):
    """An engine of a user with an option."""

    def algorithm(self, reading):
        super().algorithm(reading)
        return PenalisedLaplace(self.penalty)


@dataclass(frozen=True)
class PenalisedPropagation(ExpectationPropagation):
    """Expectation propagation less a penalty, which its ``solve`` knows nothing of."""

    penalty: Any = 0.0

    def log_evidence(self, form, state):
        return super().log_evidence(form, state) - self.penalty


class PenalisedEP(WithPenalty, EP):
    """EP with an option of a user."""

    def algorithm(self, reading):
        super().algorithm(reading)
        return PenalisedPropagation(penalty=self.penalty)


class PenalisedByFunctions(Penalised):
    """The same as it was written before algorithms had fields, with one key for all of them."""

    def algorithm(self, reading):
        base = LaplaceApproximation.algorithm(self, reading)

        def log_evidence(form, state):
            return base.log_evidence(form, state) - jnp.sum(jnp.asarray(self.penalty))

        with pytest.warns(FutureWarning, match="write a frozen dataclass below Algorithm"):
            return base._replace(log_evidence=log_evidence, key=("mine",))


@dataclass(frozen=True)
class ShiftedExact(Exact):
    def log_evidence(self, form, state):
        return super().log_evidence(form, state) + 7.0


class Shifted(ExactGaussian):
    def algorithm(self, reading):
        super().algorithm(reading)
        return ShiftedExact()


class ShiftedByFunctions(ExactGaussian):
    """An engine whose algorithm is made of functions, with the key of another engine."""

    def algorithm(self, reading):
        base = super().algorithm(reading)
        with pytest.warns(FutureWarning, match=r"new_engine\.py"):
            return Algorithm(
                init=base.init,
                solve=base.solve,
                log_evidence=lambda form, state: base.log_evidence(form, state) + 7.0,
                posterior=base.posterior,
                key=base.key,
            )


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize("kind", few([Penalised, PenalisedByFunctions, PenalisedEP], 1))
def test_engines_of_other_options_report_their_own_numbers(kind):
    free = kind(model)
    assert log_evidence_of(free) == pytest.approx(EXACT, abs=TOL)
    assert log_evidence_of(kind(model, penalty=100.0)) == pytest.approx(EXACT - 100.0, rel=1e-6)
    # Nor is the state of one taken for that of the other.
    continued = log_evidence_of(kind(model, penalty=50.0), init_state=free.last_state)
    assert continued == pytest.approx(EXACT - 50.0, rel=1e-6)
    with compiled_programs() as names:
        assert log_evidence_of(kind(model, penalty=100.0)) == pytest.approx(EXACT - 100.0, rel=1e-6)
    assert (names == []) == (kind is not PenalisedByFunctions)  # nothing is known of functions, so that they share none


@pytest.mark.parametrize("kind", [Shifted, ShiftedByFunctions])
def test_engines_of_other_classes_report_their_own_numbers(kind):
    assert log_evidence_of(ExactGaussian(model)) == pytest.approx(EXACT, abs=TOL)
    assert log_evidence_of(kind(model)) == pytest.approx(EXACT + 7.0, abs=TOL)


@pytest.mark.parametrize("kind", [Penalised, PenalisedByFunctions])
def test_an_option_that_is_changed_does_not_reach_functions_made_before(kind):
    penalty = np.array([1.0, 0.0])
    engine = kind(model, penalty=penalty)
    before = engine.bound_algorithm(READING)
    if kind is Penalised:
        penalty += 1.0  # in place: 3 for 1
    else:
        engine.penalty = np.array([2.0, 1.0])
    after = engine.bound_algorithm(READING)
    assert before != after
    assert before.state_key != after.state_key
    form = READING.form({}, READING.data)
    state = before.init(form)
    difference = before.log_evidence(form, state) - after.log_evidence(form, state)
    assert float(difference) == pytest.approx(2.0, abs=TOL)


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        (EP, {"power": 0.5}),
        (LaplaceApproximation, {}),
        (VariationalGaussian, {"covariance": "diagonal"}),
        (VariationalGaussian, {"method": "cholesky"}),
        (INLA, {}),
        (Penalised, {"penalty": [1.0]}),
    ],
)
def test_algorithms_are_equal_by_their_options_and_nothing_else(engine, changes):
    found = engine(model).bound_algorithm(READING)
    # What is no part of the algorithm, or is data of its programs, compiles nothing.
    others = {"num_samples": 7, "progress_bar": False, "init_values": {"scale": 2.0}, "hyper_values": {"scale": 1.0}}
    others |= {"grid_step": 0.5} if engine is INLA else {}
    again = engine(other_model, **others).bound_algorithm(READING)
    assert (again, hash(again), again.state_key) == (found, hash(found), found.state_key)
    if changes:
        other = engine(model, **changes).bound_algorithm(READING)
        assert other != found
        assert other.state_key != found.state_key


def test_states_in_files_are_known_by_the_keys_of_earlier_releases():
    """Files hold a digest of these."""
    assert EP(model, power=0.5).algorithm(READING).state_key == ("EP", 0.0, True, 0.5, "parallel")
    assert INLA(model).algorithm(READING).state_key == ("LaplaceApproximation",)
    of_methods = [
        VariationalGaussian(model, method=method).algorithm(READING).state_key
        for method in ("natural-gradient", "coordinate", "opper-archambeau")
    ]
    assert of_methods == [
        ("VariationalGaussian", method, "'exact'", 20, "full")
        for method in ("natural-gradient", "coordinate", "opper-archambeau")
    ]
    # Of algorithms of users it is text and numbers, and tells functions apart.
    texts = [stable_text(PenalisedLaplace(value).state_key) for value in (1, True, [1], np.ones(1), np.sin, np.cos)]
    assert "PenalisedLaplace" in texts[0]
    assert len(set(texts)) == len(texts)
    assert texts[3] == stable_text(PenalisedLaplace(np.ones(1)).state_key)


def test_algorithms_refuse_options_that_engines_refuse():
    with pytest.raises(ValueError, match="damping is the fraction of the old site that is kept"):
        ExpectationPropagation(damping=1.0)
    with pytest.raises(ValueError, match="covariance must be one of 'full', 'diagonal', 'shared'"):
        NaturalGradient(covariance="banded")


def test_options_that_are_no_fields_are_refused():
    class Forgetful(Laplace):
        def __init__(self, penalty):
            self.penalty = penalty

    assert PenalisedLaplace(True) != PenalisedLaplace(1) != PenalisedLaplace(1.0)
    assert PenalisedLaplace([1.0]) == PenalisedLaplace([1.0])
    with pytest.raises(TypeError, match=r"holds 'penalty', which is no field.*write @dataclass\(frozen=True\)"):
        hash(Forgetful(1.0))
    with pytest.raises(TypeError, match="abstract"):
        dataclass(frozen=True)(type("Half", (Algorithm,), {"init": Laplace.init}))()


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
