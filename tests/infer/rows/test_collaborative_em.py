"""Expectation maximisation over many people's preferences, against the values of Ko (2017), section 3.2."""

import itertools
import json
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from jax import random

from numpyro_ext.infer import EP, collaborative_em, rank_summary, shortlist
from numpyro_ext.infer.collaborative import em as em_module
from numpyro_ext.infer.collaborative import pairs as pairs_module
from numpyro_ext.infer.collaborative.component_analysis import factor_step, free_step, prior_gradient
from numpyro_ext.infer.collaborative.fit import CollaborativeFit
from numpyro_ext.infer.collaborative.pairs import Pairs, UserBatch, batches_of_users, checked_pairs
from numpyro_ext.infer.collaborative.user_inference import (
    SharedPrior,
    infer_users,
    initial_state,
    user_form,
    user_moments,
)
from numpyro_ext.infer.front.files.archive import write_archive
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation
from numpyro_ext.models import collaborative_preferences
from numpyro_ext.potentials import ProbitPotential
from tests.compilations import compiled_programs
from tests.tiers import thorough

REFERENCE = Path(__file__).parents[2] / "reference"
KO = json.loads((REFERENCE / "ko-preferences.json").read_text())
METHODS = {"ep": "EP", "vg": "VG", "jaakkola": "JK", "laplace": "LP"}
# The methods share all but the solver.
SHORT = [
    "jaakkola",
    pytest.param("ep", marks=pytest.mark.thorough),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("vg", "laplace")),
]
USER = np.repeat(np.arange(10), [len(pairs) for pairs in KO["pairs"]])
FIRST, SECOND = np.concatenate(KO["pairs"]).T
PAIRS = (USER, FIRST, SECOND)

# Most runs here are of a few steps on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:collaborative_em did not converge")


def _kernel(X, psi, alpha):
    X = np.asarray(X)
    return np.exp(-np.sum((X[:, None] - X) ** 2, -1) / psi) + alpha * np.eye(len(X))


KERNEL = _kernel(KO["X"], KO["psi"], KO["alpha"])
START = {"V": np.array(KO["V"]), "b": np.array(KO["b"]), "sigma": KO["sigma2"] ** 0.5}
PRIOR = SharedPrior(jnp.asarray(START["b"]), jnp.asarray(START["V"]), jnp.asarray(KO["sigma2"]), jnp.asarray(KERNEL))


def _infer(method, prior=PRIOR, pairs=PAIRS):
    """Batches with their statistics, and the sums of these."""
    found = []
    for batch in batches_of_users(checked_pairs(pairs, None, 8)[0], 8):
        nameless = batch._replace(users=None)
        state = initial_state(nameless, prior, method)
        found.append((batch, infer_users(nameless, prior, state, method=method, num_steps=300, tol=1e-13)[1]))
    return found, *(sum(getattr(each, name) for _, each in found) for name in ("objective", "shift", "curvature"))


