"""Factorisation of counts: the reference file, descent, and people who were not there."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.sequences import EventSequences, MatrixFactorisation, matrix_factorisation_objective
from numpyro_ext.sequences.events import hold_out

FILE = json.loads((Path(__file__).parents[1] / "reference" / "ko-crnn.json").read_text())
REFERENCE = FILE["mf_baseline"]


def reference_split():
    parts = [[one[part] for one in FILE["sequences"]] for part in (slice(-3), slice(-3, None))]
    made = [EventSequences(np.concatenate(p), [len(one) for one in p], np.arange(6), np.arange(3)) for p in parts]
    return hold_out(*made)


def test_reference_values():
    M, V, U = (np.array(REFERENCE[name]) for name in ("M", "V", "Ufac"))
    compiled = jax.jit(jax.value_and_grad(matrix_factorisation_objective, argnums=(1, 2)))
    value, (slope_v, slope_u) = compiled(M, V, U, REFERENCE["lam"])
    np.testing.assert_allclose(value, REFERENCE["objective"], rtol=1e-12)
    np.testing.assert_allclose(slope_v, REFERENCE["grad_V"], atol=1e-12)
    np.testing.assert_allclose(slope_u, REFERENCE["grad_U"], atol=1e-12)
    split = reference_split()
    model = MatrixFactorisation(2).fit(split.train)
    model.items, model.users = V.T, U.T
    np.testing.assert_allclose(-split.mean_over_users(model.log_predictive(split)), REFERENCE["metric"], rtol=1e-12)


def test_sweeps_descend_to_a_point_without_slope():
    split = reference_split()
    model = MatrixFactorisation(2, 0.05, max_sweeps=3000).fit(split.train)
    assert (np.diff(model.objective) < 1e-12).all() and len(model.objective) < 3000
    M, V, U = jnp.array(REFERENCE["M"]), model.items.T, model.users.T
    np.testing.assert_allclose(model.objective[-1], matrix_factorisation_objective(M, V, U, 0.05), rtol=1e-12)
    # vectors of the items are at their minimum given those of the users, and one sweep more changes little
    slopes = jax.grad(matrix_factorisation_objective, argnums=(1, 2))(M, V, U, 0.05)
    np.testing.assert_allclose(slopes[0], 0.0, atol=1e-12)
    np.testing.assert_allclose(slopes[1], 0.0, atol=0.02)
    assert model.objective[-1] < REFERENCE["objective"]
    # an item that nobody had is as good as none, and so is someone without events
    assert (model.items[3] == 0).all()
    np.testing.assert_allclose(model.next_log_probabilities([]), -np.log(6))


def test_someone_new_has_the_vector_of_her_history():
    split = reference_split()
    model = MatrixFactorisation(2).fit(split.train)
    known = model.next_log_probabilities([], user=1)
    np.testing.assert_allclose(known[split.test[1]], model.log_predictive(split)[3:6], rtol=1e-12)
    np.testing.assert_allclose(np.exp(known).sum(), 1.0, rtol=1e-12)

    # least squares with a row for each item that she had, and the penalty as further rows
    rows = np.vstack([model.items[[0, 1, 4]], np.sqrt(3 * 0.05) * np.eye(2)])
    vector = np.linalg.lstsq(rows, np.append(np.log([2, 3, 2]), [0, 0]), rcond=None)[0]
    logits = model.items @ vector
    found = np.exp(model.next_log_probabilities([1, 1, 4, 0]))
    np.testing.assert_allclose(found, np.exp(logits) / np.exp(logits).sum(), rtol=1e-10)
    for user in (-1, 3, 1.0, True, "ann"):
        with pytest.raises(ValueError, match=r"the integers 0 to 2; got .* its place in EventSequences.user_labels"):
            model.next_log_probabilities([], user=user)
    with pytest.raises(ValueError, match="width is from 1"):
        MatrixFactorisation(0).fit(split.train)
