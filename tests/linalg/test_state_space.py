"""Conditioning in a state space, against plain inversion of the matrix that it stands for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian.conditioning import choose_space, kl_divergence, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, Dynamics, StateSpaceDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior
from numpyro_ext.linalg.gaussian.spaces.state_space import White
from tests.infer.gaussian.gaussian_forms import dense_prior_precision, one_block
from tests.tiers import few

K, M, S, N, P = 5, 3, 2, 2, 2
NUM_ROWS, NUM_COLUMNS = 13, 12


def problem(is_flat=False, is_signed=False):
    """Two states and two shared unknowns (the last ones), of which one is where the first state starts; the second
    state has no noise of its own, and rows and columns are padded."""
    rng = np.random.default_rng(5)
    size = S + P
    transition = np.zeros((K, size, size))
    transition[:, :S, :S] = np.array([[0.9, 1.0], [0.0, 0.8]]) + 0.1 * rng.normal(size=(K, S, S))
    transition[:, :S, S:] = 0.2 * rng.normal(size=(K, S, P))
    transition[:, S:, S:] = np.eye(P)
    gain = np.zeros((K, size, N))
    gain[:, 0] = rng.normal(size=(K, N))
    start = np.concatenate([[[1.0, 0.0], [0.0, 0.0]], np.eye(P)])
    columns = np.arange(K * N).reshape(K, N)
    rows = np.full((K, M), NUM_ROWS)
    rows.flat[:NUM_ROWS] = rng.permutation(NUM_ROWS)
    states, local = rng.normal(size=(K, M, size)), rng.normal(size=(K, M, N))
    states[rows == NUM_ROWS], local[rows == NUM_ROWS] = 0.0, 0.0
    dynamics = Dynamics(
        *map(jnp.asarray, (transition, gain, start, columns)), jnp.array([10, 11]), NUM_COLUMNS, "this one"
    )
    design = StateSpaceDesign(dynamics, jnp.asarray(rows), jnp.asarray(states), jnp.asarray(local), NUM_ROWS)
    root = rng.normal(size=(2, 2, 2))
    steps = CovariancePrior(jnp.asarray(root @ root.swapaxes(-1, -2) + 0.3 * np.eye(2)))
    shared = (DiagonalPrior(jnp.array([4.0])), FlatPrior(1)) if is_flat else (DiagonalPrior(jnp.array([4.0, 0.5])),)
    precision = rng.gamma(1.0, size=NUM_ROWS)
    precision[2] = 0.0
    if is_signed:
        precision[[1, 4]] = -0.04, -0.02
    prior = (DiagonalPrior(jnp.asarray(rng.gamma(2.0, size=6))), steps, *shared)
    return prior, design, jnp.asarray(precision), jnp.asarray(rng.normal(size=NUM_ROWS))


def test_products_are_those_of_the_matrix():
    _, design, _, _ = problem()
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(2, 3, NUM_COLUMNS))), jnp.asarray(rng.normal(size=(4, NUM_ROWS)))
    matrix = np.zeros((NUM_ROWS, NUM_COLUMNS))
    dynamics = design.dynamics
    state = np.zeros((S + P, NUM_COLUMNS))
    state[:, np.asarray(dynamics.shared)] = dynamics.start
    for k in range(K):
        local = np.eye(NUM_COLUMNS)[np.asarray(dynamics.columns[k])]
        for m, row in enumerate(np.asarray(design.rows[k])):
            if row < NUM_ROWS:
                matrix[row] = design.states[k, m] @ state + design.local[k, m] @ local
        state = dynamics.transition[k] @ state + dynamics.gain[k] @ local
    np.testing.assert_allclose(design.to_dense(), matrix, atol=1e-13)
    np.testing.assert_allclose(design.matvec(x), x @ matrix.T, atol=1e-13)
    np.testing.assert_allclose(design.rmatvec(y), y @ matrix, atol=1e-13)
    weight = jnp.asarray(rng.normal(size=NUM_ROWS))
    np.testing.assert_allclose(design.scale_rows(weight).to_dense(), weight[:, None] * matrix, atol=1e-13)


@partial(jax.jit, static_argnames=("is_signed", "space"))
def answers(prior, design, precision, shift, other, is_signed, space="auto"):
    """Marginals, divergence from the prior, and moments of the unknowns, of the rows and of other rows: one program."""
    space = linear_gaussian(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS), is_signed=is_signed, space=space)
    posterior = space.condition(precision, shift)
    marginals, of_others = posterior.marginals(), (posterior.map_variance(other), posterior.map_covariance(other))
    divergence = kl_divergence(space, posterior, marginals.variance)
    return marginals, divergence, posterior.unknowns(), posterior.map_covariance(design), *of_others


@pytest.mark.parametrize(
    ("is_flat", "is_signed"),
    few([(True, True), (False, False), (True, False), (False, True)], 2),
)
def test_moments_agree_with_inversion(is_flat, is_signed):
    prior, design, precision, shift = problem(is_flat, is_signed)
    assert choose_space(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS)) == "state"
    other = np.random.default_rng(1).normal(size=(3, NUM_COLUMNS))
    asked = prior, design, precision, shift, DenseDesign(jnp.asarray(other)), is_signed
    found, divergence, unknowns, of_rows, other_variance, other_covariance = answers(*asked)
    wanted, wanted_divergence, *_ = answers(*asked, space="coefficient")
    matrix = np.asarray(design.to_dense())
    hessian = dense_prior_precision(prior) + matrix.T @ (precision[:, None] * matrix)
    covariance = np.linalg.inv(hessian)
    np.testing.assert_allclose(unknowns, covariance @ matrix.T @ shift, atol=1e-11)
    np.testing.assert_allclose(found.variance, np.diag(matrix @ covariance @ matrix.T), atol=1e-11)
    np.testing.assert_allclose(found.mean, matrix @ covariance @ matrix.T @ shift, atol=1e-11)
    np.testing.assert_allclose(found.log_partition, wanted.log_partition, atol=1e-11)
    np.testing.assert_allclose(found.cavity_ratio, wanted.cavity_ratio, atol=1e-11)
    np.testing.assert_allclose(of_rows, matrix @ covariance @ matrix.T, atol=1e-11)
    np.testing.assert_allclose(divergence, wanted_divergence, atol=1e-11)
    np.testing.assert_allclose(other_variance, np.diag(other @ covariance @ other.T), atol=1e-11)
    np.testing.assert_allclose(other_covariance, other @ covariance @ other.T, atol=1e-11)


def test_colouring_white_numbers_gives_draws_of_the_posterior():
    """The factor that draws are made with is an exact root of the covariance: no Monte Carlo error."""
    prior, design, precision, shift = problem()

    @jax.jit
    def drawn(prior, design, precision, shift):
        space = linear_gaussian(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS))
        posterior = space.condition(precision, shift)
        white = White(*space.split(jnp.eye(NUM_COLUMNS)))
        root = space.unknowns(posterior.colour(white)[:, None])
        return root, posterior.sample(jax.random.key(0), 5), posterior.unknowns()

    root, draws, mean = drawn(prior, design, precision, shift)
    matrix = np.asarray(design.to_dense())
    covariance = np.linalg.inv(dense_prior_precision(prior) + matrix.T @ (precision[:, None] * matrix))
    np.testing.assert_allclose(root.T @ root, covariance, atol=1e-11)
    assert draws.shape == (5, NUM_COLUMNS)
    assert np.all(np.abs(draws - mean) < 6.0 * np.sqrt(np.diag(covariance)))


def test_gradients_pass_through_states_without_noise():
    prior, design, precision, shift = problem()
    blocks = one_block(NUM_ROWS, NUM_COLUMNS)

    def log_partition(weight, space):
        scaled = design.scale_rows(weight)
        return (
            linear_gaussian(prior, scaled, *blocks, space=space).condition(precision, shift).marginals().log_partition
        )

    weight = jnp.linspace(0.5, 1.5, NUM_ROWS)
    found, expected = (
        jax.jit(jax.grad(log_partition), static_argnums=1)(weight, space) for space in ("state", "observation")
    )
    np.testing.assert_allclose(found, expected, atol=1e-11)


def test_improper_posterior_is_nan_and_what_has_no_state_space_is_refused():
    prior, design, precision, shift = problem(is_flat=True)
    blocks = one_block(NUM_ROWS, NUM_COLUMNS)
    space = linear_gaussian(prior, design, *blocks)
    log_partition = jax.jit(lambda *sites: space.condition(*sites).marginals().log_partition)
    assert np.isnan(log_partition(-10.0 * precision, shift))
    assert choose_space(prior, design, *blocks, is_sequential=True) == "coefficient"
    with pytest.raises(ValueError, match="sequential schedule"):
        jax.eval_shape(lambda *sites: space.condition(*sites).sequential_moments(), precision, shift)
    with pytest.raises(ValueError, match="models with scans"):
        linear_gaussian(prior, DenseDesign(design.to_dense()), *blocks, space="state")