@pytest.mark.thorough
@pytest.mark.parametrize("method", SHORT)
def test_users_and_both_m_steps_have_the_reference_values(method):
    expected = KO["inference"][METHODS[method]]
    found, objective, shift, curvature = _infer(method)
    moments = jax.jit(user_moments)
    np.testing.assert_allclose(objective, expected["objective"], rtol=1e-9)
    for batch, each in found:
        matrix, vector = moments(batch._replace(users=None), PRIOR, each.precision, each.site_shift)
        blocks = np.asarray(PRIOR.blocks(batch.items))
        for row, user in enumerate(batch.users):
            theirs, kept = expected["users"][user], np.asarray(batch.observed[row])
            np.testing.assert_allclose(each.precision[row][kept], theirs["pi"], atol=1e-8)
            np.testing.assert_allclose(each.site_shift[row][kept], theirs["beta"], atol=1e-8)
            design = np.zeros((kept.sum(), batch.items.shape[1]))
            design[np.arange(len(design)), batch.winner[row][kept]] += 1.0
            design[np.arange(len(design)), batch.loser[row][kept]] -= 1.0
            np.testing.assert_allclose(vector[row], design.T @ np.array(theirs["e"]), atol=1e-8)
            pi = np.array(theirs["pi"])
            E = np.linalg.inv(np.diag(1.0 / pi) + design @ blocks[row] @ design.T)
            np.testing.assert_allclose(np.diag(E), theirs["diagE"], atol=1e-8)
            np.testing.assert_allclose(matrix[row], design.T @ E @ design, atol=1e-8)
    shift, curvature = shift / 10, curvature / 10
    np.testing.assert_allclose(shift, expected["s"], atol=1e-8)
    np.testing.assert_allclose(curvature, expected["S_without_ss"], atol=1e-8)
    for name, old_mean in (("mstep_joint", False), ("mstep_oldmean", True)):
        step, theirs = factor_step(PRIOR, shift, curvature, old_mean=old_mean), expected[name]
        np.testing.assert_allclose(step.mean, theirs["b"], atol=1e-8)
        np.testing.assert_allclose(step.loadings @ step.loadings.T, theirs["VVt"], atol=1e-8)
        np.testing.assert_allclose(step.variance, theirs["sigma2"], atol=1e-8)
    krylov = factor_step(PRIOR, shift, curvature, dense=False)
    dense = factor_step(PRIOR, shift, curvature)
    np.testing.assert_allclose(krylov.loadings @ krylov.loadings.T, dense.loadings @ dense.loadings.T, atol=1e-10)
    np.testing.assert_allclose(krylov.variance, dense.variance, rtol=1e-10)
    free = SharedPrior(PRIOR.mean, jnp.zeros((8, 0)), jnp.ones(()), PRIOR.covariance())
    np.testing.assert_allclose(free_step(free, shift, curvature).kernel, expected["npca_step_Sigma"], atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("method", SHORT)
def test_predictions_and_traces_have_the_reference_values(method):
    expected = KO["inference"][METHODS[method]]
    options = {"method": method, "init_values": START, "accelerator": "none", "progress_bar": False, "tol": 0.0}
    options |= {"inference_tol": 1e-12, "num_inference_steps": 300}
    at_start = collaborative_em(PAIRS, KERNEL, 2, num_steps=0, **options)
    found = np.stack(at_start.predict(*np.array(KO["queries"]).T), axis=1)
    np.testing.assert_allclose(found, expected["predict_m_v_p"], atol=1e-8)
    fit = collaborative_em(np.stack(PAIRS, axis=1), KERNEL, 2, num_steps=24, **options)
    np.testing.assert_allclose(fit.objective_trace, expected["em_objective"], atol=1e-6)
    np.testing.assert_allclose(fit.prior.variance, expected["em_sigma2"][-1], atol=1e-6)
    assert np.all(np.diff(fit.objective_trace) > 0) and fit.num_steps == 24 and not fit.converged


def test_any_covariance_has_the_reference_trace():
    fit = collaborative_em(
        PAIRS, KERNEL, 2, covariance="free", init_values=START, num_steps=24, tol=0, inference_tol=1e-12,
        progress_bar=False,
    )  # fmt: skip
    np.testing.assert_allclose(fit.objective_trace, KO["npca_ep_objective"], atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["jaakkola", "ep", "vg"])
def test_statistics_are_the_gradient_of_the_objective(method):
    _, _, shift, curvature = _infer(method)
    found = prior_gradient(PRIOR, shift, curvature)
    rng = np.random.default_rng(0)
    for _ in range(2):
        move = (rng.normal(size=8), rng.normal(size=(8, 2)), rng.normal())
        ends = [
            _infer(method, SharedPrior(*(p + step * m for p, m in zip(PRIOR[:3], move, strict=True)), PRIOR.kernel))[1]
            for step in (1e-3, -1e-3, 2e-3, -2e-3)
        ]
        along = sum(np.sum(g * m) for g, m in zip(found, move, strict=True))
        np.testing.assert_allclose(along, (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / 12e-3, rtol=1e-7)


@pytest.mark.thorough
def test_statistics_are_what_differentiating_the_evidence_gives():
    batch = batches_of_users(checked_pairs(PAIRS, None, 8)[0], 8)[0]
    batch = jax.tree.map(lambda x: x[:2], batch._replace(users=None))
    state = initial_state(batch, PRIOR, "ep")
    state, found = infer_users(batch, PRIOR, state, method="ep", num_steps=300, tol=1e-13)

    def evidence(mean, loadings, variance):
        prior, total = SharedPrior(mean, loadings, variance, PRIOR.kernel), 0.0
        for k in range(len(batch.items)):
            user, own = jax.tree.map(lambda x, k=k: x[k], (batch, state))
            total += expectation_propagation.log_evidence(user_form(user, prior, "ep"), own)
        return total

    expected = jax.jit(jax.grad(evidence, argnums=(0, 1, 2)))(*PRIOR[:3])
    for ours, theirs in zip(prior_gradient(PRIOR, found.shift, found.curvature), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", ["ep", pytest.param("vg", marks=pytest.mark.slow)])
def test_users_stop_on_their_own(method):
    # One went round in circles, and takes other steps than the one whose pairs agree.
    own = [(0, 1), (1, 2), (0, 2)], [(0, 1), *((k % 3, (k + 1) % 3) for k in range(9)), *[(1, 0)] * 6]
    pairs = np.array([(user, *pair) for user in range(2) for pair in own[user]])
    wide = SharedPrior(PRIOR.mean, PRIOR.loadings, 30.0 * PRIOR.variance, PRIOR.kernel)
    counts = np.bincount(pairs[:, 0])
    items = jnp.array([[0, 1, 2]] * 2)
    places = np.zeros((2, 2, counts.max()), int)
    for user in range(2):
        places[user, :, : counts[user]] = pairs[pairs[:, 0] == user, 1:].T
    observed = jnp.arange(counts.max()) < counts[:, None]
    batch = UserBatch(None, items, jnp.asarray(places[:, 0]), jnp.asarray(places[:, 1]), observed)

    def sites(users):
        part = jax.tree.map(lambda x: x[users], batch)
        state = initial_state(part, wide, method)
        return infer_users(part, wide, state, method=method, num_steps=100, tol=1e-2)[1].precision[0]

    for one, other in ((0, 1), (1, 0)):
        np.testing.assert_allclose(sites(np.array([one, other])), sites(np.array([one, one])), rtol=1e-13)


def test_levels_of_users_cost_least():
    rng = np.random.default_rng(0)
    num_shapes = set()

    def cost(level, widths, counts):
        each = [level == k for k in np.unique(level)]
        padded = sum(m.sum() * (widths[m].max() ** 3 + pairs_module._COST_OF_PAIR * counts[m].max()) for m in each)
        return padded + 1e5 * len(each)

    for size in (1, 2, *[9] * 10):
        widths = rng.integers(2, 40, size)
        counts = widths + rng.integers(500, size=size)
        cuts = [cut for k in range(3) for cut in itertools.combinations(np.unique(widths)[1:], k)]
        least = min(cost(np.searchsorted(np.array(cut), widths, side="right"), widths, counts) for cut in cuts)
        found = pairs_module._levels(widths, counts, most_shapes=3, cost_of_shape=1e5)
        num_shapes.add(len(np.unique(found)))
        np.testing.assert_allclose(cost(found, widths, counts), least)
    assert num_shapes == {1, 2, 3}


@pytest.mark.parametrize(("dtype", "digits"), [(jnp.float64, 1e-12), (jnp.float32, 1e-6)])
def test_sites_of_single_pairs_in_far_tails(dtype, digits):
    rows = {name: np.array([row[name] for row in KO["probit_site"]]) for name in KO["probit_site"][0]}
    cavity = (jnp.asarray(rows[name], dtype) for name in ("cavity_mean", "cavity_var"))
    log_z, mean, variance, precision, shift = ProbitPotential(jnp.ones((), dtype)).tilted_moments(*cavity)
    for name, found in (("logZ", log_z), ("tilted_mean", mean), ("tilted_var", variance), ("pi", precision)):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, float), rows[name], rtol=digits)
    # a shift is the difference of the mean of the tilted density and that of the cavity, each times a precision
    size = np.abs(rows["beta"]) + np.abs(rows["cavity_mean"] * rows["pi"])
    np.testing.assert_array_less(np.abs(np.asarray(shift, float) - rows["beta"]), digits * size)


@pytest.mark.thorough
def test_log_predictive_keeps_its_tails():
    b = np.array([60.0, *[0.0] * 7])
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START | {"b": b}, num_steps=0, progress_bar=False)
    users, first, second, won = [0, 9, 3], [1, 0, 0], [0, 2, 5], [1, 0, 1]
    for user in (users, None):
        moments = fit.predict(user, first, second)
        sign = np.array([1.0, -1.0, 1.0])
        z = sign * moments.mean / np.sqrt(1.0 + moments.variance)
        found = fit.log_predictive(user, first, second, won)
        np.testing.assert_allclose(found, scipy.stats.norm.logcdf(z), rtol=1e-9)
        assert found[0] < -300 and found[1] < -300 and found[2] > -1e-100


