"""Rows that are masked have no say: what is asked of a fit is the same without them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.design.outcomes.pool import _Seen, rows_of
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.potentials.outcomes import with_outcome
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.latent_gaussian import AffineMap

from ..structure.grammar import random_model


@jax.jit
def _answers(form, everything):
    state, info = ep.solve(form, ep.init(form), num_steps=1000, tol=1e-14)
    return info.converged, info.objective, *ep.posterior(form, state).mean_and_variance(everything)


def _fits(seed):
    """Of a random model of which every third observation is masked: evidence, means and variances with these rows, with
    other values in them and without them; none where the pools of a design could not hold it."""
    try:
        reading = read_latent_gaussian(random_model(seed), check=False)
    except ModelStructureError:
        return None
    form = reading.form(reading.initial_hyper())
    known = [potential.outcomes() for potential in form.potentials]
    if not isinstance(form.design, DenseDesign | SparseRows) or None in known:
        return None
    observed = tuple(mask & (np.arange(len(mask)) % 3 != 1) for mask in form.observed)
    places = [np.flatnonzero(np.asarray(mask)) for mask in observed]
    values = [
        np.broadcast_to(np.asarray(getattr(potential, outcomes.field)), mask.shape)
        for potential, outcomes, mask in zip(form.potentials, known, observed, strict=True)
    ]
    others = [np.where(mask, value, value[at[0]]) for mask, value, at in zip(observed, values, places, strict=True)]
    masked = form._replace(observed=observed)
    potentials = tuple(with_outcome(*pair) for pair in zip(form.potentials, others, strict=True))
    seen = _Seen(
        tuple(map(jnp.asarray, places)),
        tuple(jnp.asarray(value[at]) for value, at in zip(values, places, strict=True)),
        tuple(jnp.ones(len(at), bool) for at in places),
    )
    everything = AffineMap(form.design, form.offset)
    alone = rows_of(form, seen)
    return [_answers(one, everything) for one in (masked, masked._replace(potentials=potentials), alone)]


def _compare_all(seeds):
    compared = 0
    for seed in seeds:
        fits = _fits(seed)
        if fits is None or not all(converged for converged, *_ in fits):
            continue
        compared += 1
        (_, *masked), *others = fits
        for _, *other in others:
            for a, b in zip(masked, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=f"{seed}")
    return compared


def test_a_masked_row_changes_nothing():
    assert _compare_all([14]) == 1


@pytest.mark.thorough
def test_masked_rows_change_nothing():
    assert _compare_all([9, 25, 31]) == 3


@pytest.mark.slow
def test_masked_rows_of_random_models_change_nothing():
    # The others have factors whose outcomes are not known, scaled ones, and the product of two fields.
    assert _compare_all(range(40)) >= 16
