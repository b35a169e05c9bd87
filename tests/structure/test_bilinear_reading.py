"""Ways of writing bilinear models: all lead to the form, and what is not bilinear is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_ext.distributions import ContinuationRatio, OrderedProbit, SoftplusPoisson
from numpyro_ext.structure import ModelStructureError, read_bilinear
from tests.tiers import few

R, C, K, N = 4, 3, 2, 9
RNG = np.random.default_rng(0)
ROWS, COLS = RNG.integers(0, R, N), RNG.integers(0, C, N)
Y, DENSE = RNG.poisson(2.0, N), RNG.poisson(2.0, (R, C))
MASK = RNG.uniform(size=(R, C)) < 0.7
EXPOSURE = RNG.uniform(0.5, 2.0, N)
STIMULI = RNG.normal(size=(N, 3, 4))
FEATURES = RNG.normal(size=(R, 2))


def vectors(name, num, scale=1.0):
    with numpyro.plate(f"{name}s", num):
        return numpyro.sample(name, dist.Normal(0.0, scale).expand([K]).to_event(1))


def indexed():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w, z = vectors("w", R, scale), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp((w[ROWS] * z[COLS]).sum(-1))), obs=Y)


def einsum():
    w, z = vectors("w", R), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp(jnp.einsum("rk,sk->rs", w, z))).to_event(2), obs=DENSE)


def matmul_and_index():
    w, z = vectors("w", R), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp((w @ z.T)[ROWS, COLS])), obs=Y)


def vmapped():
    w, z = vectors("w", R), vectors("z", C)
    eta = jax.vmap(lambda r, c: jnp.dot(w[r], z[c]))(jnp.asarray(ROWS), jnp.asarray(COLS))
    numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=Y)


def nested_plates():
    with numpyro.plate("rows", R), numpyro.plate("rank", K):
        w = numpyro.sample("w", dist.Normal(0.0, 0.7))
    with numpyro.plate("cols", C), numpyro.plate("rank", K):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("cells", N):
        numpyro.sample("y", dist.Poisson(jnp.exp((w[:, ROWS] * z[:, COLS]).sum(0))), obs=Y)


def non_centred():
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([K]).to_event(1))
    w = numpyro.deterministic("w", scales * vectors("w_base", R))
    z = vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp(jnp.sum(w[ROWS] * z[COLS], -1))), obs=Y)


def biases_inside():
    with numpyro.plate("rows", R):
        w = numpyro.sample("w", dist.Normal(0.0, jnp.array([1.0, 1.0, 0.5])).to_event(1))
    with numpyro.plate("cols", C):
        z = numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.2))
    ones = jnp.ones((N, 1))
    left = jnp.concatenate([w[ROWS], ones], axis=1)
    right = jnp.concatenate([z[COLS, :2], ones, z[COLS, 2:]], axis=1)
    numpyro.sample("y", dist.Poisson(jnp.exp((left * right).sum(-1))), obs=Y)


def transposed():
    w, z = vectors("w", R), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp(z @ w.T)).to_event(2), obs=DENSE.T)


def masked_dense():
    w, z = vectors("w", R), vectors("z", C)
    with handlers.mask(mask=MASK):
        numpyro.sample("y", dist.Poisson(jnp.exp(w @ z.T)), obs=np.where(MASK, DENSE, -1))


def everything():
    """Biases, an intercept, several terms, side features, exposures, a hierarchical mean."""
    centre = numpyro.sample("centre", dist.Normal(0.0, 1.0))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    w, z, z2 = vectors("w", R), vectors("z", C), vectors("z2", C)
    with numpyro.plate("rows", R):
        bias = numpyro.sample("bias", dist.Normal(centre, 1.0))
    with numpyro.plate("cols", C):
        effect = numpyro.sample("effect", dist.Normal(0.3, 1.0).expand([2]).to_event(1))
        bias2 = numpyro.sample("bias2", dist.Normal(0.0, 1.0))
    eta = intercept + (w[ROWS] * z[COLS]).sum(-1) + 0.5 * (w[ROWS, 0] * z2[COLS, 1]) + bias[ROWS] + bias2[COLS]
    eta = eta + (FEATURES[ROWS] * effect[COLS]).sum(-1)
    with handlers.scale(scale=0.5):
        numpyro.sample("y", dist.Poisson(EXPOSURE * jnp.exp(eta)), obs=Y)


def receptive_field():
    """A filter in space times a filter in time: one vector each, and a matrix of stimuli per observation."""
    w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)).expand([2]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2, 4]).to_event(2))
    numpyro.sample("y", dist.Poisson(jnp.exp(jnp.einsum("nij,ki,kj->n", STIMULI, w, z))), obs=Y)


# model, sizes of the vectors, number of cells, of paired components
WAYS = [
    (indexed, ((R, K), (C, K)), N, K),
    (einsum, ((R, K), (C, K)), R * C, K),
    (matmul_and_index, ((R, K), (C, K)), N, K),
    (vmapped, ((R, K), (C, K)), N, K),
    (nested_plates, ((R, K), (C, K)), N, K),
    (non_centred, ((R, K), (C, K)), N, K),
    (biases_inside, ((R, K + 1), (C, K + 1)), N, K),
    (transposed, ((R, K), (C, K)), R * C, K),
    (masked_dense, ((R, K), (C, K)), int(MASK.sum()), K),
    (everything, ((R, K + 1), (C, 2 * K + 3)), N, None),
    (receptive_field, ((1, 6), (1, 8)), N, None),
]


@pytest.mark.parametrize(
    "model, shapes, num_cells, num_pairs", few(WAYS, 4), ids=lambda x: getattr(x, "__name__", None)
)
def test_ways_of_writing(model, shapes, num_cells, num_pairs):
    """The check of the reading compares the form with NumPyro's log density at random points."""
    reading = read_bilinear(model)
    assert tuple(e.shape for e in reading.elements) == shapes
    assert reading.index[0].size == num_cells
    assert reading._design.num_pairs == num_pairs
    assert reading._design.is_coupling_shared == (model is not receptive_field)


