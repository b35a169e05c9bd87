"""Engines that learn within their iterations end at maxima, or say why not: against closed forms and other writings."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import BilinearVG, StructuredMeanField
from numpyro_ext.structure import ModelStructureError
from tests.infer.bounds_by_density import BilinearBound, SparseBound
from tests.tiers import thorough

KEY = jax.random.key(0)
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
RNG = np.random.default_rng(0)
N = 40
SIGNAL = np.concatenate([2.0 * RNG.normal(size=20), 0.05 * RNG.normal(size=20)]) + 0.1 * RNG.normal(size=N)
R, C = 12, 8
ROWS, COLS = np.divmod(np.arange(R * C), C)
COUNTS = RNG.poisson(np.exp(1.0 + RNG.normal(size=R)[ROWS] * RNG.normal(size=C)[COLS]))


def sparse(scale, noise=0.1):
    def model(y):
        s = numpyro.sample("s", dist.Laplace(0.0, scale()).expand([N]))
        numpyro.sample("y", dist.Normal(s, noise), obs=y)

    return model


def gaussian(y, term=lambda scale: 0.0):
    """Everything is known in closed form."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.factor("term", term(scale))
    s = numpyro.sample("s", dist.Normal(0.0, scale).expand([N]))
    numpyro.sample("y", dist.Normal(s, 1.0), obs=y)


def counts_of(predictor=lambda: 1.0, scale=lambda: 1.0):
    def model(y):
        level, deviation = predictor(), scale()
        with numpyro.plate("rows", R):
            w = numpyro.sample("w", dist.Normal(0.0, deviation))
        with numpyro.plate("cols", C):
            z = numpyro.sample("z", dist.Normal(0.0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + w[ROWS] * z[COLS])), obs=y)

    return model


@pytest.mark.thorough
def test_a_saddle_of_hyperparameters_is_left():
    """Two factors that start at zero: no derivative says how to leave it. The scale alone knows the maximum."""
    product, plain = (
        StructuredMeanField(sparse(scale), progress_bar=False, tol=1e-6)
        for scale in (
            lambda: jnp.exp(numpyro.param("b", 0.0) * numpyro.param("c", 0.0)),
            lambda: numpyro.param("scale", 1.0, constraint=dist.constraints.positive),
        )
    )
    for engine in (product, plain):
        engine.run(KEY, SIGNAL)
        assert engine.diagnostics.converged and not engine.diagnostics.messages
    np.testing.assert_allclose(product.log_evidence, plain.log_evidence, atol=1e-4)
    found = float(product.hyper["b"].value * product.hyper["c"].value)
    np.testing.assert_allclose(np.exp(found), plain.hyper["scale"].value, rtol=1e-3)
    assert len(product.diagnostics.objective_trace) == product.diagnostics.num_steps


@pytest.mark.parametrize("engine", [StructuredMeanField, *thorough(BilinearVG)])
def test_a_saddle_that_cannot_be_left_is_not_called_converged(engine):
    """Without a search from beside it: an ascent from a higher point would end higher."""

    def scale():
        return jnp.exp(numpyro.param("b", 0.0) * numpyro.param("c", 0.0))

    model, y, options = {
        StructuredMeanField: (sparse(scale), SIGNAL, {}),
        BilinearVG: (counts_of(scale=scale), COUNTS, {"num_restarts": 0}),
    }[engine]
    engine = type(engine.__name__, (engine,), {"_most_escapes": 0})(model, progress_bar=False, **options)
    with pytest.warns(UserWarning, match="not a maximum.*curves upwards there .*'b', 'c'"):
        engine.run(KEY, y)
    assert not engine.diagnostics.converged
    assert abs(engine.hyper["b"].value) < 1e-6 and abs(engine.hyper["c"].value) < 1e-6


def test_iterations_that_end_too_soon_beside_a_saddle_are_not_called_converged():
    """They have no derivatives that could be nothing but rounding."""
    model = sparse(lambda: jnp.exp(numpyro.param("b", 0.0) * numpyro.param("c", 0.0)))
    engine = StructuredMeanField(model, progress_bar=False, num_steps=3, tol=1e-6)
    with pytest.warns(UserWarning, match="no maximum was left, but .* have not converged in 3"):
        engine.run(KEY, SIGNAL)
    assert not engine.diagnostics.converged


@pytest.mark.parametrize("engine", [StructuredMeanField, *thorough(BilinearVG)])
def test_steps_are_refused_by_name(engine):
    def threshold(size):
        position = numpyro.sample("switch", dist.Uniform(0.0, float(size)))
        return jnp.where(jnp.arange(size) < position, 2.0, 0.1)

    model, y = {
        StructuredMeanField: (sparse(lambda: threshold(N)), SIGNAL),
        BilinearVG: (counts_of(scale=lambda: threshold(R)), COUNTS),
    }[engine]
    with pytest.raises(
        ModelStructureError, match="'switch' cannot be learned by its derivative.*hyper_values={'switch"
    ):
        engine(model, progress_bar=False).run(KEY, y)


