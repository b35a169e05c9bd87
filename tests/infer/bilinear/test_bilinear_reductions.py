"""Special cases of bilinear engines that other options or engines have too, and the transposed problem."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import log_expit

from numpyro_ext.distributions import OrderedProbit
from numpyro_ext.infer import BilinearEP, BilinearVG
from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms import sweeps as core
from numpyro_ext.infer.bilinear.algorithms.messages import mean_of, times
from numpyro_ext.infer.bilinear.algorithms.quadratic import Options
from numpyro_ext.infer.bilinear.algorithms.ratings import iterations, noise
from numpyro_ext.infer.bilinear.algorithms.selection import Selected
from numpyro_ext.models import gaussian_factorization, poisson_factorization
from numpyro_ext.potentials import BinomialLogitPotential, GaussianPotential, LogitPotential
from numpyro_ext.structure import read_bilinear
from numpyro_ext.structure.bilinear.form import Background, Bilinear, Common, GaussianSide, Selection, order_cells
from numpyro_ext.structure.bilinear.noisy.scales import find_noise

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
thorough, slow = pytest.mark.thorough, pytest.mark.slow
KEY = jax.random.key(0)
R, C, K = 7, 5, 2


def form_of(listed, potential, *, background=None, is_mixed=False, weight=1.0, precision_ndim=2):
    """Cells where a matrix says so, with other priors for each vector, biases and an intercept."""
    rng = np.random.default_rng(3)
    rows, cols = np.nonzero(listed)
    sides = []
    for n in (R, C):
        precision = rng.uniform(0.5, 2.0, (n, K + 1))
        if precision_ndim == 3:
            precision = precision[:, :, None] * np.eye(K + 1) + 0.2
        sides.append(GaussianSide(jnp.asarray(0.3 * rng.normal(size=(n, K + 1))), jnp.asarray(precision)))
    linear = [jnp.array([[a, -0.3, 1.0] if is_mixed else [0.0, 0.0, 1.0]]) for a in (0.4, 0.7)]
    n, order = len(rows), jnp.zeros(len(rows), int)
    common = None
    if background is None or background.selection is None:
        common = Common(GaussianSide(jnp.zeros((1, 1)), jnp.full((1, 1, 1), 1.5)), jnp.ones((n, 1)))
    return order_cells(
        Bilinear(
            *sides, jnp.asarray(rows), jnp.asarray(cols), jnp.asarray(rng.uniform(0.5, 1.5, (1, K))), *linear,
            jnp.full(n, -0.2), potential(rng, n), jnp.full(n, weight), jnp.zeros(()), order, order, background, common,
        )
    )  # fmt: skip


def outcomes(rng, n):
    return LogitPotential(jnp.asarray(rng.integers(0, 2, n)))


def ones(rng, n):
    return LogitPotential(jnp.ones(n, int))


def values(rng, n):
    return GaussianPotential(jnp.asarray(rng.normal(size=n)), jnp.full(n, 0.7))


SOME = np.random.default_rng(1).uniform(size=(R, C)) < 0.5
SOME[2], SOME[:, 1] = False, False
ZEROS = Background(jnp.ones(()))
PAIRS = Background(jnp.asarray(11.0), Selection(jnp.full(R, 1.2), jnp.full(C, 0.9)))


def transposed(form):
    """The same cells with the other side as rows."""
    background = form.background
    if background is not None and background.selection is not None:
        background = background._replace(selection=Selection(*background.selection[::-1]))
    return order_cells(
        form._replace(
            rows=form.columns, columns=form.rows, row_index=form.column_index, column_index=form.row_index,
            row_linear=form.column_linear, column_linear=form.row_linear, background=background,
        )
    )  # fmt: skip


def turned(state):
    """A state of the transposed problem."""
    return state._replace(
        rows=state.columns, columns=state.rows, row_step=state.column_step, column_step=state.row_step,
        selected=state.selected and state.selected.transposed(),
    )  # fmt: skip


TRANSPOSED = [
    (values, None, Options("exact", "tiles", True, "bulk"), "diagonal", {}),
    (values, None, Options("exact", "grid", False, "joint"), "full", {"precision_ndim": 3}),
    (outcomes, None, Options("jaakkola", "tiles", False, "joint"), "diagonal", {"is_mixed": True}),
    (outcomes, None, Options("bohning", "grid", True, "coordinate"), "diagonal", {}),
    (ones, ZEROS, Options("jaakkola", "tiles", True, "joint", "shared"), "diagonal", {}),
    (ones, ZEROS, Options("jaakkola", "grid", True, "coordinate", "exact"), "diagonal", {}),
    (ones, PAIRS, Options("jaakkola", "tiles", True, "bulk"), "diagonal", {}),
    (ones, PAIRS, Options("jaakkola", "tiles", True, "joint", selection="constant"), "diagonal", {}),
]


@needs_float64
@thorough
@pytest.mark.parametrize("potential, background, options, family, parts", TRANSPOSED)
def test_a_transposed_problem_has_the_transposed_answer(potential, background, options, family, parts):
    """Whichever side moves first; tangents by row alone belong to the rows, and are no part of this."""
    form = form_of(SOME, potential, background=background, **parts)
    start = core.init(form, KEY, family, family)

    @partial(jax.jit, static_argnums=2)
    def sweep(form, state, first):
        views = quadratic.make_views(form, options)
        return quadratic.sweep(form, state, options, views=views, first=first, with_gauge=True)[0]

    found, other = start, turned(start)
    for _ in range(3):
        found, other = sweep(form, found, "rows"), sweep(transposed(form), other, "columns")
    assert np.max(np.abs(found.rows.mean - start.rows.mean)) > 0.05
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(turned(other)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-10)


@needs_float64
@thorough
def test_one_zero_in_each_row_has_a_tangent_of_its_own():
    """Tangents of rows are those of cells; so are the bound and all updates."""
    listed = np.arange(C) != (3 * np.arange(R) % C)[:, None]
    form = form_of(listed, ones, background=ZEROS)
    start = core.init(form, KEY, "diagonal", "diagonal")
    ends = []
    for kind, zeros in (("grid", "exact"), ("grid", "by_row"), ("tiles", "by_row")):
        options = Options("jaakkola", kind, True, "joint", zeros)
        sweep = jax.jit(partial(quadratic.sweep, options=options, views=quadratic.make_views(form, options)))
        state = start
        for _ in range(3):
            state = sweep(form, state)[0]
        ends.append(jax.tree.leaves(state))
    for exact, *by_row in zip(*ends, strict=True):
        for found in by_row:
            np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-10)


def moments_of_all(form, state):
    """Means and expected squares of the predictors of all pairs, from dense arrays."""
    (u, s), (v, t) = ((np.asarray(b.mean), np.asarray(b.covariance)) for b in (state.rows, state.columns))
    w = np.asarray(form.coupling)[0]
    mean = (u[:, :K] * w) @ v[:, :K].T + u[:, K:] + v[:, K] + float(form.offset[0])
    products = (u[:, :K] * w) ** 2 @ t[:, :K].T + (s[:, :K] * w**2) @ (v[:, :K] ** 2 + t[:, :K]).T
    return mean, mean**2 + products + s[:, K:] + t[:, K]


@needs_float64
@thorough
def test_zeros_are_pairs_of_uniform_selection():
    """Zeros are censored pairs, one of each pair, with a zero more in each listed one."""
    uniform = Background(jnp.asarray(float(R * C)), PAIRS.selection)
    pairs = form_of(SOME, ones, background=uniform)
    state = core.init(pairs, KEY, "diagonal", "diagonal")
    mean, square = moments_of_all(pairs, state)
    selected = Selected(
        *(jnp.full(n, a) for n, a in ((R, 2.0), (C, 3.0))),
        *(jnp.full(n, -np.log(n)) for n in (R, C)),
        jnp.asarray(square[~SOME].mean()),
    )
    state = state._replace(selected=selected)
    options = Options("jaakkola", "tiles", True, "joint", "shared")
    # the zeros of a binary matrix, and the same where each listed pair is a one and a zero
    zeros = pairs._replace(background=ZEROS)
    one = jnp.ones(zeros.num_cells)
    both = zeros._replace(potential=BinomialLogitPotential(one, 2.0 * one))

    @jax.jit
    def bound_and_update(form, state):
        views = quadratic.make_views(form, options)
        own = 0.0 if views.censored is None else views.censored.bound(state.selected)
        best = quadratic.with_tangents(views, state, options)
        moved = [quadratic.update_side(form, state, best, side, options) for side in ("rows", "columns")]
        return quadratic.bound_of(form, state, views, options) - own, (moved[0][0].rows, moved[1][0].columns)

    plain = state._replace(selected=None)
    bound, moved = bound_and_update(pairs, state)
    xi = np.sqrt(square[SOME])
    listed_zeros = np.sum(log_expit(xi) - xi / 2.0 - mean[SOME] / 2.0)
    np.testing.assert_allclose(bound - listed_zeros, bound_and_update(zeros, plain)[0], rtol=1e-10)
    expected = bound_and_update(both, plain)
    np.testing.assert_allclose(bound, expected[0] - zeros.num_cells * np.log(2.0), rtol=1e-10)  # in either order
    for one, two in zip(jax.tree.leaves(moved), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-10)


# Ratings


def ratings(user, item, rating, *, prior=(5.0, 5.0), has_noise=True):
    """Known cut points and priors of the sides, and noise of people that may be latent."""
    with numpyro.plate("people", 8):
        w = numpyro.sample("w", dist.Normal(0.2, 1.0).expand([2]).to_event(1))
        variance = numpyro.sample("noise", dist.InverseGamma(*prior)) if has_noise else jnp.full(8, 2.5)
    with numpyro.plate("things", 6):
        z = numpyro.sample("z", dist.Normal(0.0, 0.9).expand([2]).to_event(1))
    root = jnp.sqrt(variance)[user]
    cuts = jnp.array([-2.0, 0.3, 1.5]) / root[:, None]
    numpyro.sample("r", OrderedProbit((w[user] * z[item]).sum(-1) / root, cuts), obs=rating)


def some_ratings():
    rng = np.random.default_rng(3)
    user, item = np.divmod(rng.permutation(48)[:40], 6)
    value = 1.5 * (rng.normal(size=(8, 2))[user] * rng.normal(size=(6, 2))[item]).sum(1) + rng.normal(size=40)
    return user, item, np.sum(value[:, None] > np.array([-2.0, 0.3, 1.5]), axis=1)


@pytest.fixture(scope="module")
def plain():
    engine = BilinearEP(partial(ratings, has_noise=False), tol=1e-11, num_steps=3000, progress_bar=False)
    engine.run(KEY, *some_ratings())
    assert engine.diagnostics.converged
    return engine


def products_of(w, z):
    """Means and variances of the products of all people and things."""
    mean = w.mean @ z.mean.T
    return mean, w.mean**2 @ z.variance.T + w.variance @ (z.mean**2 + z.variance).T


@needs_float64
@slow
def test_messages_about_noise_that_is_known_are_expectation_propagation(plain):
    """A model without a latent variance, cut point or hyperprior: iterations for these end where those of the
    plain engine do."""
    data = some_ratings()
    reading = read_bilinear(
        partial(ratings, has_noise=False), data, {}, by_component=True, takes_any_factor=True, learns_hyper=False
    )
    form, sites = find_noise(reading, jax.jit(reading.form), (), {})
    assert sites.names == () and form.cuts is None
    run = plain._finished()
    state = iterations.paced(noise.init(form, *run.vectors), 0.5)
    arguments = [jnp.asarray(x) for x in (2000, 0.5, 0, 1e-11)]
    state, info, _, _ = iterations.iterate(form, state, *arguments, rule="quadrature", chunk=2000)
    assert iterations.has_settled(state, info, 0, 1e-11)
    own = times(state.messages.factor, state.messages.product)
    w, z = state.messages.rows.seen, state.messages.columns.seen
    mean, variance = products_of(w, z)
    expected = products_of(plain.posterior["w"], plain.posterior["z"])
    assert np.max(np.abs(mean)) > 0.3
    np.testing.assert_allclose(mean, expected[0], atol=1e-8)
    np.testing.assert_allclose(variance, expected[1], atol=1e-8)
    assert np.all(np.isfinite(mean_of(own)))


@needs_float64
@slow
def test_noise_with_a_sharp_prior_is_given_noise(plain):
    sharp = 1e8
    model = partial(ratings, prior=(sharp, 2.5 * sharp))
    engine = BilinearEP(model, tol=1e-6, num_steps=3000, progress_bar=False)
    engine.run(KEY, *some_ratings())
    assert engine.diagnostics.converged
    np.testing.assert_allclose(engine.posterior["noise"].mean, 2.5, rtol=1e-6)
    for one, two in zip(
        products_of(engine.posterior["w"], engine.posterior["z"]),
        products_of(plain.posterior["w"], plain.posterior["z"]),
        strict=True,
    ):
        np.testing.assert_allclose(one, two, atol=1e-5)
    given = BilinearEP(model, tol=1e-11, num_steps=3000, hyper_values={"noise": np.full(8, 2.5)}, progress_bar=False)
    given.run(KEY, *some_ratings())
    np.testing.assert_allclose(given.log_evidence, plain.log_evidence, rtol=1e-9)


# Engines


@needs_float64
@slow
@pytest.mark.parametrize("kind", ["steps", "closed", "messages"])
def test_engines_have_the_transposed_answer(kind):
    """One component, so that the best of some starts is the same."""
    rng = np.random.default_rng(5)
    rows, cols = np.divmod(rng.permutation(48)[:40], 8)
    sizes = {"rank": 1}
    if kind == "steps":
        model, y = poisson_factorization, rng.poisson(np.exp(rng.normal(size=6)[rows] * rng.normal(size=8)[cols]))
        given = {name: 0.7 for name in ("row_bias_scale", "col_bias_scale")} | {"row_scale": 1.0}
        pairs = (("w", "z"), ("row_bias", "col_bias"))
    else:
        model, y = gaussian_factorization, 2.0 * rng.normal(size=6)[rows] * rng.normal(size=8)[cols]
        sizes["heteroscedastic"] = True
        given = {"z": 0.1, "row_scale": 1.0}
        noises = {"row_noise": np.linspace(0.5, 1.5, 6), "column_noise": np.linspace(0.3, 2.0, 8)}
        pairs = (("u", "v"),)

    def run(index, shape, hyper):
        engine = BilinearEP if kind == "messages" else BilinearVG
        engine = engine(model, hyper_values=hyper, tol=1e-10, progress_bar=False)
        engine.run(KEY, *index, y, num_rows=shape[0], num_cols=shape[1], **sizes)
        assert engine.diagnostics.converged
        return engine

    first, second = given, given
    if kind != "steps":
        first = given | noises
        second = given | {"row_noise": noises["column_noise"], "column_noise": noises["row_noise"]}
    one, two = run((rows, cols), (6, 8), first), run((cols, rows), (8, 6), second)
    np.testing.assert_allclose(one.log_evidence, two.log_evidence, rtol=1e-7)
    for row, column in pairs:
        for left, right in ((row, column), (column, row)):
            np.testing.assert_allclose(abs(one.posterior[left].mean), abs(two.posterior[right].mean), atol=1e-4)
            np.testing.assert_allclose(one.posterior[left].variance, two.posterior[right].variance, rtol=1e-3)
