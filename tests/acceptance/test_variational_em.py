"""What Khan (2012) shows of variational EM on discrete data, as far as the data can be made or found."""

import gzip
import json
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax

from numpyro_ext.datasets import data_path
from numpyro_ext.infer.rows.expectation import expectation_step, initial_modes, initial_posteriors
from numpyro_ext.infer.rows.expectation_maximisation import variational_em
from numpyro_ext.infer.rows.posteriors import (
    LatentGaussianRows,
    predictive_log_density,
)
from numpyro_ext.potentials import BoundedPotential, LogitPotential, SoftmaxPotential, logistic_bound
from numpyro_ext.potentials.families.stick_breaking import stick_breaking_labels
from tests.tiers import few

REFERENCE = Path(__file__).parents[1] / "reference"
FACTORS = json.loads((REFERENCE / "khan_lgm_small.json").read_text())["bfa"]
BINARY = json.loads((REFERENCE / "khan_blggm5.json").read_text())
CATEGORICAL = json.loads((REFERENCE / "khan_clggm.json").read_text())

BOUNDS = {
    "B": logistic_bound("bohning"),
    "J": logistic_bound("jaakkola"),
    **{f"L{count}": logistic_bound("piecewise-linear", count) for count in (3, 4, 5, 10)},
    **{f"Q{count}": logistic_bound("piecewise-quadratic", count) for count in (3, 4, 5, 10, 20)},
    "exact": logistic_bound("exact"),
}


def logit(table, bound):
    return BoundedPotential(LogitPotential(jnp.asarray(table)), BOUNDS[bound])


def binary_factors(table, bound, num_factors, observed=None):
    """Factor analysis of binary columns, with two factors at the loadings from which the reference starts."""
    num_rows, num_columns = np.shape(table)
    loadings = 0.5 * np.cos(1.0 + np.arange(num_columns)[:, None] + 2.0 * np.arange(num_factors))
    if num_factors > 2:  # these cosines have rank two, and EM keeps a rank that is too low
        loadings = 0.5 * np.random.default_rng(1).normal(size=(num_columns, num_factors))
    observed = jnp.ones((num_rows, num_columns), bool) if observed is None else jnp.asarray(observed)
    return LatentGaussianRows(
        jnp.zeros(num_factors),
        jnp.eye(num_factors),
        jnp.asarray(loadings),
        jnp.zeros(num_columns),
        (logit(table, bound),),
        (observed,),
        jnp.ones(num_rows),
    )


def graphical_model(potentials, observed, weights, variance=1.0):
    """One latent variable behind each predictor."""
    size = sum(mask.shape[1] * getattr(part, "dimension", 1) for part, mask in zip(potentials, observed, strict=True))
    return LatentGaussianRows(
        jnp.zeros(size),
        variance * jnp.eye(size),
        jnp.eye(size),
        jnp.zeros(size),
        tuple(potentials),
        tuple(map(jnp.asarray, observed)),
        jnp.asarray(weights, float),
    )


def assert_rises(trace):
    assert np.all(np.diff(trace) > -1e-9 * (1.0 + np.abs(trace[1:])))


def sobol_normal(size, power):
    return stats.norm.ppf(stats.qmc.Sobol(size, seed=0).random_base2(power))


# --- factor analysis of a small table: the bound along EM


@pytest.mark.thorough
@pytest.mark.parametrize("bound", few(["B", "J"], 1))
def test_trace_of_binary_factor_analysis(bound):
    rows = binary_factors(FACTORS["Y"], bound, 2)
    np.testing.assert_allclose(rows.loadings, FACTORS["W_init"], atol=1e-12)
    found = variational_em(
        rows,
        learn=("loadings", "intercept"),
        num_steps=50,
        tol=-1.0,
        num_expectation_steps=500,
        expectation_tol=1e-15,
    )
    expected = FACTORS[bound]["bound_at_iters"]
    trace = found.objective_trace[::2]
    np.testing.assert_allclose([trace[int(i)] for i in expected], list(expected.values()), atol=1e-7)
    np.testing.assert_allclose(found.rows.loadings, FACTORS[bound]["W50"], atol=1e-5)
    np.testing.assert_allclose(found.rows.intercept, FACTORS[bound]["w0_50"], atol=1e-5)
    assert_rises(found.objective_trace)


