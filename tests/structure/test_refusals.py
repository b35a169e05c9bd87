"""What cannot be treated is refused by name, with a way out."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.reparam import TransformReparam

from numpyro_ext.infer import EP, LaplaceApproximation, recommend
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.structure import ModelStructureError, Reason, read_latent_gaussian

IS_DOUBLE = jax.config.jax_enable_x64

N = 6
X = np.random.default_rng(1).normal(size=(N, 2))
COUNTS = np.array([0, 2, 1, 4, 0, 3])


def _poisson(y: Any = COUNTS, x: Any = X, mask: Any = True, weight: Any = 1.0) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with handlers.mask(mask=mask), handlers.scale(scale=weight):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ b)), obs=y)


def _exposed(exposure: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Poisson(exposure * jnp.exp(X @ b)), obs=COUNTS)


def _two_predictors() -> None:
    with numpyro.plate("rows", N):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
        scale = jnp.exp(log_scale)[jnp.array([0, 0, 1, 2, 3, 4])]
        numpyro.sample("y", dist.Normal(loc, scale), obs=X[:, 0])


def _product() -> None:
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([N]))
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([N]))
    numpyro.sample("y", dist.Normal(u * v, 1.0), obs=X[:, 0])


def _quadratic_form() -> None:
    f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([N]))
    numpyro.sample("y", dist.Normal(f @ f, 1.0), obs=0.3)


def _several_probabilities() -> None:
    f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([N, 3]))
    probs = jnp.exp(f**2) / jnp.sum(jnp.exp(f**2), axis=-1, keepdims=True)
    numpyro.sample("y", dist.Categorical(probs=probs), obs=np.array([0, 1, 2, 0, 1, 2]))


def _correlated() -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.MultivariateStudentT(3.0, X @ b, jnp.eye(N)), obs=X[:, 0])


def _proportions(y: np.ndarray, concentration: float | None = None) -> None:
    mean = jax.nn.sigmoid(X @ numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1)))
    size = numpyro.sample("size", dist.Gamma(2.0, 0.1))
    fn = dist.BetaProportion(mean, size) if concentration is None else dist.Beta(concentration, jnp.exp(mean))
    numpyro.sample("y", fn, obs=y)


def _local_gamma() -> None:
    with numpyro.plate("rows", N):
        w = numpyro.sample("w", dist.Gamma(2.0, 2.0))
        f = numpyro.sample("f", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(f, 1.0 / jnp.sqrt(w)), obs=X[:, 0])


def _discrete() -> None:
    f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([2]))
    k = numpyro.sample("k", dist.Bernoulli(0.5).expand([N]))
    numpyro.sample("y", dist.Normal(f[k], 1.0), obs=X[:, 0])


def _subsampled() -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=3) as index:
        numpyro.sample("y", dist.Normal(X[index] @ b, 1.0), obs=X[index, 0])


def _scaled_latent() -> None:
    with handlers.scale(scale=2.0):
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([N]))
    numpyro.sample("y", dist.Normal(f, 1.0), obs=X[:, 0])


def _funnel() -> None:
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", dist.Normal(0.0, jnp.exp(v / 2)).expand([N]))
    numpyro.sample("y", dist.Normal(f, 1.0), obs=X[:, 0])


def _no_gaussian() -> None:
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
    numpyro.sample("y", dist.Poisson(rate), obs=COUNTS)


def _transformed() -> None:
    rate = numpyro.sample("rate", dist.LogNormal(0.5, 1.0).expand([N]).to_event(1))
    numpyro.sample("y", dist.Poisson(rate), obs=COUNTS)


def _bounded() -> None:
    f = numpyro.sample("f", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Uniform(f - np.full(60, 3.0), f + 3.0), obs=np.where(np.arange(60) == 40, 9.0, 0.0))


def _unconnected() -> None:
    numpyro.sample("f", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(1.0, 1.0), obs=X[:, 0])


def _unobserved() -> None:
    numpyro.sample("f", dist.Normal(0.0, 1.0))


def _singular() -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(N), jnp.ones((N, N)) - 2.0 * jnp.eye(N)))
    numpyro.sample("y", dist.Normal(f, 1.0), obs=X[:, 0])


def _tree_of_values() -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.deterministic("both", {"once": b, "twice": 2.0 * b})
    numpyro.sample("y", dist.Normal(b, 1.0), obs=X[:, 0])


def _bounded_by_a_site() -> None:
    upper = numpyro.sample("upper", dist.LogNormal(0.0, 1.0))
    noise = numpyro.param("noise", 0.1, constraint=dist.constraints.interval(0.0, upper))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(b, noise), obs=X[:, 0])


_CASES: dict[str, tuple[Callable[[], None], str]] = {
    "two predictors, one of them shared": (
        _two_predictors,
        r"site 'y': .* 2 predictors, through 'loc' and 'log_scale', .*share one.*exp\(log_scale\[group\]\).*NUTS",
    ),
    "product of latents": (_product, r"site 'y': .*\(a product of u and v\).*field=.*BilinearVG"),
    "quadratic in the latents": (_quadratic_form, r"site 'y': .* 6 predictors, through 'f'.*product of f"),
    "categorical, neither by logits nor by a softmax": (
        _several_probabilities,
        r"site 'y': .* 3 predictors, through 'f'.*Categorical",
    ),
    "vectors of observations": (_correlated, r"site 'y': .* 6 predictors, through 'b'.*one predictor each.*correlated"),
    "local latent that is not Gaussian": (
        _local_gamma,
        r"'w' \(Gamma, shape \(6,\)\) is not Gaussian.*6 elements.*Student-t",
    ),
    "discrete latent": (_discrete, r"'k' \(BernoulliProbs, shape \(6,\)\) is discrete.*sum it out"),
    "subsampled plate": (_subsampled, r"plate 'rows' draws a random subsample of 3 out of 6.*SVI"),
    "scaled latent": (_scaled_latent, r"latent site 'f' is inside a scale of 2"),
    "no Gaussian latent": (_no_gaussian, r"no Gaussian latent site \(latent sites: \{'rate': 'Gamma'\}\).*NUTS"),
    "a function of Gaussian latents": (
        _transformed,
        r"no Gaussian latent site.*\['rate'\] are functions of Gaussian ones.*config=\{'rate': TransformReparam\(\)\}",
    ),
    "data independent of the field": (_unconnected, r"no observed site depends on the field \['f'\]"),
    "no data": (_unobserved, r"no observed site: pass the data"),
    "covariance not positive definite": (_singular, r"covariance of site 'f' is not positive definite.*jitter"),
    "negative counts": (lambda: _poisson(COUNTS - 1), r"'y': 2 values are outside the support.*-1 at index \(0,\)"),
    "fractional counts": (lambda: _poisson(COUNTS + 0.5), r"'y': 6 values are outside the support.*0\.5 at index"),
    "many bounds": (_bounded, r"^.{,60}'y': 1 value is outside the support of Uniform.{,120}9.0 at index \(40,\)"),
    "proportions of one": (
        lambda: _proportions(np.array([0.2, 1.0, 0.0, 0.5, 1.0, 0.9])),
        r"'y': 3 values are at an end of the support of Beta.*first is 1.0 at index \(1,\).*0\.5\) / n.*handlers.mask",
    ),
    "missing data without a mask": (
        lambda: _poisson(np.array([np.nan, 1, 2, 3, 4, 5])),
        r"'y': 1 value is not finite.*index \(0,\).*mask it",
    ),
    "missing covariates": (
        lambda: _poisson(x=np.where(X == X.max(), np.nan, X)),
        r"predictor of site 'y' is not finite in .*covariates",
    ),
    "weights that are not finite": (
        lambda: _poisson(weight=np.where(X[:, 1] == X[:, 1].max(), np.nan, 1.0)),
        r"weights of site 'y' \(handlers.scale\) are not finite in 1 places; the first is nan at index \(\d,\)",
    ),
    "negative exposures": (
        lambda: _exposed(np.where(np.arange(N) == 2, -1.0, 1.0)),
        r"NaN, as parameter 'rate' of site 'y' \(Poisson\) is out of its range.* in 1 place; the first is -.*\(2,\)",
    ),
    "column of observations": (lambda: _poisson(COUNTS[:, None]), r"'y' has data of shape \(6, 1\).*\(6, 6\).*ravel"),
    "empty data": (lambda: _poisson(COUNTS[:0], X[:0]), r"'y' is empty"),
    "wrong number of rows": (lambda: _poisson(COUNTS[:4]), r"(site 'y'|after site 'b').*shape"),
    "a deterministic site of several arrays": (_tree_of_values, r"site 'both' is a dict.*a site of each"),
    "a param bounded by a site": (_bounded_by_a_site, r"param site 'noise' is computed in the model.*upper \* share"),
    "wrong number of columns": (lambda: _poisson(x=X[:, :1]), r"after site 'b' \(line .*x @ b.*it fails with.*shape"),
}


@pytest.mark.parametrize("name", _CASES)
def test_refusal_names_the_site_and_the_way_out(name: str) -> None:
    model, message = _CASES[name]
    with pytest.raises(ModelStructureError, match="(?s)" + message):
        read_latent_gaussian(model)


def test_proportions_of_zero_are_data_where_their_density_is_known_to_be_finite() -> None:
    """A concentration of one leaves the density its value at zero."""
    reading = read_latent_gaussian(partial(_proportions, np.array([0.2, 0.1, 0.0, 0.5, 0.0, 0.9]), 1.0))
    assert reading.observed_names == ("y",)


@pytest.mark.parametrize(
    ("name", "reason", "site"),
    [
        ("no Gaussian latent", Reason.NO_FIELD, None),
        ("no data", Reason.DATA, None),
        ("negative counts", Reason.DATA, "y"),
        ("wrong number of columns", Reason.EXECUTION, None),
        ("product of latents", Reason.STRUCTURE, "y"),
        ("discrete latent", Reason.STRUCTURE, "k"),
        ("scaled latent", Reason.STRUCTURE, "f"),
        ("local latent that is not Gaussian", Reason.STRUCTURE, "w"),
        ("covariance not positive definite", Reason.STRUCTURE, "f"),
    ],
)
def test_reasons_are_data_and_survive_pickling(name: str, reason: Reason, site: str | None) -> None:
    with pytest.raises(ModelStructureError) as caught:
        read_latent_gaussian(_CASES[name][0])
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.reason, error.site, str(error)) == (reason, site, str(caught.value))


def test_funnel_becomes_a_hyperparameter() -> None:
    reading = read_latent_gaussian(_funnel)
    assert (reading.field, tuple(reading.hyper)) == (("f",), ("v",))


def test_field_override_is_checked() -> None:
    with pytest.raises(ModelStructureError, match=r"With field=\['f', 'v'\]: the scale of site 'f' depends on \['v'\]"):
        read_latent_gaussian(_funnel, field=["f", "v"])
    with pytest.raises(
        ModelStructureError, match=r"site 'rate' is Gamma; latent sites of this model that this form takes: \[\]"
    ):
        read_latent_gaussian(_no_gaussian, field=["rate"])


def test_one_name_is_a_field_of_one_site() -> None:
    def model() -> None:
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(level, 1.0), obs=X[:, 0])

    assert read_latent_gaussian(model, field="level", check=False).field == ("level",)
    assert EP(model, field="level").field == ("level",)


def test_values_for_hyperparameters_are_checked() -> None:
    with pytest.raises(ModelStructureError, match=r"no latent or param site 'w'.*\['f', 'v'\]"):
        read_latent_gaussian(_funnel, init_values={"w": 1.0})
    with pytest.raises(ModelStructureError, match=r"site 'v' has shape \(2,\), the site has shape \(\)"):
        read_latent_gaussian(_funnel, init_values={"v": np.ones(2)})
    with pytest.raises(ModelStructureError, match="site 'v' is a str, which is no array of numbers"):
        read_latent_gaussian(_funnel, init_values={"v": "wide"})


def test_misreading_is_caught_by_the_check() -> None:
    """The independent check compares with NumPyro: a density that depends on hidden state must not pass."""
    calls = []

    def model() -> None:
        calls.append(None)
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([N]))
        numpyro.sample("y", dist.Normal(f, 1.0 + 0.1 * len(calls)), obs=X[:, 0])

    with pytest.raises(ModelStructureError, match="misread"):
        read_latent_gaussian(model)


def _nearly_singular_triangle() -> None:
    tril = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1e-7 if IS_DOUBLE else 1e-3]])
    f = numpyro.sample("f", dist.MultivariateNormal(0, scale_tril=tril))
    numpyro.sample("y", dist.Normal(f, 0.5), obs=np.zeros(3))


def _nearly_singular_rank() -> None:
    diagonal = jnp.full(3, 1e-12 if IS_DOUBLE else 1e-6)
    f = numpyro.sample("f", dist.LowRankMultivariateNormal(jnp.zeros(3), jnp.ones((3, 1)), diagonal))
    numpyro.sample("y", dist.Normal(f, 0.5), obs=np.zeros(3))


@pytest.mark.parametrize("model", [_nearly_singular_triangle, _nearly_singular_rank])
def test_a_nearly_singular_prior_is_called_that(model) -> None:
    with pytest.raises(ModelStructureError, match="covariance of site 'f' is nearly singular.*jitter"):
        read_latent_gaussian(model)


@pytest.mark.parametrize("field", ["slope", ("slope"), ["slope"]])
def test_a_field_of_one_site_may_be_its_name(field) -> None:
    def model() -> None:
        mean = numpyro.sample("slope", dist.Normal(0, 1)) + numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mean, 1), obs=np.zeros(3))

    assert read_latent_gaussian(model, field=field).field == ("slope",)
    assert EP(model, field=field).field == ("slope",)
    with pytest.raises(ModelStructureError, match="site 'slop' does not exist"):
        read_latent_gaussian(model, field="slop")


def test_a_process_that_is_integrated_out_by_hand_is_told_how_it_is_read() -> None:
    def marginal(x: Any, y: Any = None) -> None:
        length = numpyro.sample("length", dist.LogNormal(0, 1))
        kernel = jnp.exp(-0.5 * jnp.square((x[:, None] - x) / length)) + 0.1 * jnp.eye(N)
        numpyro.sample("y", dist.MultivariateNormal(0.0, kernel), obs=y)

    with pytest.raises(ModelStructureError, match=r"dist.Normal\(f, noise\) for 'y', it is read") as refusal:
        EP(marginal).run(jax.random.key(0), X[:, 0], X[:, 1])
    assert refusal.value.reason is Reason.NO_FIELD
    assert str(refusal.value).count("it is read") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("inner", "bound"), [(dist.Uniform, lambda s: (0, s)), (dist.Pareto, lambda s: (s, 2.0))], ids=["uniform", "pareto"]
)
def test_a_support_that_another_site_moves_is_refused_unless_it_is_given(inner, bound) -> None:
    """The transform was that at the starting values, and the posterior was cut there without a word."""

    def model(y: Any) -> None:
        outer = numpyro.sample("outer", dist.Gamma(2, 2))
        scale = numpyro.sample("scale", inner(*bound(outer)))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([3]))
        numpyro.sample("y", dist.Normal(effect[np.arange(6) % 3], 1), obs=y)

    with pytest.raises(ModelStructureError, match=r"'scale' \(\w+\) depends on \['outer'\]") as found:
        EP(model, progress_bar=False).run(jax.random.key(0), X[:, 0])
    assert found.value.site == "scale"
    assert str(found.value).count(f"dist.{inner.__name__}(") == 2
    assert "the support of hyperparameter 'scale'" in str(recommend(model, X[:, 0]))
    given = EP(model, hyper_values={"outer": 0.5}, progress_bar=False)
    given.run(jax.random.key(0), X[:, 0])
    draws = given.get_samples()["scale"]
    assert np.all(draws < 0.5) if inner is dist.Uniform else np.all(draws > 0.5)


@pytest.mark.thorough
def test_a_bound_that_is_computed_from_another_site_and_stays_is_taken() -> None:
    """Zero times a scale is zero."""

    def model(y: Any) -> None:
        outer = numpyro.sample("outer", dist.Gamma(2, 2))
        scaling = dist.transforms.AffineTransform(0.0, outer, domain=dist.constraints.positive)
        scale = numpyro.sample("scale", dist.TransformedDistribution(dist.HalfNormal(1.0), scaling))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([3]))
        numpyro.sample("y", dist.Normal(effect[np.arange(6) % 3], 1), obs=y)

    def twin(y: Any) -> None:
        outer = numpyro.sample("outer", dist.Gamma(2, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(outer))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([3]))
        numpyro.sample("y", dist.Normal(effect[np.arange(6) % 3], 1), obs=y)

    found = [LaplaceApproximation(m, integrate="none", progress_bar=False) for m in (model, twin)]
    for engine in found:
        engine.run(jax.random.key(0), np.array([3.0, -4.0, 2.0, 3.2, -3.7, 2.4]))
    values = [[engine.hyper[n].value for n in ("outer", "scale")] for engine in found]
    np.testing.assert_allclose(*values, rtol=1e-3)


@pytest.mark.parametrize("bound", [lambda s: jnp.maximum(s, 2.0), lambda s: s - s + 1.0, lambda s: 1.0 * (s > 3.0)])
def test_bounds_that_move_in_places_are_refused_and_others_are_not(bound) -> None:
    def model(y: Any) -> None:
        outer = numpyro.sample("outer", dist.Gamma(2, 2))
        scale = numpyro.sample("scale", dist.Uniform(bound(outer), 9.0))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([3]))
        numpyro.sample("y", dist.Normal(effect[np.arange(6) % 3], 1), obs=y)

    reading = read_latent_gaussian(model, (X[:, 0],))
    moves = any(float(bound(jnp.float32(s))) != float(bound(jnp.float32(1.0))) for s in (0.5, 8.0))
    assert reading.hyper["scale"].bounded_by == (("outer",) if moves else ())


def test_functions_of_gaussian_latents_beside_a_field_are_told_how_they_are_read() -> None:
    def model() -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            rate = numpyro.sample("rate", dist.LogNormal(mean, 1.0))
            numpyro.sample("y", dist.Poisson(rate), obs=COUNTS)

    with pytest.raises(
        ModelStructureError, match=r"too many to maximise.*reparam\(model, config=\{'rate': Transform"
    ) as error:
        read_latent_gaussian(model)
    assert error.value.site == "rate"
    reparametrised = handlers.reparam(model, config={"rate": TransformReparam()})
    assert read_latent_gaussian(reparametrised).field == ("mean", "rate_base")


def test_a_function_of_gaussian_latents_is_read_as_the_refusal_says():
    model = handlers.reparam(_transformed, config={"rate": TransformReparam()})
    assert read_latent_gaussian(model).field == ("rate_base",)


@pytest.mark.parametrize("given, is_taken", [({"share": 0.0}, True), ({"share": 0.5}, False), ({}, False)])
def test_a_bound_that_a_given_zero_holds_is_taken(given, is_taken) -> None:
    def model(y: Any) -> None:
        share = numpyro.sample("share", dist.Uniform(-1, 1))
        outer = numpyro.sample("outer", dist.Gamma(2, 2))
        scale = numpyro.sample("scale", dist.Uniform(share * outer, 9.0))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([3]))
        numpyro.sample("y", dist.Normal(effect[np.arange(6) % 3], outer), obs=y)

    reading = read_latent_gaussian(model, (X[:, 0],), init_values=given)
    assert reading.hyper["scale"].bounded_by == ("share", "outer")
    if is_taken:
        assert UnconstrainedSpace(reading.hyper, given).names == ("outer", "scale")
    else:
        with pytest.raises(ModelStructureError, match=r"'scale' \(Uniform\) depends on"):
            UnconstrainedSpace(reading.hyper, given)


def test_the_larger_factor_of_a_product_is_no_hyperparameter():
    """Loadings with a prior, where the tastes that they multiply are to be the field."""

    def shared_tastes():
        loadings = numpyro.sample("loadings", dist.Normal(0.0, 1.0).expand([6, 2]).to_event(2))
        with numpyro.plate("users", 2):
            taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        utility = taste @ loadings.T
        numpyro.sample("y", dist.Bernoulli(logits=utility[jnp.arange(5) % 2, jnp.arange(5)]), obs=np.ones(5, int))

    assert read_latent_gaussian(shared_tastes, check=False).field == ("loadings",)
    with pytest.raises(ModelStructureError, match=r"choose another field \(field=\[...\]\), take BilinearVG"):
        read_latent_gaussian(shared_tastes, field="taste", check=False)