@pytest.mark.thorough
def test_accelerators_reach_what_plain_steps_do_and_the_engine_has_the_same_evidence():
    options = {"progress_bar": False, "num_steps": 100}
    plain = collaborative_em(PAIRS, KERNEL, 1, **options, accelerator="none", tol=1e-3)
    squared = collaborative_em(PAIRS, KERNEL, 1, **options, tol=1e-3, accelerator="squarem")
    climbed = collaborative_em(PAIRS, KERNEL, 1, **options, tol=1e-9, accelerator="lbfgs")
    assert np.all(np.diff(squared.objective_trace) > 0) and squared.converged and plain.converged
    assert climbed.converged and climbed.objective_trace[-1] > squared.objective_trace[-1] > plain.objective_trace[-1]
    ep = EP(collaborative_preferences, hyper_values=squared.parameters, progress_bar=False)
    ep.run(random.key(0), *PAIRS, np.ones(USER.size, int), num_users=10, kernel=KERNEL, rank=1)
    np.testing.assert_allclose(ep.log_evidence, squared.objective_trace[-1], rtol=1e-6)


@pytest.mark.thorough
def test_new_users_and_new_items_follow_from_the_prior():
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    covariance = np.asarray(PRIOR.covariance())
    new = fit.predict(None, [1, 2], [4, 0])
    for k, (i, j) in enumerate([(1, 4), (2, 0)]):
        variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
        mean = START["b"][i] - START["b"][j]
        np.testing.assert_allclose([new.mean[k], new.variance[k]], [mean, variance], rtol=1e-12)
        np.testing.assert_allclose(new.probability[k], scipy.stats.norm.cdf(mean / np.sqrt(1 + variance)), rtol=1e-10)
    # those who answer alike are the same to the model
    folded = fit.fold_in((USER[USER == 5] - 5, FIRST[USER == 5], SECOND[USER == 5]))
    old, same = fit.predict([5, 5], [3, 1], [0, 6]), folded.predict([0, 0], [3, 1], [0, 6])
    np.testing.assert_allclose(old, same, rtol=1e-6)
    mean, spread = fit.utilities([5])
    contrast = np.zeros(8)
    contrast[[3, 0]] = 1.0, -1.0
    np.testing.assert_allclose([contrast @ mean[0], contrast @ spread[0] @ contrast], [old.mean[0], old.variance[0]])
    draws = np.asarray(fit.draw_utilities(random.key(0), [5], 20_000))[:, 0] @ contrast
    np.testing.assert_allclose([draws.mean(), draws.var()], [old.mean[0], old.variance[0]], atol=0.03)
    # an item that is as another one is but for its loadings, where there are none
    plain = collaborative_em(PAIRS, KERNEL, 0, init_values={"b": np.zeros(8)}, num_steps=0, progress_bar=False)
    more = plain.add_items(KERNEL[:1] - 0.1 * np.eye(8)[:1], [[KERNEL[0, 0]]])
    assert more.prior.mean.shape == (9,)
    np.testing.assert_allclose(more.predict([5], [3], [0]), plain.predict([5], [3], [0]), rtol=1e-10)
    twin, known = more.predict([5, 2], [8, 8], [3, 3]), plain.predict([5, 2], [0, 0], [3, 3])
    np.testing.assert_allclose([twin.mean[0], twin.variance[0]], [known.mean[0], known.variance[0]], rtol=1e-10)
    assert twin.variance[1] > known.variance[1]  # who compared the one knows less of the other