def predictor():
    w, z = vectors("w", R), vectors("z", C)
    return (w[ROWS] * z[COLS]).sum(-1)


def ordered():
    steps = numpyro.sample("steps", dist.HalfNormal(1.0).expand([2]).to_event(1))
    cutpoints = jnp.concatenate([jnp.array([-1.0]), -1.0 + jnp.cumsum(steps)])
    numpyro.sample("y", dist.OrderedLogistic(predictor(), cutpoints), obs=jnp.minimum(Y, 3))


def negative_binomial():
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.NegativeBinomial2(EXPOSURE * jnp.exp(predictor()), concentration), obs=Y)


def two_sites():
    eta = predictor()
    with handlers.mask(mask=EXPOSURE > 0.8):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=Y > 1)
    numpyro.sample("again", dist.Bernoulli(logits=0.5 - eta[:4]), obs=Y[:4] > 2)


LIKELIHOODS = {
    "poisson, softplus link": lambda: dist.Poisson(EXPOSURE * jax.nn.softplus(predictor())),
    "softplus poisson": lambda: SoftplusPoisson(predictor(), EXPOSURE, 0.3 * EXPOSURE),
    "negative binomial, exp link": lambda: dist.NegativeBinomialLogits(2.0, predictor()),
    "bernoulli logits": lambda: dist.Bernoulli(logits=predictor()),
    "bernoulli, logistic link": lambda: dist.Bernoulli(probs=jax.nn.sigmoid(-predictor())),
    "bernoulli, probit link": lambda: dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(predictor())),
    "binomial logits": lambda: dist.Binomial(8, logits=predictor()),
    "ordered probit": lambda: OrderedProbit(predictor(), jnp.array([-1.0, 0.5])),
    "continuation ratio": lambda: ContinuationRatio(predictor(), jnp.array([0.5, -1.0])),
}


@pytest.mark.parametrize("label", few(LIKELIHOODS, 3))
def test_likelihoods(label):
    """The check of the reading compares with NumPyro."""
    limit = {"b": 1, "o": 2, "c": 2}.get(label[0], 100)
    reading = read_bilinear(lambda: numpyro.sample("y", LIKELIHOODS[label](), obs=jnp.minimum(Y, limit)))
    assert f"({label})" in reading.describe()


@pytest.mark.thorough
def test_parameters_of_likelihoods_and_several_sites():
    reading = read_bilinear(ordered)
    assert set(reading.hyper) == {"steps"} and not reading.is_design_fixed
    assert reading.form({"steps": jnp.ones(2)}).potential.thresholds.shape == (N, 3)
    reading = read_bilinear(negative_binomial)
    assert set(reading.hyper) == {"concentration"}
    used = EXPOSURE > 0.8
    form = read_bilinear(two_sites).form({})
    np.testing.assert_array_equal(form.potential.label, np.concatenate([Y[used] > 1, Y[:4] > 2]))


@pytest.mark.thorough
def test_hyperparameters_and_what_they_touch():
    reading = read_bilinear(everything, check=False)
    assert set(reading.hyper) == {"centre", "intercept"}
    assert reading.sides == (("w", "bias"), ("z", "z2", "effect", "bias2"))
    assert not reading.is_design_fixed
    assert reading._design.is_linear_shared == (True, False)
    reading = read_bilinear(indexed, check=False)
    assert set(reading.hyper) == {"scale"} and reading.is_design_fixed
    form = reading.form({"scale": 0.5})
    np.testing.assert_allclose(form.rows.precision, 4.0)
    assert form.row_linear.shape == (1, 0)
    assert "2 products of components" in reading.describe()
    # a row without cells has its place
    assert not np.isin(np.arange(R), ROWS).all() or reading.elements[0].shape[0] == R
    reading = read_bilinear(non_centred, check=False)
    assert not reading.is_design_fixed
    np.testing.assert_allclose(reading.form({"scales": jnp.array([2.0, 3.0])}).coupling, [[2.0, 3.0]])


