"""A sweep of expectation propagation over one factor after the other, as Minka (2001) has it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .....linalg.gaussian.conditioning import LinearGaussian
from .....linalg.gaussian.marginals import Marginals
from .....structure.latent_gaussian import LatentGaussian
from .tilting import propose, tilt, with_broad_cavities


def sweep_sequentially(
    form: LatentGaussian, prior: LinearGaussian, precision: Array, shift: Array, size: Array, power: ArrayLike
) -> tuple[Array, Array, Array]:
    """Visit the rows of every block in turn, all blocks side by side, with rank-one updates of the joint.

    :param LatentGaussian form: the model.
    :param LinearGaussian prior: its prior, in a space that has the joint covariance.
    :param precision: of the sites, shape ``(num_rows,)``.
    :param shift: precision times mean of the sites.
    :param size: fraction of the way to the proposed sites.
    :param power: fraction of a factor that is replaced at a time.
    :return: precisions and shifts after the sweep, and which factors kept theirs.
    """
    joint = prior.condition(precision, shift - precision * form.offset)
    nowhere = jnp.zeros_like(precision)

    def visit(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        mean, covariance, precision, shift, skipped = carry
        index, row = prior.rows[:, i], prior.sequential_row(i)

        def at_row(values: Array) -> Array:
            return values.at[index].get(mode="fill", fill_value=0)

        def to_rows(values: Array) -> Array:
            return nowhere.at[index].set(values, mode="drop")

        direction = jnp.einsum("bij,bj->bi", covariance, row)
        m, v = jnp.sum(row * mean, -1), jnp.sum(row * direction, -1)
        # Rows that are not visited get the variance zero, which keeps their sites.
        here = Marginals(to_rows(m), to_rows(v), to_rows(1.0 - at_row(precision) * v), jnp.zeros((), v.dtype))
        tilted = tilt(form, with_broad_cavities(form, here), precision, shift, power)
        new_precision, new_shift, is_kept = propose(form, precision, shift, tilted, power)
        d_precision = size * at_row(new_precision - precision)
        d_shift = size * at_row(new_shift - shift)
        denominator = 1.0 + d_precision * v
        is_kept = at_row(is_kept) | ~(denominator > 0)
        d_precision, d_shift = jnp.where(is_kept, 0.0, d_precision), jnp.where(is_kept, 0.0, d_shift)
        denominator = jnp.where(is_kept, 1.0, denominator)
        local_shift = d_shift - d_precision * at_row(form.offset)
        mean = mean + direction * ((local_shift - d_precision * m) / denominator)[:, None]
        weight = (d_precision / denominator)[:, None, None]
        covariance = covariance - weight * direction[:, :, None] * direction[:, None, :]
        precision = precision.at[index].add(d_precision, mode="drop")
        shift = shift.at[index].add(d_shift, mode="drop")
        return mean, covariance, precision, shift, skipped.at[index].set(is_kept, mode="drop")

    carry = (*joint.sequential_moments(), precision, shift, jnp.zeros(nowhere.shape, bool))
    *_, precision, shift, skipped = lax.fori_loop(0, prior.rows.shape[1], visit, carry)
    return precision, shift, skipped
