"""Answers one below the other, in tables that are found: against sums over the cells of each person."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.infer.gaussian.algorithms.nodes.quadrature import Quadrature
from numpyro_ext.infer.gaussian.algorithms.nodes.shared_columns import SharedColumns
from numpyro_ext.models import item_response, item_response_records

_NUM_PEOPLE, _NUM_ITEMS = 80, 6
_FAMILIES = ["2pl"] * 3 + ["graded"] * 3


def _records(seed=0):
    """Two thirds of all answers in any order, those of a person to one item twice, and another person without any."""
    rng = np.random.default_rng(seed)
    person, item = map(np.ravel, np.meshgrid(np.arange(_NUM_PEOPLE), np.arange(_NUM_ITEMS), indexing="ij"))
    chosen = rng.permutation(np.flatnonzero((rng.random(person.size) < 0.7) & (person != 7)))
    chosen = np.append(chosen, chosen[:1])
    level = rng.normal(size=_NUM_PEOPLE)[person] + rng.logistic(size=person.size)
    answers = (level > 0.0).astype(int) + np.where(item >= 3, level > 1.0, 0)
    return person[chosen], item[chosen], answers[chosen]


def _engine(shares=True, **options):
    model = partial(item_response_records, num_people=_NUM_PEOPLE, num_items=_NUM_ITEMS, family=_FAMILIES)
    engine = AdaptiveQuadrature(model, progress_bar=False, **options)
    return engine if shares else engine._unshared()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Items to look at")
def test_records_have_the_sums_of_their_cells():
    person, item, answers = _records()
    mask = np.arange(len(person)) % 11 != 3
    engine = _engine()
    engine.run(jax.random.key(0), person, item, answers, mask)
    assert isinstance(engine._run.algorithm, SharedColumns) and engine.diagnostics.converged
    assert engine._run.algorithm.is_ragged and sum(f.number for f in engine._run.algorithm.families) == _NUM_ITEMS + 1
    hyper = {name: found.value for name, found in engine.hyper.items()}
    cells = _engine(shares=False, hyper_values=hyper)
    cells.run(jax.random.key(0), person, item, answers, mask)
    assert isinstance(cells._run.algorithm, Quadrature)
    np.testing.assert_allclose(float(engine.log_evidence), float(cells.log_evidence), rtol=1e-11)
    np.testing.assert_allclose(engine.posterior["trait"].mean, cells.posterior["trait"].mean, atol=1e-8)
    np.testing.assert_allclose(engine.posterior["trait"].variance, cells.posterior["trait"].variance, atol=1e-8)
    np.testing.assert_allclose(engine._run.leave_one_out[0], cells._run.leave_one_out[0], atol=1e-7)
    # the gradient and the second derivatives are those of the cells
    start = {name: np.asarray(value) for name, value in hyper.items()}
    again = _engine(shares=False, init_values=start)
    again.run(jax.random.key(0), person, item, answers, mask)
    for name, found in engine.hyper.items():
        np.testing.assert_allclose(found.value, again.hyper[name].value, atol=1e-3)
        np.testing.assert_allclose(found.standard_error, again.hyper[name].standard_error, rtol=1e-3)


@pytest.mark.thorough
def test_records_and_a_table_of_them_have_the_same_fit(tmp_path):
    person, item, answers = (part[:-1] for part in _records(1))
    table = np.full((_NUM_PEOPLE, _NUM_ITEMS), np.nan)
    table[person, item] = answers
    engine, whole = _engine(), AdaptiveQuadrature(partial(item_response, family=_FAMILIES), progress_bar=False)
    for one, args in ((engine, (person, item, answers)), (whole, (table,))):
        with pytest.warns(UserWarning, match="people without answers"):
            one.run(jax.random.key(0), *args)
    np.testing.assert_allclose(float(engine.log_evidence), float(whole.log_evidence), rtol=1e-11)
    for name, found in engine.hyper.items():
        np.testing.assert_allclose(found.value, whole.hyper[name].value, atol=1e-7)
    engine.save(tmp_path / "fit.npz")
    loaded = AdaptiveQuadrature.load(tmp_path / "fit.npz", engine.model)
    np.testing.assert_allclose(loaded.posterior["trait"].mean, engine.posterior["trait"].mean, atol=1e-12)


def test_rows_that_share_nothing_have_no_table():
    """A covariate of each row: no two rows have one factor."""

    def model(group, covariate, answers=None):
        slope = numpyro.param("slope", jnp.array(0.5))
        with numpyro.plate("groups", 20):
            level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("answers", dist.Bernoulli(logits=slope * covariate + level[group]), obs=answers)

    rng = np.random.default_rng(0)
    group = np.sort(rng.integers(0, 20, 100))
    engine = AdaptiveQuadrature(model, progress_bar=False)
    engine.run(jax.random.key(0), group, rng.normal(size=100), rng.integers(0, 2, 100))
    assert isinstance(engine._run.algorithm, Quadrature)