@pytest.mark.thorough
def test_probabilities_by_the_logit_are_compiled_once():
    fit = collaborative_em(PAIRS, KERNEL, 1, method="jaakkola", num_steps=0, progress_bar=False)
    first = fit.log_predictive([0, 1], [1, 2], [2, 3])
    other = fit._replace(prior=fit.prior._replace(mean=fit.prior.mean + 1.0))
    with compiled_programs() as programs:
        again = other.log_predictive([0, 1], [1, 2], [2, 3])
    assert not programs
    np.testing.assert_allclose(again, first, rtol=1e-12)


@pytest.mark.thorough
def test_places_of_items_for_users_of_a_fit():
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    draws = np.asarray(fit.draw_utilities(random.key(0), [5, 2]))
    found, expected = rank_summary(fit, users=[5, 2], k=3), rank_summary(draws, k=3)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(
        shortlist(fit, users=5, k=3), shortlist(fit.draw_utilities(random.key(0), [5])[:, 0], k=3)
    )
    assert rank_summary(fit).best.shape == (10, 8)


@pytest.mark.thorough
def test_random_pairs_and_pairs_that_lost():
    options = {"progress_bar": False, "init_values": START, "num_steps": 3}
    swapped = collaborative_em((USER, SECOND, FIRST, np.zeros(USER.size)), KERNEL, 2, **options)
    straight = collaborative_em(PAIRS, KERNEL, 2, num_users=10, **options)
    np.testing.assert_allclose(swapped.objective_trace, straight.objective_trace, rtol=1e-12)
    few = collaborative_em(PAIRS, KERNEL, 2, num_pairs_per_user=2, **options)
    assert not few.converged and max(batch.winner.shape[1] for batch in few.batches) == 2
    assert np.isfinite(few.objective_trace).all() and few.objective_trace[0] > straight.objective_trace[0]
    outcome = few.log_predictive([0, 0], [1, 2], [2, 1], [1, 0])
    np.testing.assert_allclose(outcome[0], outcome[1], rtol=1e-12)
    np.testing.assert_allclose(np.exp(outcome[0]), few.predict([0], [1], [2]).probability[0])


