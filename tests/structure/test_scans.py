"""Scans: models with them are read, as state spaces where they are long, and refused by their true reason."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan

from numpyro_ext.infer.front.answers.sites import missing_sites
from numpyro_ext.linalg.gaussian.design import DenseDesign, StateSpaceDesign
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
from tests import scan_models
from tests.tiers import few

LENGTH = 22
RNG = np.random.default_rng(0)
PATH = jnp.asarray(0.3 * np.cumsum(RNG.normal(size=LENGTH)))
COUNTS, SIGNS = RNG.poisson(2.0, LENGTH), (RNG.random(LENGTH) < 0.5).astype(int)
TABLE = jnp.asarray(RNG.normal(size=(LENGTH, 3)))
# data, field, hyperparameters, numbers carried from step to step, shared unknowns
MODELS = {
    "local_level": (PATH, ("first", "level"), ("drift", "noise"), 1, 1),
    "local_linear_trend": (PATH, ("first", "level", "slope"), ("scales", "noise"), 2, 2),
    "smooth_trend": (jnp.asarray(COUNTS), ("slope",), ("scale",), 2, 0),
    "seasonal_dummies": (PATH, ("level_0", "season_0", "level", "season"), ("sigma",), 4, 4),
    "trigonometric_season": (PATH, ("start", "state"), ("sigma",), 2, 2),
    "second_order": (jnp.asarray(SIGNS), ("x",), ("phi", "sigma"), 2, 0),
    "vector_autoregression": (TABLE, ("start", "state"), ("scale",), 2, 2),
    "innovations_by_lax": (PATH, ("white",), ("phi", "sigma"), 2, 0),
    "shared_level": (TABLE, ("trend", "common", "own"), ("scale",), 4, 1),
    "stochastic_volatility": (PATH, ("mean", "h"), ("phi", "sigma"), 1, 1),
}


read_blocks = partial(read_latent_gaussian, costs=LayoutCosts(time_block=8, time_blocks=2))
"""State spaces for series that are so short that a matrix would be cheaper."""


def evaluated(reading: Any, hyper: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """The form, its matrix, and the matrices of all sites, as one program."""

    @jax.jit
    def evaluate(hyper: Any) -> tuple[Any, Any, dict[str, Any]]:
        form = reading.form(hyper)
        return form, form.design.to_dense(), {site: m.design.to_dense() for site, m in reading.maps(hyper).items()}

    return evaluate(reading.initial_hyper() if hyper is None else hyper)


@pytest.mark.parametrize("name", few(MODELS, 2))
def test_models_with_scans_are_state_spaces(name: str) -> None:
    """The density of the state space is NumPyro's (checked while reading), and its matrix that of the dense reading."""
    data, field, hyper, num_states, num_shared = MODELS[name]
    model = getattr(scan_models, name)
    plain = read_latent_gaussian(model, (data,), check=False)
    reading = read_blocks(model, (data,))
    assert (reading.field, tuple(reading.hyper)) == (field, hyper)
    expected = f"{LENGTH} steps of {num_states} states, {num_shared} shared unknowns"
    assert expected in reading.describe()
    (form, found, of_sites), (dense, wanted, wanted_of_sites) = evaluated(reading), evaluated(plain)
    assert isinstance(form.design, StateSpaceDesign) and isinstance(dense.design, DenseDesign)
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    np.testing.assert_allclose(form.offset, dense.offset, atol=1e-12)
    assert reading.affine_sites == plain.affine_sites
    for site, matrix in of_sites.items():
        np.testing.assert_allclose(matrix, wanted_of_sites[site], atol=1e-12)


@pytest.mark.parametrize("name, field", [("conditioned_autoregression", 2), ("holt_winters", 6)])
def test_scans_through_the_data_are_regressions(name: str, field: int) -> None:
    reading = read_latent_gaussian(getattr(scan_models, name), (PATH,))
    assert reading.num_columns == field
    assert isinstance(jax.eval_shape(reading.form, reading.initial_hyper()).design, DenseDesign)


