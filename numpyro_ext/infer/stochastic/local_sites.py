"""Parameters of the rows of a plate: finding them in a model, and optimising only those of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpyro.primitives import Messenger

from ..front.running.progress import warn

LONGEST_FIRST_STEP = 10.0
"""Length of the first step, in later ones of the same gradient, from which the user is warned."""

MOST_NUMBERS = 64
"""Latent numbers of a person, each of which is a forward pass per step."""


class InBatch(Messenger):
    """Effect handler that runs a model on some rows of a plate.

    The plate gets the rows, whatever ``subsample_size`` says. Local parameters are expected to hold these rows alone,
    so the plate does not gather them. Latent sites are scaled by ``weights`` (those in the plate) or by ``share``.
    """

    def __init__(
        self,
        fn: Callable[..., object] | None,
        plate: str,
        rows: Array,
        local: Mapping[str, int],
        weights: Array | None = None,
        share: Array | None = None,
    ) -> None:
        self.plate, self.rows, self.local, self.weights, self.share = plate, rows, local, weights, share
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] == self.plate:
            msg["value"], msg["args"] = self.rows, (msg["args"][0], self.rows.shape[0])
        elif msg["type"] == "param" and msg["name"] in self.local:
            # without it the plate takes the value as it is
            msg["kwargs"] = {name: value for name, value in msg["kwargs"].items() if name != "event_dim"}
        elif msg["type"] == "sample" and not msg["is_observed"] and self.weights is not None:
            dims = [frame.dim for frame in msg["cond_indep_stack"] if frame.name == self.plate]
            weight = self.weights.reshape(-1, *(1,) * (-dims[0] - 1)) if dims else self.share
            msg["scale"] = weight if msg["scale"] is None else msg["scale"] * weight


class LocalSites(NamedTuple):
    """Local parameters of a model and its guide."""

    axes: dict[str, int]
    """Axis of the rows in each, counted from the left."""
    num_rows: int
    """Size of the plate."""


class Recorder(Messenger):
    """Effect handler that notes the parameters in a plate while a model runs."""

    def __init__(self, plate: str, rows: Array) -> None:
        self.plate, self.rows = plate, rows
        self.sizes: dict[str, int] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.latents: set[str] = set()
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            self.sizes[msg["name"]] = msg["args"][0]
            if msg["name"] == self.plate:
                msg["value"], msg["args"] = self.rows, (msg["args"][0], self.rows.shape[0])
        elif msg["type"] == "mutable" and msg["name"] != "_carry":
            raise ValueError(f"ChunkedSVI: the site {msg['name']!r} is mutable, which minibatches do not keep.")

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            self.latents.add(msg["name"])
        if msg["type"] == "param":  # the value is that before the plate gathers rows, since the plate is inside
            stack = list(msg["cond_indep_stack"])
            self.params[msg["name"]] = {"shape": jnp.shape(msg["value"]), "stack": stack, **msg["kwargs"]}

    def local_sites(self, num_rows: int | None) -> LocalSites:
        """Local parameters that were seen.

        :param num_rows: number of rows of the data, which the plate must have.
        :raises ValueError: if the plate is missing or has another size, or a parameter in it cannot be taken by rows;
            the message has the line to write.
        """
        if self.plate not in self.sizes:
            found = ", ".join(map(repr, self.sizes)) or "none"
            raise ValueError(f"ChunkedSVI: the model has no plate {self.plate!r}; its plates are: {found}.")
        size = self.sizes[self.plate]
        if num_rows is not None and size != num_rows:
            raise ValueError(f"ChunkedSVI: the plate {self.plate!r} has {size} rows, and the data have {num_rows}.")
        axes = {}
        for name, site in self.params.items():
            frames = {frame.name: frame for frame in site["stack"]}
            if self.plate not in frames:
                continue
            shape, event_dim = site["shape"], site.get("event_dim")
            if event_dim is None:
                if size in shape:
                    raise ValueError(
                        f"ChunkedSVI: the parameter {name!r} of shape {shape} is in the plate {self.plate!r} without "
                        f"event_dim, so NumPyro takes it whole. Write numpyro.param({name!r}, ..., event_dim="
                        f"{max(len(shape) + frames[self.plate].dim, 0)}) for a row for each member, or move it out of "
                        "the plate."
                    )
                continue
            axis = len(shape) + frames[self.plate].dim - event_dim
            if axis < 0 or shape[axis] == 1 != size:
                continue  # broadcast over the plate
            others = [other for other in frames if frames[other].size != self.sizes.get(other, frames[other].size)]
            others = [other for other in others if other != self.plate]
            if others:
                raise ValueError(
                    f"ChunkedSVI: the parameter {name!r} is in the plate {self.plate!r} and in the plate {others[0]!r}"
                    ", which is subsampled as well: only one plate can come in batches."
                )
            axes[name] = axis
        return LocalSites(axes, size)


def personal_site(sites: Mapping[str, Any], plate: str, caller: str) -> Any:
    """The one latent site of a model, which is in the plate and has few numbers for each member.

    :param sites: trace of the model.
    :raises ValueError: if it is not so.
    """
    latent = [site for site in sites.values() if site["type"] == "sample" and not site["is_observed"]]
    if len(latent) != 1 or not any(frame.name == plate for frame in latent[0]["cond_indep_stack"]):
        raise ValueError(
            f"{caller}: needs one latent site in the plate {plate!r}, of few numbers for each member, as "
            f'collaborative_rnn(personal="low-rank") has; the model has {[site["name"] for site in latent]}.'
        )
    site = latent[0]
    batch, event = site["fn"].batch_shape, site["fn"].event_shape
    if len(event) > 1 or np.prod(batch[1:]) != 1 or np.prod(event) > MOST_NUMBERS:
        raise ValueError(
            f"{caller}: the site {site['name']!r} must have one number or one vector for each member, of "
            f"{MOST_NUMBERS} numbers at most; it has the shape {(*batch[1:], *event)}. A whole matrix for each is too "
            'much for a full Gaussian: write it as a sum of few, as collaborative_rnn(personal="low-rank") does.'
        )
    return site


def parted(values: Mapping[str, Array], axes: Mapping[str, int]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Shared parameters, and local ones with their rows in front."""
    shared = {name: value for name, value in values.items() if name not in axes}
    return shared, {name: _moved(values[name], axis, 0) for name, axis in axes.items()}