@pytest.mark.thorough
@pytest.mark.parametrize("covariance", ["factor", *thorough("free")])
def test_minibatches_of_users(covariance):
    """One minibatch is one step of EM, some users of which have no pairs; many reach as far in a few passes as EM."""
    options = {"progress_bar": False, "init_values": START, "covariance": covariance, "num_users": 12}
    plain = {"accelerator": "none", "tol": 0.0}
    whole = collaborative_em(PAIRS, KERNEL, 2, num_steps=1, **options, **plain)
    single = collaborative_em(PAIRS, KERNEL, 2, num_steps=1, batch_size=12, **options)
    np.testing.assert_allclose(single.objective_trace, whole.objective_trace, rtol=1e-9)
    np.testing.assert_allclose(single.prior.covariance(), whole.prior.covariance(), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(single.prior.mean, whole.prior.mean, rtol=1e-8, atol=1e-10)
    whole = collaborative_em(PAIRS, KERNEL, 2, num_steps=3, **options, **plain)
    parts = collaborative_em(PAIRS, KERNEL, 2, num_steps=3, batch_size=4, **options)
    assert parts.num_steps == 3 and not parts.converged
    assert parts.objective_trace[-1] > whole.objective_trace[0] + 0.7 * np.ptp(whole.objective_trace)
    # sites and parameters are of one fit
    again = CollaborativeFit.fold_in(parts, PAIRS, 12)
    np.testing.assert_allclose(again.objective_trace[0], parts.objective_trace[-1], rtol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("covariance", ["factor", *thorough("free")])
def test_a_mean_that_is_given(covariance):
    """Steps with it ascend, minibatches of all are such steps, and neither moves it."""
    options = {"progress_bar": False, "init_values": START, "covariance": covariance, "learn_mean": False}
    plain = {"accelerator": "none", "tol": 0.0}
    whole = collaborative_em(PAIRS, KERNEL, 2, num_steps=4, **options, **plain)
    assert np.all(np.diff(whole.objective_trace) > 0)
    np.testing.assert_array_equal(whole.prior.mean, START["b"])
    once = collaborative_em(PAIRS, KERNEL, 2, num_steps=1, **options, **plain)
    single = collaborative_em(PAIRS, KERNEL, 2, num_steps=1, batch_size=10, **options)
    np.testing.assert_array_equal(single.prior.mean, START["b"])
    np.testing.assert_allclose(single.prior.covariance(), once.prior.covariance(), rtol=1e-8, atol=1e-10)
    if covariance == "factor":
        climbed = collaborative_em(PAIRS, KERNEL, 2, num_steps=60, tol=1e-9, **options)
        np.testing.assert_array_equal(climbed.prior.mean, START["b"])
        # stationary in the loadings, and not in the mean
        _, _, shift, curvature = _infer("ep", climbed.prior)
        np.testing.assert_allclose(prior_gradient(climbed.prior, shift, curvature)[1], 0.0, atol=2e-2)
        assert np.max(np.abs(shift)) > 0.1 and climbed.objective_trace[-1] > whole.objective_trace[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("covariance", ["factor", "free"])
def test_a_fit_from_a_file_goes_on_as_if_it_had_not_ended(covariance, tmp_path):
    options = {"covariance": covariance, "accelerator": "none", "tol": 0.0, "progress_bar": False}
    whole = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=6, **options)
    half = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=3, **options)
    half.save(tmp_path / "fit")
    loaded = CollaborativeFit.load(tmp_path / "fit")
    jax.tree.map(np.testing.assert_array_equal, loaded, half)
    questions = [0, 5, 9], [1, 3, 2], [4, 0, 6]
    np.testing.assert_array_equal(loaded.predict(*questions), half.predict(*questions))
    rest = collaborative_em(PAIRS, KERNEL, 2, init=loaded, num_steps=3, **options)
    trace = np.append(half.objective_trace[:-1], rest.objective_trace)
    np.testing.assert_allclose(trace, whole.objective_trace, rtol=1e-8)
    np.testing.assert_allclose(rest.predict(*questions), whole.predict(*questions), rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.usefixtures("python_handles_control_c")
@pytest.mark.parametrize(
    ("options", "calls"),
    [
        *thorough(({"accelerator": "lbfgs"}, 7)),
        ({"accelerator": "squarem"}, 8),
        *thorough(({"num_pairs_per_user": 2}, 3)),
    ],
    ids=["lbfgs", "squarem", "random-pairs"],
)
def test_interrupted_runs_keep_what_they_had(options, calls, monkeypatch):
    infer, count = em_module.infer_users, itertools.count()

    def interrupted(*args, **kwargs):
        if next(count) == calls * num_batches:
            signal.raise_signal(signal.SIGINT)
        return infer(*args, **kwargs)

    options = {"init_values": START, "tol": 0.0, "progress_bar": False, **options}
    num_batches = len(collaborative_em(PAIRS, KERNEL, 2, num_steps=0, **options).batches)
    monkeypatch.setattr(em_module, "infer_users", interrupted)
    with pytest.warns(UserWarning, match=r"interrupted after \d steps, of which this is the fit\. Go on by init=fit"):
        fit = collaborative_em(PAIRS, KERNEL, 2, num_steps=50, **options)
    # users are inferred no more once the batch at which it came is done
    assert not fit.converged and next(count) == calls * num_batches + 1 and fit.num_steps <= calls + 1
    # sites and parameters are of one fit
    trained = tuple(np.concatenate(part) for part in zip(*(_rows_of(batch) for batch in fit.batches), strict=True))
    again = CollaborativeFit.fold_in(fit, trained, 10)
    np.testing.assert_allclose(again.objective_trace[0], fit.objective_trace[-1], rtol=1e-7)
    questions = [0, 5, 9], [1, 3, 2], [4, 0, 6]
    np.testing.assert_allclose(again.predict(*questions), fit.predict(*questions), rtol=1e-5)


def _rows_of(batch):
    """Users, winners and losers of a batch."""
    row, place = np.nonzero(np.asarray(batch.observed))
    items = np.asarray(batch.items)
    return batch.users[row], *(items[row, np.asarray(part)[row, place]] for part in (batch.winner, batch.loser))


def test_an_interruption_before_the_first_fit_ends_the_run(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(em_module, "infer_users", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collaborative_em(PAIRS, KERNEL, 2, init_values=START, progress_bar=False)


def test_fits_that_do_not_go_together_are_refused(tmp_path):
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    for rank, kernel, given, message in [
        (1, KERNEL, {}, "init is a fit of rank 2"),
        (2, 2.0 * KERNEL, {}, "rank and kernel must be the same"),
        (2, np.eye(9), {}, "init is a fit of 8 items, and kernel has 9"),
        (2, KERNEL, {"init_values": START}, "Give init or init_values, not both"),
    ]:
        with pytest.raises(ValueError, match=message):
            collaborative_em(PAIRS, kernel, rank, init=fit, **given)
    write_archive(tmp_path / "other", {"something": 1})
    with pytest.raises(ValueError, match="holds no fit by collaborative_em"):
        CollaborativeFit.load(tmp_path / "other")


def test_tables_are_read_by_the_names_of_their_columns():
    won = np.arange(USER.size) % 2
    table = {"won": won, "second": SECOND, "first": FIRST, "user": USER}
    for given in (table, pd.DataFrame(table)):
        found, *_ = checked_pairs(given, None, 8)
        np.testing.assert_array_equal(found, checked_pairs((USER, FIRST, SECOND, won), None, 8)[0])
    other = pd.Series(SECOND).sample(frac=1, random_state=0)
    with pytest.raises(ValueError, match="loser have the same labels as those of user in another order"):
        checked_pairs((pd.Series(USER), FIRST, other), None, 8)


def test_bad_input_is_explained():
    for call, message in [
        (lambda: collaborative_em(PAIRS, KERNEL, 8), "rank must be in 0, ..., 7"),
        (lambda: collaborative_em(PAIRS, np.ones((8, 8)), 1), "Add a share of the identity"),
        (lambda: collaborative_em(PAIRS, KERNEL[:7, :7], 1), "winner must lie in 0, ..., 6; got values from 0 to 7"),
        (lambda: collaborative_em(PAIRS[:2], KERNEL, 1), "got 2 columns"),
        (lambda: collaborative_em((USER, FIRST, SECOND + 0.5), KERNEL, 1), "loser must hold integers; 44 of 44 are"),
        (lambda: collaborative_em((USER, FIRST, SECOND, 2 * FIRST), KERNEL, 1), "won must be 0 or 1; "),
        (lambda: collaborative_em(PAIRS, KERNEL, 1, method="mcmc"), "method must be one of 'ep'"),
        (lambda: collaborative_em(PAIRS, KERNEL, 1, method="laplace", accelerator="lbfgs"), "squarem"),
        (lambda: collaborative_em(dict(zip("abc", PAIRS, strict=True)), KERNEL, 1), "has columns named user, winner"),
        (lambda: collaborative_em((USER.astype(str), FIRST, SECOND), KERNEL, 1), "Numbers for names are"),
        (
            lambda: collaborative_em((USER, FIRST, np.where(FIRST, SECOND, np.nan)), KERNEL, 1),
            "the first is nan at index",
        ),
        (lambda: collaborative_em(PAIRS, KERNEL, 1.0), "rank must be an integer; got 1.0"),
        (lambda: collaborative_em(PAIRS, KERNEL, 1, num_steps=-1), "num_steps must not be negative"),
        (lambda: collaborative_em(PAIRS, KERNEL, 1, batch_size=0), "batch_size must be one or more; got 0"),
        (lambda: collaborative_em(PAIRS, KERNEL, 1, init_values={"V": START["V"]}), r"init_values may hold V \(8, 1\)"),
        (lambda: collaborative_em(np.zeros((0, 3), int), KERNEL, 1), "There are no pairs"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="A random key is asked for, as in collaborative_em"):
        collaborative_em(PAIRS, KERNEL, 1, rng_key=0)
    with pytest.warns(UserWarning, match="1 pair compares an item with itself"):
        fit = collaborative_em(
            tuple(np.append(part, 3) for part in PAIRS), KERNEL, 2, num_steps=0, init_values=START, progress_bar=False
        )
    assert fit.num_constant == 1
    np.testing.assert_allclose(fit.objective_trace[0], KO["inference"]["EP"]["objective"], rtol=1e-7)
    with pytest.raises(ValueError, match="user must hold integers in 0, ..., 9"):
        fit.predict([10], [0], [1])


def _outcomes(third, dtype=None):
    return np.array([1, 0, third, *np.ones(USER.size - 3, int)], dtype)


@pytest.mark.parametrize(
    ("won", "message"),
    [
        (_outcomes(np.nan, np.float32), "won must be 0 or 1; 1 of 44 are not, the first is nan at index 2"),
        (_outcomes(np.nan, np.float64), "won must be 0 or 1; 1 of 44 are not, the first is nan at index 2"),
        (_outcomes(2), "won must be 0 or 1; 1 of 44 are not, the first is 2 at index 2"),
        (_outcomes(0.5).tolist(), "won must be 0 or 1; 1 of 44 are not, the first is 0.5 at index 2"),
        (_outcomes("yes"), "won must hold ones and zeros; got <U"),
        (pd.Series(_outcomes("yes", object)), "won must hold ones and zeros; got object"),
    ],
)
def test_outcomes_that_are_none_are_refused_in_a_fit_and_in_what_is_asked_of_it(won, message):
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    for call in (
        lambda: collaborative_em((*PAIRS, won), KERNEL, 2),
        lambda: fit.fold_in((*PAIRS, won)),
        lambda: fit.log_predictive(*PAIRS, won),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_questions_of_other_lengths_are_refused():
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    with pytest.raises(ValueError, match="one outcome for each of"):
        fit.log_predictive(*PAIRS, [1, 0])
    with pytest.raises(ValueError, match="user, first and second must be vectors of one length"):
        fit.predict([0, 1, 2], [0, 1], [1, 2])


def test_a_user_with_many_pairs_keeps_its_digits_in_single_precision():
    """Of the sites of thousands of pairs under a prior of nearly one direction all digits were lost."""
    rng = np.random.default_rng(0)
    first = rng.integers(8, size=3000)
    second = (first + rng.integers(1, 8, size=3000)) % 8
    (batch,) = batches_of_users(Pairs(np.zeros(3000, int), first, second), 8)
    mean, V = rng.normal(size=8), 6.0 * rng.normal(size=(8, 1))
    difference = mean[np.asarray(batch.winner)] - mean[np.asarray(batch.loser)]
    sites = 0.3 * np.ones((1, 3000)), 0.3 * difference + 0.5 * rng.normal(size=(1, 3000))

    def utilities(dtype):
        prior = SharedPrior(*(jnp.asarray(part, dtype) for part in (0.9 * mean, V, 1e-3, np.eye(8))))
        _, vector = user_moments(batch, prior, *(jnp.asarray(site, dtype) for site in sites))
        return prior.mean + prior.covariance() @ vector[0]

    # The standard deviation of a utility is 0.03.
    np.testing.assert_allclose(utilities(jnp.float32), utilities(jnp.float64), atol=2e-3)


def test_a_trial_without_an_objective_is_no_part_of_the_trace(monkeypatch):
    infer, count = em_module._Problem.expect, itertools.count()

    def expect(self, prior):
        found = infer(self, prior)
        return found._replace(objective=np.nan) if next(count) == 2 else found

    monkeypatch.setattr(em_module._Problem, "expect", expect)
    fit = collaborative_em(PAIRS, KERNEL, 1, method="jaakkola", num_steps=8, progress_bar=False)
    assert np.all(np.isfinite(fit.objective_trace)) and np.all(np.diff(fit.objective_trace) >= 0.0)


@pytest.mark.thorough
def test_questions_may_be_numbers_or_none_at_all():
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    np.testing.assert_allclose(fit.predict(3, 1, 2).mean, fit.predict([3], [1], [2]).mean)
    np.testing.assert_allclose(fit.predict(3, [1, 2], [2, 1]).mean, fit.predict([3, 3], [1, 2], [2, 1]).mean)
    assert fit.predict([], [], []).probability.shape == (0,)


@pytest.mark.thorough
def test_new_users_say_how_often_they_compared_an_item_with_itself():
    fit = collaborative_em(PAIRS, KERNEL, 2, init_values=START, num_steps=0, progress_bar=False)
    with pytest.warns(UserWarning, match="2 pairs compare an item with itself"):
        found = fit.fold_in(([0, 0, 1], [1, 2, 3], [1, 5, 3]))
    assert found.num_constant == 2
    alone = fit.fold_in(([0], [2], [5]), num_users=2)
    np.testing.assert_allclose(found.utilities([0, 1])[0], alone.utilities([0, 1])[0])


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:collaborative_em did not converge")
def test_a_fit_that_is_not_at_its_end_says_so():
    with pytest.warns(UserWarning, match="did not converge: the objective still rose in the last of"):
        short = collaborative_em(PAIRS, KERNEL, 1, num_steps=2, progress_bar=False)
    rows = np.stack(PAIRS, axis=1).tolist()
    whole = collaborative_em(rows, KERNEL, 1, init_values=short.parameters, progress_bar=False)
    assert whole.converged and not short.converged and whole.objective_trace[-1] > short.objective_trace[-1]


def _synthetic():
    table = np.genfromtxt(REFERENCE / "ko-preferences-synth.csv", delimiter=",", dtype=None, names=True, encoding=None)
    results = json.loads((REFERENCE / "ko-preferences-synth-results.json").read_text())
    parts = [
        np.stack([table[n][table["split"] == split] for n in ("user", "winner", "loser")])
        for split in ("train", "test")
    ]
    return *parts, _kernel(results["X"], results["psi"], results["alpha"]), results["models"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "options"),
    [
        ("GPVU-EP", 2, {}),
        ("GPVU-VG", 2, {"method": "vg"}),
        ("GPVU-JK", 2, {"method": "jaakkola"}),
        ("GPVU-LP", 2, {"method": "laplace"}),
        ("VU-EP", 2, {}),
        ("GPitem-EP", 0, {}),
        ("GPitem-LP", 0, {"method": "laplace"}),
        ("NPCA-EP", 2, {"covariance": "free"}),
    ],
)
def test_synthetic_users_after_forty_iterations(name, rank, options):
    train, test, kernel, results = _synthetic()
    kernel = np.eye(30) if name.startswith("VU") else kernel
    fit = collaborative_em(
        tuple(train), kernel, rank, accelerator="none", num_steps=40, tol=0, progress_bar=False, **options
    )
    assert np.all(np.diff(fit.objective_trace) > 0)
    np.testing.assert_allclose(-fit.log_predictive(*test).mean(), results[name]["test_logloss"], atol=0.01)
    if name.startswith("GPVU"):
        np.testing.assert_allclose(fit.prior.variance, results[name]["sigma2"], atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0])
def test_synthetic_users_at_the_optimum(scale):
    train, test, kernel, _ = _synthetic()
    white = scale * np.random.default_rng(0).normal(size=(30, 2))
    fit = collaborative_em(
        tuple(train), kernel, 2, accelerator="lbfgs", num_steps=40, tol=1e-7, progress_bar=False,
        init_values={"V": np.linalg.cholesky(kernel) @ white},
    )  # fmt: skip
    assert fit.objective_trace[-1] >= -1479 and -fit.log_predictive(*test).mean() <= 0.472