@pytest.mark.slow
def test_tighter_bounds_are_tighter_at_given_parameters():
    bounds = {}
    for bound in ("B", "J", "Q20", "exact"):
        rows = binary_factors(FACTORS["Y"], bound, 2)
        bounds[bound] = float(expectation_step(rows, initial_posteriors(rows), num_steps=200).bound.sum())
        np.testing.assert_allclose(bounds[bound], FACTORS["init_elbo"][bound], atol=1e-7)
    assert bounds["B"] < bounds["J"] < bounds["Q20"] < bounds["exact"] < FACTORS["init_true_loglik"]


# --- graphical model of five binary columns (Fig 4.5), infinite data: each pattern with its probability as weight


def fit_five_columns(bound):
    table = np.array(BINARY["patterns"])
    rows = graphical_model([logit(table, bound)], [np.ones(table.shape, bool)], BINARY["P"], variance=4.0)
    found = variational_em(rows, learn=("mean", "covariance"), num_steps=600, tol=-1.0, num_expectation_steps=6)
    assert_rises(found.objective_trace)
    z = np.asarray(found.rows.mean) + sobol_normal(5, 17) @ np.linalg.cholesky(found.rows.covariance).T
    log_one, log_zero = -np.logaddexp(0.0, -z), -np.logaddexp(0.0, z)
    model = np.exp(table @ log_one.T + (1 - table) @ log_zero.T).mean(axis=1)
    truth = np.array(BINARY["P"])
    return np.asarray(found.rows.covariance), float(np.sum(truth * np.log2(truth / model)))


def check_five_columns(bound):
    covariance, divergence = fit_five_columns(bound)
    expected = BINARY["fits"][bound]
    # The reference creeps by about 1e-3 per iteration in the accurate bounds.
    np.testing.assert_allclose(covariance, expected["Sigma"], atol=1e-3)
    np.testing.assert_allclose(divergence, expected["kl_bits"], atol=1e-5)
    return divergence


@pytest.mark.thorough
def test_five_binary_columns_with_the_bound_of_jaakkola():
    assert check_five_columns("J") == pytest.approx(0.1114, abs=1e-4)


@pytest.mark.slow
def test_five_binary_columns_with_all_bounds():
    found = {bound: check_five_columns(bound) for bound in BINARY["fits"]}
    print({bound: round(divergence, 4) for bound, divergence in found.items()})
    # Few quadratic pieces do what more linear ones do.
    assert found["B"] > found["J"] > found["L3"] > found["L4"] > found["Q3"] > found["L5"] > found["exact"]
    # What remains with any number of pieces is the price of the Gaussian.
    for bound in ("L10", "Q4", "Q5", "Q10"):
        assert abs(found[bound] - found["exact"]) < 5e-4


# --- graphical model of two columns with four categories (Fig 5.3 to 5.5), infinite data


def stick_family(labels, num_sticks, bound="exact"):
    """Columns of categories as binary columns: the family, and which of its cells are observed."""
    ones, observed = (np.asarray(part) for part in stick_breaking_labels(jnp.asarray(labels), num_sticks))
    size = labels.shape[1] * num_sticks
    return logit(ones.reshape(-1, size), bound), observed.reshape(-1, size)


def stick_log_probabilities(eta):
    """Of all categories, from predictors on the last axis."""
    stay = np.cumsum(-np.logaddexp(0.0, eta), axis=-1)
    breaks = eta + stay
    return np.concatenate([breaks, stay[..., -1:]], axis=-1)


