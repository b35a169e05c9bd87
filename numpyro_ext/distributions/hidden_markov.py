"""Sequences of categories emitted by the hidden states of a Markov chain."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from .categories import checked_key


class _Sequence(constraints.Constraint):
    """Categories within the length of the sequence, anything in the cells after it."""

    is_discrete = True
    event_dim = 1

    def __init__(self, num_categories: int, lengths: ArrayLike) -> None:
        self.num_categories, self.lengths = num_categories, lengths

    def __call__(self, value: ArrayLike) -> Array:
        value = jnp.asarray(value)
        is_category = (value >= 0) & (value < self.num_categories) & (value == jnp.floor(value))
        return jnp.all(is_category | ~_inside(value.shape[-1], self.lengths), axis=-1)

    def __repr__(self) -> str:
        return f"sequences of the categories 0, ..., {self.num_categories - 1}, within their lengths"

    def feasible_like(self, prototype: ArrayLike) -> Array:
        return jnp.zeros_like(jnp.asarray(prototype))

    def tree_flatten(self) -> tuple[tuple[ArrayLike], tuple[tuple[str, ...], dict[str, int]]]:
        return (self.lengths,), (("lengths",), {"num_categories": self.num_categories})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Sequence):
            return False
        return self.num_categories == other.num_categories and bool(jnp.array_equal(self.lengths, other.lengths))

    __hash__ = None  # type: ignore[assignment]


class HiddenMarkov(Distribution):
    r"""Sequences of categories emitted by the hidden states of a Markov chain.

    .. math::
        p(y_1, \dots, y_T) = \sum_{z_1, \dots, z_T} \pi_{z_1} B_{z_1 y_1} \prod_{t=2}^T A_{z_{t-1} z_t} B_{z_t y_t}

    The states are summed out by the forward recursion in logarithms, in a time of :math:`T K^2` with :math:`K` states,
    so that the density is exact however long the sequence, and differentiable in all probabilities. Sequences of
    different lengths are padded at the end and come with their ``lengths``: cells after these weigh nothing.

    Permuting the states leaves the density as it is, so draws of NUTS must be aligned before they are averaged.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.distributions import HiddenMarkov
        >>> transition = jnp.array([[0.9, 0.1], [0.2, 0.8]])
        >>> emission = jnp.array([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
        >>> chain = HiddenMarkov(jnp.array([0.5, 0.5]), transition, emission, num_steps=4)
        >>> print(chain.log_prob(jnp.array([0, 0, 2, 2])))
        -3.748
        >>> print(chain.most_probable_states(jnp.array([0, 0, 2, 2])))
        [0 0 1 1]
        >>> print(chain.posterior_states(jnp.array([0, 0, 2, 2]))[:, 1])
        [0.095 0.145 0.807 0.873]

    **References**

    1. Rabiner, L. R. (1989), A tutorial on hidden Markov models and selected applications in speech recognition,
       *Proceedings of the IEEE* 77, 257-286, section III.

    :param initial: probabilities of the first state, shape ``(..., states)``.
    :param transition: probabilities of the next state (last axis) given a state, shape ``(..., states, states)``.
    :param emission: probabilities of the categories (last axis) in a state, shape ``(..., states, categories)``.
    :param int num_steps: length of the longest sequence, and of the last axis of values.
    :param lengths: length of each sequence, integers from 0 to ``num_steps`` of the batch shape; all of ``num_steps``
        by default.
    :raises ValueError: for shapes that do not fit together, rows that do not add up to one, or lengths out of range.
    """

    arg_constraints = {
        "initial": constraints.simplex,
        "transition": constraints.independent(constraints.simplex, 1),
        "emission": constraints.independent(constraints.simplex, 1),
    }
    pytree_data_fields = ("initial", "transition", "emission", "lengths")
    pytree_aux_fields = ("num_steps",)

    def __init__(
        self,
        initial: ArrayLike,
        transition: ArrayLike,
        emission: ArrayLike,
        *,
        num_steps: int,
        lengths: ArrayLike | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(num_steps, bool) or int(num_steps) != num_steps or num_steps < 1:
            raise ValueError(f"HiddenMarkov: num_steps is an integer from 1; got {num_steps!r}.")
        self.num_steps = int(num_steps)
        self.initial, self.transition, self.emission = (
            jnp.asarray(value, float) for value in (initial, transition, emission)
        )
        states = self.initial.shape[-1] if self.initial.ndim else 0
        shapes = (self.transition.shape[-2:], self.emission.shape[-2:-1])
        if not states or shapes != ((states, states), (states,)):
            raise ValueError(
                "HiddenMarkov: with K states initial has the shape (..., K), transition (..., K, K) and emission "
                f"(..., K, categories); got {self.initial.shape}, {self.transition.shape} and {self.emission.shape}."
            )
        for name in ("initial", "transition", "emission"):
            value = getattr(self, name)
            if not isinstance(value, jax.core.Tracer):
                rows, slack = np.asarray(value), 1e3 * np.finfo(value.dtype).eps
                if not ((rows >= 0).all() and (np.abs(rows.sum(-1) - 1.0) < slack * rows.shape[-1]).all()):
                    raise ValueError(f"HiddenMarkov: the last axis of {name} holds probabilities that add up to one.")
        self.lengths = jnp.asarray(self.num_steps if lengths is None else lengths)
        if not jnp.issubdtype(self.lengths.dtype, jnp.integer):
            raise ValueError(f"HiddenMarkov: lengths are integers; got {self.lengths.dtype}.")
        if not isinstance(self.lengths, jax.core.Tracer):
            known = np.asarray(self.lengths)
            if known.size and not 0 <= known.min() <= known.max() <= self.num_steps:
                raise ValueError(
                    f"HiddenMarkov: lengths are 0 to num_steps = {self.num_steps}; got {known.min()} to {known.max()}."
                )
        batch_shape = lax.broadcast_shapes(
            self.initial.shape[:-1], self.transition.shape[:-2], self.emission.shape[:-2], self.lengths.shape
        )
        super().__init__(batch_shape=batch_shape, event_shape=(self.num_steps,), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return _Sequence(self.emission.shape[-1], self.lengths)

    @property
    def num_states(self) -> int:
        """Number of hidden states."""
        return int(self.initial.shape[-1])

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log probability of sequences of shape ``(..., num_steps)``; ``nan`` for a value that is no category."""
        found = _log_evidence(*self._logs(value))
        return jnp.where(self._is_valid(value), found, jnp.nan)

    def posterior_states(self, value: ArrayLike) -> Array:
        """Posterior probability of each state at each step, shape ``(..., num_steps, states)``.

        :param value: sequences, shape ``(..., num_steps)``.
        :return: the probabilities; zero after the length of a sequence, ``nan`` for a sequence that is impossible.
        """
        logs = self._logs(value)
        # the posterior is the gradient of the log evidence by the log probabilities of what was seen
        evidence, found = _evidence_and_posterior(*logs)
        possible = self._is_valid(value) & (evidence > -jnp.inf)
        return jnp.where(possible[..., None, None], found, jnp.nan)

    def most_probable_states(self, value: ArrayLike) -> Array:
        """Most probable path of states given a sequence, by the Viterbi recursion, shape ``(..., num_steps)``.

        :param value: sequences, shape ``(..., num_steps)``.
        :return: indices of states; -1 after the length of a sequence, and all along one that is impossible.
        """
        logs = self._logs(value)
        states, best = _best_path(*logs)
        possible = self._is_valid(value) & (best > -jnp.inf)
        return jnp.where(possible[..., None] & _inside(self.num_steps, self.lengths), states, -1)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Sequences of shape ``sample_shape + batch_shape + (num_steps,)``, zero after their length."""
        key_first, key_states, key_seen = random.split(checked_key(self, key), 3)
        shape = (*sample_shape, *self.batch_shape)
        first = random.categorical(key_first, _log(self.initial), shape=shape)

        def row(table: Array, state: Array) -> Array:
            at = jnp.broadcast_to(state[..., None, None], (*shape, 1, table.shape[-1]))
            return jnp.take_along_axis(jnp.broadcast_to(table, shape + table.shape[-2:]), at, axis=-2)[..., 0, :]

        def step(state: Array, key: Array) -> tuple[Array, Array]:
            return random.categorical(key, row(_log(self.transition), state)), state

        _, states = lax.scan(step, first, random.split(key_states, self.num_steps))
        keys = random.split(key_seen, self.num_steps)
        seen = lax.map(lambda x: random.categorical(x[0], row(_log(self.emission), x[1])), (keys, states))
        return jnp.where(_inside(self.num_steps, self.lengths), jnp.moveaxis(seen, 0, -1), 0)

    def _is_valid(self, value: ArrayLike) -> Array:
        return _Sequence(self.emission.shape[-1], self.lengths)(value)

    def _logs(self, value: ArrayLike) -> tuple[Array, Array, Array, Array]:
        """Log probabilities of the first state, of transitions and of what was seen at each step, and the lengths."""
        value = jnp.asarray(value)
        if value.shape[-1:] != (self.num_steps,):
            raise ValueError(
                f"HiddenMarkov: values have num_steps = {self.num_steps} cells on their last axis, padded at the end; "
                f"got the shape {value.shape}."
            )
        category = jnp.clip(value, 0, self.emission.shape[-1] - 1).astype(int)
        return _log(self.initial), _log(self.transition), _seen(_log(self.emission), category), self.lengths


def _inside(num_steps: int, lengths: ArrayLike) -> Array:
    return jnp.arange(num_steps) < jnp.asarray(lengths)[..., None]


def _log(p: Array) -> Array:
    """Logarithm whose derivative at zero is zero: what is impossible stays so."""
    positive = p > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, p, 1.0)), -jnp.inf)


def _log_sum(x: Array, axis: int) -> Array:
    """Logarithm of a sum of exponentials, with derivatives that are zero where all terms are."""
    top = lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    top = jnp.where(top > -jnp.inf, top, 0.0)
    total = jnp.sum(jnp.exp(x - top), axis=axis)
    return _log(total) + jnp.squeeze(top, axis)


@jax.jit
@partial(jnp.vectorize, signature="(k,i),(t)->(t,k)")
def _seen(emission: Array, category: Array) -> Array:
    """Emissions of the categories of one sequence."""
    return emission[:, category].T


def _one_log_evidence(initial: Array, transition: Array, seen: Array, length: Array) -> Array:
    """Log probability of one sequence by the forward recursion."""

    @partial(jax.checkpoint, prevent_cse=False)  # the recursion keeps K numbers a step instead of K squared
    def step(carry: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        number, logs = now
        new = _log_sum(carry[:, None] + transition, axis=0) + logs
        # a shift of each step, summed in the end: a sum that runs along would lose digits in long sequences
        top = lax.stop_gradient(jnp.max(new))
        shift = jnp.where((number < length) & (top > -jnp.inf), top, 0.0)
        return jnp.where(number < length, new - shift, carry), shift

    number = jnp.arange(1, seen.shape[0])
    last, shifts = lax.scan(step, initial + seen[0], (number, seen[1:]))
    return jnp.where(length > 0, _log_sum(last, axis=0) + jnp.sum(shifts), 0.0)


_SEQUENCE = "(k),(k,k),(t,k),()->"
_log_evidence = jax.jit(jnp.vectorize(_one_log_evidence, signature=_SEQUENCE + "()"))
# The posterior of the states is the gradient of the log evidence by the log probabilities of what was seen.
_evidence_and_posterior = jax.jit(
    jnp.vectorize(jax.value_and_grad(_one_log_evidence, argnums=2), signature=_SEQUENCE + "(),(t,k)")
)


@jax.jit
@partial(jnp.vectorize, signature=_SEQUENCE + "(t),()")
def _best_path(initial: Array, transition: Array, seen: Array, length: Array) -> tuple[Array, Array]:
    """Most probable states of one sequence, and the log of their probability; states after its length mean nothing."""

    def step(carry: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        number, logs = now
        paths = carry[:, None] + transition
        inside = number < length
        back = jnp.where(inside, jnp.argmax(paths, axis=0), jnp.arange(len(carry)))
        return jnp.where(inside, jnp.max(paths, axis=0) + logs, carry), back

    def follow(state: Array, back: Array) -> tuple[Array, Array]:
        return back[state], state

    last, backs = lax.scan(step, initial + seen[0], (jnp.arange(1, seen.shape[0]), seen[1:]))
    first, states = lax.scan(follow, jnp.argmax(last), backs, reverse=True)
    return jnp.concatenate([first[None], states]), jnp.max(last)
