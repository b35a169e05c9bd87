"""Pairs of symbols of which some are censored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from .categories import checked_key

_MOST_PAIRS = 10_000_000


class PairTable(constraints.Constraint):
    """Rows of a first index, a second index and a count."""

    is_discrete = True
    event_dim = 2

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.sizes = num_rows, num_columns

    def __call__(self, value: ArrayLike) -> Array:
        value = jnp.asarray(value)
        if value.ndim < 2 or value.shape[-1] != 3:
            return jnp.zeros(value.shape[:-2], bool)
        below = value[..., :2] < jnp.asarray(self.sizes)
        is_whole = (value >= 0) & (value == jnp.floor(value))
        return jnp.all(is_whole, axis=(-2, -1)) & jnp.all(below, axis=(-2, -1))

    def __repr__(self) -> str:
        rows, columns = self.sizes
        return (
            "tables with a row (i, j, count) for each pair that was seen: whole numbers, of shape (n, 3), with i from "
            f"0 to {rows - 1} and j from 0 to {columns - 1}"
        )

    def feasible_like(self, prototype: ArrayLike) -> Array:
        return jnp.zeros_like(prototype)

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, Any]]]:
        return (), ((), {"sizes": self.sizes})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PairTable) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)


class CensoredPairs(Distribution):
    r"""Pairs of a row and a column that are selected independently, and then emitted or censored.

    A row :math:`i` is selected with probability :math:`\pi_i`, a column :math:`j` with :math:`\psi_j`. With
    probability :math:`\sigma(a_{ij})`, where :math:`a_{ij} = u_i^\top v_j + b_i + g_j`, the pair is emitted, else it is
    censored: then nothing is known of it but that it was there. For counts :math:`c_{ij}` of emitted pairs in a given
    order and :math:`D'` censored ones

    .. math::
        \log p = \sum_{ij} c_{ij} \big(\log \pi_i + \log \psi_j + \log \sigma(a_{ij})\big)
        + D' \log \sum_{ij} \pi_i \psi_j \big(1 - \sigma(a_{ij})\big).

    The density visits all pairs of a row and a column. Under :class:`~numpyro_ext.infer.BilinearVG` the cost is that of
    the emitted ones.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import CensoredPairs
        >>> half, zero = jnp.full(2, 0.5), jnp.zeros(2)
        >>> pairs = CensoredPairs(jnp.eye(2), jnp.eye(2), zero, zero, half, half, num_censored=3)
        >>> print(f"{pairs.log_prob(jnp.array([[0, 0, 2], [1, 0, 1]])):.4f}")
        -8.3462

    **References**

    1. Paquet, U., Koenigstein, N. and Winther, O., Scalable Bayesian Modelling of Paired Symbols.

    :param u: vectors of the rows, shape ``(num_rows, rank)``.
    :param v: vectors of the columns, shape ``(num_columns, rank)``.
    :param b: biases of the rows, shape ``(num_rows,)``.
    :param g: biases of the columns, shape ``(num_columns,)``.
    :param pi: probabilities of the rows, shape ``(num_rows,)``.
    :param psi: probabilities of the columns, shape ``(num_columns,)``.
    :param num_censored: :math:`D'`, positive. It need not be a whole number.
    :param int num_pairs: emitted pairs in a draw.
    :raises ValueError: if shapes do not fit. :meth:`log_prob` and :meth:`sample` also raise it above 10,000,000 pairs
        of a row and a column.
    """

    arg_constraints = {
        "u": constraints.independent(constraints.real, 2),
        "v": constraints.independent(constraints.real, 2),
        "b": constraints.real_vector,
        "g": constraints.real_vector,
        "pi": constraints.simplex,
        "psi": constraints.simplex,
        "num_censored": constraints.positive,
    }
    pytree_aux_fields = ("num_pairs",)

    def __init__(
        self,
        u: ArrayLike,
        v: ArrayLike,
        b: ArrayLike,
        g: ArrayLike,
        pi: ArrayLike,
        psi: ArrayLike,
        num_censored: ArrayLike,
        *,
        num_pairs: int = 1,
        validate_args: bool | None = None,
    ) -> None:
        self.u, self.v, self.b, self.g, self.pi, self.psi = (jnp.asarray(x) for x in (u, v, b, g, pi, psi))
        self.num_censored, self.num_pairs = num_censored, num_pairs
        shapes = {n: jnp.shape(getattr(self, n)) for n in ("u", "v", "b", "g", "pi", "psi", "num_censored")}
        if len(shapes["u"]) != 2 or len(shapes["v"]) != 2 or shapes["u"][1] != shapes["v"][1]:
            raise ValueError(
                "CensoredPairs needs vectors u of shape (num_rows, rank) and v of (num_columns, rank); got "
                f"{shapes['u']} and {shapes['v']}."
            )
        (rows, rank), columns = shapes["u"], shapes["v"][0]
        wanted = dict(zip(shapes, ((rows, rank), (columns, rank), *((rows,), (columns,)) * 2, ()), strict=True))
        for name, shape in shapes.items():
            if shape != wanted[name]:
                raise ValueError(f"CensoredPairs needs {name} of shape {wanted[name]} for these vectors; got {shape}.")
        super().__init__(batch_shape=(), event_shape=(num_pairs, 3), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self) -> constraints.Constraint:
        return PairTable(self.b.shape[0], self.g.shape[0])

    def logits(self, rows: Array, columns: Array) -> Array:
        """Logits of the probabilities that these pairs are emitted, once they are selected."""
        return jnp.sum(self.u[rows] * self.v[columns], axis=-1) + self.b[rows] + self.g[columns]

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log probability of a table with rows ``(i, j, count)``, shape ``(..., n, 3)``.

        It is ``nan`` for a value that is none unless arguments are validated.
        """
        value = jnp.asarray(value)
        rows, columns = value[..., 0].astype(int), value[..., 1].astype(int)
        log_emitted = jnp.log(self.pi)[rows] + jnp.log(self.psi)[columns]
        log_emitted += jax.nn.log_sigmoid(self.logits(rows, columns))
        log_censored = jax.nn.logsumexp(self._log_selected() - jax.nn.softplus(self._all_logits()))
        value_of_table = jnp.sum(value[..., 2] * log_emitted, axis=-1) + self.num_censored * log_censored
        return jnp.where(self.support(value), value_of_table, jnp.nan)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Emitted pairs one by one, as tables of shape ``sample_shape + (num_pairs, 3)`` with counts of one."""
        size = (*sample_shape, self.num_pairs)
        log_emitted = self._log_selected() + jax.nn.log_sigmoid(self._all_logits())
        chosen = random.categorical(checked_key(self, key), log_emitted.reshape(-1), shape=size)
        rows, columns = jnp.divmod(chosen, self.g.shape[0])
        return jnp.stack([rows, columns, jnp.ones_like(rows)], axis=-1)

    def _log_selected(self) -> Array:
        return jnp.log(self.pi)[:, None] + jnp.log(self.psi)

    def _all_logits(self) -> Array:
        num_rows, num_columns = self.b.shape[0], self.g.shape[0]
        if num_rows * num_columns > _MOST_PAIRS:
            raise ValueError(
                f"the density of CensoredPairs visits all {num_rows} x {num_columns} = {num_rows * num_columns} pairs, "
                f"more than {_MOST_PAIRS}: fit the model by BilinearVG(model, bound='jaakkola'), whose cost is that of "
                "the emitted ones."
            )
        return self.u @ self.v.T + self.b[:, None] + self.g
