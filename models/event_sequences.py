"""Recurrent networks of the events of many people, with a personal part."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_ext.distributions import LinearCategorical
from numpyro_ext.linalg import gated_states, simple_states

__all__ = ["collaborative_rnn"]


def collaborative_rnn(
    users: ArrayLike,
    events: ArrayLike,
    mask: ArrayLike,
    carry: Any,
    *,
    num_users: int,
    num_items: int,
    width: int,
    cell: Literal["tanh", "gru"] = "tanh",
    personal: Literal["full", "none", "deviation", "low-rank"] = "full",
    rank: int = 8,
    candidate: Literal["tanh", "logistic"] = "tanh",
    pointer: bool = False,
) -> Any:
    r"""Collaborative recurrent network: items are shared by all, the recurrent matrices are personal (Ko, 2017).

    Each event is scored under the state before it, and then taken in:

    .. math::
        y_t \sim \text{softmax}(W_\text{out} h_{t-1}), \qquad
        h_t = \sigma(W_u h_{t-1} + W_\text{in}[:, y_t])

    With ``cell="gru"`` the state moves by a fraction :math:`w` to a candidate, in which a gate :math:`r` chooses what
    is seen of the state before; both have recurrent matrices of their own.

    The function is for :class:`~numpyro_ext.infer.ChunkedSVI`, which may train it on some of the items
    (``sampled_softmax=``), and runs under NumPyro's SVI as it is.

    Sites: ``W_in`` and ``W_out`` (items), ``W_h`` (recurrent), for the GRU also ``W_zi``, ``W_ri``, ``W_zh`` and
    ``W_rh``; and ``event``. What recurrent matrices are depends on ``personal``:

    - ``"full"``: a free matrix for each user, parameters of shape ``(num_users, 1, width, width)``;
    - ``"none"``: one for all, of shape ``(width, width)``;
    - ``"deviation"``: one for all and a latent deviation of each user, ``W_h_deviation`` with independent normal cells
      of the scale ``deviation_scale``, a parameter;
    - ``"low-rank"``: one for all and ``rank`` standard normal coefficients of each user, ``coefficients``, which weigh
      the matrices ``W_h_basis`` of shape ``(rank, width, width)``, and item offsets ``W_out_basis`` of shape ``(rank,
      num_items)``.

    The last two need a guide, such as NumPyro's ``AutoNormal(collaborative_rnn, init_loc_fn=init_to_mean,
    init_scale=0.1)``, which begins at the pooled network; without ``init_loc_fn`` everybody begins at random numbers
    between -2 and 2, and the network is not learned. They train best from the parameters of a pooled network,
    ``run(..., init_params=pooled.params)``. For ``"low-rank"`` there is ``ChunkedSVI(local="laplace")`` as well.

    With ``pointer=True`` a gate chooses between the network and the items that the person herself had so far, by how
    often (counts :math:`c`, :math:`n` in all):

    .. math::
        p(y_t) = g\, \text{softmax}(W_\text{out} h_{t-1})_{y_t} + (1 - g)\, c_{y_t} / n, \qquad
        \log\frac{g}{1 - g} = w^\top h_{t-1} + b - s \log n

    with the parameters ``pointer_weights``, ``pointer_offset`` and ``pointer_power``; the first event is the network's.
    The counts are a second part of the carry: ``run(..., carry=(jnp.zeros(width), jnp.zeros(num_items)))``.

    **Example:**

    >>> import optax
    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> from jax import random
    >>> from numpyro_ext.infer import ChunkedSVI
    >>> from numpyro_ext.models import collaborative_rnn
    >>> turns = SimpleNamespace(items=np.array([0, 1] * 8 + [2, 3] * 4), starts=np.array([0, 8, 16]),
    ...                         lengths=np.array([8, 8, 8]), num_items=4)
    >>> engine = ChunkedSVI(collaborative_rnn, optim=optax.adam(0.05), plate="users", batch_size=2, chunk=4,
    ...                     progress_bar=False)
    >>> fit = engine.run(random.key(0), turns, num_epochs=60, width=4)
    >>> print(fit.next_log_probabilities([0, 1, 0], user=0).argmax())
    1

    :param users: indices of the users of the batch, shape ``(users,)``.
    :param events: items, integers from zero, shape ``(users, steps)``.
    :param mask: cells of ``events`` that are events, shape ``(users, steps)``.
    :param carry: state before, shape ``(users, width)``; zeros before the first event. With ``pointer``, a tuple of it
        and of the counts so far, shape ``(users, num_items)``.
    :param int num_users: number of users.
    :param int num_items: number of items.
    :param int width: size of the state.
    :param cell: ``"tanh"`` or ``"gru"``.
    :param personal: kind of recurrent matrices, above.
    :param int rank: coefficients of a user, for ``"low-rank"``.
    :param candidate: function of the new state (``"tanh"``) or of the candidate (``"gru"``): hyperbolic tangent or
        logistic.
    :param bool pointer: mix the network with the person's own counts, above.
    :return: the carry after, for the next chunk.
    :raises ValueError: for an unknown option, or a carry without counts.

    **Source:** Ko (2017), thesis, section 3.3, equations 145 to 152. Its candidate matrix is personal as well, which
    equation 152 leaves out. For the gate Merity, Xiong, Bradbury and Socher (2017), *Pointer sentinel mixture models*.
    """
    options: dict[str, tuple[str, tuple[str, ...]]] = {
        "cell": (cell, ("tanh", "gru")),
        "candidate": (candidate, ("tanh", "logistic")),
        "personal": (personal, ("full", "none", "deviation", "low-rank")),
    }
    for name, (value, known) in options.items():
        if value not in known:
            raise ValueError(f"collaborative_rnn: {name} is one of {known}; got {value!r}.")
    if pointer and not (isinstance(carry, tuple) and len(carry) == 2):
        raise ValueError(
            "collaborative_rnn: with pointer=True the carry has the counts of the items as well: "
            "run(..., carry=(jnp.zeros(width), jnp.zeros(num_items)))."
        )
    state, counts = carry if pointer else (carry, None)
    events = jnp.asarray(events)
    weights = dist.Normal(0.0, width**-0.5)

    def parameter(name: str, *shape: int, scale: float = 1.0) -> Array:
        return numpyro.param(name, lambda key: scale * weights.sample(key, shape))

    gates = ["h"] if cell == "tanh" else ["h", "zh", "rh"]
    inputs = [parameter(name, width, num_items) for name in (["W_in"] if cell == "tanh" else ["W_in", "W_zi", "W_ri"])]
    W_out = parameter("W_out", num_items, width)
    if personal != "full":
        shared = {gate: parameter(f"W_{gate}", width, width) for gate in gates}
    if personal == "deviation":
        spread = numpyro.param("deviation_scale", jnp.array(0.1), constraint=constraints.positive)
    if personal == "low-rank":
        # small, so that people begin near the pooled network
        bases = {gate: parameter(f"W_{gate}_basis", rank, width, width, scale=0.1) for gate in gates}
        offsets = parameter("W_out_basis", rank, num_items, scale=0.1)

    plate = partial(numpyro.plate, "users", num_users, subsample_size=len(users), dim=-2)  # type: ignore[arg-type]
    # without this, NumPyro's SVI would draw other users
    with handlers.substitute(data={"users": jnp.asarray(users)}), plate():
        if personal == "full":
            shape = (num_users, 1, width, width)
            recurrent = [
                numpyro.param(f"W_{gate}", lambda key: weights.sample(key, shape), event_dim=2)[:, 0] for gate in gates
            ]
        elif personal == "deviation":
            cells = dist.Normal(0.0, spread).expand([width, width]).to_event(2)
            recurrent = [shared[gate] + numpyro.sample(f"W_{gate}_deviation", cells)[:, 0] for gate in gates]
        elif personal == "low-rank":
            coefficients = numpyro.sample("coefficients", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))[:, 0]
            recurrent = [shared[gate] + jnp.einsum("uk,kij->uij", coefficients, bases[gate]) for gate in gates]
        else:
            recurrent = [shared[gate] for gate in gates]

        taken = [matrix.T[events.T] for matrix in inputs]
        if cell == "tanh":
            state, before = simple_states(candidate, recurrent[0], taken[0], state)
        else:
            state, before = gated_states(candidate, recurrent, taken, state)
        before = jnp.swapaxes(before, 0, 1)
        features, weighed = [before], [W_out]
        if personal == "low-rank":  # one product with the state, as offsets would be passes over all logits
            features.append(jnp.broadcast_to(coefficients[:, None], (*before.shape[:2], rank)))
            weighed.append(offsets.T)
        following: dist.Distribution = LinearCategorical(jnp.concatenate(features, -1), jnp.concatenate(weighed, -1))
        if counts is not None:
            odds = before @ numpyro.param("pointer_weights", jnp.zeros(width))
            odds += numpyro.param("pointer_offset", jnp.array(1.0))
            power = numpyro.param("pointer_power", jnp.array(0.5))
            logits, counts = _with_own(following.logits, odds, power, counts, events, mask)
            following = dist.Categorical(logits=logits)
        with numpyro.plate("steps", events.shape[1], dim=-1), handlers.mask(mask=mask):
            numpyro.sample("event", following, obs=events)
    return (state, counts) if pointer else state


def _with_own(
    logits: Array, odds: Array, power: Array, counts: Array, events: Array, mask: ArrayLike
) -> tuple[Array, Array]:
    """Log probabilities of the mixture with the person's own counts before each event, and the counts after all."""
    taken = jax.nn.one_hot(events, logits.shape[-1], dtype=counts.dtype) * jnp.asarray(mask)[..., None]
    after = counts[:, None] + jnp.cumsum(taken, 1)
    own = after - taken
    number = own.sum(-1, keepdims=True)
    network, odds = jax.nn.log_softmax(logits), odds[..., None] - power * jnp.log(jnp.maximum(number, 1.0))
    shares = jnp.log(own) - jnp.log(jnp.maximum(number, 1.0)) + jax.nn.log_sigmoid(-odds)
    mixed = jnp.logaddexp(network + jax.nn.log_sigmoid(odds), shares)
    return jnp.where(number > 0, mixed, network), after[:, -1]
