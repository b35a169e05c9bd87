"""Second moments of derivatives over blocks and nodes, against the sum written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.gaussian.algorithms.nodes.column_information import _Blocks, _outcomes_apart, _products

NUM_BLOCKS, NUM_NODES, NUM_ITEMS = 11, 9, 4


def _tables(kind, rng):
    """Derivatives of log probabilities by intercepts, shape ``(K, Q, G, m)``."""
    eta = rng.normal(size=(NUM_NODES, NUM_ITEMS))
    if kind == "partial credit":

        def log_probabilities(shifts, x):
            return jax.nn.log_softmax(jnp.concatenate([jnp.zeros(1), x * jnp.arange(1, 3) + shifts]))

        found = jax.vmap(jax.vmap(lambda x: jax.jacfwd(log_probabilities)(jnp.zeros(2), x)))(eta)
        return jnp.moveaxis(found, 2, 0)
    guessing = 0.2 if kind == "3pl" else 0.0

    def binary(shift, x):
        correct = guessing + (1.0 - guessing) * jax.nn.sigmoid(x + shift)
        return jnp.log(jnp.stack([1.0 - correct, correct]))

    found = jax.vmap(jax.vmap(lambda x: jax.jacfwd(binary)(0.0, x)))(eta)
    return jnp.moveaxis(found, 2, 0)[..., None]


@pytest.mark.parametrize(
    ("kinds", "is_apart", "has_gaps"),
    [(["2pl", "partial credit"], True, False), (["2pl", "3pl"], False, False), (["2pl"], True, True)],
)
def test_second_moments_are_the_sum_over_blocks_and_nodes(kinds, is_apart, has_gaps):
    rng = np.random.default_rng(len(kinds) + has_gaps)
    tables = [_tables(kind, rng) for kind in kinds]
    labels = tuple(jnp.asarray(rng.integers(0, len(each), (NUM_BLOCKS, NUM_ITEMS))) for each in tables)
    counted = tuple(jnp.asarray(rng.random(each.shape) < 0.7) for each in labels) if has_gaps else None
    weights = rng.dirichlet(np.ones(NUM_NODES), NUM_BLOCKS)
    powers = np.column_stack([np.ones(NUM_NODES), rng.normal(size=(NUM_NODES, 2))])
    width = sum(each.shape[2] * each.shape[3] for each in tables)
    by_all = [jnp.asarray(rng.normal(size=(width, 3))) for _ in range(3)]
    blocks = _Blocks(jnp.asarray(weights), jnp.ones(NUM_BLOCKS), labels, counted, None, None)
    of_outcome, found_apart = _outcomes_apart(tables)
    assert bool(found_apart) is is_apart
    products, _ = _products(tables, by_all, jnp.asarray(powers), blocks, of_outcome, found_apart)
    scores = np.zeros((NUM_BLOCKS, NUM_NODES, width))
    for b in range(NUM_BLOCKS):
        start = 0
        for k, each in enumerate(tables):
            for g in range(NUM_ITEMS):
                own = np.asarray(each)[int(labels[k][b, g]), :, g]
                scores[b, :, start : start + own.shape[1]] = own if counted is None else own * counted[k][b, g]
                start += own.shape[1]
    expected = [
        np.einsum("bq,q,bqi,bqj->ij", weights, powers[:, i] * powers[:, j], scores, scores)
        for i in range(3)
        for j in range(i, 3)
    ]
    np.testing.assert_allclose(products, expected, atol=1e-12)
