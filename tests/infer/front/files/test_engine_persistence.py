"""Results on disk."""

import copy
import dataclasses
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array

from numpyro_ext.infer import EP, SMC, LaplaceApproximation
from numpyro_ext.infer.front.answers.sites import PointPosterior, PosteriorSites
from numpyro_ext.infer.front.files.archive import read_archive, write_archive
from numpyro_ext.infer.front.files.checkpoints import read_checkpoint, write_checkpoint
from numpyro_ext.linalg import (
    LinearOperator,
    convolution,
    frozen_pytree,
    saved_as,
    saved_names,
    select,
    wavelet_transform,
)
from numpyro_ext.linalg.operators.convolution import _by_fourier
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


def test_options_of_numpy_are_given_back(counts_case, tmp_path):
    options = {"num_steps": np.int64(60), "num_samples": np.int32(7), "tol": np.float64(1e-7)}
    engine = EP(counts_case.model, hyper_values={"scale": 0.9}, progress_bar=False, **options)
    engine.run(jax.random.key(0), counts_case.t, counts_case.y)
    engine.save(tmp_path / "run")
    loaded = EP.load(tmp_path / "run", counts_case.model)
    assert [(type(v), v) for v in (loaded.num_steps, loaded.num_samples)] == [(int, 60), (int, 7)]
    assert loaded.tol == 1e-7


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


@saved_as("mine.Reversal")
@frozen_pytree
class Reversal(LinearOperator):
    example: Array
    factor: float = dataclasses.field(default=2.0, metadata={"static": True})

    @property
    def shape(self):
        return 2 * self.example.shape

    def matvec(self, x):
        return self.factor * x[::-1]


class Span(NamedTuple):
    first: float
    last: float


def test_a_class_of_your_own_is_saved_by_its_name(tmp_path, monkeypatch):
    write_archive(tmp_path / "file", {"args": (Reversal(jnp.ones(3)), 1.0)})
    with np.load(tmp_path / "file") as members:
        assert "numpyro_ext." not in str(members["header"]) and __name__ not in str(members["header"])
    found = read_archive(tmp_path / "file")["args"][0]
    assert jax.tree.structure(found) == jax.tree.structure(Reversal(jnp.ones(3)))
    np.testing.assert_array_equal(found @ jnp.arange(3.0), [4.0, 2.0, 0.0])
    with pytest.raises(ValueError, match="'FourierOperator' is the name of numpyro_ext"):
        saved_as("FourierOperator")(Reversal)
    with pytest.raises(TypeError, match="Case must be a dataclass or a NamedTuple"):
        saved_as("mine.Case")(type("Case", (), {}))
    monkeypatch.setattr(Reversal, "__dataclass_fields__", {})
    with pytest.raises(ValueError, match="another class of that name"):
        read_archive(tmp_path / "file")
    monkeypatch.delitem(saved_names._CLASSES, "mine.Reversal")
    with pytest.raises(ValueError, match=r"no class of that name.*import it before loading"):
        read_archive(tmp_path / "file")


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
def test_a_damaged_file_is_said_to_be_damaged(saved, counts_case, tmp_path, damage):
    whole, path = saved.read_bytes(), tmp_path / "damaged.npz"
    middle = len(whole) // 2
    contents = {
        "cut": whole[:middle],
        "changed": whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 99]) + whole[middle + 99 :],
        "empty": b"",
        "text": b"no archive at all",
    }
    path.write_bytes(contents[damage])
    with pytest.raises(ValueError, match=r"damaged.npz' is damaged, or no file of this package"):
        EP.load(path, counts_case.model)
    with pytest.raises(ValueError, match=r"damaged checkpoint has to be removed"):
        read_checkpoint(path, (), "")


def test_checkpoints_and_runs_are_told_apart(saved, counts_case, fitted_counts, tmp_path):
    with pytest.raises(ValueError, match="finished run"):
        read_checkpoint(saved, (), "")
    write_checkpoint(tmp_path / "checkpoint", fitted_counts.last_state)
    with pytest.raises(ValueError, match="is a checkpoint"):
        EP.load(tmp_path / "checkpoint", counts_case.model)


@pytest.mark.thorough
def test_a_run_with_complex_arrays_is_saved(tmp_path):
    def blurred(kernel, y):
        s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([y.size]).to_event(1))
        numpyro.sample("y", dist.Normal(_by_fourier(kernel, y.shape, "periodic") @ s, 0.3), obs=y)

    kernel, y = jnp.array([0.5, 0.3]), jnp.array([0.3, -1.0, 2.0, 0.4, 0.1])
    engine = EP(blurred, num_samples=5, progress_bar=False)
    engine.run(jax.random.key(0), kernel, y)
    engine.save(tmp_path / "run")
    loaded = EP.load(tmp_path / "run", blurred)
    np.testing.assert_array_equal(loaded.posterior["s"].mean, engine.posterior["s"].mean)


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"args\[1\].*function"):
        write_archive(tmp_path / "file", {"args": (1.0, lambda x: x)})
    with pytest.raises(TypeError, match=r"args\[0\].*Span, which has no name in files.*saved_as"):
        write_archive(tmp_path / "file", {"args": (Span(1.0, 2.0),)})
    with pytest.raises(TypeError, match="keys that are not strings"):
        write_archive(tmp_path / "file", {"kwargs": {1: 2}})


def _counts_by_group(x, group, y=None):
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 2):
        level = numpyro.sample("level", dist.Normal(0, spread))
    numpyro.sample("y", dist.Poisson(jnp.exp(level[group] + x)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP(_counts_by_group), SMC(_counts_by_group, num_particles=50)])
def test_engines_are_pickled_and_copied_with_their_run(engine):
    engine.progress_bar = False
    x, group = np.linspace(-1, 1, 6), np.arange(6) % 2
    assert pickle.loads(pickle.dumps(engine)).model is _counts_by_group
    engine.run(jax.random.key(0), x, group, np.array([0, 1, 3, 2, 1, 4]))
    engine.to_arviz()  # what is computed on demand stays behind as well
    for again in (pickle.loads(pickle.dumps(engine)), copy.deepcopy(engine), copy.copy(engine)):
        assert again.log_evidence == engine.log_evidence
        np.testing.assert_array_equal(again.get_samples()["level"], engine.get_samples()["level"])
    assert copy.copy(engine)._run is engine._run
    with pytest.raises(TypeError, match="SitePosterior|MixturePosterior|WeightedSite"):
        pickle.dumps(engine.posterior["level"])


def test_an_answer_is_copied_and_in_no_pickle():
    site = PointPosterior("level", jnp.array([1.0, 2.0]))
    for again in (copy.copy(site), copy.deepcopy([site])[0]):
        assert again is not site and np.array_equal(again.mean, site.mean)
    for answer in (site, PosteriorSites({"level": site}, {})):
        with pytest.raises(TypeError, match="Pickle or save.. the engine"):
            pickle.dumps(answer)
