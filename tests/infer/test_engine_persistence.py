"""Results on disk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.infer.front.archive import read_archive, write_archive
from numpyro_ext.linalg import convolution, select, wavelet_transform
from numpyro_ext.potentials.trees.forest import Forest


@pytest.fixture(scope="module")
def saved(fitted_counts, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run.npz"
    fitted_counts.save(path)
    return path


def test_a_loaded_engine_has_the_same_results(saved, fitted_counts, counts_case, capsys):
    engine = EP.load(saved, counts_case.model)
    assert engine.log_evidence == fitted_counts.log_evidence
    assert engine.diagnostics._replace(hyper=None, objective_trace=None) == fitted_counts.diagnostics._replace(
        hyper=None, objective_trace=None
    )
    np.testing.assert_array_equal(
        engine.diagnostics.hyper.objective_trace, fitted_counts.diagnostics.hyper.objective_trace
    )
    np.testing.assert_array_equal(engine.posterior["f"].mean, fitted_counts.posterior["f"].mean)
    np.testing.assert_array_equal(engine.posterior["f"].variance, fitted_counts.posterior["f"].variance)
    np.testing.assert_array_equal(engine.hyper["scale"].standard_error, fitted_counts.hyper["scale"].standard_error)
    for name, value in fitted_counts.get_samples().items():
        np.testing.assert_array_equal(engine.get_samples()[name], value)
    np.testing.assert_array_equal(engine.log_predictive()["y"], fitted_counts.log_predictive()["y"])
    engine.print_summary()
    assert "converged" in capsys.readouterr().out


def test_a_loaded_engine_can_go_on(saved, counts_case, fitted_counts):
    engine = EP.load(saved, counts_case.model)
    engine.run(jax.random.key(0), counts_case.t, counts_case.y, mask=counts_case.mask, init_state=engine.last_state)
    assert float(engine.log_evidence) == float(fitted_counts.log_evidence)


def test_options_are_saved(counts_case, tmp_path):
    engine = EP(
        counts_case.model, damping=0.25, num_samples=7, hyper_values={"scale": jnp.array(0.9)}, progress_bar=False
    )
    engine.run(jax.random.key(0), counts_case.t, counts_case.y)
    engine.save(tmp_path / "run")
    loaded = EP.load(tmp_path / "run", counts_case.model)
    assert (loaded.damping, loaded.num_samples, loaded.progress_bar) == (0.25, 7, False)
    assert loaded.hyper["scale"].is_fixed
    assert loaded.get_samples()["f"].shape == (7, counts_case.t.size)


def test_what_does_not_belong_together_is_refused(saved, line_case, counts_case, tmp_path):
    with pytest.raises(ValueError, match="holds a run of EP"):
        LaplaceApproximation.load(saved, counts_case.model)

    def other(t, y=None, mask=True):
        return counts_case.model(1.5 * t, y, mask)

    with pytest.raises(ValueError, match="another density"):
        EP.load(saved, other)
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    with pytest.raises(ValueError, match="not a file written by save"):
        EP.load(tmp_path / "other.npz", counts_case.model)


def test_archives_keep_containers_and_kinds(tmp_path):
    content = {
        "nested": {"a": [1, 2.5, "text", None, True], "b": (jnp.arange(3), np.ones(2, np.float32))},
        "key": jax.random.key(3),
        "old_key": jax.random.PRNGKey(3),
        "infinite": float("inf"),
    }
    write_archive(tmp_path / "file", content)
    found = read_archive(tmp_path / "file")
    assert found["nested"]["a"] == [1, 2.5, "text", None, True]
    assert isinstance(found["nested"]["b"], tuple)
    assert isinstance(found["nested"]["b"][0], jax.Array)
    assert isinstance(found["nested"]["b"][1], np.ndarray)
    assert found["nested"]["b"][1].dtype == np.float32
    assert found["infinite"] == float("inf")
    np.testing.assert_array_equal(jax.random.normal(found["key"]), jax.random.normal(content["key"]))
    np.testing.assert_array_equal(found["old_key"], content["old_key"])


def test_operators_and_forests_are_saved(tmp_path):
    blur = convolution((8, 8), np.ones((3, 3)) / 9.0, boundary="reflect")
    operator = select(np.arange(64) % 3 == 0) @ (2.0 * blur + wavelet_transform((8, 8), "db2", 1).T)
    forest = Forest.from_parents([-1, 0, 0, 1])
    write_archive(tmp_path / "file", {"operator": operator, "forest": forest})
    found = read_archive(tmp_path / "file")
    assert jax.tree.structure(found["operator"]) == jax.tree.structure(operator)
    x = np.random.default_rng(0).normal(size=64)
    np.testing.assert_array_equal(found["operator"] @ x, operator @ x)
    assert jax.tree.structure(found["forest"]) == jax.tree.structure(forest)
    jax.tree.map(np.testing.assert_array_equal, found["forest"], forest)


def test_objects_of_other_packages_are_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr("numpyro_ext.infer.front.archive._PACKAGE", "")
    write_archive(tmp_path / "file", {"outside": Fraction(1)})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="does not have in this form"):
        read_archive(tmp_path / "file")


class Fraction(NamedTuple):
    numerator: int


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"args\[1\].*function"):
        write_archive(tmp_path / "file", {"args": (1.0, lambda x: x)})
    with pytest.raises(TypeError, match="keys that are not strings"):
        write_archive(tmp_path / "file", {"kwargs": {1: 2}})