def recursion(body: Any, before: Any = None, **options: Any) -> Any:
    """A model whose scan has one site in its body, and observations of it."""

    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        given = before() if before else None

        def step(carry: Any, value: Any) -> tuple[Any, Any]:
            x = body(carry, scale, given)
            numpyro.sample("y", dist.Normal(x, 1.0), obs=value)
            return x, x

        scan(step, 0.0, y, **options)

    return model


def gaussian(location: Any, scale: Any) -> Any:
    return numpyro.sample("x", dist.Normal(location, scale))


def hidden(carry: Any, scale: Any, _: Any) -> Any:
    with handlers.block():
        return gaussian(carry, scale)


def masked(y: Any) -> None:
    with handlers.mask(mask=np.arange(LENGTH) > 3):
        scan(lambda c, v: (gaussian(c, 1.0), numpyro.sample("y", dist.Normal(c, 1.0), obs=v)), 0.0, y)


def nested(carry: Any, scale: Any, _: Any) -> Any:
    def inner(z: Any, _: Any) -> tuple[Any, None]:
        return numpyro.sample("z", dist.Normal(z, scale)), None

    return scan(inner, carry, None, length=3)[0]


@pytest.mark.parametrize(
    "model, words",
    [
        (recursion(lambda c, s, _: gaussian(jnp.sin(c), s)), "location of site 'x' is not affine in its own values at"),
        (recursion(lambda c, s, _: gaussian(c, jnp.exp(c))), "scale of site 'x' depends on its own values at earlier"),
        (recursion(lambda c, s, _: 1.0 * numpyro.sample("k", dist.Bernoulli(0.5))), r"discrete sites \['k'\] can be"),
        (
            recursion(lambda c, s, _: gaussian(c + numpyro.sample("k", dist.Bernoulli(0.5)), s)),
            "latent site 'k' .* is discrete",
        ),
        (recursion(nested), "site 'z' is inside a scan within a scan"),
        (recursion(hidden), r"asks for a random key \(as a site hidden by a block does\)"),
        (
            recursion(lambda c, s, _: numpyro.sample("k", dist.Poisson(jnp.exp(jnp.sin(c) + s))).astype(float)),
            r"discrete sites \['k'\] can be",
        ),
        (masked, r"sites \['x'\] are masked: mask their observations alone"),
        (recursion(lambda c, s, _: gaussian(c, s), reverse=True), "site 'x' is inside a scan .* reverse=True"),
        (
            recursion(lambda c, s, _: gaussian(c, s) + jax.random.normal(numpyro.prng_key())),
            "asks for a random key .* after site 'x'",
        ),
        (recursion(lambda c, s, _: gaussian(c, s) * numpyro.param("w", 1.0)), "asks for the param 'w'"),
        (
            recursion(lambda c, s, _: gaussian(c, numpyro.sample("tau", dist.HalfCauchy(1.0)))),
            "latent site 'tau' .* 22 elements for 22 observations",
        ),
    ],
    ids=[
        "not-affine",
        "scale",
        "discrete",
        "switching",
        "nested",
        "hidden",
        "counts",
        "masked",
        "reverse",
        "key",
        "param",
        "local-scales",
    ],
)
def test_steps_that_cannot_be_read_are_named(model: Any, words: str) -> None:
    with pytest.raises(ModelStructureError, match=words):
        read_latent_gaussian(model, (PATH,))


@pytest.mark.parametrize("is_switching", [False, True])
def test_steps_that_do_not_look_back_are_read_or_refused_like_a_plate(is_switching: bool) -> None:
    """The carry enters no step: what is handed on has no start that anything depends on."""

    def model(y: Any) -> None:
        means = numpyro.sample("means", dist.Normal(0.0, 3.0).expand([2]))

        def step(carry: Any, value: Any) -> tuple[Any, None]:
            k = numpyro.sample("k", dist.Bernoulli(0.5)) if is_switching else carry + 0 * value.astype(int)
            numpyro.sample("y", dist.Normal(means[k], 1.0), obs=value)
            return (k, None) if is_switching else (1 - value.astype(int) * 0, None)

        scan(step, 0, y)

    if is_switching:
        with pytest.raises(ModelStructureError, match="latent site 'k' .* is discrete") as caught:
            read_latent_gaussian(model, (PATH,))
        assert caught.value.site == "k"
    else:
        assert read_latent_gaussian(model, (PATH,)).field == ("means",)


