"""Gaussian Markov random fields against dense eigenvalues, dense conditioning, differences and their own draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.linalg
import scipy.sparse
import scipy.stats
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from numpyro_ext.distributions import (
    GaussianMarkovRandomField,
    SparsePrecision,
    bspline_basis,
    car,
    difference_precision,
    graph_precision,
    kronecker,
    kronecker_sum,
    leroux,
    sparse_matmul,
)
from tests.map_models import bym2
from tests.monte_carlo import assert_close_covariance
from tests.tiers import thorough

IS_DOUBLE = jax.config.jax_enable_x64
DIGITS = 1e-9 if IS_DOUBLE else 2e-4

GRAPH = graph_precision([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (4, 5), (5, 6)], num_nodes=8)
WALK, ROUGH = difference_precision(5, 2), difference_precision(4, 1)
INTERACTION = kronecker(graph_precision([(0, 1), (1, 2)], num_nodes=3).precision, ROUGH)
SURFACE = kronecker_sum(WALK, ROUGH)

# Of two positive parameters: of the first kind the numbers are a factor times constants, of the second they are traced.
FIELDS = {
    "proper": (lambda t: (SparsePrecision.of(WALK + scipy.sparse.eye(5)).scale_by(t[0] * t[1]), None)),
    "map": (lambda t: (GRAPH.scaled.scale_by(t[0] / t[1]), GRAPH.null_space)),
    "walk": (lambda t: (WALK.scale_by(t[0] + t[1]), WALK.null_space)),
    "interaction": (lambda t: (INTERACTION.scale_by(t[0] * t[1]), INTERACTION.null_space)),
    "leroux": (lambda t: (leroux(GRAPH, t[0] / (t[0] + t[1])).scale_by(t[1]), None)),
    "surface": (lambda t: (kronecker_sum(WALK.scale_by(t[0]), ROUGH.scale_by(t[1])), SURFACE.null_space)),
}
KINDS = [(name, is_zero) for name in FIELDS for is_zero in (False, True)]
QUICK = [("map", True), ("surface", False), ("leroux", True)]
THETA = np.array([0.7, 1.9])


def _field(name, sum_to_zero, theta=THETA, loc=None):
    precision, null_space = FIELDS[name](theta)
    loc = np.cos(np.arange(precision.size)) if loc is None else loc
    return GaussianMarkovRandomField(precision, loc, null_space=null_space, sum_to_zero=sum_to_zero)


def _dense(name, sum_to_zero):
    """Orthonormal basis of where the density is one, mean and covariance there, by eigenvalues and dense inverses."""
    precision, null_space = FIELDS[name](THETA)
    q = np.asarray(precision.to_dense(), float)
    taken = np.zeros((len(q), 0)) if null_space is None else null_space
    taken = np.ones((len(q), 1)) if sum_to_zero and null_space is None else taken
    basis = scipy.linalg.null_space(taken.T) if taken.shape[1] else np.eye(len(q))
    loc = np.cos(np.arange(len(q)))
    if null_space is not None:
        values, vectors = np.linalg.eigh(q)
        keep = values > (1e-9 if IS_DOUBLE else 1e-5) * values[-1]  # a matrix of rounded numbers has others
        assert keep.sum() == len(q) - null_space.shape[1]
        covariance = vectors[:, keep] / values[keep] @ vectors[:, keep].T
        mean = basis @ (basis.T @ loc)
    else:
        covariance = np.linalg.inv(q)
        gain = covariance @ taken @ np.linalg.inv(taken.T @ covariance @ taken) if taken.shape[1] else taken
        mean, covariance = loc - gain @ (taken.T @ loc), covariance - gain @ taken.T @ covariance
    return basis, mean, covariance


@pytest.mark.float32
@pytest.mark.parametrize(("name", "sum_to_zero"), [*QUICK, *thorough(*(kind for kind in KINDS if kind not in QUICK))])
def test_densities_and_moments_are_those_of_dense_matrices(name, sum_to_zero):
    field, (basis, mean, covariance) = _field(name, sum_to_zero), _dense(name, sum_to_zero)
    x = mean + basis @ np.sin(1.0 + np.arange(basis.shape[1]))
    inner = basis.T @ covariance @ basis
    white = np.linalg.solve(np.linalg.cholesky(inner), basis.T @ (x - mean))
    expected = -0.5 * (white @ white + np.linalg.slogdet(2 * np.pi * inner)[1])
    assert field.log_prob(x) == pytest.approx(expected, rel=DIGITS, abs=DIGITS)
    if not field.is_proper:
        level = np.asarray(FIELDS[name](THETA)[1]).sum(axis=1)
        np.testing.assert_allclose(field.log_prob(x + 3.0 * level), expected, rtol=10 * DIGITS)
        for ask in (lambda: field.mean, lambda: field.variance, lambda: field.sample(random.key(0))):
            with pytest.raises(NotImplementedError, match=r"flat along the \d+ columns.*sum_to_zero=True"):
                ask()
        return
    np.testing.assert_allclose(field.mean, mean, atol=10 * DIGITS)
    np.testing.assert_allclose(field.variance, np.diagonal(covariance), atol=10 * DIGITS * covariance.max())
    # draws are linear in standard normal numbers, so that their covariance is known without drawing
    numbers = field._numbers
    factor = np.asarray(field.entries.coloured(numbers, jnp.eye(len(mean)))) / np.sqrt(field.scale)
    np.testing.assert_allclose(factor @ factor.T, covariance, atol=20 * DIGITS * covariance.max())


@pytest.mark.parametrize(("name", "sum_to_zero"), [*QUICK, *thorough(*(kind for kind in KINDS if kind not in QUICK))])
def test_derivatives_are_those_of_differences(name, sum_to_zero):
    basis, mean, _ = _dense(name, sum_to_zero)
    x = mean + basis @ np.sin(1.0 + np.arange(basis.shape[1]))
    size = len(mean)

    @jax.jit
    def log_prob(theta):
        return _field(name, sum_to_zero, theta[:2], theta[2:]).log_prob(x)

    at = np.concatenate([THETA, np.cos(np.arange(size))])
    direction = np.random.default_rng(0).normal(size=at.size)
    step = 1e-4
    slopes = [float(log_prob(at + h * direction) - log_prob(at - h * direction)) / (2 * h) for h in (step, 2 * step)]
    expected = (4.0 * slopes[0] - slopes[1]) / 3.0  # Richardson
    assert float(jax.grad(log_prob)(at) @ direction) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.float32
def test_draws_and_batches():
    scales = jnp.array([[1.0], [4.0]])
    field = GaussianMarkovRandomField(
        WALK.scale_by(scales), jnp.zeros((3, 1)), null_space=WALK.null_space, sum_to_zero=True
    )
    assert field.batch_shape == (2, 3)
    draws = field.sample(random.key(1), (2000,))
    assert draws.shape == (2000, 2, 3, 5)
    covariance = np.linalg.pinv(np.asarray(WALK.to_dense(), float), rcond=1e-6)
    # a constrained covariance is singular: compare where it is not
    basis = scipy.linalg.null_space(WALK.null_space.T)
    for i, scale in enumerate((1.0, 4.0)):
        assert_close_covariance(np.asarray(draws[:, i, 2]) @ basis, basis.T @ covariance @ basis / scale)
    assert np.all(field.support(draws))
    single = [_walk(s).log_prob(draws[0, i, j]) for i, s in enumerate((1.0, 4.0)) for j in range(3)]
    np.testing.assert_allclose(field.log_prob(draws[0]).reshape(-1), single, rtol=1e-4 if not IS_DOUBLE else 1e-12)
    np.testing.assert_allclose(field.variance[1, 2], np.diagonal(covariance) / 4.0, rtol=1e-3)
    mapped = jax.vmap(lambda f, x: f.log_prob(x))(_walk(jnp.array([1.0, 4.0])), draws[0, :, 0])
    np.testing.assert_allclose(mapped, field.log_prob(draws[0])[:, 0], rtol=1e-4 if not IS_DOUBLE else 1e-12)


def _walk(scale):
    return GaussianMarkovRandomField(WALK.scale_by(scale), null_space=WALK.null_space, sum_to_zero=True)


def test_the_proper_autoregression_is_that_of_numpyro():
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
    adjacency = np.zeros((4, 4))
    adjacency[tuple(np.transpose(pairs))] = 1.0
    graph, x = graph_precision(adjacency + adjacency.T), np.array([0.3, -1.0, 2.0, 0.1])
    ours = jax.jit(lambda a, t: GaussianMarkovRandomField(car(graph, a).scale_by(t), 0.5).log_prob(x))(0.6, 2.0)
    assert float(ours) == pytest.approx(float(dist.CAR(0.5, 0.6, 2.0, adjacency + adjacency.T).log_prob(x)), rel=1e-10)


def test_support_is_reached_by_an_isometry():
    field = _field("map", True)
    transform = biject_to(field.support)
    assert transform == biject_to(_field("map", True).support)
    columns = np.asarray(transform(jnp.eye(5)))
    np.testing.assert_allclose(columns @ columns.T, np.eye(5), atol=1e-14)
    np.testing.assert_allclose(columns @ GRAPH.null_space, 0.0, atol=1e-14)
    np.testing.assert_allclose(transform.inv(columns), np.eye(5), atol=1e-14)
    assert transform.inverse_shape((3, 8)) == (3, 5)
    assert transform.forward_shape((3, 5)) == (3, 8)
    assert bool(field.support(field.support.feasible_like(np.ones(8))))
    assert not field.support(np.ones(8))


@pytest.mark.float32
def test_long_walks_are_no_singular_matrices():
    """Their smallest eigenvalues are below the digits of single precision; the determinant is that of n and its powers.

    The product of the eigenvalues of D D^T that are not zero is n for first differences and n^2 (n^2 - 1) / 12 for
    second ones.
    """
    for order, size, expected in ((1, 3000, np.log(3000.0)), (2, 1500, np.log(1500.0**2 * (1500.0**2 - 1) / 12.0))):
        walk = difference_precision(size, order)
        field = GaussianMarkovRandomField(walk, null_space=walk.null_space)
        rank = size - order
        known = 0.5 * (expected - rank * np.log(2.0 * np.pi))
        assert float(field.log_prob(np.zeros(size))) == pytest.approx(known, rel=1e-6 if IS_DOUBLE else 1e-4)


def test_numbers_that_are_wrong_under_jit_are_nan():
    """Nothing can be refused where numbers are traced, so nothing is answered."""

    @jax.jit
    def log_prob(ridge):
        precision = WALK + SparsePrecision([(i, i) for i in range(5)], ridge * jnp.ones(5), 5)
        return GaussianMarkovRandomField(precision, null_space=WALK.null_space).log_prob(jnp.arange(5.0))

    assert jnp.isfinite(log_prob(0.0))
    assert jnp.isnan(log_prob(0.1))
    indefinite = jax.jit(lambda c: GaussianMarkovRandomField(_pair(c)).log_prob(jnp.ones(2)))
    assert jnp.isfinite(indefinite(0.9))
    assert jnp.isnan(indefinite(1.1))


def _pair(c):
    return SparsePrecision([(0, 0), (1, 0), (1, 1)], jnp.array([1.0, c, 1.0]), 2)


LARGE = scipy.sparse.diags([np.r_[1.0, np.full(1998, 2.0), 1.0], -np.ones(1999), -np.ones(1999)], [0, 1, -1])
REFUSED = {
    "null space forgotten": (WALK, {}, r"flat along 2 directions. Give null_space=precision.null_space"),
    "null space unknown": (ROUGH.to_scipy(), {}, r"has 1 null directions \(.*0.5 at .*Give null_space=.*diagonal"),
    "indefinite": (
        [[1.0, 2.0], [2.0, 1.0]],
        {},
        r"has 1 negative and 0 zero eigenvalues.*0.71 at.*No null_space= helps",
    ),
    "large": (LARGE, {}, r"has (null directions|eigenvalues that are negative or zero).*Give null_space="),
    "another null space": (WALK, {"null_space": np.arange(5.0) ** 2}, r"not annihilate column 0.*Q n is \d.*norm one"),
    "part of it": (WALK, {"null_space": np.ones(5)}, r"has 1 null directions beside the 1 columns of null_space"),
    "twice": (WALK, {"null_space": np.ones((5, 2))}, r"2 columns of null_space depend on each other. Give each"),
    "shape": (WALK, {"null_space": np.ones(4)}, r"shape \(5, k\); got \(4,\)"),
    "nan": (WALK, {"null_space": [1, 1, np.nan, 1, 1]}, r"null_space\[2, 0\] is nan"),
    "loc": (ROUGH, {"null_space": np.ones(4), "loc": np.ones(3)}, r"4 unknowns; got loc of shape \(3,\)"),
    "all flat": (np.zeros((2, 2)), {"null_space": np.eye(2)}, r"all 2 directions are flat.*ImproperUniform"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_was_found_and_what_to_do(case):
    precision, given, told = REFUSED[case]
    with pytest.raises(ValueError, match=told):
        GaussianMarkovRandomField(precision, **given)


# ---- programs, as users write them ----


def surface(B, P, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    s = numpyro.sample("s", dist.HalfNormal(1))
    w = numpyro.sample("w", GaussianMarkovRandomField(P.scale_by(1 / tau**2), null_space=P.null_space))
    numpyro.sample("y", dist.Normal(sparse_matmul(B, w), s), obs=y)


def trend(graph, y=None):
    """A flat walk and a zero-sum field, which the data tell from each other by their priors alone."""
    walk = numpyro.sample("walk", GaussianMarkovRandomField(ROUGH.scale_by(4.0), null_space=ROUGH.null_space))
    field = GaussianMarkovRandomField(graph.precision, jnp.arange(4.0), null_space=np.ones(4), sum_to_zero=True)
    bump = numpyro.sample("bump", field)
    numpyro.sample("y", dist.Normal(walk + bump, 0.5).to_event(1), obs=y)


@pytest.mark.thorough
def test_nuts_samples_flat_and_constrained_fields():
    """Against the Gaussian posterior, from dense matrices."""
    graph, y = graph_precision([(0, 1), (1, 2), (2, 3), (3, 0)], num_nodes=4), np.array([3.0, -1.0, 2.0, 4.5])
    mcmc = MCMC(NUTS(trend), num_warmup=300, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), graph, y)
    draws = np.concatenate([mcmc.get_samples()[name] for name in ("walk", "bump")], axis=1)
    basis = scipy.linalg.block_diag(np.eye(4), scipy.linalg.null_space(np.ones((1, 4))))
    prior = scipy.linalg.block_diag(4.0 * np.asarray(ROUGH.to_dense()), np.asarray(graph.precision.to_dense()))
    rows = np.tile(np.eye(4), 2)
    precision = basis.T @ (prior + rows.T @ rows / 0.25) @ basis
    covariance = basis @ np.linalg.inv(precision) @ basis.T
    loc = np.concatenate([np.zeros(4), np.arange(4.0)])
    mean = covariance @ (rows.T @ y / 0.25 + prior @ loc)
    sizes = np.array([effective_sample_size(draws[None, :, k]) for k in range(8)])
    assert sizes.min() > 300
    deviations = np.sqrt(np.diagonal(covariance))
    assert np.all(np.abs(draws.mean(0) - mean) < 5.0 * deviations / np.sqrt(sizes))
    assert np.all(np.abs(draws.std(0) / deviations - 1.0) < 5.0 / np.sqrt(2.0 * sizes))


@pytest.mark.thorough
def test_programs_run_under_svi_and_predictive():
    coords = np.random.default_rng(0).uniform(size=(60, 2))
    rows = bspline_basis(coords, knots=(6, 6))
    precision = kronecker_sum(difference_precision(6, order=2), difference_precision(6, order=2))
    y = np.sin(4.0 * coords[:, 0]) + coords[:, 1]
    guide = AutoNormal(surface)
    svi = SVI(surface, guide, numpyro.optim.Adam(0.03), Trace_ELBO())
    found = svi.run(random.key(0), 600, rows, precision, y, progress_bar=False)
    draws = guide.sample_posterior(random.key(1), found.params, sample_shape=(200,))
    fitted = Predictive(surface, draws)(random.key(2), rows, precision)["y"].mean(axis=0)
    assert np.corrcoef(fitted, y)[0, 1] > 0.98
    with pytest.raises(NotImplementedError, match="improper and cannot be drawn from"):
        Predictive(surface, num_samples=2)(random.key(0), rows, precision)
    drawn = Predictive(bym2, num_samples=300)(random.key(1), GRAPH, np.ones(8), np.zeros(8))
    np.testing.assert_allclose(drawn["spatial"] @ GRAPH.null_space, 0.0, atol=1e-12)
    assert drawn["y"].shape == (300, 8)
