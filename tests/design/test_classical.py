"""Classical designs: against sets of rows one by one, inverses, and designs known by theory."""

import itertools

import numpy as np
import pytest

from numpyro_ext.design import design_criterion, design_scores, optimal_design

CRITERIA = "DAEG"


def covariance_after(rows, noise, chosen, prior=None):
    at = list(chosen)
    precision = rows[at].T @ (rows[at] / noise[at][:, None])
    return np.linalg.inv(precision if prior is None else precision + np.linalg.inv(prior))


def problem(seed):
    rng = np.random.default_rng(seed)
    rows, noise = rng.normal(size=(9, 3)), rng.uniform(0.3, 2.0, 9)
    root = rng.normal(size=(3, 3))
    return rows, noise, root @ root.T + 0.1 * np.eye(3), rng.normal(size=(5, 3))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scores_are_what_one_measurement_changes(criterion):
    rows, noise, prior, targets = problem(0)
    found = design_scores(rows, prior, noise, criterion=criterion, targets=targets if criterion == "G" else None)
    at = targets if criterion == "G" else None
    before = design_criterion(prior, criterion, at)
    after = [design_criterion(covariance_after(rows, noise, [k], prior), criterion, at) for k in range(9)]
    np.testing.assert_allclose(found, before - np.array(after), atol=1e-10)


@pytest.mark.parametrize("has_prior", [True, False])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_exchanges_find_the_best_of_all_sets(criterion, has_prior):
    for seed in range(4):
        rows, noise, prior, targets = problem(seed)
        at, P = targets if criterion == "G" else None, prior if has_prior else None
        values = {
            some: design_criterion(covariance_after(rows, noise, some, P), criterion, at)
            for some in itertools.combinations(range(9), 4)
        }
        best = min(values, key=values.get)
        found = optimal_design(rows, 4, P, noise, criterion=criterion, targets=at, num_starts=10)
        assert tuple(found.rows) == best
        np.testing.assert_allclose(found.value, values[best], rtol=1e-9)
        np.testing.assert_allclose(found.covariance, covariance_after(rows, noise, best, P), rtol=1e-8)
        # from the greedy choice alone, one that no exchange makes better
        local = set(optimal_design(rows, 4, P, noise, criterion=criterion, targets=at).rows)
        neighbours = [s for s in values if len(local & set(s)) == 3]
        assert values[tuple(sorted(local))] <= min(values[s] for s in neighbours) + 1e-12


def test_polynomials_of_theory():
    x = np.linspace(-1.0, 1.0, 41)
    parabola = np.stack([x**0, x, x**2], axis=1)
    design = optimal_design(parabola, 6, repeat=True)
    np.testing.assert_allclose(np.sort(x[design.rows]), [-1, -1, 0, 0, 1, 1], atol=1e-12)
    # Kiefer and Wolfowitz: such a design has p / size for its largest variance of a prediction, and no other has less.
    np.testing.assert_allclose(design_criterion(design.covariance, "G", parabola), 3 / 6, rtol=1e-9)
    by_g = optimal_design(parabola, 6, criterion="G", repeat=True)
    np.testing.assert_allclose(by_g.value, 3 / 6, rtol=1e-9)
    line = optimal_design(parabola[:, :2], 4, criterion="A", repeat=True)
    np.testing.assert_allclose(np.sort(x[line.rows]), [-1, -1, 1, 1], atol=1e-12)
    assert len(set(optimal_design(parabola, 6).rows)) == 6


def test_what_people_type():
    rows = [[1, 0], [0, 1], [1, 1]]
    np.testing.assert_allclose(design_scores(rows, np.eye(2, dtype=np.float32)), np.log([2.0, 2.0, 3.0]))
    np.testing.assert_allclose(design_scores(rows, [[1, 0], [0, 0]]), np.log([2.0, 1.0, 2.0]))  # one is known
    same = optimal_design([[1, 2]] * 5, 2, [[1, 0], [0, 1]])
    assert len(same.rows) == 2
    for call, message in (
        (lambda: design_scores([1, 0], np.eye(2)), r"rows must have the shape \(n, p\)"),
        (lambda: design_scores(rows, np.eye(3)), "rows have 2 columns"),
        (lambda: design_scores(rows, [[1, 2], [0, 1]]), "must be symmetric"),
        (lambda: design_scores(rows, [[1, 2], [2, 1]]), "no negative eigenvalue; the least is -1"),
        (lambda: design_criterion(-np.eye(2)), "no negative eigenvalue; the least is -1"),
        (lambda: design_scores(rows, np.eye(2), -1), "noise_variance must be positive"),
        (lambda: design_scores([[np.nan, 1]], np.eye(2)), "rows must be finite"),
        (lambda: design_scores(rows, np.eye(2), criterion="V"), "criterion must be one of"),
        (lambda: design_criterion(np.eye(2), "G"), "give the targets"),
        (lambda: optimal_design(rows, 4), "4 candidates are asked for, and there are 3"),
        (lambda: optimal_design(rows, 1), "1 rows leave some of the 2 parameters undetermined"),
        (lambda: optimal_design([[1, 2]] * 5, 2), "their matrix has a lower rank"),
        (lambda: optimal_design(rows, 2, [[1, 0], [0, 0]]), "must be positive definite"),
        (lambda: optimal_design(rows, 0), "size must be a whole number"),
        (lambda: optimal_design(rows, 2, num_starts=0), "num_starts must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
