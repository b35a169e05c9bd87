"""Conditioning a Gaussian on sites, in every space, against plain inversion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian.conditioning import choose_space, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, OperatorRows, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior
from tests.infer.gaussian.gaussian_forms import (
    dense_prior_precision,
    identity,
    kernel,
    mixed_prior,
    one_block,
    random_sparse,
)
from tests.tiers import few, thorough

NUM_ROWS, NUM_COLUMNS = 13, 11
SPACES = ["observation", "coefficient", "sparse"]


def problem(is_flat=False, is_signed=False):
    rng = np.random.default_rng(3)
    prior = mixed_prior(rng, is_flat)
    design = random_sparse(rng, NUM_ROWS, NUM_COLUMNS, 3)
    precision = rng.gamma(1.0, size=NUM_ROWS)
    precision[2] = 0.0
    if is_signed:
        precision[[1, 4]] = -0.04, -0.02
    return prior, design, precision, rng.normal(size=NUM_ROWS)


def by_inversion(prior, design, precision, shift):
    matrix = np.asarray(design.to_dense())
    prior_precision = dense_prior_precision(prior)
    posterior_precision = prior_precision + matrix.T @ (precision[:, None] * matrix)
    assert np.linalg.eigvalsh(posterior_precision).min() > 0
    covariance = np.linalg.inv(posterior_precision)
    mean = covariance @ matrix.T @ shift
    num_flat = sum(block.size for block in prior if isinstance(block, FlatPrior))
    proper = prior_precision[: NUM_COLUMNS - num_flat, : NUM_COLUMNS - num_flat]
    log_partition = 0.5 * mean @ posterior_precision @ mean + 0.5 * np.linalg.slogdet(proper)[1]
    log_partition += 0.5 * num_flat * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(posterior_precision)[1]
    return mean, covariance, log_partition


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize(
    "space, is_flat", few([(s, False) for s in SPACES] + [("coefficient", True), ("sparse", True)], 3)
)
def test_moments_agree_with_inversion(space, is_flat, is_signed, is_dense):
    if is_dense and space == "sparse":
        with pytest.raises(ValueError, match="sparse rows"):
            linear_gaussian(
                mixed_prior(np.random.default_rng(0)),
                DenseDesign(jnp.ones((NUM_ROWS, NUM_COLUMNS))),
                *one_block(NUM_ROWS, NUM_COLUMNS),
                space=space,
            )
        return
    prior, design, precision, shift = problem(is_flat, is_signed)
    mean, covariance, log_partition = by_inversion(prior, design, precision, shift)
    matrix = np.asarray(design.to_dense())
    if is_dense:
        design = DenseDesign(jnp.asarray(matrix))
    quantity = random_sparse(np.random.default_rng(8), 4, NUM_COLUMNS, 2)

    @jax.jit
    def run(design, precision, shift):
        prepared = linear_gaussian(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS), is_signed=is_signed, space=space)
        posterior = prepared.condition(precision, shift)
        maps = [
            (posterior.map_covariance(map_), posterior.map_variance(map_))
            for map_ in (quantity, DenseDesign(quantity.to_dense()))
        ]
        coordinates = posterior.coordinates
        by_coordinates = prepared.predictor(coordinates), prepared.unknowns(coordinates)
        return posterior.marginals(), posterior.unknowns(), by_coordinates, maps

    marginals, unknowns, (predictor, unknowns_again), maps = run(design, jnp.asarray(precision), jnp.asarray(shift))
    variance = np.diag(matrix @ covariance @ matrix.T)
    tolerance = {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(marginals.mean, matrix @ mean, **tolerance)
    np.testing.assert_allclose(marginals.variance, variance, **tolerance)
    np.testing.assert_allclose(marginals.cavity_ratio, 1 - precision * variance, **tolerance)
    np.testing.assert_allclose(marginals.log_partition, log_partition, **tolerance)
    np.testing.assert_allclose(unknowns, mean, **tolerance)
    np.testing.assert_allclose(predictor, matrix @ mean, **tolerance)
    np.testing.assert_allclose(unknowns_again, mean, **tolerance)
    dense = np.asarray(quantity.to_dense())
    expected = dense @ covariance @ dense.T
    for map_covariance, map_variance in maps:
        np.testing.assert_allclose(map_covariance, expected, **tolerance)
        np.testing.assert_allclose(map_variance, np.diag(expected), **tolerance)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("space", ["observation", "coefficient"])
def test_draws_have_the_posterior_moments(space, is_signed):
    prior, design, precision, shift = problem(is_signed=is_signed)
    mean, covariance, _ = by_inversion(prior, design, precision, shift)
    space = linear_gaussian(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS), is_signed=is_signed, space=space)
    posterior = space.condition(jnp.asarray(precision), jnp.asarray(shift))
    num_samples = 100_000
    draws = np.asarray(posterior.sample(jax.random.key(0), num_samples))
    white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    # Means have standard error 1/sqrt(n); entries of a white sample covariance at most sqrt(2/n).
    assert np.abs(white.mean(1)).max() < 5 / np.sqrt(num_samples)
    assert np.abs(np.cov(white) - np.eye(NUM_COLUMNS)).max() < 5 * np.sqrt(2 / num_samples)


@pytest.mark.parametrize("space", ["observation", "coefficient"])
@pytest.mark.parametrize("is_signed", [*thorough(False), True])
def test_blocks_equal_the_whole(space, is_signed):
    rng = np.random.default_rng(5)
    widths, counts = [2, 2, 2], [3, 1, 2]
    columns = np.array([[0, 3, 4], [1, 5, 6], [2, 7, 8]])
    home = np.repeat([0, 1, 2], counts)
    order = rng.permutation(6)
    home = home[order]
    num_rows, num_columns = 6, 10  # the last column belongs to a block without rows
    rows = np.full((4, 3), num_rows)
    padded = np.full((4, 3), num_columns)
    padded[:3], padded[3, 0] = columns, 9
    for block in range(3):
        members = np.flatnonzero(home == block)
        rows[block, : members.size] = members
    design_columns = np.stack([rng.choice(columns[block], size=2) for block in home])
    design = SparseRows(jnp.asarray(design_columns), jnp.asarray(rng.normal(size=(num_rows, 2))), num_columns)
    a = rng.normal(size=(len(widths), 2, 2))
    prior = (
        DiagonalPrior(jnp.array([1.0, 2.0, 0.5])),
        CovariancePrior(jnp.asarray(a @ a.swapaxes(-1, -2) + np.eye(2))),
        DiagonalPrior(jnp.array([3.0])),
    )
    precision = rng.gamma(1.0, size=num_rows)
    if is_signed:
        precision[1] = -0.05
    shift = rng.normal(size=num_rows)
    quantity = random_sparse(rng, 4, num_columns, 3)
    dense_quantity = DenseDesign(quantity.to_dense())

    @jax.jit
    def run(design, rows, columns):
        prepared = linear_gaussian(prior, design, rows, columns, is_signed=is_signed, space=space)
        posterior = prepared.condition(jnp.asarray(precision), jnp.asarray(shift))
        maps = [(posterior.map_variance(map_), posterior.map_covariance(map_)) for map_ in (quantity, dense_quantity)]
        energy = prepared.inner(posterior.coordinates, posterior.coordinates)
        draws = posterior.sample(jax.random.key(1), 2000)
        return (posterior.marginals(), posterior.unknowns(), maps, energy), draws.mean(0)

    blocked, whole = (jnp.asarray(rows), jnp.asarray(padded)), one_block(num_rows, num_columns)
    cases = (design, blocked), (DenseDesign(design.to_dense()), blocked), (design, whole)
    results = []
    for form_of_design, blocks in cases:
        result, mean_of_draws = run(form_of_design, *blocks)
        results.append(result)
        largest_variance = 10.0
        assert np.abs(mean_of_draws - result[1]).max() < 5 * np.sqrt(largest_variance / 2000)
    for other in results[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12), results[0], other)


def test_dominating_sites_lose_no_digits():
    """The cavity of a site that is 10^16 times as precise as the prior, against the closed form for one row."""
    prior_variance, precision = 1e8, 1e8
    space = linear_gaussian(
        (DiagonalPrior(jnp.array([prior_variance])),), identity(1), *one_block(1, 1), space="observation"
    )
    marginals = space.condition(jnp.array([precision]), jnp.array([0.0])).marginals()
    total = 1 + prior_variance * precision
    np.testing.assert_allclose(marginals.variance, prior_variance / total, rtol=1e-14)
    np.testing.assert_allclose(marginals.variance / marginals.cavity_ratio, prior_variance, rtol=1e-14)


def test_singular_covariance_of_predictors_is_no_obstacle():
    prior, design = (DiagonalPrior(jnp.array([2.0, 1.0])),), DenseDesign(jnp.array([[1.0, 0.0], [1.0, 0.0]]))
    space = linear_gaussian(prior, design, *one_block(2, 2), is_signed=True)
    marginals = space.condition(jnp.array([3.0, -0.5]), jnp.array([1.0, 1.0])).marginals()
    np.testing.assert_allclose(marginals.variance, 1 / (0.5 + 2.5), rtol=1e-13)
    np.testing.assert_allclose(marginals.mean, 2 / 3, rtol=1e-13)


@pytest.mark.parametrize("space", SPACES)
def test_improper_posterior_is_nan(space):
    space = linear_gaussian((DiagonalPrior(jnp.ones(2)),), identity(2), *one_block(2, 2), is_signed=True, space=space)
    marginals = space.condition(jnp.array([1.0, -1.5]), jnp.zeros(2)).marginals()
    assert np.isnan(marginals.log_partition)


def test_choice_of_space():
    dense, sparse = DenseDesign(jnp.ones((30, 20))), random_sparse(np.random.default_rng(0), 30, 20, 2)
    proper, flat = (DiagonalPrior(jnp.ones(20)),), (FlatPrior(20),)
    assert choose_space(proper, dense, *one_block(30, 20)) == "coefficient"
    assert choose_space(proper, sparse, *one_block(30, 20)) == "sparse"
    assert choose_space(proper, DenseDesign(dense.matrix.T), *one_block(20, 30)) == "observation"
    assert choose_space(flat, DenseDesign(dense.matrix[:10]), *one_block(10, 20)) == "coefficient"
    with pytest.raises(ValueError, match="no covariance"):
        linear_gaussian(flat, dense, *one_block(30, 20), space="observation")
    with pytest.raises(ValueError, match="Unknown space"):
        linear_gaussian(proper, dense, *one_block(30, 20), space="dual")


@pytest.mark.float32
def test_single_precision():
    prior = (CovariancePrior(jnp.asarray(kernel(12, jitter=1e-3), jnp.float32)[None]),)
    design = SparseRows(jnp.arange(12)[:, None], jnp.ones((12, 1), jnp.float32), 12)
    precision = jnp.linspace(0.0, 4.0, 12, dtype=jnp.float32)
    expected = np.linalg.inv(np.linalg.inv(np.asarray(prior[0].covariance[0], float)) + np.diag(precision))
    for space in SPACES:
        posterior = linear_gaussian(prior, design, *one_block(12, 12), space=space).condition(precision, precision)
        marginals = posterior.marginals()
        assert marginals.variance.dtype == jnp.float32
        np.testing.assert_allclose(marginals.variance, np.diag(expected), rtol=2e-4)
        np.testing.assert_allclose(marginals.mean, expected @ np.asarray(precision, float), rtol=2e-4)


def banded_problem(is_flat):
    """Rows over stretches of up to 41 of 150 unknowns, which takes four blocks of the band, the last one padded."""
    rng = np.random.default_rng(11)
    num_rows, num_columns = 240, 150
    start = rng.integers(0, num_columns - 41, num_rows)
    start[:2] = 0, num_columns - 41
    columns = np.sort(start[:, None] + rng.integers(0, 41, (num_rows, 4)), axis=1)
    columns[:2, 0], columns[:2, -1] = start[:2], start[:2] + 40
    columns[5] = columns[5, 0]  # one column four times
    columns[10:160, 0] = np.arange(150)  # every unknown is seen, so that flat ones have a posterior
    columns[10:160, 1:] = np.clip(columns[10:160, 1:], np.arange(150)[:, None] - 40, np.arange(150)[:, None] + 40)
    columns = np.where(np.ptp(columns, axis=1, keepdims=True) > 40, columns[:, :1], columns)
    bandwidth = int(np.ptp(columns, axis=1).max())
    design = SparseRows(jnp.asarray(columns), jnp.asarray(rng.normal(size=columns.shape)), num_columns, bandwidth)
    variance = rng.gamma(2.0, size=num_columns)
    variance[7] = 0.0
    prior = (DiagonalPrior(jnp.asarray(variance[:100])), DiagonalPrior(jnp.asarray(variance[100:])))
    if is_flat:
        prior = (prior[0], FlatPrior(num_columns - 100))
    return prior, design, rng.gamma(1.0, size=num_rows), rng.normal(size=num_rows)


@pytest.mark.thorough
@pytest.mark.parametrize("is_flat", few([False, True], 1))
def test_banded_space_agrees_with_the_dense_one(is_flat):
    prior, design, precision, shift = banded_problem(is_flat)
    local, far = random_sparse(np.random.default_rng(8), 6, 150, 2), jnp.asarray([[3, 4], [140, 150 - 1]])
    near = SparseRows(far, jnp.asarray([[1.0, -2.0], [0.5, 1.0]]), 150, 9)

    def run(space, precision, shift):
        prepared = linear_gaussian(prior, design, *one_block(240, 150), space=space)
        posterior = prepared.condition(precision, shift)
        maps = [(posterior.map_covariance(m), posterior.map_variance(m)) for m in (local, near)]
        inner = prepared.inner(posterior.coordinates, posterior.coordinates)
        predictor = prepared.predictor(posterior.coordinates)
        return posterior.marginals(), posterior.unknowns(), posterior.log_volume(), maps, inner, predictor

    arrays = jnp.asarray(precision), jnp.asarray(shift)
    banded, dense = (jax.jit(run, static_argnums=0)(space, *arrays) for space in ("banded", "coefficient"))
    assert np.isfinite(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(dense)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), banded, dense)

    gradients = [
        jax.jit(jax.grad(lambda p, space=space: run(space, p, arrays[1])[0].log_partition))(arrays[0])
        for space in ("banded", "coefficient")
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.thorough
def test_banded_draws_and_refusals():
    prior, design, precision, shift = banded_problem(is_flat=True)
    space = linear_gaussian(prior, design, *one_block(240, 150), space="banded")
    posterior = space.condition(jnp.asarray(precision), jnp.asarray(shift))
    draws = posterior.sample(jax.random.key(0), 20_000)
    assert draws.shape == (20_000, 150)
    variance = posterior.map_variance(SparseRows(jnp.arange(150)[:, None], jnp.ones((150, 1)), 150, 0))
    is_free = np.asarray(variance) > 0
    score = (draws.mean(0) - posterior.unknowns())[is_free] / np.sqrt(variance[is_free] / 20_000)
    assert np.abs(score).max() < 5
    np.testing.assert_allclose(draws.var(0)[is_free], variance[is_free], rtol=6 * np.sqrt(2 / 20_000))
    assert draws.var(0)[7] == 0.0

    improper = linear_gaussian((FlatPrior(150),), design, *one_block(240, 150), space="banded")
    assert np.isnan(improper.condition(jnp.zeros(240), jnp.zeros(240)).log_volume())
    with pytest.raises(ValueError, match="sequential schedule has no banded form"):
        space.sequential_row(0)
    with pytest.raises(ValueError, match="banded space needs independent unknowns"):
        linear_gaussian((CovariancePrior(jnp.eye(150)[None]),), design, *one_block(240, 150), space="banded")


def test_images_are_conditioned_in_a_band():
    rows = jnp.arange(900)[:, None] + jnp.array([0, 30])
    design = SparseRows(rows, jnp.ones((900, 2)), 930, 30)
    assert choose_space((FlatPrior(930),), design, *one_block(900, 930)) == "banded"
    assert choose_space((FlatPrior(930),), design, *one_block(900, 930), is_sequential=True) == "sparse"
    unknown_extent = SparseRows(rows, jnp.ones((900, 2)), 930)
    assert choose_space((FlatPrior(930),), unknown_extent, *one_block(900, 930)) == "sparse"


def transform_and_square(e, known):
    """Rows of a Fourier transform, scaled, and some unknowns themselves."""
    spectrum = jnp.fft.rfft(known["scale"] * e)
    return jnp.concatenate([spectrum.real, spectrum.imag, e[:9]]) + 3.0


@pytest.mark.thorough
@pytest.mark.parametrize("is_flat", [False, True])
def test_operators_are_conditioned_as_their_matrices(is_flat):
    rng = np.random.default_rng(5)
    size = 1100  # of which the factor is inverted in blocks
    known, num_rows = {"scale": jnp.asarray(rng.gamma(2.0, size=size))}, size + 2 + 9
    operator = OperatorRows(known, jnp.asarray(rng.normal(size=num_rows)), transform_and_square, size)
    matrix = DenseDesign(operator.to_dense())
    np.testing.assert_allclose(matrix.matrix @ known["scale"], operator.matvec(known["scale"]), rtol=1e-9, atol=1e-9)
    variance = rng.gamma(2.0, size=size)
    variance[7] = 0.0
    prior = (DiagonalPrior(jnp.asarray(variance)),)
    if is_flat:
        prior = DiagonalPrior(jnp.asarray(variance[:900])), FlatPrior(200)
    assert choose_space(prior, operator, *one_block(num_rows, size)) == "operator"
    sparse = random_sparse(rng, 6, size, 2)

    arrays = jnp.asarray(rng.gamma(1.0, size=num_rows)), jnp.asarray(rng.normal(size=num_rows))
    expected = linear_gaussian(prior, matrix, *one_block(num_rows, size), space="coefficient").condition(*arrays)
    found = linear_gaussian(prior, operator, *one_block(num_rows, size)).condition(*arrays)
    for a, b in zip(found.marginals(), expected.marginals(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found.unknowns(), expected.unknowns(), rtol=1e-8, atol=1e-9)
    for m in (sparse, DenseDesign(matrix.matrix[:5])):
        np.testing.assert_allclose(found.map_covariance(m), expected.map_covariance(m), rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(found.map_variance(m), expected.map_variance(m), rtol=1e-8, atol=1e-9)
    draws = found.sample(jax.random.key(0), 4000)
    seen = np.asarray(sparse.matvec(draws - found.unknowns()))
    np.testing.assert_allclose(seen.var(0), found.map_variance(sparse), rtol=6 * np.sqrt(2 / 4000))

    def value(design, precision):
        return linear_gaussian(prior, design, *one_block(num_rows, size)).condition(precision, arrays[1]).marginals()[3]

    gradients = [jax.jit(jax.grad(lambda p, d=d: value(d, p)))(arrays[0]) for d in (operator, matrix)]
    np.testing.assert_allclose(*gradients, rtol=1e-7, atol=1e-9)
    with pytest.raises(ValueError, match="space of operators needs independent unknowns"):
        linear_gaussian((CovariancePrior(jnp.eye(size)[None]),), operator, *one_block(num_rows, size), space="operator")