def trilinear():
    t = vectors("t", 2)
    w, z = vectors("w", R), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp((w[ROWS] * z[COLS] * t[ROWS % 2]).sum(-1))), obs=Y)


def shared_block():
    w = vectors("w", R)
    numpyro.sample("y", dist.Poisson(jnp.exp((w[ROWS] * w[COLS]).sum(-1))), obs=Y)


def shared_block_with_bias():
    w = vectors("w", R)
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Poisson(jnp.exp(b + (w[ROWS] * w[COLS]).sum(-1))), obs=Y)


def no_product():
    w = vectors("w", R)
    numpyro.sample("y", dist.Poisson(jnp.exp(w[ROWS].sum(-1))), obs=Y)


def other_likelihood():
    numpyro.sample("y", dist.Laplace(predictor(), 1.0), obs=Y)


def unknown_link():
    numpyro.sample("y", dist.Poisson(1.0 + jnp.exp(predictor())), obs=Y)


def mixed_likelihoods():
    eta = predictor()
    numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=Y)
    numpyro.sample("seen", dist.Bernoulli(logits=eta), obs=Y > 0)


def out_of_range():
    w, z = vectors("w", R), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp((w[ROWS + 1] * z[COLS]).sum(-1))), obs=Y)


def nothing_observed():
    w, z = vectors("w", R), vectors("z", C)
    numpyro.sample("y", dist.Poisson(jnp.exp((w[ROWS] * z[COLS]).sum(-1))))


def flat():
    with numpyro.plate("rows", R):
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("cols", C):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Poisson(jnp.exp(w[ROWS] * z[COLS])), obs=Y)


def missing_covariate():
    w, z = vectors("w", R), vectors("z", C)
    x = np.where(np.arange(Y.size) == 3, np.nan, 0.1)
    numpyro.sample("y", dist.Poisson(jnp.exp((w[ROWS] * z[COLS]).sum(-1) + x)), obs=Y)


@pytest.mark.parametrize(
    "model, words",
    few(
        [
            (missing_covariate, ["predictor of site 'y'", "1 cells (the first is at index (3,))", "NaN"]),
            (trilinear, ["'t'", "'w'", "'z'", "not bilinear", "field="]),
            (shared_block, ["'w'", "multiplied with itself"]),
            (shared_block_with_bias, ["'w'", "multiplied with itself"]),
            (no_product, ["no product", "VariationalGaussian"]),
            (other_likelihood, ["'y'", "laplace", "Poisson", "NUTS"]),
            (unknown_link, ["'y'", "not recognised", "softplus"]),
            (mixed_likelihoods, ["'y' and 'seen'", "PoissonExpPotential and LogitPotential", "one family"]),
            (out_of_range, ["'w'", "out of range", "length 4"]),
            (nothing_observed, ["no observed site"]),
            (flat, ["'w'", "flat prior"]),
        ],
        4,
    ),
    ids=lambda x: getattr(x, "__name__", None),
)
def test_refusals(model, words):
    with pytest.raises(ModelStructureError) as refusal:
        read_bilinear(model)
    for word in words:
        assert word in str(refusal.value)


def test_a_factor_of_three_can_be_a_hyperparameter():
    reading = read_bilinear(trilinear, field=["w", "z"], check=False)
    assert set(reading.hyper) == {"t"} and reading.sides == (("w",), ("z",))


@pytest.mark.parametrize("totals", [3, np.full(4, 3), np.array([3, 1, 2, 5])])
def test_counts_of_several_outcomes_are_refused_by_name(totals):
    def model(counts):
        with numpyro.plate("rows", 4):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("columns", 3):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("counts", dist.Multinomial(totals, logits=u @ v.T, total_count_max=5), obs=counts)

    counts = np.zeros((4, 3), int)
    counts[:, 1] = totals
    for takes_any in (False, True):
        with pytest.raises(ModelStructureError, match="'counts' was read as multinomial logits.* predictor"):
            read_bilinear(model, (counts,), takes_any_factor=takes_any)


@pytest.mark.thorough
def test_values_that_are_given_may_be_many():
    """Nothing is maximised over them; the reading compares the form with the density of the model at them."""

    def model(rows, columns, y):
        with numpyro.plate("rows", 30):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
            noise = numpyro.sample("noise", dist.InverseGamma(5.0, 5.0))
        with numpyro.plate("columns", 4):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(u[rows] * v[columns], jnp.sqrt(noise[rows])), obs=y)

    args, values = (np.arange(20), np.arange(20) % 4, np.linspace(-1.0, 1.0, 20)), np.linspace(0.5, 2.0, 30)
    with pytest.raises(ModelStructureError, match="'noise' .* has 30 elements for 20 observations"):
        read_bilinear(model, args, init_values={"noise": values})
    reading = read_bilinear(model, args, init_values={"noise": values}, held=["noise"])
    scale = reading.form({"noise": values}).potential.scale
    np.testing.assert_allclose(scale, np.sqrt(values)[:20], rtol=1e-6)
