"""Item-response models against densities written out answer by answer, and what they say of answers that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from scipy import stats

from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import bifactor_pattern, item_response, item_response_records
from numpyro_ext.models.item_response import item_call
from numpyro_ext.structure import ModelStructureError

FAMILY = ["2pl", "graded", "3pl", "graded", "nominal", "4pl", "gaussian", "partial-credit", "rasch", "rating-scale",
          "generalised-partial-credit", "graded"]  # fmt: skip
CATEGORIES = [2, 3, 2, 4, 3, 2, 9, 3, 2, 4, 3, 4]
RNG = np.random.default_rng(0)
PEOPLE = 5
VALUES = {
    "discrimination_2pl": [1.3],
    "intercept_2pl": [0.4],
    "discrimination_graded": [0.8, 1.5, 1.1],
    "cutpoints_graded_3": [[-0.5, 0.7]],
    "cutpoints_graded_4": [[-1.0, 0.1, 2.0], [-2.0, -1.0, 0.5]],
    "discrimination_3pl": [1.2],
    "intercept_3pl": [-0.3],
    "guessing_3pl": [0.2],
    "slopes_nominal": [[0.5, 1.4]],
    "intercepts_nominal": [[0.2, -0.6]],
    "discrimination_4pl": [0.9],
    "intercept_4pl": [0.1],
    "guessing_4pl": [0.1],
    "upper_4pl": [0.9],
    "discrimination_gaussian": [1.7],
    "intercept_gaussian": [0.3],
    "noise_gaussian": [0.6],
    "discrimination_partial_credit": 1.2,
    "steps_partial_credit": [[0.3, -0.2]],
    "discrimination_rasch": 0.7,
    "intercept_rasch": [1.0],
    "discrimination_rating_scale": 1.1,
    "intercept_rating_scale": [0.5],
    "steps_rating_scale": [-0.6, 0.1, 0.5],
    "discrimination_generalised_partial_credit": [0.9],
    "steps_generalised_partial_credit": [[-0.4, 0.8]],
}
# For each item its family and the row of its parameters among those of its sites.
PLACES = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
SLOPES = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def probabilities(k, theta):
    """The answers to item k of one person, from the formulas of the families."""
    family = FAMILY[k]
    end = "_" + family.replace("-", "_")
    sized = f"{end}_{CATEGORIES[k]}" if family == "graded" else end
    own = {name: np.asarray(value) for name, value in VALUES.items()}
    a = None if family == "nominal" else own[f"discrimination{end}"]
    a = a if a is None or a.ndim == 0 else a[SLOPES[k]]
    if family in ("rasch", "2pl", "3pl", "4pl"):
        p = sigmoid(a * theta + own[f"intercept{end}"][0])
        c, u = {"3pl": (0.2, 1.0), "4pl": (0.1, 0.9)}.get(family, (0.0, 1.0))
        p = c + (u - c) * p
        return np.array([1 - p, p])
    if family == "graded":
        above = np.concatenate([[1.0], sigmoid(a * theta - own[f"cutpoints{sized}"][PLACES[k]]), [0.0]])
        return above[:-1] - above[1:]
    if family == "nominal":
        logits = np.concatenate([[0.0], own["slopes_nominal"][0] * theta + own["intercepts_nominal"][0]])
    else:
        steps = own[f"steps{end}"]
        steps = steps - own[f"intercept{end}"][0] if family == "rating-scale" else steps[0]
        logits = np.concatenate([[0.0], np.cumsum(a * theta - steps)])
    return np.exp(logits) / np.exp(logits).sum()


def answers():
    table = np.stack([RNG.integers(0, c if c < 9 else 2, PEOPLE) for c in CATEGORIES], -1).astype(float)
    table[:, 6] = RNG.normal(size=PEOPLE)
    table[0, 3] = table[2, 0] = table[4, 6] = np.nan
    return table


@pytest.mark.float32
def test_every_family_has_its_density_in_a_table_and_in_records():
    table, theta = answers(), RNG.normal(size=PEOPLE)
    expected = stats.norm.logpdf(theta).sum()
    for n, k in zip(*np.nonzero(np.isfinite(table)), strict=True):
        if FAMILY[k] == "gaussian":
            expected += stats.norm.logpdf(table[n, k], 1.7 * theta[n] + 0.3, 0.6)
        else:
            expected += np.log(probabilities(k, theta[n])[int(table[n, k])])
    values = {name: jnp.asarray(value) for name, value in VALUES.items()} | {"trait": jnp.asarray(theta)}
    options = {"family": FAMILY, "num_categories": CATEGORIES}
    tolerance = 1e-12 if jax.config.jax_enable_x64 else 1e-5
    sites = {}

    def of_table(values):
        found, trace = log_density(item_response, (table,), options, values)
        sites.update(trace)
        return found, trace["difficulty_2pl"]["value"]

    found, difficulty = jax.jit(of_table)(values)
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    np.testing.assert_allclose(difficulty, [-0.4 / 1.3], rtol=tolerance)
    free = {name for name, site in sites.items() if site["type"] in ("param", "sample") and not site.get("is_observed")}
    assert set(values) == free

    order = RNG.permutation(np.flatnonzero(np.isfinite(table).ravel()))
    person, item = np.divmod(order, len(FAMILY))
    sizes = {"num_people": PEOPLE, "num_items": len(FAMILY)}
    call = (person, item, table[person, item])
    of_records = jax.jit(lambda values: log_density(item_response_records, call, {**options, **sizes}, values)[0])
    np.testing.assert_allclose(of_records(values), expected, rtol=tolerance)


def test_several_traits_follow_pattern_correlation_and_covariates():
    pattern = np.array([[1, 0], [1, -1], [0, 1]])
    free, d = np.array([0.8, 1.2, 0.5, 1.9]), np.array([0.1, -0.4, 0.3])
    a = np.array([[0.8, 0.0], [1.2, -0.5], [0.0, 1.9]])
    covariates, slopes = RNG.normal(size=(4, 1)), np.array([[0.4, -0.2]])
    factor = np.array([[1.0, 0.0], [0.6, 0.8]])
    x, y = RNG.normal(size=(4, 2)), RNG.integers(0, 2, (4, 3))
    expected = sum(stats.multivariate_normal.logpdf(row, mean, factor @ factor.T)
                   for row, mean in zip(x, covariates @ slopes, strict=True))  # fmt: skip
    p = sigmoid(x @ a.T + d)
    expected += np.log(np.where(y, p, 1 - p)).sum()
    values = {"free_discrimination": free, "intercept": d, "trait": x, "trait_cholesky": factor,
              "trait_coefficients": slopes}  # fmt: skip
    options = {"family": "2pl", "pattern": pattern, "correlated": True, "covariates": covariates}
    found, trace = log_density(item_response, (y,), options, values)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(trace["discrimination"]["value"], a)
    np.testing.assert_allclose(trace["trait_correlation"]["value"], factor @ factor.T)
    person, item = np.repeat(np.arange(4), 3), np.tile(np.arange(3), 4)
    records = log_density(item_response_records, (person, item, y.ravel()),
                          {**options, "num_people": 4, "num_items": 3}, values)[0]  # fmt: skip
    np.testing.assert_allclose(records, expected, rtol=1e-12)


@pytest.mark.thorough
def test_exploratory_and_nominal_items_of_several_traits():
    x, y = RNG.normal(size=(4, 2)), RNG.integers(0, 3, (4, 2))
    slopes, intercepts = RNG.normal(size=(2, 2, 2)), RNG.normal(size=(2, 2))
    logits = np.concatenate([np.zeros((4, 2, 1)), np.einsum("nd,ikd->nik", x, slopes) + intercepts], -1)
    expected = stats.norm.logpdf(x).sum() + np.take_along_axis(
        logits - np.log(np.exp(logits).sum(-1, keepdims=True)), y[..., None], -1
    ).sum()  # fmt: skip
    options = {"family": "nominal", "num_traits": 2, "num_categories": 3}
    values = {"slopes": slopes, "intercepts": intercepts, "trait": x}
    np.testing.assert_allclose(log_density(item_response, (y,), options, values)[0], expected, rtol=1e-12)
    a, d = RNG.normal(size=(2, 2)), RNG.normal(size=2)
    p = sigmoid(x @ a.T + d)
    expected = stats.norm.logpdf(x).sum() + np.log(np.where(y > 0, p, 1 - p)).sum()
    values = {"discrimination": a, "intercept": d, "trait": x}
    options = {"family": "2pl", "num_traits": 2, "signed": True}
    np.testing.assert_allclose(log_density(item_response, (y > 0,), options, values)[0], expected, rtol=1e-12)


@pytest.mark.thorough
def test_priors_are_those_of_the_documentation():
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        item_response(family=["2pl", "3pl", "partial-credit"], num_categories=3, priors=True, shape=(3, 3))
    assert all(site["type"] != "param" for site in trace.values())
    at = {
        "discrimination_2pl": [1.3],
        "intercept_3pl": [0.4],
        "guessing_3pl": [0.2],
        "steps_partial_credit": [[0.3, 1]],
    }
    expected = {
        "discrimination_2pl": stats.lognorm(0.5).logpdf(1.3),
        "intercept_3pl": stats.norm(0, 3).logpdf(0.4),
        "guessing_3pl": stats.beta(5, 17).logpdf(0.2),
        "steps_partial_credit": stats.norm(0, 3).logpdf([0.3, 1]).sum(),
    }
    for name, value in at.items():
        np.testing.assert_allclose(trace[name]["fn"].log_prob(jnp.asarray(value)), expected[name], rtol=1e-6)


def test_answers_come_as_tables_of_pandas_lists_and_booleans():
    numbers = np.array([[0, 1.0], [2, 0.0], [1, np.nan], [2, 1.0]])
    levels = ["no", "perhaps", "yes"]
    frame = pd.DataFrame({
        "anger": pd.Categorical([levels[int(k)] for k in numbers[:, 0]], levels, ordered=True),
        "told": pd.array([True, False, pd.NA, True], dtype="boolean"),
    })  # fmt: skip
    theta = np.array([0.3, -1.0, 0.5, 1.2])
    options = {"family": ["graded", "2pl"]}
    values = {"discrimination_graded": [1.3], "cutpoints_graded": [[-1.0, 0.5]], "discrimination_2pl": [0.8],
              "intercept_2pl": [0.1], "trait": theta}  # fmt: skip
    values = {name: jnp.asarray(value) for name, value in values.items()}
    expected = log_density(item_response, (numbers,), options, values)[0]
    mask = np.isfinite(numbers)
    others = [(frame,), (frame.astype(object).assign(anger=numbers[:, 0]),), ([[0, 1], [2, 0], [1, None], [2, 1]],),
              (np.nan_to_num(numbers).astype(int), mask), (jnp.asarray(numbers),)]  # fmt: skip
    for given in others:
        np.testing.assert_allclose(log_density(item_response, given, options, values)[0], expected, rtol=1e-12)


def test_a_mask_goes_by_the_names_of_the_items():
    """Its columns may be in another order than those of the answers; so do the answers that statistics compare."""
    rng = np.random.default_rng(3)
    response = pd.DataFrame(rng.integers(0, 2, (6, 3)), columns=["a", "b", "c"])
    mask = pd.DataFrame(rng.random((6, 3)) < 0.6, columns=["a", "b", "c"])
    values = {"discrimination": jnp.array([0.5, 1.0, 2.0]), "intercept": jnp.arange(3.0), "trait": jnp.arange(6.0) - 2}
    options = {"family": "2pl"}
    expected = log_density(item_response, (response.to_numpy(), mask.to_numpy()), options, values)[0]
    for given in (mask, mask[["c", "a", "b"]]):
        found = log_density(item_response, (response, given), options, values)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        table = item_call(item_response, (response, given), options).table()
        np.testing.assert_array_equal(table, np.where(mask, response, np.nan))


BAD = {
    "An answer to item 1 is 3; a graded item has answers 0 to 2": ([[0, 3], [1, 1]], {"num_categories": 3}),
    "No answer to a graded item is 0": ([[1, 3], [2, 1]], {}),
    "no answer is 0, so if they are counted from one, subtract one": ([[1, 2], [2, 1]], {"family": "2pl"}),
    "An answer to item 0 is 1.5, between two categories": ([[1.5, 3], [0, 1]], {}),
    "An answer to item 1 is -1": ([[0, -1], [1, 2]], {}),
    "answers are numbers 0, 1": ([["no", "yes"], ["yes", "no"]], {}),
    "family must be one of": ([[0, 1]], {"family": "5pl"}),
    "got 1 of them": ([[0, 1]], {"family": ["2pl"]}),
    "pattern must hold -1, 0 and 1": ([[0, 1]], {"pattern": [[1, 0.5], [0, 1]]}),
    "No item measures trait 1": ([[0, 1]], {"pattern": [[1, 0], [1, 0]]}),
    "Item 1 measures no trait": ([[0, 1]], {"pattern": [1, 0]}),
    "num_traits is 3, and pattern has 2": ([[0, 1]], {"pattern": np.eye(2), "num_traits": 3}),
    "correlated=True needs two traits": ([[0, 1]], {"correlated": True}),
    "rasch items have one slope": ([[0, 1]], {"family": "rasch", "num_traits": 2}),
    "people in rows and items in columns": ([0, 1], {}),
    r"one person and one item at least; got answers of shape \(20, 0\)": (np.zeros((20, 0)), {}),
    "num_categories must be an integer": ([[0, 1]], {"num_categories": [3, 3, 3]}),
    "covariates must have shape": ([[0, 1]], {"covariates": np.zeros((3, 1))}),
    "covariates must be numbers: .*get_dummies": ([[0, 1]], {"covariates": [["f"]]}),
    r"mask must have the shape of the answers, \(1, 2\); got \(3, 2\)": ([[0, 1]], {"mask": np.ones((3, 2))}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message):
    response, options = BAD[message]
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        item_response(response, **{"family": "graded", **options})


def test_records_and_categories_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="person must lie in 0, ..., 1"), handlers.seed(rng_seed=0):
        item_response_records([0, 2], [0, 1], [1, 0], num_people=2, num_items=2, family="2pl")
    with pytest.raises(ValueError, match="person must be a vector of integers.*np.unique"), handlers.seed(rng_seed=0):
        item_response_records(["a", "b"], [0, 1], [1, 0], num_people=2, num_items=2, family="2pl")
    with pytest.raises(ValueError, match="one answer for each of 2 records"), handlers.seed(rng_seed=0):
        item_response_records([0, 1], [0, 1], [1], num_people=2, num_items=2, family="2pl")
    frame = pd.DataFrame({"colour": pd.Categorical(["red", "green", "blue"])})
    with pytest.raises(ValueError, match="Column 'colour' has categories without an order"), handlers.seed(rng_seed=0):
        item_response(frame, family="graded")


def test_refusals_are_in_the_words_of_the_model():
    """An engine adds no line of the model's source, and no advice on what the model has said itself."""
    answers = np.array([[0, 1], [1, 3]])
    with pytest.raises(ModelStructureError) as caught:
        AdaptiveQuadrature(item_response).run(random.key(0), answers, family="2pl")
    said = "An answer to item 1 is 3; a 2pl item has answers 0 to 1. Missing answers are nan."
    assert str(caught.value) == f"the model refuses these arguments: {said}"
    words = pd.DataFrame({"a": ["yes", "no"]})
    with pytest.raises(ModelStructureError, match="arguments: Column 'a' holds words such as 'no', 'yes'"):
        AdaptiveQuadrature(item_response).run(random.key(0), words, family="2pl")


