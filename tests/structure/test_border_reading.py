"""Groups that share a few unknowns: found in the model, and the same answers as from all unknowns at once."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.algorithms.posterior import GaussianPosterior, gaussian_prior
from numpyro_ext.linalg.gaussian.spaces.border_space import BorderSpace
from numpyro_ext.structure import read_latent_gaussian
from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
from numpyro_ext.structure.latent_gaussian.form import AffineMap
from tests.readings import with_layouts
from tests.tiers import thorough

from .grammar_of_blocks import random_multilevel_model

G, ROWS = 160, 4


def multilevel(group, x, y=None, offset=0.0):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", G):
        effect = numpyro.sample("effect", dist.Normal(intercept, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(x @ slopes + effect[group] + offset)), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(G), ROWS)
    x, effect = rng.normal(size=(group.size, 2)), rng.normal(size=G)
    return group, x, rng.poisson(np.exp(0.4 * effect[group] + x @ [0.3, -0.2]))


def border_of(model, *args):
    found = read_latent_gaussian(model, args, check=False)
    return found, found.abstract_form.border


def test_common_coefficients_are_the_border(data):
    reading, border = border_of(multilevel, *data)
    assert border.columns.shape == (G, 1) and border.shared.shape == (3,)
    assert "blocks: 160 independent, of up to 1 unknowns given 3 that they share" in reading.describe()
    form = reading.abstract_form
    assert form.blocks.rows.shape[0] == 1  # to whoever knows no border, all is one
    assert isinstance(jax.eval_shape(gaussian_prior, form), BorderSpace)


def test_effects_of_few_groups_are_the_border():
    rng = np.random.default_rng(1)
    subject, item, school = rng.integers(0, 300, 1500), rng.integers(0, 12, 1500), np.arange(300) // 100

    def crossed(y=None):
        by_subject = numpyro.sample("by_subject", dist.Normal(0.0, 1.0).expand([300]))
        by_item = numpyro.sample("by_item", dist.Normal(0.0, 1.0).expand([12]))
        numpyro.sample("y", dist.Bernoulli(logits=by_subject[subject] - by_item[item]), obs=y)

    def nested(y=None):
        of_school = numpyro.sample("of_school", dist.Normal(0.0, 1.0).expand([3]))
        with numpyro.plate("subjects", 300):
            effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), 0.5 * jnp.eye(2) + 0.1))
        eta = effect[subject, item % 2] + of_school[school[subject]]
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    y = rng.binomial(1, 0.5, 1500)
    _, border = border_of(crossed, y)
    assert border.columns.shape == (300, 1) and border.shared.shape == (12,)
    _, border = border_of(nested, y)
    assert border.columns.shape == (300, 2) and border.shared.shape == (3,)


@pytest.mark.thorough
def test_of_two_large_factors_the_smaller_is_a_border_by_its_entries():
    """Numbers of rows times levels of the border are made nowhere."""
    rng = np.random.default_rng(1)
    student, lecturer = rng.integers(0, 600, 4000), rng.integers(0, 300, 4000)

    def crossed(y=None):
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
        by_student = numpyro.sample("by_student", dist.Normal(0.0, 1.0).expand([600]))
        by_lecturer = numpyro.sample("by_lecturer", dist.Normal(0.0, 1.0).expand([300]))
        numpyro.sample("y", dist.Normal(intercept + by_student[student] + by_lecturer[lecturer], 1.0), obs=y)

    reading, border = border_of(crossed, rng.normal(size=4000))
    assert border.columns.shape == (600, 1) and border.shared.shape == (301,)
    assert border.shared_slots.shape == (4000, 2)
    # the list of a student has the lecturers that it marks and the intercept, and rows find theirs in it
    assert reading.field == ("intercept", "by_student", "by_lecturer")
    found = reading.data[-1].border
    block = np.argsort(found.columns[:, 0])  # students stand in the order of their columns
    for number in range(600):
        marked = lecturer[student == number]
        assert {*found.met[block[number]]} - {301} == {*(0 * marked), *(1 + marked)}
    seen = np.take_along_axis(found.met[block[student]], found.listed, axis=1)
    np.testing.assert_array_equal(np.sort(seen, axis=1), np.column_stack([0 * lecturer, 1 + lecturer]))
    form = reading.abstract_form
    space = jax.eval_shape(gaussian_prior, form)
    assert max(leaf.size for leaf in jax.tree.leaves(space)) < 4000 * 50
    # a narrow border stays a matrix
    assert (
        border_of(multilevel, np.arange(640) % G, rng.normal(size=(640, 2)), np.ones(640, int))[1].shared_slots is None
    )


def test_where_nothing_is_gained_there_is_no_border():
    """Few unknowns, chains, a joint process of all observations, and groups that share nothing."""
    rng = np.random.default_rng(1)
    group, x = np.repeat(np.arange(400), 4), np.linspace(0.0, 1.0, 300)
    kernel = jnp.exp(-((x[:, None] - x) ** 2) / 0.02) + 1e-4 * jnp.eye(300)

    def few():
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([10]))
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + effect[group % 10])), obs=np.ones(1600))

    def chain():
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([400]))
        numpyro.sample("y", dist.Laplace(f[1:] - f[:-1], 1.0), obs=np.zeros(399))

    def process():
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(300), kernel))
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + f)), obs=rng.poisson(1.0, 300))

    def apart():
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([400]))
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=np.ones(1600))

    for model in (few, chain, process, apart):
        assert border_of(model)[1] is None, model.__name__


def test_groups_of_very_different_sizes_need_no_padding():
    """One group of many rows among a thousand of one each: their blocks would be padding for the most part."""
    group = np.concatenate([np.zeros(3000, int), np.arange(1, 1000)])

    def model():
        with numpyro.plate("groups", 1000):
            effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), 0.5 * jnp.eye(2) + 0.1))
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group, np.arange(group.size) % 2])), obs=np.ones(group.size))

    form = read_latent_gaussian(model, check=False).abstract_form
    assert form.border is None and form.touched.rows.columns.size <= 2 * group.size
    assert sum(blocks * width for blocks, width in form.touched.shapes) < 3 * 1000


def test_what_one_coefficient_joins_is_taken_apart_by_it():
    """Slopes and intercepts of groups, and an intercept that they share: once more unknowns than all rows touch."""
    group = np.repeat(np.arange(250), 25)

    def model():
        level = numpyro.sample("level", dist.Normal(0.0, 5.0))
        with numpyro.plate("groups", 250):
            effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), 0.5 * jnp.eye(2) + 0.1))
        eta = level + effect[group, 0] + effect[group, 1] * np.linspace(-1.0, 1.0, group.size)
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=np.ones(group.size))

    reading, border = border_of(model)
    assert reading.abstract_form.touched is None and border.columns.shape == (250, 2) and border.shared.shape == (1,)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(EP, marks=pytest.mark.thorough),
        *(pytest.param(e, marks=pytest.mark.slow) for e in (LaplaceApproximation, VariationalGaussian, INLA)),
    ],
)
def test_engines_give_what_they_give_without_it(engine, data):
    group, x, y = data
    results = []
    for is_dense in (False, True):
        options = {} if engine is INLA else {"integrate": "none"}
        chosen = with_layouts(engine, border=np.inf) if is_dense else engine
        fitted = chosen(multilevel, hyper_values={"scale": 0.5}, progress_bar=False, tol=1e-10, **options)
        fitted.run(jax.random.key(0), group, x, y)
        assert (fitted._run.reading.abstract_form.border is None) == is_dense
        sites = {name: (site.mean, site.variance) for name, site in fitted.posterior.items()}
        assert fitted.diagnostics.converged
        results.append((fitted.log_evidence, sites, fitted.posterior["slopes"].covariance()))
        if engine is EP:
            left_out = fitted.loo()
            pointwise = left_out.loo_i if hasattr(left_out, "loo_i") else left_out.elpd_i  # ArviZ 0.x, 1.x
            results[-1] += np.asarray(pointwise), fitted.log_predictive(group[:3], x[:3], y[:3])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), *results)


def answers(reading, form, precision, shift):
    """Moments of the predictors with the evidence of Gaussian sites, of the unknowns, and of all sites."""
    posterior = GaussianPosterior(form, precision, shift)
    conditioned = posterior.condition()
    sites = {}
    for name, map_ in reading.maps(reading.initial_hyper()).items():
        sites[name] = posterior.mean_and_variance(AffineMap(*map_))
    return conditioned.marginals(), conditioned.unknowns(), sites


def _compare(seeds):
    num_borders = 0
    for seed in seeds:
        model = random_multilevel_model(seed)
        results = []
        for overhead in (-1e30, np.inf):  # a border wherever there is one, and none
            reading = read_latent_gaussian(model, check=overhead < 0, costs=LayoutCosts(border=overhead))
            num_rows = reading.abstract_form.num_rows
            rng = np.random.default_rng(seed)
            sites = jnp.asarray(rng.gamma(1.0, size=num_rows)), jnp.asarray(rng.normal(size=num_rows))

            def evidence(hyper, reading=reading, sites=sites):
                form = reading.form(hyper)
                moments = answers(reading, form, *sites)
                return moments[0].log_partition + jnp.sum(moments[0].variance), moments

            is_there = reading.abstract_form.border is not None
            results.append(jax.jit(jax.value_and_grad(evidence, has_aux=True))(reading.initial_hyper()))
            assert not (is_there and overhead > 0)
            num_borders += is_there
        assert np.isfinite(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(results[1]))), model.description
        jax.tree.map(
            lambda a, b, model=model: np.testing.assert_allclose(
                a, b, rtol=1e-9, atol=1e-10, err_msg=model.description
            ),
            *results,
        )
    assert num_borders >= 0.8 * len(seeds)


@pytest.mark.parametrize("start", [*thorough(0), pytest.param(2, marks=pytest.mark.slow)])
def test_random_multilevel_models(start):
    _compare(range(start, start + 2))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 300, 25))
def test_two_hundred_random_multilevel_models(start):
    _compare(range(start, start + 25))
