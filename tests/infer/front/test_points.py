"""Sites that a run sets to a point are named in all that it reports, and warned of where they are effects."""

import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, INLA, LaplaceApproximation

KEY = jax.random.key(0)
GROUP = np.arange(12) % 3
X = np.linspace(-1.0, 1.0, 12)
Y = np.array([0.1, 1.2, -0.7])[GROUP] + 0.5 * X + 0.2 * np.sin(7.0 * np.arange(12))


def effects(y, is_heavy_tailed=True):
    """Effects without a place in the field, or with one."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    if is_heavy_tailed:
        effect = numpyro.sample("effect", dist.StudentT(4.0, 0.0, 1.0).expand([3]).to_event(1))
    else:
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(effect[GROUP] + slope * X, scale), obs=y)


@pytest.fixture(scope="module")
def fitted():
    engine = LaplaceApproximation(effects, integrate="none", progress_bar=False, num_samples=50)
    words = r"'effect' \(3,\) has no place in the Gaussian field.*integrate='auto'.*BilinearVG"
    with pytest.warns(UserWarning, match=words):
        engine.run(KEY, Y)
    return engine


@pytest.mark.thorough
def test_effects_set_to_a_point_are_named_everywhere(fitted, capsys, tmp_path):
    assert fitted.diagnostics.points == ("scale", "effect")
    assert np.all(np.ptp(np.asarray(fitted.get_samples()["effect"]), axis=0) == 0.0)
    fitted.print_summary()
    assert "Set to a point, without uncertainty: scale, effect" in capsys.readouterr().out
    attributes = fitted.to_arviz()["posterior"].attrs
    assert list(attributes["points"]) == ["scale", "effect"]
    assert attributes["converged"] == 1 and attributes["inference_engine"] == "LaplaceApproximation"
    fitted.save(tmp_path / "run.npz")
    assert LaplaceApproximation.load(tmp_path / "run.npz", effects).diagnostics.points == ("scale", "effect")


@pytest.mark.thorough
def test_scalars_and_params_pass_without_a_warning():
    def model(y):
        level = numpyro.param("level", np.zeros(3))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(level[GROUP] + slope * X, scale), obs=y)

    engine = LaplaceApproximation(model, integrate="none", progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(KEY, Y)
    assert engine.diagnostics.points == ("scale",) and engine.diagnostics.edges == ()
    fixed = LaplaceApproximation(model, hyper_values={"scale": 0.3}, progress_bar=False)
    fixed.run(KEY, Y)
    assert fixed.diagnostics.points == ()


@pytest.mark.thorough
def test_what_is_integrated_is_no_point():
    engine = INLA(effects, progress_bar=False)
    engine.run(KEY, Y, is_heavy_tailed=False)
    assert engine.diagnostics.points == ()


def test_a_scale_at_zero_is_warned_of():
    def model(y):
        scale = numpyro.sample("group_scale", dist.HalfNormal(1.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, scale).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(effect[GROUP], 1.0), obs=y)

    engine = EP(model, integrate="none", progress_bar=False)
    with pytest.warns(UserWarning, match="'group_scale' ended at the edge of the support"):
        engine.run(KEY, 0.1 * np.sin(np.arange(12)))
    assert engine.diagnostics.edges == ("group_scale",)
    assert np.all(np.asarray(engine.posterior["effect"].sd) < 0.05)
