"""New vectors of a fit of ratings, against draws from their exact posterior and against sums level by level."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import entr
from scipy.stats import norm

from numpyro_ext.infer.bilinear.algorithms.messages import Moments
from numpyro_ext.infer.bilinear.algorithms.ratings import noise
from numpyro_ext.infer.bilinear.marginals.newcomers import Fitted, Newcomers, with_cells
from numpyro_ext.models import heteroscedastic_ratings
from numpyro_ext.structure import ModelStructureError, read_bilinear
from numpyro_ext.structure.bilinear.noisy.scales import find_noise

SIZES = {"num_users": 5, "num_items": 6, "rank": 2, "num_levels": 3}
USER, ITEM = np.divmod(np.random.default_rng(1).permutation(30), 6)
RATING = np.random.default_rng(2).integers(0, 3, 30)
NUM_DRAWS = 400_000
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def form_of(user=USER, item=ITEM, rating=RATING, **options):
    model = partial(heteroscedastic_ratings, **SIZES, **options)
    reading = read_bilinear(
        model, (user, item, rating), {}, by_component=True, takes_any_factor=True, learns_hyper=False
    )
    return find_noise(reading, jax.jit(reading.form), tuple(reading.hyper), {})


def posited(spread=1.0, **options):
    """A fit that nobody made: vectors anywhere, and nothing learned of noise and cut points."""
    form, sites = form_of(**options)
    rng = np.random.default_rng(0)
    blocks = [
        Moments(jnp.asarray(1.5 * rng.normal(size=(num, 2))), jnp.asarray(spread * rng.uniform(0.05, 0.4, (num, 2))))
        for num in (5, 6)
    ]
    return Fitted(form, sites, noise.init(form, *blocks))


def asked(fitted, side, num_used, chosen=(1, 3)):
    people = Newcomers.of(fitted, fitted.form, side, np.array(chosen))
    person = np.asarray(people.met.person)
    slots = np.stack([np.flatnonzero(person == number)[:5] for number in range(len(chosen))])
    return people.learned(slots, num_used, tol=1e-6, rule="quadrature"), slots


def exact_moments(people, slots, number):
    """Means and variances of a new vector, and of the log of its noise, by draws of the prior that answers weight."""
    rng = np.random.default_rng(5)
    met = people.met
    u = np.asarray(met.prior.mean)[number] + np.sqrt(np.asarray(met.prior.variance)[number]) * rng.normal(
        size=(NUM_DRAWS, 2)
    )
    variance = np.ones(NUM_DRAWS)
    for gamma in met.own_noise:
        variance = np.asarray(gamma.rate)[number] / rng.gamma(float(gamma.shape[number]), size=NUM_DRAWS)

    def drawn(moments):
        mean, spread = (np.asarray(x) for x in moments)
        return mean + np.sqrt(spread) * rng.normal(size=(NUM_DRAWS, *mean.shape))

    own = None if met.own_cuts is None else drawn([x[number] for x in met.own_cuts])
    log_weight = np.zeros(NUM_DRAWS)
    for cell in slots:
        at, rest = (drawn([x[cell] for x in moments]) for moments in (met.coefficient, met.offset))
        held = np.zeros(2) if met.held_cuts is None else drawn([x[cell] for x in met.held_cuts])
        cuts = np.asarray(met.form.thresholds)[cell] + (held if own is None else own)
        root = np.sqrt(np.asarray(met.noise)[cell] * variance)
        passed = norm.cdf((cuts - (np.sum(at * u, 1) + rest)[:, None]) / root[:, None])
        passed = np.column_stack([np.zeros(NUM_DRAWS), passed, np.ones(NUM_DRAWS)])
        level = int(met.form.label[cell])
        with np.errstate(divide="ignore"):
            log_weight += np.log(np.maximum(passed[:, level + 1] - passed[:, level], 0.0))
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1.0 / np.sum(weight**2) > 5000
    mean = weight @ u
    noise_mean = weight @ np.log(variance)
    return mean, (u - mean).T @ ((u - mean) * weight[:, None]), noise_mean


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize(
    ("side", "options", "of_mean", "of_variance"),
    [
        (0, {"spread": 0.1, "heteroscedastic": False}, 0.05, 0.03),
        # of wide vectors of the other side, which say how large the new ones are
        (0, {"heteroscedastic": False}, 0.06, 0.1),
        # noise stands at its mode, where Gaussians hear of it
        (0, {"spread": 0.1}, 0.15, 0.1),
        (1, {"spread": 0.1}, 0.35, 0.15),
        (1, {"spread": 0.1, "learn_cuts": False}, 0.35, 0.15),
    ],
)
def test_new_vectors_have_the_moments_of_their_exact_posterior(side, options, of_mean, of_variance):
    """Given the other side up to its Gaussian, after four ratings; the draws are of prior and answers alone."""
    people, slots = asked(posited(**options), side, 4)
    for number in range(2):
        mean, covariance, log_noise = exact_moments(people, slots[number, :4], number)
        assert np.max(np.abs(mean)) > 0.2 and np.min(np.diag(covariance)) < 0.95  # of the prior: zero and one
        found = people.state.vectors
        sd = np.sqrt(np.diag(covariance))
        np.testing.assert_array_less(np.abs(np.asarray(found.mean)[number] - mean), of_mean * sd)
        np.testing.assert_array_less(np.abs(np.asarray(found.variance)[number] - covariance), of_variance)
        for gamma in people.state.noise:
            own = np.log(gamma.rate[number]) - np.log(gamma.shape[number] - 0.5)
            assert abs(float(own) - log_noise) < 0.15


@pytest.mark.thorough
@needs_float64
def test_answers_are_taken_one_by_one_as_all_at_once():
    """Slots out of use say nothing, and the end does not depend on where iterations start."""
    fitted = posited()
    people, slots = asked(fitted, 0, 1)
    for number in range(2, 5):
        people = people.learned(slots, number, tol=1e-6, rule="quadrature")
    at_once, _ = asked(fitted, 0, 4)
    for one, other in zip(people.state.vectors, at_once.state.vectors, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    alone, _ = asked(fitted, 0, 4, chosen=(3,))
    np.testing.assert_allclose(alone.state.vectors.mean[0], at_once.state.vectors.mean[1], atol=1e-5)
    none, _ = asked(fitted, 0, 0)
    np.testing.assert_allclose(none.state.vectors.mean, none.met.prior.mean, atol=1e-12)


@pytest.mark.thorough
@needs_float64
def test_information_is_that_of_sums_level_by_level():
    people, _ = asked(posited(), 0, 3)
    met, state = people.met, people.state
    points = np.random.default_rng(3).normal(size=(7, 2))
    rate = [np.asarray(g.rate / (g.shape + 1.0)) for g in state.noise][0]

    def levels(cell, at, spread):
        root = np.sqrt(spread + float(met.noise[cell]) * rate[met.person[cell]] + np.asarray(state.cuts.variance[cell]))
        passed = np.maximum.accumulate(norm.cdf((np.asarray(state.cuts.mean[cell]) - at) / root))
        return np.array([y - x for x, y in pairwise([0.0, *passed, 1.0])])

    given = people.information(jnp.asarray(points))
    at_mean = people.information(jnp.zeros((1, 2)))
    for cell in range(met.person.size):
        a, s = np.asarray(met.coefficient.mean[cell]), np.asarray(met.coefficient.variance[cell])
        mean, covariance = (np.asarray(x[met.person[cell]]) for x in state.vectors)
        vectors = mean + points @ np.linalg.cholesky(covariance).T
        tables = np.array([levels(cell, a @ u, s @ u**2) for u in vectors])
        expected = entr(tables.mean(0)).sum() - entr(tables).sum(1).mean()
        np.testing.assert_allclose(given[cell], expected, atol=2e-6)
        overall = levels(cell, a @ mean, a @ covariance @ a + s @ (mean**2 + np.diag(covariance)))
        np.testing.assert_allclose(people.predictive[cell], overall, atol=1e-9)
        np.testing.assert_allclose(
            at_mean[cell], entr(overall).sum() - entr(levels(cell, a @ mean, s @ mean**2)).sum(), atol=2e-6
        )


@pytest.mark.thorough
@needs_float64
def test_a_fit_goes_on_with_further_ratings():
    """Cells that are joined are those of the model on all of them, and it ends where nothing changes there."""
    first = slice(0, 22)
    form, sites = form_of(USER[first], ITEM[first], RATING[first])
    blocks = [Moments(jnp.asarray(np.random.default_rng(0).normal(size=(n, 2))), jnp.full((n, 2), 0.5)) for n in (5, 6)]
    whole, _ = form_of()
    fitted = with_cells(Fitted(form, sites, noise.init(form, *blocks)), whole.taken(jnp.arange(22, 30)), "quadrature")
    for name in ("label", "noise", "thresholds"):
        np.testing.assert_array_equal(getattr(fitted.form, name), getattr(whole, name))
    for name in ("row_index", "column_index", "offset", "coupling"):
        found, expected = (np.asarray(getattr(f.cells, name)) for f in (fitted.form, whole))
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
    np.testing.assert_array_equal(fitted.form.cuts.element, whole.cuts.element)
    _, info = noise.step(whole, fitted.messages, jnp.asarray(0.9), jnp.asarray(True), rule="quadrature")
    assert float(info.change) < 2e-3


@pytest.mark.thorough
def test_what_is_shared_between_newcomers_is_refused_by_name():
    fitted = posited()
    groups = fitted.form._replace(
        scales=(fitted.form.scales[0]._replace(group=fitted.form.cells.row_index // 2), *fitted.form.scales[1:])
    )
    with pytest.raises(ModelStructureError, match="'row_noise' has elements that belong neither to one new vector"):
        Newcomers.of(fitted, groups, 0, np.arange(5))


@pytest.mark.thorough
def test_a_fit_that_leaves_open_whose_the_noise_is_is_refused():
    """Each person rated one item, and nobody else rated it."""
    form, sites = form_of(np.arange(5), np.arange(5), np.arange(5) % 3)
    blocks = [Moments(jnp.ones((num, 2)), jnp.ones((num, 2))) for num in (5, 6)]
    with pytest.raises(ModelStructureError, match="'row_noise' has elements that belong to one new vector each and to"):
        Newcomers.of(Fitted(form, sites, noise.init(form, *blocks)), form, 0, np.arange(5))
