"""Structured mean field where the prior is that of coefficients in a frame."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.distributions import AnalysisPrior, HiddenMarkovTree
from numpyro_ext.infer import EP, StructuredMeanField
from numpyro_ext.infer.sparse import mean_field as smf
from numpyro_ext.infer.sparse.gaussian_solver import gram_of
from numpyro_ext.linalg import from_matrix, total_variation
from numpyro_ext.models import wavelet_inpainting
from numpyro_ext.potentials import Forest, GaussianPotential, LaplacePotential
from numpyro_ext.potentials.trees.mixture import TreeParameters, log_density
from numpyro_ext.structure import ModelStructureError, read_sparse_linear
from numpyro_ext.structure.sparse_linear.form import SparseLinear
from tests.infer.sparse.test_structured_mean_field_core import fit, prepare, small_form
from tests.monte_carlo import NUM_ERRORS, log_determinant_error


def frame_of(num_bases, size, seed=3):
    rng = np.random.default_rng(seed)
    return np.concatenate([np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(num_bases)])


def two_bases(data=(0.9, -0.2), weight=0.5):
    """Two unknowns with trees over their coefficients in two bases."""
    prior = TreeParameters(
        LaplacePotential(0.0, jnp.array([0.2])), LaplacePotential(0.0, jnp.array([1.0])),
        jnp.array([0.4]), jnp.array([[0.1, 0.7]]),
    )  # fmt: skip
    forest = Forest.from_parents([-1, 0, -1, 2], [0, 0, 0, 0])
    matrix = jnp.array([[1.0, 0.3]])
    return SparseLinear(
        from_matrix(matrix),
        jnp.asarray(data)[:1],
        jnp.asarray(0.09),
        forest,
        prior,
        from_matrix(frame_of(2, 2)),
        weight,
    )


def test_one_basis_of_weight_one_is_the_model_of_its_coefficients():
    form = small_form("laplace-tree")
    turn = from_matrix(frame_of(1, form.num_columns))
    turned = form._replace(operator=form.operator @ turn, analysis=turn)
    (workspace, state, options), (other, start, choices) = prepare(form), prepare(turned)
    state, info = fit(form, workspace, state, options, tol=1e-9)
    found, more = fit(turned, other, start, choices, tol=1e-9)
    np.testing.assert_allclose(more.objective, info.objective, atol=1e-7)
    np.testing.assert_allclose(turn @ found.mean, state.mean, atol=1e-6)
    np.testing.assert_allclose(found.variance, state.variance, atol=1e-6)
    np.testing.assert_allclose(found.fitted_variance, state.fitted_variance, atol=1e-6)


def integral(form, limit=8.0, num=321):
    """Log integral of the joint density and the posterior mean, on a grid."""
    x = np.linspace(-limit, limit, num)
    points = jnp.asarray(np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2))
    prior = jax.vmap(lambda s: log_density(form.forest, form.prior, form.analysis @ s))(points)
    log_joint = jax.vmap(form.log_likelihood)(points) + form.weight * prior
    np.testing.assert_allclose(log_joint[5], form.log_density(points[5]), rtol=1e-10)
    return jax.scipy.special.logsumexp(log_joint) + 2.0 * np.log(x[1] - x[0]), jax.nn.softmax(log_joint) @ points


def test_bound_is_below_the_integral_and_no_step_lowers_it():
    form = two_bases()
    workspace, state, options = prepare(form)
    state, info = fit(form, workspace, state, options, tol=1e-8)
    trace = np.append(info.objective_trace[: info.num_steps], info.objective)
    assert info.converged and np.all(np.diff(trace) > -1e-10)
    exact, mean = integral(form)
    assert exact - 1.5 < info.objective < exact
    assert np.max(np.abs(state.mean - mean)) < 0.2


def test_bound_of_gaussian_components_is_the_integral():
    component = GaussianPotential(0.0, jnp.array([0.8]))
    tree = TreeParameters(component, component, jnp.zeros(1), jnp.zeros((1, 2)))
    form = two_bases()._replace(prior=tree)
    workspace, state, options = prepare(form)
    state, info = fit(form, workspace, state, options, tol=1e-8)
    exact, mean = integral(form)
    np.testing.assert_allclose(info.objective, exact, atol=1e-6)
    np.testing.assert_allclose(state.mean, mean, atol=1e-6)


@pytest.mark.slow
def test_solvers_agree():
    form = small_form("laplace-tree")
    n = form.num_columns
    forest = Forest.from_parents(
        np.concatenate([form.forest.parents, np.where(form.forest.parents < 0, -1, form.forest.parents + n)]),
        np.tile(form.forest.groups, 2),
    )
    form = form._replace(forest=forest, analysis=from_matrix(frame_of(2, n)), weight=0.5)
    exact_workspace, state, exact_options = prepare(form)
    assert exact_options.solver == "dense"
    exact, _ = fit(form, exact_workspace, state, exact_options, tol=1e-8)
    options = exact_options._replace(
        solver="conjugate-gradient", variances="perturb-and-map", num_samples=1500, mean_tol=1e-9, draw_tol=1e-5,
        num_determinant_products=n,
    )  # fmt: skip
    workspace = smf.make_workspace(form, jax.random.key(4), options)
    sampled, more = fit(form, workspace, smf.init(form, workspace, options), options, tol=1e-5)
    assert more.converged and more.residual <= 1.0
    # The end is a fixed point of its own noise: mean, variances and bound are those of the Gaussian that belongs to it.
    precision = smf.posterior_precision(form, workspace, sampled)
    dense, frame = np.asarray(precision.dense()), frame_of(2, n)
    covariance = np.linalg.inv(dense)
    np.testing.assert_allclose(sampled.mean, covariance @ precision.project(form.observed), atol=1e-5)
    error = np.sqrt(2.0 / options.num_samples)
    np.testing.assert_allclose(sampled.variance, np.diag(frame @ covariance @ frame.T), rtol=NUM_ERRORS * error)
    at_end = smf.bound(form, exact_workspace, sampled._replace(draws=exact.draws), exact_options)
    scale = gram_of(form, options) + jnp.mean(precision.precision) * precision.frame_constant()
    error = log_determinant_error(dense, np.asarray(scale), len(workspace.signs))
    np.testing.assert_allclose(more.objective, at_end, atol=NUM_ERRORS * error)


FRAME = from_matrix(frame_of(2, 4))
TREE = HiddenMarkovTree(Forest.from_parents([-1, 0, 0, 0, -1, 4, 4, 4]), dist.Laplace(0.0, 0.2), dist.Laplace(0.0, 1.0))
DATA = jnp.array([0.9, 0.1, -1.2, 0.4])


def framed(y, frame=FRAME, prior=TREE, weight=0.5):
    scale = numpyro.param("scale", 0.3, constraint=dist.constraints.positive)
    x = numpyro.sample("x", AnalysisPrior(frame, prior, weight))
    numpyro.sample("y", dist.Normal(x, scale).to_event(1), obs=y)


@pytest.mark.thorough
def test_engine_reads_learns_and_draws(tmp_path):
    engine = StructuredMeanField(framed, num_samples=4000, tol=1e-2, progress_bar=False)
    with pytest.raises(ValueError, match=r"'scale' would have to be learned.*'scale': 0.3}, the value.*start\.$"):
        engine.run(jax.random.key(0), DATA)
    # Every unknown twice: then there are residuals to learn the noise from.
    engine.run(jax.random.key(0), jnp.stack([DATA, DATA + jnp.array([0.2, -0.3, 0.1, -0.1])]))
    assert engine.diagnostics.converged and "frame: 8 coefficients of 4 unknowns" in engine.describe()
    found = engine.posterior["x"]
    draws = engine.get_samples()["x"]
    np.testing.assert_allclose(draws.mean(0), found.mean, atol=0.05)
    np.testing.assert_allclose(draws.var(0), found.variance, rtol=0.15)
    assert engine.state_probabilities().shape == (8,)
    assert engine.log_evidence.is_lower_bound
    engine.save(tmp_path / "run.npz")
    again = StructuredMeanField.load(tmp_path / "run.npz", framed)
    np.testing.assert_array_equal(again.posterior["x"].mean, found.mean)


def test_what_is_refused():
    with pytest.raises(ModelStructureError, match="is no tight frame"):
        read_sparse_linear(framed, (DATA, total_variation((2, 2)), dist.Laplace(0.0, 1.0).expand([4]).to_event(1)))

    def two_sites(y):
        x = numpyro.sample("x", AnalysisPrior(FRAME, TREE, 0.5))
        z = numpyro.sample("z", dist.Laplace(0.0, 1.0).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(x + z, 1.0).to_event(1), obs=y)

    with pytest.raises(ModelStructureError, match="must be the only one"):
        read_sparse_linear(two_sites, (DATA,), field=["x", "z"])

    def free_weight(y):
        w = numpyro.sample("w", dist.Uniform(0.1, 1.0))
        x = numpyro.sample("x", AnalysisPrior(FRAME, TREE, w))
        numpyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)

    with pytest.raises(ModelStructureError, match="depend on .'w'.: they must be known"):
        read_sparse_linear(free_weight, (DATA,))
    with pytest.raises(ModelStructureError, match="one of coefficients in a frame. Use StructuredMeanField"):
        EP(framed, progress_bar=False).run(jax.random.key(0), DATA)


# The picture has no diagonal edges but those of the disc: the scale of most diagonal details ends at zero.
@pytest.mark.filterwarnings("ignore:StructuredMeanField. 'low_scale' ended at the edge of the support")
@pytest.mark.slow
def test_several_bases_fill_gaps_better_than_one():
    rows, columns = np.indices((32, 32))
    image = np.where((rows - 15) ** 2 + (columns - 18) ** 2 < 90, 1.0, 0.02 * rows)
    rng = np.random.default_rng(0)
    mask = rng.random(image.shape) < 0.4
    observed = np.where(mask, image + 0.01 * rng.standard_normal(image.shape), np.nan)
    errors = []
    for num_bases in (1, 8):
        engine = StructuredMeanField(wavelet_inpainting, tol=0.2, num_variance_samples=8, progress_bar=False)
        engine.run(jax.random.key(0), observed, mask, num_bases=num_bases, wavelet="haar")
        found = engine.posterior["image"]
        errors.append(float(np.sqrt(np.mean((found.mean - image) ** 2))))
    assert errors[1] < 0.8 * errors[0]
