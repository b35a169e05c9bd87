"""Parameters of a large forest: on a sample of the trees first, and in units of where the search has come to."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from models.images import wavelet_denoising
from numpyro_ext.distributions import HiddenMarkovTree
from numpyro_ext.infer import EP
from numpyro_ext.infer.sparse.trees import propagation as core
from numpyro_ext.infer.sparse.trees import search as tree_search
from numpyro_ext.linalg import wavelet_transform
from numpyro_ext.potentials import LaplacePotential, wavelet_forest
from numpyro_ext.potentials.trees import chunks
from numpyro_ext.potentials.trees.mixture import TreeParameters
from tests.readings import with_forest_costs

KEY = jax.random.key(0)
LEVELS = {"wavelet": "haar", "num_levels": 2, "per_orientation": True}
SMALL_PARTS = {"largest_whole": 2**7, "largest_part": 2**6}
"""The picture has 64 parts of 64 nodes, as one of 1448 x 1448 pixels has of those in use."""
EPInParts = with_forest_costs(EP, **SMALL_PARTS)


@pytest.fixture(scope="module")
def noisy():
    """Drawn from the model itself."""
    transform = wavelet_transform((64, 64), "haar", 2)
    forest = wavelet_forest(transform, per_orientation=True)
    low, high = jnp.array([3.0] + [0.1] * 3 + [0.05] * 3), jnp.array([9.0] + [2.0] * 3 + [1.0] * 3)
    tree = HiddenMarkovTree(
        forest,
        dist.Laplace(0.0, low),
        dist.Laplace(0.0, high),
        jnp.full(7, 0.4),
        jnp.tile(jnp.array([0.1, 0.8]), (7, 1)),
    )
    image = transform.T @ tree.sample(jax.random.key(1))
    return (image + 0.1 * jax.random.normal(jax.random.key(2), image.shape)).reshape(64, 64)


@pytest.fixture(scope="module")
def whole(noisy):
    """Up to 2**16 nodes are searched at once; to far below a standard error."""
    engine = EP(wavelet_denoising, hyper_tol=1e-3, max_hyper_steps=1000, progress_bar=False)
    engine.run(KEY, noisy, 0.1, **LEVELS)
    assert engine.diagnostics.converged
    return engine


@pytest.mark.thorough
def test_the_maximum_is_that_of_a_search_on_all_trees(noisy, whole, monkeypatch):
    sizes = []
    learn = tree_search.learn

    def counted(climb, *args, **kwargs):
        found = learn(climb, *args, **kwargs)
        sizes.append((float(climb.advance.args[0].sample.share), found.diagnostics.num_evaluations))
        return found

    monkeypatch.setattr(tree_search, "learn", counted)
    engine = EPInParts(wavelet_denoising, progress_bar=False)
    engine.run(KEY, noisy, 0.1, **LEVELS)
    assert engine.diagnostics.converged and engine.diagnostics.hyper.max_gradient <= 0.5
    shares = [share for share, _ in sizes]
    assert shares == sorted(shares) and {0.125, 0.5, 1.0} == set(shares)
    on_all = sum(number for share, number in sizes if share == 1.0)
    assert engine.diagnostics.hyper.num_evaluations == on_all < whole.diagnostics.hyper.num_evaluations / 2
    # Of less than one nat that 24 parameters may be below the maximum, each by half a standard error at most.
    assert -3.0 < float(engine.log_evidence) - float(whole.log_evidence) < 1e-3
    site = engine.posterior["image"]
    shift = np.abs(site.mean - whole.posterior["image"].mean) / np.sqrt(site.variance)
    assert np.mean(shift) < 0.02 and np.max(shift) < 0.3
    sizes.clear()
    engine.run(KEY, noisy, 0.1, init_state=engine.last_state, **LEVELS)
    assert engine.diagnostics.converged and [share for share, _ in sizes] == [1.0] and sizes[0][1] < 5


@pytest.mark.thorough
def test_derivatives_are_small_in_units_of_the_end(noisy):
    """By differences of the evidence at given parameters; standard errors from their curvature."""
    engine = EPInParts(wavelet_denoising, progress_bar=False)
    engine.run(KEY, noisy, 0.1, **LEVELS)
    values = {name: np.asarray(parameter.value) for name, parameter in engine.hyper.items()}

    def evidence(scale):
        fixed = EPInParts(
            wavelet_denoising, hyper_values=values | {"low_scale": values["low_scale"] * scale}, progress_bar=False
        )
        fixed.run(KEY, noisy, 0.1, **LEVELS)
        return float(fixed.log_evidence)

    at = evidence(np.ones(7))
    np.testing.assert_allclose(at, float(engine.log_evidence), rtol=1e-10)
    for place in (1, 4, 6):
        up, down = (evidence(np.exp(side * 0.02 * np.eye(7)[place])) for side in (1.0, -1.0))
        slope, curvature = (up - down) / 0.04, (up + down - 2.0 * at) / 0.02**2
        assert curvature < 0.0 and abs(slope) / np.sqrt(-curvature) < 1.0


@pytest.mark.thorough
def test_units_measured_on_a_sample_are_those_of_all(noisy):
    """About: eight random signs know a root mean square to a third or so."""
    transform = wavelet_transform((64, 64), "haar", 2)
    forest = wavelet_forest(transform, per_orientation=True)
    values = jnp.log(jnp.concatenate([jnp.full(7, 0.3), jnp.full(7, 2.0), jnp.array([0.1])]))

    def parameters(values):
        low, high = (LaplacePotential(0.0, jnp.exp(part)) for part in (values[:7], values[7:14]))
        prior = TreeParameters(low, high, jnp.full(7, 0.4), jnp.tile(jnp.array([0.1, 0.8]), (7, 1)))
        return prior, jnp.full(4096, jnp.exp(2.0 * values[14]))

    cavity = core.Cavity(transform @ noisy.reshape(-1), jnp.full(4096, 0.01))
    costs = chunks.ForestCosts(**SMALL_PARTS)
    number = chunks.num_parts(forest, costs)
    whole = core.gradient_scales(forest, parameters, values, cavity, costs=costs)
    assert number == 64
    assert abs(np.log(whole[14] / np.sqrt(2.0 * 4096))) < np.log(3.0)
    for size in (16, number):
        share = size / number
        sample = core.Sample(jnp.asarray(size), jnp.asarray(share))
        some = core.gradient_scales(forest, parameters, values, cavity, sample, costs)
        assert np.all(np.abs(np.log(some / np.sqrt(share) / whole)) < np.log(3.0)), (some, whole)


@pytest.mark.thorough
@pytest.mark.usefixtures("python_handles_control_c")
def test_an_interrupted_sample_ends_with_the_evidence_of_all(noisy, monkeypatch):
    begun = []
    learn = tree_search.learn

    def interrupted(climb, *args, **kwargs):
        advance = climb.advance

        def raising(*arguments):
            begun.append(float(advance.args[0].sample.share))
            if len(begun) == 2:
                signal.raise_signal(signal.SIGINT)
            return advance(*arguments)

        return learn(climb._replace(advance=raising), *args, **kwargs)

    monkeypatch.setattr(tree_search, "learn", interrupted)
    engine = EPInParts(wavelet_denoising, progress_bar=False)
    with pytest.warns(UserWarning, match="Interrupted"):
        engine.run(KEY, noisy, 0.1, **LEVELS)
    assert not engine.diagnostics.converged and begun == [0.125, 0.125, 1.0]
    given = {name: parameter.value for name, parameter in engine.hyper.items()}
    fixed = EPInParts(wavelet_denoising, hyper_values=given, progress_bar=False)
    fixed.run(KEY, noisy, 0.1, **LEVELS)
    np.testing.assert_allclose(float(engine.log_evidence), float(fixed.log_evidence), rtol=1e-10)


@pytest.mark.thorough
def test_few_steps_are_few_and_said_so(noisy):
    engine = EPInParts(wavelet_denoising, max_hyper_steps=2, progress_bar=False)
    with pytest.warns(UserWarning, match="did not converge"):
        engine.run(KEY, noisy, 0.1, **LEVELS)
    assert not engine.diagnostics.converged and engine.diagnostics.hyper.num_iterations == 2
