"""Rankings of items by utilities and Gumbel noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from ..potentials.families.plackett_luce import PlackettLucePotential, ranking_places
from .categories import checked_key


class _Ranking(constraints.Constraint):
    """The first ``num_ranked`` entries name different items."""

    is_discrete = True
    event_dim = 1

    def __init__(self, num_items: int, num_ranked: ArrayLike) -> None:
        self.num_items, self.num_ranked = num_items, num_ranked

    def __call__(self, value: ArrayLike) -> Array:
        value = jnp.asarray(value)
        places = jnp.arange(value.shape[-1])
        counts = places < jnp.asarray(self.num_ranked)[..., None]
        is_item = (value >= 0) & (value < self.num_items) & (value == jnp.floor(value))
        same = (value[..., None] == value[..., None, :]) & counts[..., None] & counts[..., None, :]
        is_repeat = jnp.any(same & (places[:, None] != places), axis=(-2, -1))
        return jnp.all(is_item | ~counts, axis=-1) & ~is_repeat

    def __repr__(self) -> str:
        return (
            f"rankings: different ones of the items 0, ..., {self.num_items - 1}, best first, as many as num_ranked "
            "says. End a ranking that has ties before the first of them, or break ties at random; where ties are many, "
            "compare the items two by two (models.bradley_terry with ties=True)"
        )

    def feasible_like(self, prototype: ArrayLike) -> Array:
        shape = jnp.shape(prototype)
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.result_type(prototype)), shape)

    def tree_flatten(self) -> tuple[tuple[ArrayLike], tuple[tuple[str, ...], dict[str, int]]]:
        return (self.num_ranked,), (("num_ranked",), {"num_items": self.num_items})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Ranking):
            return False
        return self.num_items == other.num_items and bool(jnp.array_equal(self.num_ranked, other.num_ranked))

    __hash__ = None  # type: ignore[assignment]


class PlackettLuce(Distribution):
    r"""Rankings: the best item is drawn as from a softmax, then the best of the others, and so on.

    .. math::
        p(y \mid \eta) = \prod_{k = 1}^{n} \frac{e^{\eta_{y_k}}}{\sum_{j \notin \{y_1, \dots, y_{k-1}\}} e^{\eta_j}}

    This is the order of the utilities :math:`\eta` after independent Gumbel noise is added to them. A value holds
    indices of items, best first. Rankings may end early: the first ``num_ranked`` entries count, the others are padding
    (draws have ``-1`` there), and the items that they do not name are below those that they do. Rankings have no ties.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import PlackettLuce
        >>> races = PlackettLuce(jnp.array([1.0, 0.0, 2.0]), num_ranked=jnp.array([3, 1]))
        >>> probabilities = jnp.exp(races.log_prob(jnp.array([[2, 0, 1], [2, -1, -1]])))
        >>> print([f"{probability:.3f}" for probability in probabilities])
        ['0.486', '0.665']

    **References**

    1. Plackett, R. L. (1975), The analysis of permutations, *Applied Statistics* 24.

    :param utilities: :math:`\eta`, with the items on the last axis.
    :param num_ranked: how many entries of a value count, from zero to the number of items, one number or one for each
        ranking; ``None`` for all.
    :raises ValueError: if there are fewer than two items.
    """

    arg_constraints = {"utilities": constraints.real_vector, "num_ranked": constraints.nonnegative_integer}
    reparametrized_params = ["utilities"]

    def __init__(
        self, utilities: ArrayLike, num_ranked: ArrayLike | None = None, *, validate_args: bool | None = None
    ) -> None:
        if jnp.ndim(utilities) == 0 or jnp.shape(utilities)[-1] < 2:
            raise ValueError(
                f"PlackettLuce needs the utilities of two items or more on the last axis; got shape "
                f"{jnp.shape(utilities)}."
            )
        size = jnp.shape(utilities)[-1]
        num_ranked = jnp.asarray(size if num_ranked is None else num_ranked)
        batch_shape = lax.broadcast_shapes(jnp.shape(utilities)[:-1], num_ranked.shape)
        self.utilities = jnp.asarray(utilities)
        self.num_ranked = jnp.broadcast_to(num_ranked, batch_shape)
        super().__init__(batch_shape=batch_shape, event_shape=(size,), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return _Ranking(self.event_shape[0], self.num_ranked)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log probability of a ranking; ``nan`` for a value that is none unless arguments are validated."""
        value = jnp.asarray(value)
        places = ranking_places(value, self.num_ranked, self.event_shape[0])
        log_mass = PlackettLucePotential(places).log_density(self.utilities)
        return jnp.where(self.support(value), log_mass, jnp.nan)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Rankings of shape ``sample_shape + batch_shape + (items,)``, padded by ``-1``."""
        dtype = jnp.result_type(self.utilities, float)
        noise = random.gumbel(checked_key(self, key), sample_shape + self.batch_shape + self.event_shape, dtype)
        ranking = jnp.argsort(-(self.utilities + noise), axis=-1)
        return jnp.where(jnp.arange(self.event_shape[0]) < self.num_ranked[..., None], ranking, -1)
