"""Hyperparameters with heavy tails, against closed forms and quadrature."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import halfcauchy, multivariate_t, norm
from scipy.stats import t as student

from numpyro_ext.infer import EP
from numpyro_ext.infer.gaussian.fitting.point_fit import PointFit
from numpyro_ext.infer.gaussian.integration.matched_weights import features_of, matched_weights
from numpyro_ext.infer.gaussian.integration.outskirts import missed_between_points
from numpyro_ext.infer.gaussian.integration.placement import FieldFits
from numpyro_ext.infer.hyper.density.adaptive import follow
from numpyro_ext.infer.hyper.density.design import central_composite
from numpyro_ext.infer.hyper.density.emulator import emulate
from numpyro_ext.infer.hyper.density.tails import LARGEST_MISSED, FarLook
from tests.tiers import thorough

KEY = jax.random.key(0)


def joint(freedom):
    """Log density of a multivariate Student t with unit curvature at its mode, and its standard deviation."""

    def log_density(z):
        power = freedom + z.shape[1]
        return -0.5 * power * np.log1p(np.sum(z**2, axis=1) / power)

    return log_density, lambda size: math.sqrt((freedom + size) / (freedom - 2.0))


def apart(freedom):
    """The same of independent Student t variables."""
    one, sd = joint(freedom)
    return lambda z: sum(one(column[:, None]) for column in z.T), lambda size: sd(1)


def moments(found):
    weights, points = found.cloud.weights, found.cloud.points
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


@pytest.mark.parametrize("kind", [joint, apart])
@pytest.mark.parametrize("size", [1, 3, *thorough(2, 4, 6)])
def test_tails_that_fall_as_powers_are_followed(kind, size):
    """With three degrees of freedom, standard deviations would be 0.6 to 0.9 of the truth without points far out."""
    log_density, sd = kind(3.0)
    found = follow(log_density, size)
    mean, own = moments(found)
    np.testing.assert_allclose(own / sd(size), 1.0, atol=0.13)
    np.testing.assert_allclose(mean / sd(size), 0.0, atol=0.1)
    np.testing.assert_allclose(np.sqrt(found.spread_weights @ found.spread**2) / sd(size), 1.0, atol=0.15)
    np.testing.assert_allclose(np.sqrt(found.weights @ found.points**2) / sd(size), 1.0, atol=0.25)
    assert np.max(found.seen.missed, initial=0.0) < 0.3


def test_a_constant_among_the_values_hides_no_tails():
    """Diagonals of correlation matrices are such values: nothing of them lies far out, here or further out."""
    log_density, sd = apart(3.0)
    found = follow(log_density, 3, values_at=lambda z: np.concatenate([np.ones((len(z), 1)), z], axis=1))
    np.testing.assert_allclose(moments(found)[1] / sd(3), 1.0, atol=0.13)


def test_tails_that_are_heavy_on_one_side_are_followed():
    """A Student t above the mode, and a normal density below, by quadrature."""
    above, _ = joint(3.0)

    def log_density(z):
        return np.sum(np.where(z > 0.0, above(z.reshape(-1, 1)).reshape(z.shape), -0.5 * z**2), axis=1)

    grid = 0.05 * np.sinh(np.linspace(-12.0, 12.0, 20_001))
    weights = np.exp(log_density(grid[:, None])) * np.gradient(grid)
    weights /= weights.sum()
    exact = math.sqrt(weights @ grid**2 - (weights @ grid) ** 2)
    np.testing.assert_allclose(moments(follow(log_density, 2))[1] / exact, 1.0, atol=0.13)


def test_nothing_more_is_evaluated_where_tails_are_light():
    numbers = []

    def log_density(z):
        numbers.append(len(z))
        return -0.5 * np.sum(z**2, axis=1)

    found = follow(log_density, 4)
    assert numbers[-2] == 8 + 4 and found.seen.share < LARGEST_MISSED  # the look, and then the last points
    assert sum(numbers) < 190


@pytest.mark.parametrize("kind", [joint, apart])
def test_tails_without_a_variance_are_told(kind):
    found = follow(kind(1.5)[0], 2)
    shares = found.seen.look.shares(found.seen.missed, found.seen.look.points, moments(found)[1] ** 2)
    assert np.max(shares) > 0.3


@pytest.mark.parametrize("freedom", [3.0, 5.0])
def test_a_look_tells_how_much_lies_beyond(freedom):
    """Beyond a distance on an axis, by quadrature of the tail of a Student t, of whose power the look knows nothing."""
    log_density, sd = joint(freedom)
    edge = np.array([3.0])
    log_integral = -math.log(student.pdf(0.0, freedom) / math.sqrt((freedom + 1.0) / freedom))
    look = FarLook.around(np.zeros(1), np.eye(1) * sd(1) ** 2, log_integral, (-edge, edge), np.random.default_rng(0))
    distance, rest = look.points[0, 0], look.points
    share = look.shares(look.volumes * np.exp(log_density(look.points)), rest, np.array([sd(1) ** 2]))
    further = look.further()
    share *= look.share_beyond(
        share,
        further.shares(further.volumes * np.exp(log_density(further.points)), further.points, sd(1) ** 2 * np.ones(1)),
    )
    grid = np.geomspace(distance, 1e6, 200_001)
    masses = np.exp(log_density(grid[:, None]) - log_integral) * grid**2
    exact = 2.0 * np.sum(0.5 * (masses[1:] + masses[:-1]) * np.diff(grid)) / sd(1) ** 2
    assert distance == pytest.approx(max(4.5, 1.0 + 3.0 / sd(1)) * sd(1))
    assert 0.7 < share[0] / exact < 1.4


@pytest.mark.parametrize("scale", [40.0, 100.0, 300.0])
def test_weights_stay_where_moments_are_beyond_what_numbers_hold(scale):
    """A hardly known logarithm, whose exponential has squares up to 1e170 or beyond all numbers."""
    values = np.exp(scale * np.random.default_rng(0).normal(size=(30, 2)))
    weights, features = np.full(30, 1.0 / 30.0), features_of([values])
    np.testing.assert_array_equal(matched_weights(weights, features, 1000.0 * features.mean(axis=0)), weights)


def test_an_emulator_knows_tails_of_students():
    for kind, is_joint in ((joint, True), (apart, False)):
        log_density = kind(3.0)[0]
        points = np.random.default_rng(0).standard_t(2.0, (120, 3)) * 1.5
        found = emulate(points, log_density(points), is_heavy=True)
        assert found.is_heavy and (found.joint > 0.0) == is_joint
        new = np.random.default_rng(1).standard_t(3.0, (50, 3)) * 2.0
        np.testing.assert_allclose(found.log_density(new), log_density(new), atol=0.3)


def little_is_known(size, prior):
    """Coefficients outside the field, whose prior has heavy tails and of which few data tell little."""

    def model(x, y):
        b = numpyro.sample("b", prior(size))
        f = numpyro.sample("f", dist.Normal(0, 1).expand([len(y)]))
        numpyro.sample("y", dist.Normal(f + 0.5 * jnp.tanh(x @ b), 1.0), obs=y)

    return model


PRIORS = {
    "joint": (lambda k: dist.MultivariateStudentT(3.0, jnp.zeros(k), jnp.eye(k)), multivariate_t),
    "apart": (lambda k: dist.StudentT(3.0, 0, 1).expand([k]).to_event(1), student),
}


def quadrature(x, y, prior):
    """Log evidence, means and standard deviations of the coefficients on a grid that is wide in the tails."""
    size = x.shape[1]
    axis = 0.2 * np.sinh(np.linspace(-9.5, 9.5, 4001 if size == 1 else 401))
    width = np.gradient(axis)
    points = np.array(list(itertools.product(axis, repeat=size)))
    widths = np.array(list(itertools.product(width, repeat=size))).prod(axis=1)
    if prior is student:
        log_prior = student.logpdf(points, 3.0).sum(axis=1)
    else:
        log_prior = multivariate_t.logpdf(points, np.zeros(size), np.eye(size), 3.0)
    rest = y[:, None] - 0.5 * np.tanh(x @ points.T)
    log_masses = log_prior + norm.logpdf(rest, scale=math.sqrt(2.0)).sum(axis=0) + np.log(widths)
    evidence = logsumexp(log_masses)
    weights = np.exp(log_masses - evidence)
    mean = weights @ points
    return evidence, mean, np.sqrt(weights @ (points - mean) ** 2)


def few_data(size):
    rng = np.random.default_rng(3)
    return rng.normal(size=(12 * size, size)) * 0.1, rng.normal(size=12 * size)


@pytest.mark.thorough
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("size", [1, 2])
def test_heavy_priors_of_coefficients_outside_the_field(size, prior):
    x, y = few_data(size)
    evidence, mean, sd = quadrature(x, y, PRIORS[prior][1])
    engine = EP(little_is_known(size, PRIORS[prior][0]), field=["f"], progress_bar=False, num_samples=4000)
    engine.run(KEY, x, y)
    assert engine.diagnostics.converged and engine.diagnostics.messages == ()
    assert abs(engine.log_evidence - evidence) < 0.05
    site, draws = engine.hyper["b"], engine.get_samples()["b"]
    np.testing.assert_allclose((np.asarray(site.mean) - mean) / sd, 0.0, atol=0.1)
    np.testing.assert_allclose(np.asarray(site.sd) / sd, 1.0, atol=0.12)
    np.testing.assert_allclose(draws.std(axis=0) / sd, 1.0, atol=0.15)


@pytest.mark.thorough
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("size", "integrate"), [(1, "ccd"), (2, "grid"), (2, "normal"), (3, "ccd"), (6, "normal")])
def test_designs_that_miss_heavy_tails_say_so(size, integrate, prior):
    x, y = few_data(size)
    with pytest.warns(UserWarning, match="goes on far from its mode.*'b' .* times as large.*integrate='adaptive'"):
        model = little_is_known(size, PRIORS[prior][0])
        engine = EP(model, field=["f"], progress_bar=False, integrate=integrate)
        engine.run(KEY, x, y)
    assert not engine.diagnostics.converged
    assert np.all(np.asarray(engine.hyper["b"].sd) < 0.9 * math.sqrt(3.0))  # of the prior, which is nearly left alone


def groups(y):
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    effect = numpyro.sample("effect", dist.Normal(0, tau).expand([len(y)]))
    numpyro.sample("y", dist.Normal(effect, 0.5), obs=y)


def scale_of_groups(y):
    """Mean and standard deviation of the scale, by sums over a grid."""
    grid = np.linspace(-12.0, 14.0, 6001)
    log_density = norm.logpdf(y[:, None], scale=np.hypot(np.exp(grid), 0.5)).sum(axis=0)
    log_density += halfcauchy.logpdf(np.exp(grid)) + grid
    weights = np.exp(log_density - logsumexp(log_density))
    mean = weights @ np.exp(grid)
    return mean, np.sqrt(weights @ (np.exp(grid) - mean) ** 2)


@pytest.mark.thorough
def test_a_scale_of_few_groups_under_a_heavy_prior():
    """The scale of three groups under a half-Cauchy prior has the tail of a Student t with three degrees of freedom."""
    y = np.array([1.0, -1.5, 2.0])
    mean, sd = scale_of_groups(y)
    engine = EP(groups, progress_bar=False)
    engine.run(KEY, y)
    assert engine.diagnostics.converged and engine.diagnostics.messages == ()
    assert abs(float(engine.hyper["tau"].mean) - mean) < 0.1 * sd
    assert abs(float(engine.hyper["tau"].sd) / sd - 1.0) < 0.1


def test_what_was_looked_at_is_not_fitted_again():
    class Around:
        size, asked = 2, 0

        def fits(self, points, states=None, tol=None, *, with_marginals=True, known=None, floor=-np.inf):
            self.asked += len(points)
            there = -0.5 * np.sum(points**2, axis=1)
            return PointFit(there, None, there, None, np.ones(len(points), bool), {}, None)

    around = Around()
    at, points = FieldFits(around), np.array([[0.0, 0.0], [1.0, 2.0]])
    np.testing.assert_array_equal(at.heights_at(points), [0.0, -2.5])
    np.testing.assert_array_equal(at.brief_heights_at(2.0 * points), [0.0, -10.0])
    assert around.asked == 4
    np.testing.assert_array_equal(at.look(2.0 * points).objective, at.brief_heights_at(2.0 * points))
    assert around.asked == 4
    at.look(points + 3.0)
    assert around.asked == 6


@pytest.mark.thorough
def test_what_lies_among_the_outermost_points_and_beyond_them_is_told_together():
    """Neither is a fifth of the variance for four groups; both are, and the standard deviation is 0.74 of the truth."""
    y = np.array([1.0, -1.5, 2.0, -0.5])
    engine = EP(groups, progress_bar=False, integrate="ccd")
    with pytest.warns(UserWarning, match="goes on far from its mode.*'tau' .* times as large"):
        engine.run(KEY, y)
    assert not engine.diagnostics.converged
    assert float(engine.hyper["tau"].sd) < 0.8 * scale_of_groups(y)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [0.7, 1.5])
def test_a_composite_design_of_few_points_says_what_these_miss_of_a_scale(scale):
    """Three points have the moments of the logarithm of a scale, and too small a variance of the scale of six groups:
    0.79 to 0.86 of the standard deviation, to which neither the outermost points nor those beyond add a third."""
    engine = EP(groups, progress_bar=False, integrate="ccd")
    for seed in (5, 8):
        y = np.random.default_rng(seed).normal(size=6) * np.hypot(scale, 0.5)
        with pytest.warns(UserWarning, match="goes on far from its mode.*'tau' .* times as large"):
            engine.run(KEY, y)
        assert not engine.diagnostics.converged
        assert float(engine.hyper["tau"].sd) < 0.87 * scale_of_groups(y)[1]


@pytest.mark.parametrize("width", [0.02, 1.0])
def test_what_few_points_miss_is_the_variance_of_what_bends(width):
    """Against the moments of a log-normal variable and of a normal one."""
    found = missed_between_points(
        lambda z: {"plain": 2.0 * z, "bent": np.exp(width * z), "both": np.hstack([z, np.exp(width * z)])},
        np.ones((2, 1)),
    )
    three = central_composite(1)
    masses = np.exp(three.log_volumes - 0.5 * three.points[:, 0] ** 2) / math.sqrt(2.0 * math.pi)
    value = np.exp(width * three.points[:, 0])
    variance = masses @ value**2 - (masses @ value) ** 2
    exact = math.exp(width**2) * math.expm1(width**2) / variance - 1.0
    assert abs(found["plain"]) < 5e-3  # by points that are many, not all
    assert found["bent"] == pytest.approx(exact, rel=0.1, abs=5e-3)
    assert found["both"] == pytest.approx(found["bent"], rel=1e-9)
