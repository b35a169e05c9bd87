"""Answers of models with a border, a low rank or touched blocks, against those from all unknowns at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_ext.infer import EP, cross_validate, marginalize
from numpyro_ext.linalg.inducing import fitc
from tests.readings import with_layouts

G, USERS, ITEMS = 60, 6, 8
INDUCING = np.linspace(0.0, 10.0, 5)
_SLOW = pytest.mark.slow


def grouped(group, x, y=None, mask=True):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("groups", G):
        effect = numpyro.sample("effect", dist.Normal(slopes[0], scale))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ slopes + effect[group])), obs=y)


def compared(first, second, y=None, mask=True):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    kernel = jnp.exp(-0.1 * (jnp.arange(ITEMS)[:, None] - jnp.arange(ITEMS)) ** 2) + 0.1 * jnp.eye(ITEMS)
    with numpyro.plate("users", USERS):
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(ITEMS), kernel))
    user = np.arange(len(first)) % USERS
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Bernoulli(logits=scale * (own[user, first] - own[user, second])), obs=y)


def sparse_process(x, y=None, mask=True):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    factor, diagonal = fitc(lambda a, b: scale**2 * jnp.exp(-0.5 * (a[:, None] - b) ** 2 / 4.0), x, INDUCING)
    f = numpyro.sample("f", dist.LowRankMultivariateNormal(jnp.zeros(x.shape), factor, diagonal))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def case(name):
    """The model, arguments without the observations, two sets of these, and new arguments."""
    rng = np.random.default_rng(0)
    if name == "border":
        group, x = np.repeat(np.arange(G), 3), rng.normal(size=(3 * G, 2))
        effect = 0.7 * rng.normal(size=(2, G, 1))
        ys = rng.poisson(np.exp(x @ [0.4, -0.3] + np.repeat(effect[..., 0], 3, axis=1)))
        return grouped, (group, x), ys, (group[10:15], x[:5] + 0.1)
    if name == "touched":
        first = rng.integers(0, ITEMS - 1, 60)
        second = (first + rng.integers(1, ITEMS - 1, 60)) % (ITEMS - 1)
        ys = (rng.uniform(size=(2, 60)) < 0.5 + 0.3 * np.sign(first - second)).astype(int)
        return compared, (first, second), ys, (first[:5], np.full(5, ITEMS - 1))
    x = np.sort(rng.uniform(0.0, 10.0, 90))
    return sparse_process, (x,), rng.poisson(np.exp(np.sin(x)), size=(2, 90)), (np.array([0.5, 3.3, 11.0]),)


def has_blocks(name, engine):
    form = engine._run.reading.abstract_form
    return (form.touched if name == "touched" else form.border) is not None


@pytest.fixture(params=["border", pytest.param("touched", marks=_SLOW), pytest.param("low rank", marks=_SLOW)])
def both(request):
    """Compares what a function of an engine and the case returns with blocks and without them."""

    def compare(answers, rtol=1e-6, atol=1e-7, **options):
        found = []
        for is_there in (True, False):
            touched = dict.fromkeys(("touched", "touched_gain", "bucket"), 0.0 if is_there else 1e30)
            chosen = with_layouts(EP, border=-1e30 if is_there else np.inf, **touched)
            engine = chosen(case(request.param)[0], progress_bar=False, tol=1e-10, hyper_tol=1e-7, **options)
            found.append(answers(engine, *case(request.param)[1:]))
            if engine._run is not None:
                assert has_blocks(request.param, engine) == is_there
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), *found)

    return compare


def moments(engine):
    found = {n: (s.mean, s.sd) for n, s in engine.posterior.items()}
    return found | {"evidence": np.asarray(getattr(engine, "log_evidence", 0.0))}


@pytest.mark.thorough
def test_new_arguments_and_files(both, tmp_path):
    def answers(engine, args, ys, new):
        engine.run(jax.random.key(0), *args, ys[0])
        engine.save(tmp_path / "run")
        again = type(engine).load(tmp_path / "run", engine.model)
        jax.tree.map(np.testing.assert_array_equal, moments(again), moments(engine))
        predicted = engine.predict(jax.random.key(1), *new)
        return moments(engine), moments(predicted), again.log_predictive(*args, ys[1])

    both(answers, integrate="none", hyper_values={"scale": 0.6})


@_SLOW
def test_integrated_and_many_data_sets(both):
    def answers(engine, args, ys, new):
        fits = engine.run_many(jax.random.key(0), [(*args, y) for y in ys])
        engine.run(jax.random.key(0), *args, ys[1])
        np.testing.assert_allclose(np.asarray(fits[1].log_evidence), np.asarray(engine.log_evidence), rtol=1e-7)
        return [moments(fit) for fit in fits], moments(engine), moments(engine.predict(jax.random.key(1), *new))

    both(answers, rtol=1e-4, atol=1e-5)


@_SLOW
def test_folds(both):
    def answers(engine, args, ys, new):
        folds = np.arange(ys.shape[1]) % 3
        found = cross_validate(engine, jax.random.key(0), *args, ys[0], num_folds=3, folds=folds)
        return found.log_predictive

    both(answers, rtol=1e-5, atol=1e-6)


@_SLOW
def test_marginal_models(both):
    def answers(engine, args, ys, new):
        marginal = marginalize(engine.model, type(engine), tol=1e-10)

        def density(scale):
            found, _ = numpyro.infer.util.log_density(marginal, (*args, ys[0]), {}, {"scale": scale})
            return found

        return jax.value_and_grad(density)(0.6)

    both(answers)
