"""Archives that earlier releases saved are still read."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.front.files.archive import read_archive
from numpyro_ext.potentials import Forest, LaplacePotential
from tests.infer.front.files.saved_runs import operators, runs
from tests.tiers import few

ARCHIVES = Path(__file__).parents[3] / "reference" / "archives"
pytestmark = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="the archives were saved in float64")


@pytest.fixture(params=[folder.name for folder in sorted(ARCHIVES.iterdir()) if folder.is_dir()])
def folder(request):
    return ARCHIVES / request.param


@pytest.mark.parametrize("name", few(runs(), 3))
def test_a_saved_run_is_loaded(folder, name):
    run, expected = runs()[name], json.loads((folder / "results.json").read_text())[name]
    engine = run.engine.load(folder / f"{name}.npz", run.model)
    np.testing.assert_allclose(engine.log_evidence, expected["log_evidence"], rtol=1e-9)
    assert set(engine.posterior) >= set(expected["means"]) and set(engine.hyper) == set(expected["hyper"])
    for site, mean in expected["means"].items():
        np.testing.assert_allclose(engine.posterior[site].mean, mean, rtol=1e-6, atol=1e-8)
    for site, value in expected["hyper"].items():
        np.testing.assert_allclose(engine.hyper[site].value, value, rtol=1e-6)
    assert engine.num_samples == 10 and engine.diagnostics.converged


def test_saved_arguments_are_what_they_were(folder):
    found, expected = read_archive(folder / "operators.npz"), operators()
    for name, operator in expected.items():
        assert jax.tree.structure(found[name]) == jax.tree.structure(operator)
        x = jnp.asarray(np.random.default_rng(0).normal(size=operator.shape[1]))
        np.testing.assert_allclose(found[name] @ x, operator @ x, atol=1e-12)
    assert jax.tree.structure(found["forest"]) == jax.tree.structure(Forest.from_parents([-1, 0, 0, 1]))
    assert isinstance(found["potential"], LaplacePotential) and found["potential"].scale == 2.0