def test_keys_that_are_carried_make_numbers_that_stay_the_same() -> None:
    def model(y: Any) -> None:
        key = numpyro.prng_key()

        def step(carry: Any, value: Any) -> tuple[Any, None]:
            key, x = carry
            key, own = jax.random.split(key)
            x = numpyro.sample("x", dist.Normal(0.9 * x, 1.0))
            numpyro.sample("y", dist.Normal(x + jax.random.normal(own), 1.0), obs=value)
            return (key, x), None

        scan(step, (key, 0), y)

    reading = read_blocks(model, (PATH,))
    form = jax.jit(reading.form)({})
    assert isinstance(form.design, StateSpaceDesign) and np.ptp(form.offset) > 1.0


def test_a_scan_that_is_longer_than_its_data_is_refused_and_a_second_one_is_read() -> None:
    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        x = numpyro.sample("x", dist.Normal(0.9 * carry, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0))
        return x, x

    def longer(y: Any) -> None:
        with handlers.condition(data={"y": y}):
            scan(step, 0.0, None, length=len(y) + 4)

    with pytest.raises(ModelStructureError, match="site 'y' is inside a scan .* of 26 steps, .* only 22 are given"):
        read_latent_gaussian(longer, (PATH,))

    def forecast(y: Any) -> None:
        with handlers.condition(data={"y": y}):
            last, _ = scan(step, 0.0, jnp.arange(len(y)))

        def go_on(carry: Any, _: Any) -> tuple[Any, Any]:
            x = numpyro.sample("future", dist.Normal(0.9 * carry, 1.0))
            return x, x

        scan(go_on, last, None, length=4)

    reading = read_blocks(forecast, (PATH,))
    future = jax.jit(lambda hyper: reading.maps(hyper, names=["future"])["future"].design.to_dense())({})
    # the last state and four innovations, each fading by the same factor
    expected = np.zeros((4, LENGTH + 4))
    for row in range(4):
        expected[row, :LENGTH] = 0.9 ** (row + 1 + np.arange(LENGTH)[::-1])
        expected[row, LENGTH : LENGTH + row + 1] = 0.9 ** np.arange(row + 1)[::-1]
    np.testing.assert_allclose(future, expected, atol=1e-12)


@pytest.mark.thorough
def test_a_reversed_scan_of_jax_and_missing_observations() -> None:
    def model(y: Any) -> None:
        white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
        level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
        states = jax.lax.scan(lambda c, e: (0.8 * c + e, c), level, white, reverse=True)[1]
        with handlers.mask(mask=jnp.isfinite(y)):
            numpyro.sample("y", dist.Normal(states, 1.0), obs=jnp.nan_to_num(y))

    reading = read_blocks(model, (PATH.at[3].set(jnp.nan),))
    form, matrix, _ = evaluated(reading)
    assert isinstance(form.design, StateSpaceDesign) and not form.observed[0][3]
    steps = np.arange(LENGTH)
    gap = steps[None] - steps[:, None] - 1
    expected = np.where(gap >= 0, 0.8 ** np.maximum(gap, 0.0), 0.0)
    np.testing.assert_allclose(matrix[:, :LENGTH], expected, atol=1e-12)
    np.testing.assert_allclose(matrix[:, LENGTH], 0.8 ** steps[::-1], atol=1e-12)


def differences(y: Any) -> None:
    states = recursion_by_lax(len(y) + 1)
    numpyro.sample("y", dist.Normal(jnp.diff(states), 1.0), obs=y)


def recursion_by_lax(length: int) -> Any:
    white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([length]).to_event(1))
    return jax.lax.scan(lambda c, e: (0.5 * c + e, c), jnp.zeros(()), white)[1]


def test_rows_over_several_steps_are_dense_or_refused() -> None:
    assert "dense" in read_latent_gaussian(differences, (jnp.zeros(300),), check=False).describe()
    with pytest.raises(ModelStructureError, match="some observations depend on steps that are .* next to each other"):
        read_latent_gaussian(differences, (jnp.zeros(8000),), check=False)


