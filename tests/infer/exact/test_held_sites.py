"""The field given hyperparameters with sites held: an exact root of its covariance and its volume, in every space."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.gaussian.algorithms.held_sites import field_given, hold
from numpyro_ext.infer.gaussian.algorithms.posterior import GaussianPosterior
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import (
    CovariancePrior,
    DiagonalPrior,
    FlatPrior,
    LowRankPrior,
    PrecisionPrior,
    SparsePrecisionPrior,
)
from numpyro_ext.linalg.gaussian.spaces.border_space import Border
from numpyro_ext.linalg.gaussian.sparse_layout import find_layout
from numpyro_ext.linalg.sparse_cholesky import SparsePattern
from numpyro_ext.potentials import GaussianPotential, PoissonExpPotential
from numpyro_ext.structure.latent_gaussian.form import Blocks
from tests.infer.gaussian.gaussian_forms import dense_prior_precision, kernel, make_form
from tests.linalg.test_state_space import problem as state_space_problem
from tests.tiers import few

NUM_ROWS = 12
COUNTS = PoissonExpPotential(jnp.ones(NUM_ROWS), jnp.ones(NUM_ROWS))
OFFSET = jnp.linspace(-1.0, 1.0, NUM_ROWS)
MATRIX = jnp.asarray(np.random.default_rng(7).normal(size=(NUM_ROWS, 5)))


def _form(prior, design, **options):
    return make_form(prior, design, (COUNTS,), OFFSET, **options)


def unknowns(scale):
    prior = DiagonalPrior(scale * jnp.array([0.5, 1.5])), PrecisionPrior(jnp.eye(2)[None] + 0.3), FlatPrior(1)
    return _form(prior, DenseDesign(MATRIX))


def predictors(scale):
    return _form((CovariancePrior(kernel(15, scale)[None]),), DenseDesign(jnp.eye(15)[:NUM_ROWS]))


def blocks(scale):
    own = np.kron(np.eye(2), np.ones((6, 3)))[:, :5]
    found = Blocks(jnp.arange(NUM_ROWS).reshape(2, 6), jnp.array([[0, 1, 2], [3, 4, 5]]))
    prior = CovariancePrior(kernel(3, scale)[None]), DiagonalPrior(jnp.array([scale, 0.5]))
    return _form(prior, DenseDesign(MATRIX * own), blocks=found)


def border(scale):
    columns = jnp.stack([jnp.arange(NUM_ROWS) // 3, jnp.full(NUM_ROWS, 4)], axis=1)
    found = Border(jnp.arange(4)[:, None], jnp.array([4]), jnp.zeros((NUM_ROWS, 1), int))
    prior = DiagonalPrior(jnp.full(4, scale)), FlatPrior(1)
    return _form(prior, SparseRows(columns, MATRIX[:, :2], 5))._replace(border=found)


def band(scale):
    columns = 2 * jnp.arange(NUM_ROWS)[:, None] + jnp.arange(2)
    return _form((DiagonalPrior(scale * jnp.linspace(1.0, 2.0, 64)),), SparseRows(columns, MATRIX[:, :2], 64, 1))


def states(scale):
    (first, *others), design, _, _ = state_space_problem(is_flat=True)
    prior = DiagonalPrior(scale * first.variance), *others
    return make_form(prior, design, (PoissonExpPotential(jnp.ones(13), jnp.ones(13)),))


def sparse(scale):
    pattern = SparsePattern.of(6, [*range(1, 6)], [*range(5)])
    values = jnp.where(jnp.asarray(pattern.rows == pattern.columns), 2.5, -1.0) / scale
    columns = np.stack([np.arange(NUM_ROWS) % 6, np.full(NUM_ROWS, 6)], axis=1)
    layout = find_layout([pattern, None], [6, 1], columns, np.ones((NUM_ROWS, 2), bool))
    prior = SparsePrecisionPrior(values, None, None, None, pattern), FlatPrior(1)
    return _form(prior, SparseRows(jnp.asarray(columns), jnp.ones((NUM_ROWS, 2)), 7))._replace(layout=layout)


def low_rank(scale):
    return _form((LowRankPrior(scale * jnp.ones((1, 5, 1)), jnp.full((1, 5), 0.3)),), DenseDesign(MATRIX))


def by_inversion(form, precision, shift):
    """Mean, covariance and log evidence of a form with Gaussian sites, by dense algebra on the host."""
    dense = {LowRankPrior: lambda b: b.dense(), SparsePrecisionPrior: lambda b: PrecisionPrior(b.precision_part())}
    prior = [dense.get(type(block), lambda b: b)(block) for block in form.prior]
    own, matrix = dense_prior_precision(prior), np.asarray(form.design.to_dense())
    covariance = np.linalg.inv(own + matrix.T @ (np.asarray(precision)[:, None] * matrix))
    mean = covariance @ matrix.T @ (shift - precision * form.offset)
    is_flat = np.concatenate([np.full(block.size, isinstance(block, FlatPrior)) for block in prior])
    total = np.linalg.slogdet(own[np.ix_(~is_flat, ~is_flat)])[1] + is_flat.sum() * np.log(2.0 * np.pi)
    total += np.linalg.slogdet(covariance)[1] + mean @ np.linalg.solve(covariance, mean)
    return mean, covariance, 0.5 * total + np.sum((shift - 0.5 * precision * form.offset) * form.offset)


@pytest.mark.parametrize("make", few((predictors, blocks, border, band, states, low_rank, sparse, unknowns), 2))
def test_map_is_a_root_of_the_covariance_and_its_determinant_is_known(make):
    rng, form = np.random.default_rng(4), make(1.0)
    precision, shift = jnp.asarray(rng.gamma(2.0, size=form.num_rows)), jnp.asarray(rng.normal(size=form.num_rows))
    sites = hold(GaussianPosterior(form, precision, shift), jnp.zeros(form.num_rows))
    np.testing.assert_array_equal(sites.site_precision, precision)
    white = jnp.asarray(rng.normal(size=form.num_columns))

    @jax.jit
    def at(scale):
        found = field_given(make(scale), sites)
        total = jnp.sum(jnp.sin(found.from_white(white))) + found.log_scale
        return total, (jax.jacfwd(found.from_white)(white), found.mean, found.log_scale, found.log_partition)

    for scale in (1.0, 1.3):
        _, (root, mean, log_scale, log_partition) = at(scale)
        wanted_mean, covariance, wanted_evidence = by_inversion(make(scale), precision, shift)
        np.testing.assert_allclose(mean, wanted_mean, atol=1e-8)
        np.testing.assert_allclose(log_partition, wanted_evidence, rtol=1e-8)
        np.testing.assert_allclose(np.linalg.slogdet(root)[1], log_scale, atol=1e-7)
        found = root @ root.T
        if make is sparse and scale != 1.0:  # correlations are those of the fit there
            found, covariance = np.diag(found), np.diag(covariance)
        np.testing.assert_allclose(found, covariance, atol=1e-7)
    slope = jax.jit(jax.grad(at, has_aux=True))(1.3)[0]
    ends = [at(scale)[0] for scale in (1.3 - 1e-5, 1.3 + 1e-5)]
    np.testing.assert_allclose(slope, (ends[1] - ends[0]) / 2e-5, rtol=1e-5, atol=1e-6)


def test_gaussian_factors_are_their_own_sites_and_negative_precisions_are_replaced():
    form = _form((DiagonalPrior(jnp.ones(5)),), DenseDesign(MATRIX))
    observation = jnp.arange(4.0)
    both = form._replace(
        potentials=(GaussianPotential(observation, jnp.full(4, 0.5)), PoissonExpPotential(jnp.ones(8), jnp.ones(8))),
        observed=(jnp.ones(4, bool), jnp.ones(8, bool)),
    )
    precision, shift = jnp.ones(NUM_ROWS).at[6].set(-0.2), jnp.ones(NUM_ROWS)
    mean = jnp.full(NUM_ROWS, 2.0)
    sites = hold(GaussianPosterior(both, precision, shift), mean)
    np.testing.assert_array_equal(sites.site_precision, precision.at[6].set(0.0))
    assert sites.num_replaced == 1
    assert sites.site_shift[6] == pytest.approx(1.0 + 0.2 * 2.0)  # the slope at the mean stays
    exact = jnp.concatenate([jnp.full(4, 4.0), sites.site_precision[4:]])
    exact_shift = jnp.concatenate([4.0 * observation, sites.site_shift[4:]])
    np.testing.assert_allclose(field_given(both, sites).mean, by_inversion(both, exact, exact_shift)[0], atol=1e-10)


def test_what_has_no_map_is_refused():
    form = sparse(1.0)
    pattern = form.prior[0].pattern
    ones = jnp.full((6, 1), 6**-0.5)
    walk = SparsePrecisionPrior(form.prior[0].values, None, ones, jnp.array([0]), pattern, is_constrained=True)
    zeros = jnp.zeros(NUM_ROWS)
    with pytest.raises(ValueError, match="sums of zero"):
        hold(GaussianPosterior(form._replace(prior=(walk, form.prior[1])), zeros, zeros), zeros)
    with pytest.raises(FloatingPointError, match="not finite"):
        hold(GaussianPosterior(form, zeros + jnp.nan, zeros), zeros)
    wide = LowRankPrior(jnp.ones((1, 3000, 1)), jnp.ones((1, 3000)))
    with pytest.raises(ValueError, match="3000 unknowns of a prior of low rank"):
        hold(GaussianPosterior(form._replace(prior=(wide,)), zeros, zeros), zeros)
