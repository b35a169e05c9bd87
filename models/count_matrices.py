"""Bilinear models of counts: factorised matrices, fields in space and time, neurons with low-rank filters."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from .indices import checked_indices

__all__ = ["low_rank_count_field", "poisson_factorization", "receptive_field_counts"]


def poisson_factorization(
    rows: ArrayLike,
    cols: ArrayLike,
    counts: ArrayLike | None = None,
    *,
    num_rows: int,
    num_cols: int,
    rank: int,
    log_rate: ArrayLike = 0.0,
) -> None:
    r"""Poisson factorisation of a matrix of counts with biases, given the cells that were seen.

    .. math::
        y_c \sim \text{Poisson}\big(\exp(\text{log\_rate}_c + w_{r(c)}^\top z_{s(c)} + b_{r(c)} + d_{s(c)})\big)

    Sites: ``row_scale``, ``row_bias_scale``, ``col_bias_scale`` (half-normal), ``w`` of shape ``(num_rows, rank)``,
    ``z`` of shape ``(num_cols, rank)``, ``row_bias``, ``col_bias`` and ``counts``. Only the product of the scales of
    ``w`` and ``z`` is determined, so that of ``z`` is one. Cells that are not listed are missing, not zero.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import poisson_factorization
        >>> rows, cols = np.divmod(np.arange(12), 4)
        >>> predictive = Predictive(poisson_factorization, num_samples=5)
        >>> draws = predictive(random.key(0), rows, cols, num_rows=3, num_cols=4, rank=2)
        >>> print(draws["w"].shape, draws["z"].shape, draws["counts"].shape)
        (5, 3, 2) (5, 4, 2) (5, 12)

    :param rows: row of each cell, integers from 0, shape ``(n,)``.
    :param cols: column of each cell, integers from 0, shape ``(n,)``.
    :param counts: shape ``(n,)``; ``None`` samples them.
    :param int num_rows: number of rows, also of those without a cell.
    :param int num_cols: number of columns.
    :param int rank: number of components.
    :param log_rate: a known offset, such as the logarithm of the mean count or of exposures; shape ``()`` or ``(n,)``.
    :raises ValueError: if an index is out of range, or the shapes differ.
    """
    rows, cols = checked_indices(rows=(rows, num_rows), cols=(cols, num_cols))
    row_scale = numpyro.sample("row_scale", dist.HalfNormal(1.0))
    row_bias_scale = numpyro.sample("row_bias_scale", dist.HalfNormal(1.0))
    col_bias_scale = numpyro.sample("col_bias_scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, row_scale).expand([rank]).to_event(1))
        row_bias = numpyro.sample("row_bias", dist.Normal(0.0, row_bias_scale))
    with numpyro.plate("cols", num_cols):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        col_bias = numpyro.sample("col_bias", dist.Normal(0.0, col_bias_scale))
    eta = log_rate + (w[rows] * z[cols]).sum(-1) + row_bias[rows] + col_bias[cols]
    with numpyro.plate("cells", rows.shape[0]):
        numpyro.sample("counts", dist.Poisson(jnp.exp(eta)), obs=counts)


def low_rank_count_field(
    place: ArrayLike,
    time: ArrayLike,
    counts: ArrayLike | None = None,
    *,
    num_places: int,
    num_times: int,
    rank: int,
    length: float = 3.0,
    log_rate: ArrayLike = 0.0,
) -> None:
    r"""Counts at places and times, with few temporal patterns that are smooth and that places share.

    .. math::
        y_c \sim \text{Poisson}\big(\exp(\text{log\_rate}_c + \textstyle\sum_k w_{p(c), k}\, f_k(t(c)))\big),
        \qquad f_k \sim GP\big(0, e^{-(t - t')^2 / 2 \ell^2}\big)

    Sites: ``place_scale`` (half-normal), ``w`` of shape ``(num_places, rank)``, ``pattern`` of shape
    ``(rank, num_times)`` and ``counts``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import low_rank_count_field
        >>> place, time = np.divmod(np.arange(30), 10)
        >>> predictive = Predictive(low_rank_count_field, num_samples=5)
        >>> draws = predictive(random.key(0), place, time, num_places=3, num_times=10, rank=2)
        >>> print(draws["pattern"].shape, draws["counts"].shape)
        (5, 2, 10) (5, 30)

    :param place: place of each count, integers from 0, shape ``(n,)``.
    :param time: time of each count, integers from 0, shape ``(n,)``.
    :param counts: shape ``(n,)``; ``None`` samples them.
    :param int num_places: number of places.
    :param int num_times: number of times.
    :param int rank: number of temporal patterns.
    :param float length: length scale of the patterns, in steps of time.
    :param log_rate: a known offset, shape ``()`` or ``(n,)``.
    :raises ValueError: if an index is out of range, or the shapes differ.
    """
    place, time = checked_indices(place=(place, num_places), time=(time, num_times))
    place_scale = numpyro.sample("place_scale", dist.HalfNormal(1.0))
    steps = jnp.arange(num_times, dtype=jnp.result_type(float))
    # Smooth kernels are singular to rounding.
    kernel = jnp.exp(-0.5 * ((steps[:, None] - steps) / length) ** 2) + 1e-4 * jnp.eye(num_times)
    with numpyro.plate("places", num_places):
        w = numpyro.sample("w", dist.Normal(0.0, place_scale).expand([rank]).to_event(1))
    with numpyro.plate("patterns", rank):
        pattern = numpyro.sample("pattern", dist.MultivariateNormal(jnp.zeros(num_times), kernel))
    eta = log_rate + (w[place] * pattern.T[time]).sum(-1)
    with numpyro.plate("cells", place.shape[0]):
        numpyro.sample("counts", dist.Poisson(jnp.exp(eta)), obs=counts)


def receptive_field_counts(
    stimulus: ArrayLike, counts: ArrayLike | None = None, *, rank: int = 1, log_rate: ArrayLike = 0.0
) -> None:
    r"""Spike counts of a neuron whose receptive field is a low-rank matrix of filters in space times filters in time.

    .. math::
        y_t \sim \text{Poisson}\big(\exp(\text{log\_rate}_t + \textstyle\sum_k w_k^\top S_t z_k)\big)

    Sites: ``space_scale`` (half-normal), ``w`` of shape ``(rank, num_pixels)``, ``z`` of shape ``(rank, num_lags)``
    and ``counts``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import receptive_field_counts
        >>> stimulus = np.random.default_rng(0).normal(size=(20, 4, 3))
        >>> draws = Predictive(receptive_field_counts, num_samples=5)(random.key(0), stimulus, rank=2)
        >>> print(draws["w"].shape, draws["z"].shape, draws["counts"].shape)
        (5, 2, 4) (5, 2, 3) (5, 20)

    :param stimulus: what was shown before each count, shape ``(n, num_pixels, num_lags)``.
    :param counts: shape ``(n,)``; ``None`` samples them.
    :param int rank: number of pairs of filters.
    :param log_rate: a known offset, shape ``()`` or ``(n,)``.
    :raises ValueError: if the stimulus has no such shape.
    """
    stimulus = jnp.asarray(stimulus)
    if stimulus.ndim != 3:
        raise ValueError(f"stimulus must have the shape (counts, pixels, lags); got {stimulus.shape}.")
    num_counts, num_pixels, num_lags = stimulus.shape
    space_scale = numpyro.sample("space_scale", dist.HalfNormal(1.0))
    with numpyro.plate("filters", rank):
        w = numpyro.sample("w", dist.Normal(0.0, space_scale).expand([num_pixels]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([num_lags]).to_event(1))
    eta = log_rate + jnp.einsum("kp,npl,kl->n", w, stimulus, z)
    with numpyro.plate("cells", num_counts):
        numpyro.sample("counts", dist.Poisson(jnp.exp(eta)), obs=counts)