@pytest.mark.filterwarnings("ignore:Items to look at")
def test_an_item_that_nobody_answered_alone_has_no_standard_errors(tmp_path, capsys):
    theta = np.random.default_rng(3).normal(size=(100, 1))
    answers = (np.random.default_rng(4).random((100, 6)) < sigmoid(theta + np.linspace(-1, 1, 6))).astype(float)
    answers[:, 2] = np.nan
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    engine.run(random.key(0), answers, family="2pl")
    (message,) = engine.diagnostics.messages
    assert "('discrimination' (element 2), 'intercept' (element 2)): no standard errors of these" in message
    others = AdaptiveQuadrature(item_response, progress_bar=False)
    others.run(random.key(0), np.delete(answers, 2, axis=1), family="2pl")
    engine.save(tmp_path / "fit.npz")
    for run in (engine, AdaptiveQuadrature.load(tmp_path / "fit.npz", item_response)):
        for name in ("discrimination", "intercept"):
            errors, ends = run.hyper[name].standard_error, run.hyper[name].interval()
            assert np.isnan(errors[2]) and np.isnan(ends[0][2])
            np.testing.assert_allclose(np.delete(errors, 2), others.hyper[name].standard_error, rtol=1e-3)
            np.testing.assert_allclose(np.delete(ends[1], 2), others.hyper[name].interval()[1], rtol=1e-3)
    engine.print_summary()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "[2]" in line and "trait" not in line]
    assert [line[2] for line in lines] == ["none", "none"]


