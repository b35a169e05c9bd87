"""What ordinary NumPyro code does besides the algebra, such as tables, keys and scatters: read, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.sparse
import scipy.stats
from jax.experimental.sparse import BCOO
from numpyro.infer.util import log_density

from numpyro_ext.distributions import StickBreakingCategorical
from numpyro_ext.infer import EP
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.errors import Reason
from tests.readings import log_densities
from tests.tiers import few, thorough

KEY = jax.random.key(0)
Y = np.array([0.3, -1.2, 0.7, 2.0, -0.4])
GROUP = np.array([0, 1, 2, 0, 1])
TABLE = pd.DataFrame({"y": Y, "group": GROUP, "x": np.arange(5)})


def check_is_read(model, *args):
    """The form has the density that NumPyro computes, which the reading itself has compared once."""
    reading = read_latent_gaussian(model, args)
    np.testing.assert_allclose(
        *log_densities(reading, jax.random.key(1)).T, rtol=1e-9 if Y.dtype == jnp.zeros(()).dtype else 1e-3
    )
    return reading


def test_sample_shapes_are_read():
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1), sample_shape=(2,))
        effect = numpyro.sample("effect", dist.Normal(0, scale.sum()), sample_shape=(3,))
        with numpyro.plate("rows", 5):
            noise = numpyro.sample("noise", dist.Normal(0, 1), sample_shape=(5,))
        numpyro.sample("y", dist.Normal(effect[GROUP] + noise, 0.5), obs=y)

    reading = check_is_read(model, Y)
    assert reading.site_shapes["effect"] == (3,)
    assert reading.hyper["scale"].shape == (2,)


def test_priors_without_a_mean_start_elsewhere():
    def model(y):
        variance = numpyro.sample("variance", dist.InverseGamma(1, 1))
        numpyro.sample("y", dist.Normal(numpyro.sample("f", dist.Normal(0, 1)), jnp.sqrt(variance)), obs=y)

    assert float(check_is_read(model, Y).hyper["variance"].init) > 0.0


@pytest.mark.parametrize("amounts", [2, [1, 2, 3]], ids=["scalar", "array"])
def test_numbers_added_to_places_are_read(amounts):
    place = np.array([0, 1, 1])

    def model(y):
        f = numpyro.sample("f", dist.Normal(0, 1).expand([5]))
        collected = jnp.zeros(5).at[place].add(f[:3])
        numpyro.sample("y", dist.Normal(f.at[place].add(jnp.asarray(amounts)) + collected, 0.5), obs=y)

    check_is_read(model, Y)


def test_sums_at_places_keep_the_design_sparse():
    def model(y):
        f = numpyro.sample("f", dist.Normal(0, 1).expand([20]))
        numpyro.sample("y", dist.Normal(jnp.zeros(20).at[np.arange(19)].add(f[1:]) + f, 0.5), obs=y)

    assert "2 entries per row" in check_is_read(model, np.linspace(-1.0, 1.0, 20)).describe()


def noisy(y, key):
    f = numpyro.sample("f", dist.Normal(0, 1))

    def step(key, _):
        key, use = jax.random.split(key)
        return key, jax.random.normal(use)

    numpyro.sample("y", dist.Normal(f + jax.lax.scan(step, key, None, length=5)[1], 0.5), obs=y)


@pytest.mark.thorough
def test_solves_and_sparse_products_are_linear():
    # A simultaneous autoregression: its matrix has a hyperparameter.
    chain = np.eye(5, k=1) + np.eye(5, k=-1)
    average = BCOO.fromdense(jnp.asarray(chain / chain.sum(1, keepdims=True)))

    def model(y):
        correlation = numpyro.sample("correlation", dist.Uniform(-1, 1))
        with numpyro.plate("places", 5):
            noise = numpyro.sample("noise", dist.Normal(0, 1))
        spatial = numpyro.deterministic("spatial", jnp.linalg.solve(jnp.eye(5) - 0.5 * correlation * chain, noise))
        numpyro.sample("y", dist.Normal(spatial + average @ noise, 0.5), obs=y)

    reading = check_is_read(model, Y)
    assert (reading.field, list(reading.hyper)) == (("noise",), ["correlation"])


@pytest.mark.parametrize("key", few([jax.random.key(3), jax.random.PRNGKey(3)], 1), ids=["typed", "raw"])
def test_a_random_key_in_a_scan_is_data(key, tmp_path):
    engine = EP(noisy, progress_bar=False, num_samples=2)
    engine.run(KEY, Y, key)
    _, noise = jax.lax.scan(
        lambda k, _: (jax.random.split(k)[0], jax.random.normal(jax.random.split(k)[1])), key, length=5
    )
    precision = 1.0 + 5 / 0.25
    np.testing.assert_allclose(engine.posterior["f"].mean, np.sum(Y - noise) / 0.25 / precision, rtol=1e-5)
    engine.save(tmp_path / "run")
    assert float(EP.load(tmp_path / "run", noisy).log_evidence) == float(engine.log_evidence)


def test_keys_that_differ_make_different_numbers():
    first, second = jax.random.key(1), jax.random.key(2)

    def model(y):
        f = numpyro.sample("f", dist.Normal(0, 1))
        noise = jax.random.normal(first, (5,)) * jax.random.normal(second, (5,))
        numpyro.sample("y", dist.Normal(f + noise, 0.5), obs=y)

    check_is_read(model, Y)


@pytest.mark.parametrize("adjacency", [np.asarray, scipy.sparse.csr_matrix], ids=["array", "sparse"])
def test_a_sparse_adjacency_matrix_is_taken(adjacency):
    chain = np.eye(5, k=1, dtype=int) + np.eye(5, k=-1, dtype=int)

    def model(y):
        f = numpyro.sample(
            "f", dist.CAR(0, 0.5, numpyro.sample("tau", dist.Gamma(2, 1)), adjacency(chain), is_sparse=True)
        )
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    check_is_read(model, Y)


def test_tables_are_taken_where_the_model_makes_arrays_of_them():
    def model(table, options):
        effect = numpyro.sample("effect", dist.Normal(0, options["scale"]).expand([table["group"].nunique()]))
        mean = effect[table["group"].to_numpy()] + 0.1 * table["x"].values
        numpyro.sample("y", dist.Normal(mean, 1), obs=table.y.to_numpy())

    check_is_read(model, TABLE, {"scale": 2, "names": ["a", "b"], "kinds": {1, 2}})


@pytest.mark.parametrize("dtype", [float, "float32", "Int64"])
def test_tables_and_columns_of_numbers_are_taken_where_the_model_needs_arrays(dtype):
    def model(table, x, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
        numpyro.sample("y", dist.Normal(jnp.dot(table, b) + b[0] * x, 1), obs=y)

    x = np.array([0, 2, -1, 3, 1])
    table = pd.DataFrame({"x": x, "group": [0, 1, 0, 1, 1]}).astype(dtype)
    columns = pd.Series(x, index=range(5, 0, -1)).astype(dtype), pd.Series(Y)
    check_is_read(model, table, *columns)
    reading = read_latent_gaussian(model, (table, *columns))
    assert all(type(value) is np.ndarray for value in reading.args)
    np.testing.assert_array_equal(reading.args[1], x)


def test_columns_of_labels_are_refused_by_the_name_of_the_argument():
    def model(group, x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
        numpyro.sample("y", dist.Normal(b[group] * x, 1), obs=y)

    labels = pd.Series(list("abaab"))
    for column in (labels, labels.astype("category")):
        with pytest.raises(ModelStructureError, match=r"argument 'group' is a Series of pandas of .*\.cat\.codes"):
            read_latent_gaussian(model, (column, 1.0), {"y": pd.Series(Y)})
    with pytest.raises(ModelStructureError, match="argument 'y' is a Series of pandas of datetime"):
        read_latent_gaussian(model, (np.zeros(5, int), 1.0), {"y": pd.Series(pd.date_range("2020", periods=5))})


def group_effects(group, x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Normal(b[group] * x, 1), obs=y)


def slopes_in_a_plate(group, x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Normal(b * x, 1), obs=y)


def group_of_a_table(table, x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Normal(b[table["group"]] * x, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "lengths", "told"),
    [
        (group_effects, (5, 4, 5), r"incompatible shapes for broadcasting: \(5,\), \(4,\)"),
        (group_effects, (4, 5, 5), r"incompatible shapes for broadcasting: \(4,\), \(5,\)"),
        (group_effects, (5, 5, 4), r"site 'y' has data of shape \(4,\), but its distribution has shape \(5,\)"),
        (slopes_in_a_plate, (5, 5, 4), r"site 'y' has data of shape \(4,\), but its distribution has shape \(5,\)"),
    ],
)
def test_columns_of_unequal_length_are_told_as_arrays_are(model, lengths, told):
    columns = [
        np.array([0, 1, 0, 1, 1][: lengths[0]]),
        np.array([0.5, 2.0, -1.0, 3.0, 1.0][: lengths[1]]),
        np.array(Y[: lengths[2]]),
    ]
    messages = []
    for wrap in (np.asarray, pd.Series):
        with pytest.raises(ModelStructureError, match=told) as caught:
            read_latent_gaussian(model, tuple(map(wrap, columns)))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_what_is_wrong_with_a_table_is_told_without_its_lines():
    with pytest.raises(ModelStructureError, match="a Series of shape") as caught:
        read_latent_gaussian(group_of_a_table, (pd.DataFrame({"group": [0, 1, 0, 1, 1]}), np.ones(5), np.ones(5)))
    assert "dtype: int64" not in str(caught.value) and "table = a DataFrame of pandas" in str(caught.value)


def labels_of_logits(y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Categorical(logits=b * jnp.arange(5.0)[:, None]), obs=y)


def labels_of_probabilities(y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Categorical(probs=jax.nn.softmax(b * jnp.arange(5.0)[:, None])).to_event(1), obs=y)


def ordered_labels(y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.OrderedLogistic(b * jnp.arange(5.0), jnp.array([-1.0, 1.0])), obs=y)


@pytest.mark.parametrize("model", [labels_of_logits, *thorough(labels_of_probabilities, ordered_labels)])
def test_labels_that_are_floats_are_refused_where_numpyro_has_no_density_of_them(model):
    ratings = pd.Series([1.0, 3.0, 2.0, 3.0, 1.0]) - 1.0
    for labels in (ratings, ratings.to_numpy(np.float32), jnp.asarray(ratings)):
        with pytest.raises(TypeError):
            values = {"b": jnp.ones(() if model is ordered_labels else 3)}
            jax.eval_shape(lambda values, own=labels: log_density(model, (np.asarray(own),), {}, values)[0], values)
        with pytest.raises(ModelStructureError, match=r"looks its categories up by integers.*astype\(int\)") as caught:
            read_latent_gaussian(model, (labels,))
        assert (caught.value.reason, caught.value.site) == (Reason.DATA, "y")
    check_is_read(model, ratings.astype(int))


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda eta: dist.Binomial(2, logits=eta),
        lambda eta: StickBreakingCategorical(eta[:, None] * jnp.ones(2)),
        *thorough(lambda eta: dist.Bernoulli(logits=eta), lambda eta: dist.Poisson(jnp.exp(eta))),
    ],
)
def test_labels_that_are_floats_are_taken_where_numpyro_has_a_density_of_them(likelihood):
    def model(y):
        numpyro.sample("y", likelihood(numpyro.sample("b", dist.Normal(0, 1)) * jnp.arange(5.0)), obs=y)

    check_is_read(model, pd.Series([1.0, 2.0, 1.0, 2.0, 1.0]) - 1.0)


def table_as_index(table, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Normal(b[table["group"]], 1), obs=y)


def table_times_latent(table, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b * table["x"], 1), obs=y)


@pytest.mark.parametrize("model", [table_as_index, table_times_latent])
def test_tables_that_jax_does_not_take_are_named(model):
    with pytest.raises(ModelStructureError, match=r"table = a DataFrame of pandas \(give the model \.to_numpy\(\)"):
        read_latent_gaussian(model, (TABLE[["x", "group"]], Y))


@pytest.mark.parametrize("values", [list(Y), np.array(["a"] * 5)], ids=["list", "strings"])
def test_observations_that_are_no_arrays_of_numbers_are_refused_by_name(values):
    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("f", dist.Normal(0, 1)), 1), obs=y)

    with pytest.raises(ModelStructureError, match=f"observed site 'y' is given a {type(values).__name__}"):
        read_latent_gaussian(model, (values,))


@pytest.mark.parametrize("total", few([200, np.uint8(200), np.array([230, 255, 200], np.uint8)], 1))
def test_small_integers_are_counts_like_others(total):
    """Of bytes, JAX makes factorials of few digits."""

    def model(y, total):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Binomial(total, logits=level), obs=y)

    y = np.array([0, 100, 200])
    forms = [read_latent_gaussian(model, args) for args in ((y, np.asarray(total, int)), (y.astype(np.uint8), total))]
    wanted, found = (log_densities(form, KEY) for form in forms)
    np.testing.assert_allclose(found, wanted, rtol=1e-9 if Y.dtype == jnp.zeros(()).dtype else 1e-5)


def _fixed_level(x, y=None):
    """As people hold a parameter fixed, against :func:`_known_level`, where it is a number."""
    level = numpyro.sample("level", dist.Delta(2))
    weights = numpyro.sample("weights", dist.Delta(np.array([1, 3])).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(level * weights[1] + slope * x, 1), obs=y)


def _known_level(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(6 + slope * x, 1), obs=y)


@pytest.mark.thorough
def test_points_are_no_unknowns():
    x, y = np.arange(4.0), np.array([6.5, 7.0, 9.0, 8.5])
    fits = [EP(model, progress_bar=False) for model in (_fixed_level, _known_level)]
    for engine in fits:
        engine.run(jax.random.key(0), x, y)
    assert fits[0].diagnostics.converged
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, rtol=1e-6)
    draws = fits[0].get_samples()
    assert np.all(draws["level"] == 2.0) and draws["weights"].shape[1:] == (2,)


@pytest.mark.thorough
def test_the_density_of_a_point_is_a_factor():
    def model(density, x=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        point = numpyro.sample("point", density(slope))
        numpyro.sample("y", dist.Normal(slope + jnp.sum(point), 1), obs=np.ones(3))

    def evidence(density):
        engine = EP(model, progress_bar=False)
        engine.run(jax.random.key(0), density)
        return engine.log_evidence

    known = evidence(lambda slope: dist.Delta(0.0))
    # Made in the model, it is not known that these are zero.
    for zeros in (
        lambda _: dist.Delta(jnp.zeros(3), jnp.zeros(3)),
        lambda _: dist.Delta(jnp.zeros(3), jnp.zeros(())).to_event(1),
    ):
        np.testing.assert_allclose(evidence(zeros), known, rtol=1e-6)
    np.testing.assert_allclose(evidence(lambda _: dist.Delta(np.zeros(3), -0.5)), known - 1.5, rtol=1e-5)
    np.testing.assert_allclose(evidence(lambda _: dist.Delta(np.zeros(3), -0.5).mask(False)), known, rtol=1e-5)
    # As if slope had a variance of one half, but for the normaliser.
    narrow = scipy.stats.multivariate_normal(np.zeros(3), np.eye(3) + 0.5).logpdf(np.ones(3)) + 0.5 * np.log(0.5)
    found = evidence(lambda slope: dist.Delta(0.0 * slope, log_density=-0.5 * slope**2))
    np.testing.assert_allclose(found, narrow, rtol=1e-5)
