"""Second derivatives of EP's evidence by blocks: equal to differences of the model's own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP
from numpyro_ext.infer.hyper.curvature import hessian
from numpyro_ext.models import item_response
from tests.infer.gaussian.fields.test_block_scores import graded_answers

KEY = jax.random.key(0)
RNG = np.random.default_rng(7)
GROUP = np.arange(120) % 12
X = RNG.normal(size=120)


def graded_traits(answers):
    """Patterns of correlated traits, with gaps: shared covariances, and slopes that move the design."""
    pattern = np.eye(2, dtype=int)[np.arange(6) % 2]
    item_response(answers, family="graded", num_categories=3, pattern=pattern, correlated=True)


def counts_and_answers(data):
    """Two families with other numbers of parameters, offsets that move, and correlated slopes."""
    count, answer = data
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 2.0))
    dispersion = numpyro.sample("dispersion", dist.LogNormal(1.0, 0.5))
    level = numpyro.sample("level", dist.LogNormal(0.0, 0.3).expand([2]))
    ridge = numpyro.sample("ridge", dist.LogNormal(0.0, 0.3))
    with numpyro.plate("groups", 12):
        effect = numpyro.sample("effect", dist.MultivariateNormal(0.0, scale_tril=scale[:, None] * factor))
    eta = effect[GROUP, 0] + effect[GROUP, 1] * jnp.tanh(2.0 * ridge * X)
    numpyro.sample("count", dist.NegativeBinomial2(jnp.exp(level[0] ** 2 + eta), dispersion), obs=count)
    numpyro.sample("answer", dist.Bernoulli(logits=jnp.sin(level[1]) - eta), obs=answer)


def noisy(data):
    """Factors that are not log-concave beside Gaussian ones, whose sites do not answer."""
    first, second = data
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5).expand([2]))
    with numpyro.plate("groups", 12):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    numpyro.sample("first", dist.StudentT(4.0, effect[GROUP], noise[0]), obs=first)
    numpyro.sample("second", dist.Normal(effect[GROUP], noise[1]), obs=second)


def gaps(answers):
    answers = answers.astype(float)
    answers[2, 3] = answers[5, 1] = np.nan
    return answers


EFFECT = RNG.normal(size=12)[GROUP]
ETA = EFFECT + RNG.normal(size=12)[GROUP] * np.tanh(2.0 * X)
DATA = {
    graded_traits: gaps(graded_answers(60, 6, 2)[0]),
    counts_and_answers: (RNG.poisson(np.exp(1.0 + ETA)), RNG.binomial(1, 1.0 / (1.0 + np.exp(ETA)))),
    noisy: (EFFECT + 0.4 * RNG.standard_t(4.0, 120), EFFECT + RNG.normal(size=120)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("model", DATA)
def test_curvature_by_blocks_is_that_of_the_model(model):
    engine = EP(model, integrate="none", progress_bar=False)
    engine.run(KEY, DATA[model])
    ended = engine.last_state.search
    reading = engine._read(KEY, (DATA[model],), {})
    space, algorithm, programs = engine._compile(reading)
    assert not programs.probes_locally  # so that the run has differences of the gradients of the model
    form_fn = programs.form_at(reading.data, space.fixed)
    assert algorithm.block_curvature(form_fn, ended.values, ended.best.state) is not None
    expected = hessian(ended, tol=1e-4)
    found = hessian(programs.probe_locally(reading.data, space.fixed, ended), tol=1e-4)
    units = 1.0 / np.sqrt(np.abs(np.diagonal(expected)))
    np.testing.assert_allclose(units[:, None] * found * units, units[:, None] * expected * units, atol=3e-4)


@pytest.mark.thorough
def test_fractional_ep_and_single_blocks_have_no_curvature_by_blocks():
    data = DATA[noisy]
    for engine, is_block in ((EP(noisy, power=0.5), False), (EP(noisy_in_one_block), True)):
        reading = engine._read(KEY, (data,), {})
        space, algorithm, programs = engine._compile(reading)
        values = space.initial()
        hyper = space.unpack(values)
        state = programs.init_state(reading.data, hyper)
        assert is_block == (reading.abstract_form.blocks.rows.shape[0] == 1)
        assert algorithm.block_curvature(programs.form_at(reading.data, space.fixed), values, state) is None


def noisy_in_one_block(data):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    numpyro.sample("first", dist.StudentT(4.0, level, noise), obs=data[0])
