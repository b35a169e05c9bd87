"""Categories of many people, each of whom is of one of a few types that nobody sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from .categories import checked_key


class CategoriesByType(Distribution):
    r"""Categories of items that people of unknown types chose: a mixture of products of categorical distributions.

    A person :math:`u` is of type :math:`t` with probability :math:`\pi_t`, and then takes category :math:`k` of item
    :math:`i` with probability :math:`\phi_{tik}`. With types summed out

    .. math::
        \log p(y) = \sum_u \log \sum_t \pi_t \prod_{c : u(c) = u} \phi_{t, i(c), y_c}.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import CategoriesByType
        >>> chances = jnp.array([[[0.9, 0.1], [0.8, 0.2]], [[0.1, 0.9], [0.5, 0.5]]])
        >>> person, item = jnp.array([0, 0]), jnp.array([0, 1])
        >>> answers = CategoriesByType(jnp.array([0.6, 0.4]), chances, person, item, num_people=1)
        >>> print(f"{jnp.exp(answers.log_prob(jnp.array([0, 0]))):.3f}", answers.type_probabilities(jnp.array([0, 0])))
        0.452 [[0.956 0.044]]

    **References**

    1. Marlin, B. (2003), Modeling user rating profiles for collaborative filtering, *NIPS* (the multinomial mixture).

    Cost: a pass over the observations for each type.

    :param probs: probabilities of the types, shape ``(num_types,)``.
    :param chances: probabilities of the categories of each item for each type, shape
        ``(num_types, num_items, num_categories)``.
    :param person: person of each observation, integers from 0, shape ``(n,)``.
    :param item: item of each observation, integers from 0, shape ``(n,)``.
    :param int num_people: number of people, also of those without an observation.
    :raises ValueError: if shapes do not fit, or a person or an item is out of range.
    """

    arg_constraints = {
        "probs": constraints.simplex,
        "chances": constraints.independent(constraints.simplex, 2),
        "person": constraints.independent(constraints.nonnegative_integer, 1),
        "item": constraints.independent(constraints.nonnegative_integer, 1),
    }
    pytree_aux_fields = ("num_people",)

    def __init__(
        self,
        probs: ArrayLike,
        chances: ArrayLike,
        person: ArrayLike,
        item: ArrayLike,
        *,
        num_people: int,
        validate_args: bool | None = None,
    ) -> None:
        self.probs, self.chances, self.person, self.item = (jnp.asarray(x) for x in (probs, chances, person, item))
        self.num_people = num_people
        shapes = self.probs.shape, self.chances.shape
        if len(shapes[0]) != 1 or len(shapes[1]) != 3 or shapes[1][0] != shapes[0][0]:
            raise ValueError(
                "CategoriesByType needs probs of shape (num_types,) and chances of (num_types, num_items, "
                f"num_categories); got {shapes[0]} and {shapes[1]}."
            )
        if self.person.ndim != 1 or self.person.shape != self.item.shape:
            raise ValueError(
                "CategoriesByType needs person and item of the same shape (n,); got "
                f"{self.person.shape} and {self.item.shape}."
            )
        # JAX would leave out, or clip, what is out of range without a word.
        for name, size in (("person", num_people), ("item", shapes[1][1])):
            index = getattr(self, name)
            if not isinstance(index, jax.core.Tracer) and index.size and not 0 <= index.min() <= index.max() < size:
                raise ValueError(
                    f"CategoriesByType needs {name} in 0, ..., {size - 1}; got values from {index.min()} to "
                    f"{index.max()}."
                )
        super().__init__(batch_shape=(), event_shape=self.person.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.integer_interval(0, self.chances.shape[-1] - 1), 1)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log probability of categories from zero, shape ``(..., n)``; minus infinity for other numbers."""
        return jnp.sum(jax.nn.logsumexp(self._log_joint(value), axis=-1), axis=-1)

    def type_probabilities(self, value: ArrayLike) -> Array:
        """Probabilities of the types of all people given their categories, shape ``(..., num_people, num_types)``.

        :param value: categories, shape ``(..., n)``.
        """
        return jax.nn.softmax(self._log_joint(value), axis=-1)

    def _log_joint(self, value: ArrayLike) -> Array:
        """Log probability of each type of each person together with all of the person's categories."""
        value, size = jnp.asarray(value), self.chances.shape[-1]
        is_category = (value >= 0) & (value < size) & (value == jnp.floor(value))
        at = jnp.clip(value, 0, size - 1).astype(int)
        # the observations in front, as sums over these are by segments
        each = jnp.moveaxis(jnp.log(self.chances)[:, self.item, at], 0, -1)
        each = jnp.where(is_category[..., None], each, -jnp.inf)
        total = jnp.zeros((*value.shape[:-1], self.num_people, self.probs.shape[0]), each.dtype)
        return total.at[..., self.person, :].add(each) + jnp.log(self.probs)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories of shape ``sample_shape + (n,)``: types are drawn, then what their people choose."""
        key_type, key_category = random.split(checked_key(self, key))
        types = random.categorical(key_type, jnp.log(self.probs), shape=(*sample_shape, self.num_people))
        log_chances = jnp.log(self.chances)[types[..., self.person], self.item]
        return random.categorical(key_category, log_chances)