def merged(shared: Mapping[str, Array], rows: Mapping[str, Array], axes: Mapping[str, int]) -> dict[str, Array]:
    """Parameters from :func:`parted`."""
    return {**shared, **{name: _moved(row, 0, axes[name]) for name, row in rows.items()}}


def _moved(table: Array, source: int, destination: int) -> Array:
    """Table with one axis elsewhere; it stays where it is, on a device or the host."""
    order = list(range(table.ndim))
    order.insert(destination, order.pop(source))
    return table.transpose(order)


def by_rows(
    optim: optax.GradientTransformation,
    axes: Mapping[str, int],
    *,
    weight: float = 1.0,
    active: Array | None = None,
    rate: Array | float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Optimiser with a state of its own for each row of local parameters, beside one for the shared ones.

    :param optim: optimiser of all.
    :param axes: local parameters, with the axis of their rows.
    :param float weight: factor of the gradient of local parameters: it undoes the scale of the plate.
    :param active: rows to move; the others keep their values and their states.
    :param rate: factor of all steps.
    """
    inner = optax.with_extra_args_support(optim)

    def init(params: Any) -> Any:
        shared, rows = parted(params, axes)
        return inner.init(shared) if shared else (), jax.vmap(inner.init)(rows) if rows else ()

    def update(grads: Any, state: Any, params: Any = None, *, value: Any = None, **extra: Any) -> Any:
        (shared_grads, row_grads), (shared, rows) = parted(grads, axes), parted(params, axes)
        (shared_state, row_states), updates = state, {}
        if shared:
            updates, shared_state = inner.update(shared_grads, shared_state, shared, value=value)
        if rows:
            row_grads = jax.tree.map(lambda x: weight * x, row_grads)
            steps, states = jax.vmap(lambda g, s, p: inner.update(g, s, p, value=value))(row_grads, row_states, rows)
            if active is not None:
                zeros = jax.tree.map(jnp.zeros_like, steps)
                steps, states = _where_rows(active, (steps, states), (zeros, row_states))
            row_states = states
            updates |= {name: jnp.moveaxis(steps[name], 0, axis) for name, axis in axes.items()}
        return jax.tree.map(lambda x: (rate * x).astype(x.dtype), updates), (shared_state, row_states)

    return optax.GradientTransformationExtraArgs(init, update)


def _where_rows(active: Array, new: Any, old: Any) -> Any:
    def choose(a: Array, b: Array) -> Array:
        return jnp.where(active.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


@lru_cache(maxsize=16)
def check_by_rows(optim: optax.GradientTransformation) -> None:
    """Refuse an optimiser whose step of one row depends on other rows, as that of a global norm does.

    :raises ValueError: if it does, or if it needs more than gradients, values and the loss.
    """

    def after_two_steps(transform: optax.GradientTransformation, scale: Array) -> Array:
        rule, params = optax.with_extra_args_support(transform), {"row": jnp.arange(1.0, 7.0).reshape(2, 3)}
        state = rule.init(params)
        for _ in range(2):
            grads = {"row": scale * params["row"]}
            steps, state = rule.update(grads, state, params, value=jnp.asarray(1.0))
            params = optax.apply_updates(params, steps)
        return params["row"]

    @jax.jit
    def difference(scale: Array) -> Array:
        together, apart = after_two_steps(optim, scale), after_two_steps(by_rows(optim, {"row": 0}), scale)
        gaps = jnp.abs(together - apart) / (1.0 + jnp.abs(together))
        # steps so long that neither stays finite tell nothing here: the run will say so
        return jnp.max(jnp.where(jnp.isfinite(together) | jnp.isfinite(apart), gaps, 0.0))

    try:
        gap = max(float(difference(jnp.asarray(scale))) for scale in (1e-2, 1e3))
    except Exception as error:
        raise ValueError(
            f"ChunkedSVI: the optimiser cannot move some rows of a table ({str(error).splitlines()[0]}). Use one that "
            "needs gradients alone, such as optax.adam."
        ) from error
    if not gap <= 1e-4:
        raise ValueError(
            "ChunkedSVI: the optimiser moves a row by the gradients of other rows (a norm over all parameters?), and "
            "rows of local parameters come in batches. Leave that part out, or clip each value (optax.clip)."
        )


def check_first_steps(optim: optax.GradientTransformation) -> None:
    """Warn of an optimiser whose mean of squared gradients begins at zero and moves slowly.

    After one gradient such a mean is ``1 - decay`` of its square, so that the step is ``(1 - decay) ** -0.5`` times as
    long as later ones of the same gradient. In every coordinate at once this can lose a network for good, and local
    parameters, which are seen a few times, hardly know other steps.
    """
    value = {"one": jnp.ones(())}

    def is_mean(node: object) -> bool:
        return isinstance(node, optax.ScaleByRmsState | optax.ScaleByRStdDevState)

    try:
        state = optax.with_extra_args_support(optim).update(value, optim.init(value), value, value=jnp.ones(()))[1]
    except Exception:  # of what an optimiser needs, only a run can tell
        return
    means = [node.nu["one"] for node in jax.tree.leaves(state, is_leaf=is_mean) if is_mean(node)]
    length = max((float(mean) ** -0.5 for mean in means if mean > 0), default=0.0)
    if length >= LONGEST_FIRST_STEP:
        warn(
            f"ChunkedSVI: the first steps of this optimiser are {length:.0f} times as long as later ones, since its "
            "mean of squared gradients begins at zero. Write optax.rmsprop(..., bias_correction=True)."
        )