def pinned_log_softmax(eta):
    return log_softmax(np.pad(eta, [(0, 0)] * (eta.ndim - 1) + [(1, 0)]), axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["bohning", "log", "stick"])
def test_two_columns_of_four_categories(bound):
    truth = np.array(CATEGORICAL["P"])
    labels = np.array(list(product(range(4), repeat=2)))
    if bound == "stick":
        family, observed = stick_family(labels, 3)
        probabilities = stick_log_probabilities
    else:
        family = SoftmaxPotential(jnp.asarray(labels), 4, pinned=0, bound=bound)
        observed, probabilities = np.ones(labels.shape, bool), pinned_log_softmax
    rows = graphical_model([family], [observed], truth.ravel())
    found = variational_em(rows, learn=("mean", "covariance"), num_steps=400, tol=-1.0, num_expectation_steps=6)
    assert_rises(found.objective_trace)
    z = np.asarray(found.rows.mean) + sobol_normal(6, 17) @ np.linalg.cholesky(found.rows.covariance).T
    first, second = (np.exp(probabilities(part)) for part in (z[:, :3], z[:, 3:]))
    divergence = float(np.sum(truth * np.log(truth / (first.T @ second / len(z)))))
    expected = CATEGORICAL["fits"]["B" if bound == "bohning" else bound]["kl_nats"]
    print(f"{bound}: {divergence:.4f} nats, reference {expected:.4f}")
    if bound == "stick":
        assert divergence < 0.02
    else:
        assert divergence == pytest.approx(expected, abs=0.005)


# --- the display of digits (Fig 4.10): seven noisy segments and seventeen coins

SEGMENTS = np.array(
    [[int(x) for x in row]
     for row in "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011".split()]
)  # fmt: skip


def digits(rng, num_rows):
    segments = SEGMENTS[rng.integers(10, size=num_rows)]
    flipped = segments ^ (rng.random(segments.shape) < 0.1)
    return np.concatenate([flipped, rng.integers(2, size=(num_rows, 17))], axis=1)


def one_hidden_cell(rng, shape):
    hidden = np.zeros(shape, bool)
    hidden[np.arange(shape[0]), rng.integers(shape[1], size=shape[0])] = True
    return hidden