def test_items_without_a_finite_maximum_are_named_once_and_not_at_given_values():
    rng = np.random.default_rng(1)
    theta = rng.normal(size=300)
    y = (rng.random((300, 5)) < sigmoid(np.array([1, 1, 1, -1.5, 1]) * theta[:, None])).astype(float)
    y[:, 4], y[:, 1], y[7] = 1, y[:, 0], np.nan
    y = pd.DataFrame(y, columns=["a", "b", "c", "d", "e"])
    with pytest.warns(UserWarning) as caught, handlers.seed(rng_seed=0):
        item_response(y, family="3pl")
    (message,) = (str(one.message) for one in caught)
    for part in (
        "one answer only, whose estimates are infinite: e;",
        "the same answers, whose slopes run away: a, b;",
        "or turn their answers round): d;",
        "guessing from difficulty",
        "people without answers, whose traits are those of the population: 1",
    ):
        assert part in message, message
    # Labels that stand for another number elsewhere: of those who answer, nobody says "rarely" to a.
    words = pd.DataFrame({"a": ["never", "often"] * 20, "b": ["never", "rarely", "often", "often"] * 10})
    order = {"a": ["never", "often"], "b": ["never", "rarely", "often"]}
    labelled = words.apply(lambda column: pd.Categorical(column, order[column.name], ordered=True))
    with (
        pytest.warns(UserWarning, match=r"items, 'often' \(1 in a, 2 in b\) \(give"),
        handlers.seed(rng_seed=0),
    ):
        item_response(labelled, family="graded")
    # Every other item turned round: those of the smaller half are named, and no others.
    mixed = (rng.random((400, 5)) < sigmoid(np.array([2, -2, 2, -2, 2]) * rng.normal(size=(400, 1)))).astype(int)
    with pytest.warns(UserWarning, match=r"reversed items [^:]*: item 1, item 3\.$"), handlers.seed(rng_seed=0):
        item_response(mixed, family="2pl")
    person, item = np.divmod(np.arange(2000), 5)
    with pytest.warns(UserWarning, match=r"reversed items [^:]*: item 1, item 3\.$"), handlers.seed(rng_seed=0):
        item_response_records(person, item, mixed.ravel(), num_people=400, num_items=5, family="2pl")
    with pytest.warns(UserWarning, match="measured by the same items"), handlers.seed(rng_seed=0):
        item_response(mixed, family="2pl", pattern=np.ones((5, 2)))
    graded = np.array([[0, 0], [1, 3], [3, 2]])
    with (
        pytest.warns(UserWarning, match="unused categories .*: item 0, item 1; fewer answers"),
        handlers.seed(rng_seed=0),
    ):
        item_response(graded, family="graded")
    # Two items have three frequencies for four parameters; three items have seven for six.
    with (
        pytest.warns(UserWarning, match=r"at. fewer frequencies .*\(3\) than parameters of items \(4\)"),
        handlers.seed(rng_seed=0),
    ):
        item_response(mixed[:, [0, 2]], family="2pl")
    with handlers.seed(rng_seed=0):
        item_response(mixed[:, [0, 2, 4]], family="2pl")
    # With values of the items, as when others are folded in, and with priors there is nothing to warn of.
    values = {"discrimination": jnp.ones(2), "cutpoints": jnp.array([[-1.0, 0, 1]] * 2)}
    with handlers.seed(rng_seed=0), handlers.substitute(data=values):
        item_response(graded, family="graded")
    with handlers.seed(rng_seed=0):
        item_response(graded, family="graded", num_categories=4, priors=True)