def test_sites_beside_the_state_space_keep_their_marginals() -> None:
    """Differences of states see two blocks, which the predictors do not: they are a matrix of their own."""

    def model(y: Any) -> None:
        states = recursion_by_lax(len(y))
        numpyro.deterministic("change", jnp.diff(states))
        numpyro.sample("y", dist.Normal(states, 1.0), obs=y)

    long = read_latent_gaussian(model, (jnp.zeros(8000),), check=False)
    assert "change" not in long.affine_sites and "several steps of a long series" in missing_sites(long)["change"]
    reading = read_latent_gaussian(model, (jnp.zeros(300),), check=False)
    maps = jax.eval_shape(reading.maps, {})
    assert isinstance(maps["white"].design, StateSpaceDesign) and not isinstance(
        maps["change"].design, StateSpaceDesign
    )


@pytest.mark.thorough
def test_each_step_may_take_its_element_of_a_site_outside() -> None:
    """As in forecasts where all drifts are sampled before the scan, which indexes them."""

    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        drift = numpyro.sample("drift", dist.Normal(0, scale).expand([len(y)]))

        def step(level: Any, t: Any) -> tuple[Any, Any]:
            level = 0.9 * level + drift[t] * jnp.sqrt(1.0 + t) + 0.5 * slope
            return level, level

        levels = scan(step, 0, jnp.arange(len(y)))[1]
        numpyro.sample("y", dist.Normal(levels, 1), obs=y)

    plain = read_latent_gaussian(model, (PATH,), check=False)
    reading = read_blocks(model, (PATH,))
    assert f"{LENGTH} steps of 1 states, 1 shared unknowns" in reading.describe()
    np.testing.assert_allclose(evaluated(reading)[1], evaluated(plain)[1], atol=1e-12)


def sum_of_steps(y: Any) -> None:
    start = numpyro.sample("start", dist.Normal(0, 5))
    steps = numpyro.sample("steps", dist.Normal(0, 1).expand([len(y) - 1]))
    numpyro.sample("y", dist.Normal(start + jnp.pad(jnp.cumsum(steps), (1, 0)), 1), obs=y)


def walk_backwards(y: Any) -> None:
    steps = numpyro.sample("steps", dist.Normal(0, 1).expand([len(y)]))
    numpyro.sample("y", dist.Normal(jnp.cumsum(steps[::-1])[::-1], 1), obs=y)


def two_walks(y: Any) -> None:
    with numpyro.plate("series", 2):
        walks = numpyro.sample("walks", dist.GaussianRandomWalk(1, num_steps=len(y)))
    numpyro.sample("y", dist.Normal(walks[0] + jnp.linspace(0, 1, len(y)) * walks[1], 1), obs=y)


def gaussian_state_space(y: Any) -> None:
    turn, root = np.array([[1.0, 1.0], [0.0, 0.9]]), np.array([[0.3, 0.0], [0.1, 0.2]])
    z = numpyro.sample("z", dist.GaussianStateSpace(len(y), turn, scale_tril=root))
    numpyro.sample("y", dist.Normal(z[:, 0], 1), obs=y)


@pytest.mark.parametrize(
    "model", few([scan_models.random_walk, sum_of_steps, walk_backwards, two_walks, gaussian_state_space], 2)
)
def test_long_walks_are_state_spaces(model: Any) -> None:
    """Beside a matrix of the same steps; the density is NumPyro's, which is checked while reading."""
    path = jnp.asarray(0.3 * np.cumsum(np.random.default_rng(1).normal(size=501)))
    plain = read_latent_gaussian(model, (path,), check=False, costs=LayoutCosts(time_blocks=501))
    hyper = plain.initial_hyper()
    dense, wanted, _ = evaluated(plain, hyper)
    assert isinstance(dense.design, DenseDesign)
    reading = read_latent_gaussian(model, (path,))
    assert " steps of " in reading.describe()
    form, matrix, _ = evaluated(reading, hyper)
    assert isinstance(form.design, StateSpaceDesign)
    np.testing.assert_allclose(matrix, wanted, atol=1e-12)
    assert all(isinstance(m.design, StateSpaceDesign) for m in jax.eval_shape(reading.maps, hyper).values())