def hidden_bits(fitted, table, hidden, bound):
    """Mean cross-entropy in bits of hidden binary cells under parameters that were fitted to other rows."""
    test = fitted._replace(
        potentials=(logit(table, bound),), observed=(jnp.asarray(~hidden),), weights=jnp.ones(len(table))
    )
    posteriors = expectation_step(test, initial_posteriors(test), num_steps=100)
    values = np.asarray(predictive_log_density(test, posteriors)[0])
    return -values[hidden].mean() / np.log(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_display_of_digits(seed):
    rng = np.random.default_rng(seed)
    table = digits(rng, 2000)
    train, test = table[:1600], table[1600:]
    hidden = one_hidden_cell(rng, test.shape)
    bits, variances = {}, {}
    for bound in ("B", "J", "Q20"):
        rows = graphical_model([logit(train, bound)], [np.ones(train.shape, bool)], np.ones(len(train)), variance=2.0)
        found = variational_em(rows, learn=("mean", "covariance"), num_steps=60, tol=-1.0, num_expectation_steps=5)
        assert_rises(found.objective_trace)
        bits[bound] = hidden_bits(found.rows, test, hidden, bound)
        variances[bound] = np.diag(found.rows.covariance)[:7]
    print(seed, bits, {name: (value.min().round(2), value.max().round(2)) for name, value in variances.items()})
    assert bits["Q20"] < bits["J"] < bits["B"]
    assert all(0.86 < value < 0.96 for value in bits.values())
    # Coarse bounds shrink the covariance.
    assert np.all(variances["B"] < variances["J"]) and np.all(variances["J"] < variances["Q20"])


# --- ends of games of tic-tac-toe (Fig 5.7)

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def ends_of_games():
    """All boards at which a game can end: nine cells (0 empty, 1 first player, 2 second), and whether the first won."""
    boards = {}

    def wins(board, player):
        return any(all(board[i] == player for i in line) for line in LINES)

    def play(board, player):
        for cell in [i for i in range(9) if board[i] == 0]:
            after = (*board[:cell], player, *board[cell + 1 :])
            if wins(after, player) or 0 not in after:
                boards[after] = int(wins(after, 1))
            else:
                play(after, 3 - player)

    play((0,) * 9, 1)
    return np.array([(*board, won) for board, won in sorted(boards.items())])


@pytest.mark.slow
def test_tic_tac_toe():
    table = ends_of_games()
    assert table.shape == (958, 10) and table[:, 9].sum() == 626
    rng = np.random.default_rng(0)
    table = table[rng.permutation(958)]
    hidden = rng.random((958, 10)) < 0.1
    hidden[:766] = False
    bits = {}
    for bound in ("stick", "log"):

        def families(rows, hidden, bound=bound):
            cells, won = table[rows, :9], table[rows, 9:]
            seen = ~hidden[rows]
            if bound == "log":
                potentials = (SoftmaxPotential(jnp.asarray(cells), 3, pinned=0, bound="log"),
                              SoftmaxPotential(jnp.asarray(won), 2, pinned=0, bound="log"))  # fmt: skip
                return potentials, (seen[:, :9], seen[:, 9:])
            family, observed = stick_family(cells, 2, "Q20")
            return (family, logit(won, "Q20")), (observed & np.repeat(seen[:, :9], 2, axis=1), seen[:, 9:])

        train, test = slice(0, 766), slice(766, 958)
        rows = graphical_model(*families(train, hidden), np.ones(766))
        found = variational_em(rows, learn=("mean", "covariance"), num_steps=100, tol=1e-5, num_expectation_steps=5)
        assert_rises(found.objective_trace)
        potentials, observed = families(test, hidden)
        rows = graphical_model(potentials, observed, np.ones(192))
        rows = rows._replace(mean=found.rows.mean, covariance=found.rows.covariance)
        posteriors = expectation_step(rows, initial_posteriors(rows), num_steps=100)
        log_probability = pinned_log_softmax if bound == "log" else stick_log_probabilities
        normal = sobol_normal(19, 12)
        total = []
        for n, seen in enumerate(~hidden[test]):
            z = np.asarray(posteriors.mean[n]) + normal @ np.linalg.cholesky(posteriors.covariance[n]).T
            for d in np.flatnonzero(~seen):
                eta = z[:, 2 * d : 2 * d + 2] if d < 9 else z[:, 18:]
                # The label one is the first stick, and the second category of the pinned softmax.
                label = table[766 + n, d] if d < 9 or bound == "log" else 1 - table[766 + n, d]
                total.append(-np.log2(np.exp(log_probability(eta)[:, label]).mean()))
        bits[bound] = np.mean(total)
    print(bits)
    assert bits["stick"] < bits["log"]
    assert 1.2 < bits["stick"] and bits["log"] < 1.6


# --- votes in the House of Representatives (Fig 4.6)


def read_votes():
    try:
        path = data_path("categorical", "house-votes-84.csv.gz")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with gzip.open(path, "rt") as file:
        cells = np.array([line.rstrip("\n").split(",") for line in file][1:])
    return np.concatenate([cells[:, :1] == "republican", cells[:, 1:] == "y"], axis=1).astype(int), cells != ""


@pytest.mark.slow
def test_votes():
    """Hidden votes, against columns on their own and against factors and loadings at the mode."""
    table, is_known = read_votes()
    kept = [0, 1, *range(3, 10), *range(12, 17)]  # without the three issues with most missing votes
    table = table[np.all(is_known[:, kept], axis=1)][:, kept]
    assert table.shape == (258, 14)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        order = rng.permutation(258)
        train = table[order[:206]]
        # Every vote of a test row is hidden in turn.
        test, hidden = np.repeat(table[order[206:]], 14, axis=0), np.tile(np.eye(14, dtype=bool), (52, 1))
        bits = {}
        for bound in ("B", "J", "Q20"):
            found = variational_em(binary_factors(train, bound, 3), learn=("loadings", "intercept"), num_steps=100)
            assert_rises(found.objective_trace)
            bits[bound] = hidden_bits(found.rows, test, hidden, bound)
        share = (train.sum(axis=0) + 1.0) / (len(train) + 2.0)
        bits["columns"] = -np.mean(np.log2(np.where(test, share, 1.0 - share)[hidden]))
        for scale in (1.0, 10.0):
            bits[f"mode, scale {scale}"] = bits_at_mode(train, test, hidden, scale)
        print(seed, {name: round(float(value), 3) for name, value in bits.items()})
        assert bits["Q20"] < bits["J"] < bits["B"] < bits["columns"]
        # The weak prior stands for none, without which loadings of separated columns have no finite maximum.
        assert bits["B"] < bits["mode, scale 10.0"]
        assert bits["Q20"] < bits["mode, scale 1.0"]


def bits_at_mode(train, test, hidden, loading_scale):
    """Factors, loadings and intercepts at the maximum of their joint density; then the factors of new rows."""
    found = variational_em(
        binary_factors(train, "exact", 3),
        learn=("loadings", "intercept"),
        method="map",
        loading_scale=loading_scale,
        num_steps=1000,
    )
    assert_rises(found.objective_trace)
    at = found.rows._replace(
        potentials=(logit(test, "exact"),), observed=(jnp.asarray(~hidden),), weights=jnp.ones(len(test))
    )
    values = np.asarray(predictive_log_density(at, expectation_step(at, initial_modes(at), num_steps=100))[0])
    return -values[hidden].mean() / np.log(2.0)


# --- many rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_hundred_thousand_rows_with_missing_cells(dtype):
    rng = np.random.default_rng(0)
    loadings, intercept = 1.5 * rng.normal(size=(50, 3)), rng.normal(size=50)
    eta = rng.normal(size=(100_000, 3)) @ loadings.T + intercept
    table = rng.random(eta.shape) < 1.0 / (1.0 + np.exp(-eta))
    observed = rng.random(eta.shape) > 0.2
    rows = binary_factors(table, "J", 3, observed)
    rows = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, rows)
    found = variational_em(rows, learn=("loadings", "intercept"), num_steps=25, num_expectation_steps=3)
    slack = 1e-9 if dtype == np.float64 else 2e-6
    assert np.all(np.diff(found.objective_trace) > -slack * np.abs(found.objective_trace[1:]))
    held = ~observed
    values = np.asarray(predictive_log_density(found.rows, found.posteriors)[0])[held]
    share = np.sum(table * observed, axis=0) / observed.sum(axis=0)
    columns = np.where(table, np.log(share), np.log1p(-share))[held]
    truth = np.where(table, -np.logaddexp(0.0, -eta), -np.logaddexp(0.0, eta))[held]
    mode = variational_em(
        rows._replace(potentials=(LogitPotential(jnp.asarray(table)),)),
        learn=("loadings", "intercept"),
        method="map",
        loading_scale=10.0,
        num_steps=25,
        num_expectation_steps=3,
    )
    at_mode = np.asarray(predictive_log_density(mode.rows, mode.posteriors)[0])[held]
    named = {"bound": values, "columns": columns, "mode": at_mode, "known factors": truth}
    print({name: round(float(-part.mean() / np.log(2)), 4) for name, part in named.items()})
    assert columns.mean() + 0.1 < values.mean() < truth.mean()
    assert at_mode.mean() < values.mean()