def test_engines_tell_of_items_that_they_are_to_learn_and_not_of_items_that_are_given():
    y = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]])
    engine = AdaptiveQuadrature(item_response)
    with pytest.warns(UserWarning, match="one answer only, whose estimates are infinite: item 2") as caught:
        engine._read(random.key(0), (y,), {"family": "2pl"})
    assert len(caught) == 1
    given = {"discrimination": jnp.ones(3), "intercept": jnp.zeros(3)}
    AdaptiveQuadrature(item_response, hyper_values=given).run(random.key(0), y, family="2pl")
    engine._read(random.key(0), (y,), {"family": "2pl"}, check=False)  # as for predictions


def test_bifactor_pattern_has_a_general_trait_and_one_for_each_group():
    np.testing.assert_array_equal(bifactor_pattern(["b", "a", None, "a"]), [[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])


@pytest.mark.thorough
def test_samplers_run_the_model_with_all_families():
    mcmc = MCMC(NUTS(item_response), num_warmup=20, num_samples=20, progress_bar=False)
    chosen = [1, 2, 4, 9]
    mcmc.run(random.key(0), answers()[:, chosen], family=[FAMILY[k] for k in chosen],
             num_categories=[CATEGORIES[k] for k in chosen], priors=True)  # fmt: skip
    draws = mcmc.get_samples()
    assert all(np.isfinite(value).all() for value in draws.values())
    assert np.all(np.diff(draws["cutpoints_graded"], axis=-1) > 0)
    np.testing.assert_allclose(np.sum(draws["steps_rating_scale"], -1), 0.0, atol=1e-6)