@pytest.mark.thorough
@needs_float64
def test_a_scale_at_its_edge_is_named_everywhere(capsys):
    """Weaker data than their noise: the maximum is at zero, far from where the first step ends."""
    y = 0.3 * np.random.default_rng(1).normal(size=N)
    engine = StructuredMeanField(gaussian, progress_bar=False, num_samples=20)
    with pytest.warns(UserWarning, match="'scale' ended at the edge of the support"):
        engine.run(KEY, y)
    assert engine.diagnostics.edges == engine.diagnostics.points == ("scale",)
    np.testing.assert_allclose(engine.log_evidence, np.sum(dist.Normal(0.0, 1.0).log_prob(y)), atol=1e-3)
    engine.print_summary()
    assert "At the edge of the support: scale" in capsys.readouterr().out
    assert list(engine.to_arviz(log_likelihood=False)["posterior"].attrs["edges"]) == ["scale"]


@pytest.mark.thorough
@needs_float64
def test_terms_of_hyperparameters_alone_count():
    def term(scale):
        return -50.0 * jnp.square(scale - 3.0)

    engine = StructuredMeanField(gaussian, progress_bar=False, tol=1e-8)
    engine.run(KEY, SIGNAL, term)
    grid = np.linspace(2.0, 4.0, 20_001)
    evidence = np.sum(dist.Normal(0.0, np.sqrt(1.0 + grid**2)).log_prob(SIGNAL[:, None]), axis=0)
    best = grid[np.argmax(evidence + term(grid) + dist.HalfNormal(1.0).log_prob(grid))]
    np.testing.assert_allclose(engine.hyper["scale"].value, best, atol=2e-4)


@pytest.mark.thorough
@needs_float64
def test_factors_at_zero_are_left_and_steps_say_where_they_went():
    """All means at zero are a stationary point of the bound, and iterations from there would stay."""
    engine = BilinearVG(counts_of(), progress_bar=False, tol=1e-9)
    engine.run(KEY, COUNTS)
    best, last = engine.log_evidence, engine.last_state
    zero = last.state._replace(
        **{n: b._replace(mean=0.0 * b.mean) for n, b in (("rows", last.state.rows), ("columns", last.state.columns))}
    )
    engine.run(KEY, COUNTS, init_state=last._replace(state=zero))
    trace = engine.diagnostics.objective_trace
    assert engine.diagnostics.converged and np.all(np.diff(trace) >= -1e-6) and trace[0] < best - 10.0
    np.testing.assert_allclose(engine.log_evidence, best, rtol=1e-7)
    bound = BilinearBound(engine, counts_of(), COUNTS)
    np.testing.assert_allclose(bound(bound.point), best, rtol=1e-6)


@pytest.mark.thorough
@needs_float64
def test_equal_components_part():
    """Two components that are equal stay so in every sweep: data of two are then explained by one."""
    rng = np.random.default_rng(3)
    w, z = rng.normal(size=(R, 2)), rng.normal(size=(C, 2))
    counts = rng.poisson(np.exp(np.minimum(1.0 + np.sum(w[ROWS] * z[COLS], -1), 4.0)))

    def model(y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([R, 2]))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([C, 2]))
        numpyro.sample("y", dist.Poisson(jnp.exp(1 + jnp.sum(w[ROWS] * z[COLS], -1))), obs=y)

    engine = BilinearVG(model, progress_bar=False, tol=1e-7, num_steps=5000, num_restarts=0)
    engine.run(KEY, counts)
    best, last = engine.log_evidence, engine.last_state
    equal = {n: jax.tree.map(lambda x: x[:, :1] + 0 * x, getattr(last.state, n)) for n in ("rows", "columns")}
    engine.run(KEY, counts, init_state=last._replace(state=last.state._replace(**equal)))
    trace = engine.diagnostics.objective_trace
    rests = np.abs(np.diff(trace)) < 1e-6 * abs(best)
    assert trace[1:][rests].min() < best - 100.0, "a saddle was met"
    assert engine.diagnostics.converged
    # The components turn into those of the other end slowly, with hundredths of a nat to gain.
    np.testing.assert_allclose(engine.log_evidence, best, atol=0.05)


@pytest.mark.thorough
def test_what_grows_for_ever_is_no_maximum():
    engine = BilinearVG(counts_of(lambda: numpyro.param("level", 0.0)), progress_bar=False, num_restarts=0)
    with pytest.warns(UserWarning, match="'level' .* would grow for ever"):
        engine.run(KEY, 0 * COUNTS)
    assert not engine.diagnostics.converged


@pytest.mark.thorough
@needs_float64
def test_the_bound_of_a_learned_scale_is_that_of_the_density():
    """The end is where the independent bound is highest along the scale."""
    model = sparse(lambda: numpyro.sample("scale", dist.LogNormal(0, 1)))
    engine = StructuredMeanField(model, progress_bar=False, tol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(KEY, SIGNAL)
    bound = SparseBound(engine, model, SIGNAL)
    values = jax.jit(jax.vmap(bound))(bound.point + jnp.array([[-0.01], [0.0], [0.01]]))
    prior = float(dist.LogNormal(0.0, 1.0).log_prob(engine.hyper["scale"].value))
    np.testing.assert_allclose(values[1], engine.log_evidence + prior, rtol=1e-7)
    assert np.argmax(values) == 1 and abs(values[2] - values[0]) < 1e-2 * (values[1] - values[0])
