"""Censored pairs: the trace of another implementation, NumPyro's density, ranks and refusals."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import beta

from numpyro_ext.distributions import CensoredPairs
from numpyro_ext.infer import BilinearEP, BilinearVG, ranking_quality, recommend_items
from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms import sweeps as core
from numpyro_ext.infer.bilinear.algorithms.cells import Block
from numpyro_ext.infer.bilinear.algorithms.quadratic import Options
from numpyro_ext.models import binary_factorization, paired_symbols
from numpyro_ext.potentials.families.binary import LogitPotential
from numpyro_ext.structure import ModelStructureError, read_bilinear
from numpyro_ext.structure.bilinear.form import Background, Bilinear, GaussianSide, Selection, order_cells
from numpyro_ext.structure.bilinear.pairs import EmittedPairs, PairSites, check_pairs, find_pair_sites
from numpyro_ext.structure.model.running.execution import ModelCall
from tests.infer.bilinear.bilinear_forms import REFERENCE

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
thorough, slow = pytest.mark.thorough, pytest.mark.slow

KNOWN = json.loads((REFERENCE / "paquet_pairs_A.json").read_text())
TABLE = np.stack([KNOWN["data_coo"][n] for n in "ijc"], axis=1)
PRIOR = KNOWN["hyper"]
START = KNOWN["init"]
SIZES = {"num_users": 30, "num_items": 20, "rank": 3, "num_censored": KNOWN["D_prime"]}
SIZES |= {n: PRIOR[n] for n in ("tau_u", "tau_v", "tau_b")} | {"alpha": PRIOR["alpha0"], "beta": PRIOR["beta0"]}


def vectors_of(state):
    """Means or variances of rows and columns, biases behind the rest."""
    parts = (("u", "b_user"), ("v", "b_item"))
    return [
        [jnp.asarray(np.column_stack([state[f"{n}_{what}"] for n in names])) for what in ("mean", "var")]
        for names in parts
    ]


def form_of(table, sizes, precisions, concentrations, num_censored):
    """The form of pairs with a bias on each side, by hand."""
    n, rank = len(table), len(precisions[0]) - 1
    sides = [GaussianSide(jnp.zeros((m, rank + 1)), jnp.tile(jnp.asarray(p), (m, 1)))
             for m, p in zip(sizes, precisions, strict=True)]  # fmt: skip
    end = jnp.zeros((1, rank + 1)).at[0, rank].set(1.0)
    selection = Selection(*(jnp.full(m, a) for m, a in zip(sizes, concentrations, strict=True)))
    form = Bilinear(
        *sides, jnp.asarray(table[:, 0]), jnp.asarray(table[:, 1]), jnp.ones((1, rank)), end, end, jnp.zeros(n),
        LogitPotential(jnp.ones(n, int)), jnp.asarray(table[:, 2], float), jnp.zeros(()), jnp.zeros(n, int),
        jnp.zeros(n, int), Background(jnp.asarray(float(num_censored)), selection),
    )  # fmt: skip
    return order_cells(form)


# The algorithm


@pytest.fixture(scope="module")
def known_form():
    precisions = [[PRIOR[n]] * 3 + [PRIOR["tau_b"]] for n in ("tau_u", "tau_v")]
    return form_of(TABLE, (30, 20), precisions, (PRIOR["alpha0"], PRIOR["beta0"]), KNOWN["D_prime"])


@needs_float64
@thorough
@pytest.mark.parametrize(
    "update, selection, name",
    [
        ("bulk", "learned", None),
        ("joint", "learned", "joint_bias_and_factor"),
        ("coordinate", "learned", "per_coordinate"),
        ("bulk", "constant", "constant_message_s_t"),
    ],
)
def test_a_known_trace(known_form, update, selection, name):
    """The bound after each of 50 sweeps of the algorithm as it was published, and at some of those of its variants."""
    state = core.init(known_form, random.key(0), "diagonal", "diagonal")
    (rows, columns) = (Block(*moments) for moments in vectors_of(START))
    state = state._replace(rows=rows, columns=columns)
    options = Options("jaakkola", "tiles", True, update, selection=selection)
    views = quadratic.make_views(known_form, options)

    @jax.jit
    def sweeps(state):
        def once(state, _):
            state, info = quadratic.sweep(known_form, state, options, views=views)
            return state, info.objective

        return jax.lax.scan(once, state, None, 50)

    end, trace = sweeps(state)
    if name is None:
        np.testing.assert_allclose(trace, KNOWN["bound_per_sweep"], rtol=1e-10)
        expected = KNOWN["results"]["50"]["state"]
        for block, (mean, variance) in zip((end.rows, end.columns), vectors_of(expected), strict=True):
            np.testing.assert_allclose(block.mean, mean, atol=1e-7)
            np.testing.assert_allclose(block.covariance, variance, atol=1e-7)
        selected = end.selected
        found = jnp.exp(selected.log_rows), jnp.exp(selected.log_columns), jnp.sqrt(selected.tangent)
        for part, n in zip((*found, selected.row_counts, selected.column_counts),
                           ("s", "t", "xi_star", "alpha", "beta"), strict=True):  # fmt: skip
            np.testing.assert_allclose(part, expected[n], atol=1e-7, rtol=1e-7)
        return
    variant = KNOWN["variants"][name]
    known = variant["bound"] if "bound" in variant else {n: found["bound"] for n, found in variant.items()}
    for number, bound in known.items():
        np.testing.assert_allclose(trace[int(number) - 1], bound, rtol=1e-8)
    assert selection == "constant" or np.all(np.diff(trace) >= -1e-9 * np.abs(trace[0]))


@needs_float64
@thorough
def test_the_bound_is_below_the_log_evidence():
    """Of three users and two items, with the evidence by draws from the prior."""
    table = np.array([[0, 0, 3], [1, 1, 2], [2, 0, 1]])
    form = form_of(table, (3, 2), ([1.0, 1.0],) * 2, (1.0, 1.0), 4.0)
    options = Options("jaakkola", "tiles", True)
    state = core.init(form, random.key(1), "diagonal", "diagonal")
    views = quadratic.make_views(form, options)
    state = jax.jit(
        lambda s: jax.lax.fori_loop(0, 200, lambda _, s: quadratic.sweep(form, s, options, views=views)[0], s)
    )(state)
    rng, num = np.random.default_rng(0), 100_000
    draws = [rng.normal(size=(num, *shape)) for shape in ((3, 1), (2, 1), (3,), (2,))]
    draws += [rng.dirichlet(np.ones(n), num) for n in (3, 2)]
    likelihood = jax.jit(jax.vmap(lambda *x: CensoredPairs(*x, 4.0, validate_args=False).log_prob(table)))(*draws)
    weight = np.exp(likelihood - np.max(likelihood))
    error = np.std(weight) / np.mean(weight) / np.sqrt(num)
    log_evidence = np.max(likelihood) + np.log(np.mean(weight))
    assert error < 0.02
    assert log_evidence - 4.0 < float(state.objective) < log_evidence - 4.0 * error


# The engine


@pytest.fixture(scope="module")
def engine():
    engine = BilinearVG(
        paired_symbols, bound="jaakkola", update="bulk", num_steps=50, tol=1e-16, num_samples=20, progress_bar=False
    )
    named = {"u": "u", "v": "v", "b": "b_user", "g": "b_item"}
    values = {site: (START[f"{n}_mean"], START[f"{n}_var"]) for site, n in named.items()}
    values |= {"pi": START["s"], "psi": START["t"], "tangent": START["xi_star"]}
    state = engine.start(TABLE, values=values, **SIZES)
    with pytest.warns(UserWarning, match="did not converge"):
        engine.run(random.key(0), TABLE, init_state=state, **SIZES)
    return engine


@needs_float64
@slow
def test_the_engine_and_its_answers(engine, tmp_path):
    """A start at stated moments gives the known trace; scores, ranks and Dirichlet marginals are those of its end."""
    np.testing.assert_allclose(engine.diagnostics.objective_trace, KNOWN["bound_per_sweep"], rtol=1e-8)
    expected = KNOWN["results"]["50"]["state"]
    np.testing.assert_allclose(engine.posterior["g"].variance, expected["b_item_var"], atol=1e-7)
    np.testing.assert_allclose(engine.background.rows, expected["s"], atol=1e-7)
    np.testing.assert_allclose(engine.background.tangent, expected["xi_star"], rtol=1e-7)
    counts = np.asarray(expected["beta"])
    psi = engine.posterior["psi"]
    exact = beta(counts, counts.sum() - counts)
    np.testing.assert_allclose(psi.mean, exact.mean(), rtol=1e-6)
    np.testing.assert_allclose(psi[[3, 1]].variance, exact.var()[[3, 1]], rtol=1e-6)
    np.testing.assert_allclose(psi.quantile([0.1, 0.9])[1], exact.ppf(0.9), rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(psi.covariance()), 0.0, atol=1e-12)
    known = KNOWN["predictions_after_50"]
    scores = recommend_items(engine, known["users"], k=20, exclude="nothing")
    best = np.take_along_axis(np.asarray(known["score_eq5"]), scores.items, axis=1)
    np.testing.assert_allclose(scores.scores, best, rtol=1e-7)
    taste = recommend_items(engine, known["users"], k=20, by="taste", exclude="nothing")
    best = np.take_along_axis(np.asarray(known["sigma_x"]), taste.items, axis=1)
    np.testing.assert_allclose(taste.scores, best, rtol=1e-7)
    ranks = KNOWN["rank_metric_after_50"]
    quality = ranking_quality(engine, *np.transpose(ranks["held_out"]), k=(5,))
    np.testing.assert_allclose(quality.ranks, ranks["R_eq12_score_eq5"], rtol=1e-12)
    np.testing.assert_allclose(quality.mean_rank, ranks["mean_R"], rtol=1e-12)
    draws, energy = engine.get_samples(), engine.get_extra_fields()["potential_energy"]
    for place in (0, 7):
        point = {n: x[place] for n, x in draws.items()}
        np.testing.assert_allclose(log_density(paired_symbols, (TABLE,), SIZES, point)[0], -energy[place], rtol=1e-9)
    assert "censored: 800 pairs" in engine.describe() and "selection: psi (20,)" in engine.describe()
    engine.save(tmp_path / "fit")
    again = BilinearVG.load(tmp_path / "fit", paired_symbols)
    np.testing.assert_allclose(again.posterior["pi"].mean, engine.posterior["pi"].mean)
    np.testing.assert_allclose(again.background.tangent, engine.background.tangent)
    for refused in (
        partial(engine.fold_in, random.key(0), TABLE, **SIZES),
        partial(engine.log_predictive, TABLE, **SIZES),
    ):
        with pytest.raises(ValueError, match="'pairs' has censored pairs"):
            refused()
    with pytest.raises(ValueError, match=r"no moments of 'w'.*'psi', 'tangent'"):
        engine.start(TABLE, values={"w": (0.0, 1.0)}, **SIZES)


# Reading


@thorough
def test_pairs_are_added_up():
    """A pair may stand in several rows, of any kind of numbers; those without a count are left out."""
    table = [[0, 1, 2], [2, 0, 1], [0, 1, 3], [1, 1, 0]]
    sizes = {"num_users": 3, "num_items": 2, "rank": 1, "num_censored": 4}
    for given in (np.array(table), jnp.array(table), np.array(table, np.float32), np.array(table, np.int8)):
        model = handlers.seed(EmittedPairs(paired_symbols), 0)
        site = handlers.trace(model).get_trace(given, **sizes)["pairs"]
        np.testing.assert_array_equal(site["scale"], [5.0, 1.0])
        np.testing.assert_array_equal(site["value"], [1, 1])


def variant(pairs, *, num_censored=3.0, pi=None, mask=None, scale=None):
    """Paired symbols of which a part may be another."""
    with numpyro.plate("users", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("items", 2):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    first = numpyro.sample("pi", dist.Dirichlet(jnp.ones(3))) if pi is None else pi
    second = numpyro.sample("psi", dist.Dirichlet(jnp.ones(2)))
    if num_censored is None:
        num_censored = numpyro.sample("number", dist.LogNormal(0.0, 1.0))
    density = CensoredPairs(u, v, jnp.zeros(3), jnp.zeros(2), first, second, num_censored)
    density = density if mask is None else density.mask(mask)
    with handlers.scale(scale=1.0 if scale is None else scale):
        numpyro.sample("pairs", density, obs=pairs)


SMALL = np.array([[0, 1, 2], [2, 0, 1]])
background = PairSites.background


@needs_float64
@thorough
@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_censored": None}, "the bound cannot say how many pairs were censored"),
        ({"num_censored": -1.0}, "is -1.0, and must be positive|invalid num_censored"),
        ({"pi": np.ones(3) / 3}, "the pi of site 'pairs' is no latent site with a Dirichlet prior"),
        ({"mask": np.array(True)}, "is masked, expanded or wrapped"),
        ({"scale": 2.0}, "is scaled"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ModelStructureError, match=words):
        read_bilinear(variant, (SMALL,), options, takes_pairs=True)


@needs_float64
@thorough
@pytest.mark.parametrize("is_large", [False, True])
def test_what_is_read_is_checked(monkeypatch, is_large):
    """The form has the density of the model as it was given, or its logits where that visits too many pairs."""
    reading = read_bilinear(variant, (SMALL,), takes_pairs=True)
    assert reading.share_sites == ("pi", "psi") and reading.index[0].size == 2
    call = ModelCall(variant, (SMALL,), {}, random.key(0))
    by_logits = partial(check_pairs, call, reading, find_pair_sites(call, ()), most_pairs=0)
    by_logits()
    if is_large:
        logits = CensoredPairs.logits
        monkeypatch.setattr(CensoredPairs, "logits", lambda self, i, j: logits(self, i, j) + (i == 2) * len(i) / 1e3)
    else:
        monkeypatch.setattr(PairSites, "background", lambda self: background(self._replace(num_censored=4.0)))
    with pytest.raises(
        ModelStructureError, match=f"misread: its {'logit of a pair' if is_large else 'log density'} is"
    ):
        by_logits() if is_large else read_bilinear(variant, (SMALL,), takes_pairs=True)


@needs_float64
@thorough
def test_who_takes_pairs():
    """Another engine, or bound, says which it has to be; data that are no pairs are shown."""
    for engine in (BilinearEP(variant), BilinearVG(variant, bound="jaakkola", unlisted_cells="zero")):
        with pytest.raises(ModelStructureError, match="'pairs' has censored pairs.*bound='jaakkola'"):
            engine.run(random.key(0), SMALL)
    with pytest.raises(ModelStructureError, match="need bound='jaakkola'"):
        BilinearVG(variant).run(random.key(0), SMALL)
    plain = partial(binary_factorization, num_rows=3, num_cols=2, rank=1)
    with pytest.raises(ValueError, match="selection='constant' is for CensoredPairs"):
        BilinearVG(plain, bound="jaakkola", selection="constant").run(random.key(0), *SMALL[:, :2].T, SMALL[:, 2] - 1)
    with pytest.raises(ModelStructureError, match="'pi' has a posterior"):
        BilinearVG(variant, bound="jaakkola", hyper_values={"pi": np.ones(3) / 3}).run(random.key(0), SMALL)
    for bad in (SMALL - 1, SMALL + [3, 0, 0], SMALL + [0, 0, 0.5], SMALL[:, :2]):
        with pytest.raises(ModelStructureError, match=r"pairs.*(tables with a row \(i, j, count\)|has data of shape)"):
            BilinearVG(variant, bound="jaakkola").run(random.key(0), bad)


@pytest.mark.parametrize(
    "pairs, num_censored, words",
    [
        (SMALL[:, :2], 4.0, r"of shape \(n, 3\)"),
        (SMALL[0], 4.0, r"got one of shape \(3,\)"),
        (SMALL, 0.0, "assume some"),
    ],
)
def test_tables_and_numbers_that_are_none_are_refused_by_the_model(pairs, num_censored, words):
    engine = BilinearVG(paired_symbols, bound="jaakkola")
    with pytest.raises(ModelStructureError, match=words):
        engine.run(random.key(0), pairs, num_users=3, num_items=2, rank=1, num_censored=num_censored)
