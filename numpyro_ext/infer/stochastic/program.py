"""Compiled steps of a batch: rows are gathered, ``SVI.update`` runs at their number, and they are written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.primitives import mutable

from .chunks import Events, batches_of_events, chunk_of
from .local_sites import InBatch, LocalSites, Recorder, by_rows, parted
from .setting import Setting

__all__ = ["Parameters", "Program", "logits_of", "of_each"]

_CARRY = "_carry"


class Parameters(NamedTuple):
    """Parameters on the real line, with the optimiser's state."""

    shared: dict[str, Array]
    tables: dict[str, Array]
    """Local parameters, rows in front."""
    shared_state: Any
    row_states: Any
    """State of the optimiser for each row, rows in front."""

    def take(self, rows: Array) -> Parameters:
        """Parameters with some rows of the tables."""
        tables, states = jax.tree.map(lambda x: x[rows], (self.tables, self.row_states))
        return self._replace(tables=tables, row_states=states)

    def put(self, rows: Array, batch: Parameters) -> Parameters:
        """Parameters with some rows from a batch, and its shared ones."""
        old, new = (self.tables, self.row_states), (batch.tables, batch.row_states)
        tables, states = jax.tree.map(lambda x, y: x.at[rows].set(y), old, new)
        return batch._replace(tables=tables, row_states=states)


class Program:
    """Steps and scores of one model and guide.

    :param loss: of NumPyro's SVI.
    :param plate: name of the plate whose rows come in batches.
    :param chunk: events of a chunk, for models that take these and return their carry.
    """

    sites: LocalSites
    """Local parameters, after :meth:`init`."""
    can_be_kept: bool = True
    """True if equal settings may share the programs."""

    def __init__(
        self,
        model: Callable[..., object],
        guide: Callable[..., object] | None,
        optim: optax.GradientTransformation,
        loss: object,
        plate: str,
        chunk: int | None,
    ) -> None:
        self.model, self.optim, self.loss, self.plate, self.chunk = model, optim, loss, plate, chunk
        self.has_carry = chunk is not None
        self.guide = guide if guide is not None else lambda *args, **kwargs: None
        self.has_guide = guide is not None
        # not with an autoguide, which keeps arrays of its first call
        self._compiles_init = guide is None
        static = ("setting",)
        self.run_chunks: Callable[..., tuple[Parameters, Array, Array, Array]] = jax.jit(
            self._run_chunks, static_argnames=("width", *static), donate_argnums=0
        )
        self.run_rows = jax.jit(self._run_rows, static_argnames=static, donate_argnums=0)
        self.score = jax.jit(self._score, static_argnames=("width", *static), donate_argnums=0)
        self.next_logits = jax.jit(self._next_logits, static_argnames=("width", *static))

    def init(
        self,
        key: Array,
        num_rows: int | None,
        users: Array,
        args: tuple[object, ...],
        setting: Setting,
        init_params: Mapping[str, object] | None = None,
    ) -> Parameters:
        """Initial parameters; finds the local ones.

        :param users: rows of a first batch.
        :param args: arguments of the model for it.
        :param setting: further arguments of the model.
        :param init_params: values of some parameters to begin at.
        :raises ValueError: if a parameter cannot be taken by rows, or the model does not return its carry.
        """
        recorder = Recorder(self.plate, users)
        svi = SVI(self._returning_carry(args[-1] if self.has_carry else None), self.guide, optax.identity(), self.loss)

        def begin(key: Array) -> Any:
            with recorder:
                state = svi.init(key, users, *args, init_params=init_params, **setting.kwargs)
                return svi.optim.get_params(state.optim_state)

        values = jax.jit(begin)(key) if self._compiles_init else begin(key)
        bounds = jax.tree.leaves(svi.constrain_fn.args)
        if any(isinstance(bound, jax.core.Tracer) for bound in bounds):  # they were made inside
            values = begin(key)
        unknown = sorted(set(init_params or ()) - set(values))
        if unknown:
            raise ValueError(
                f"ChunkedSVI: init_params has {', '.join(map(repr, unknown))}, and the parameters are "
                f"{', '.join(map(repr, values))}."
            )
        self.can_be_kept = not bounds  # these are constants of the programs
        if not self.has_guide and recorder.latents:
            raise ValueError(
                f"ChunkedSVI: the model has latent sites ({', '.join(sorted(recorder.latents))}) and there is no guide."
                " Give one, such as numpyro.infer.autoguide.AutoNormal(model), or make them numpyro.param."
            )
        if not values:
            raise ValueError("ChunkedSVI: there is nothing to train, as neither model nor guide has a param site.")
        self.sites, self.constrain = recorder.local_sites(num_rows), svi.constrain_fn
        # copies: a model may give the same array to two parameters, and buffers are donated
        values = jax.tree.map(jnp.array, values)
        init = jax.jit(by_rows(self.optim, self.sites.axes).init)
        return Parameters(*parted(values, self.sites.axes), *init(values))

    def constrained(self, parameters: Parameters) -> dict[str, Array]:
        """Values of all parameters as the model has them."""
        return self.constrain(self._merged(parameters.shared, parameters.tables))

    def values_to_validate(self, parameters: Parameters) -> dict[str, Array]:
        """Values of all parameters that the validation is scored at."""
        return self.constrained(parameters)

    def _merged(self, shared: dict[str, Array], rows: dict[str, Array]) -> dict[str, Array]:
        axes = self.sites.axes
        return {**shared, **{name: jnp.moveaxis(row, 0, axes[name]) for name, row in rows.items()}}

    def _returning_carry(self, before: Any) -> Callable[..., Any]:
        """The model with what it returns as a mutable site, which SVI hands out beside the loss."""
        if not self.has_carry:
            return self.model

        def model(*args: Any, **kwargs: Any) -> Any:
            after = self.model(*args, **kwargs)
            shapes = [jax.tree.map(jnp.shape, carry) for carry in (before, after)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"ChunkedSVI: the model must return its carry with the shapes that it was given, {shapes[0]}; it "
                    f"returned {'nothing' if after is None else shapes[1]}. End the model with `return carry`; give "
                    "the carry of one user before the first event as run(..., carry=...)."
                )
            after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.result_type(old)), after, before)
            mutable(_CARRY, {"value": after})["value"] = after
            return after

        return model

    def _update(
        self,
        batch: Parameters,
        key: Array,
        rate: Array | float,
        users: Array,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        weights: Array | None = None,
        share: Array | None = None,
    ) -> tuple[Parameters, Array, Array, Any, Array]:
        """One step of SVI: parameters, key, loss of the batch's own rows, carry, and whether all is finite."""
        portion = users.shape[0] / self.sites.num_rows
        active = None if weights is None else weights > 0
        optim = by_rows(self.optim, self.sites.axes, weight=portion, active=active, rate=rate)
        carry = args[-1] if self.has_carry else None
        model, guide = (
            InBatch(fn, self.plate, users, self.sites.axes, weights, share)
            for fn in (self._returning_carry(carry), self.guide)
        )
        svi = SVI(model, guide, optim, self.loss)
        svi.constrain_fn = self.constrain
        values = self._merged(batch.shared, batch.tables)
        given = {_CARRY: {"value": carry}} if self.has_carry else None
        start = SVIState((jnp.array(0), (values, (batch.shared_state, batch.row_states))), given, key)
        state, loss = svi.update(start, users, *args, **kwargs)
        if self.has_carry and (state.mutable_state is None or _CARRY not in state.mutable_state):
            raise ValueError(
                f"ChunkedSVI: with chunk= the loss must hand on what the model returns, and {type(self.loss).__name__} "
                "does not. Use Trace_ELBO() or TraceMeanField_ELBO() with one particle."
            )
        values, states = state.optim_state[1]
        leaves = [jnp.isfinite(x).all() for x in (loss, *jax.tree.leaves(values))]
        carry = state.mutable_state[_CARRY]["value"] if self.has_carry else None
        new = Parameters(*parted(values, self.sites.axes), *states)
        return new, state.rng_key, portion * loss, carry, jnp.stack(leaves).all()

    def _run_rows(
        self,
        parameters: Parameters,
        key: Array,
        rate: Array | float,
        users: Array,
        data: tuple[object, ...],
        arrays: Mapping[str, object],
        setting: Setting,
    ) -> tuple[Parameters, Array, Array, Array]:
        """One step on some rows: parameters, key, loss, and whether it was finite; what was not is not taken."""
        batch = parameters.take(users)
        args, kwargs = jax.tree.map(lambda x: x[users], data), {**arrays, **setting.options}
        new, key, loss, _, good = self._update(batch, key, rate, users, args, kwargs)
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, batch)
        return parameters.put(users, new), key, jnp.where(good, loss, 0.0), good

    def _run_chunks(
        self,
        parameters: Parameters,
        key: Array,
        rate: Array | float,
        users: Array,
        num_chunks: Array,
        events: Events,
        carry: object,
        arrays: Mapping[str, object],
        width: int,
        setting: Setting,
    ) -> tuple[Parameters, Array, Array, Array]:
        """One step for each chunk of some users, in order; from the first that is not finite on nothing is taken."""
        start, length = jnp.asarray(events.starts)[users], jnp.asarray(events.lengths)[users]
        kwargs = {**arrays, **setting.options}

        def body(number: Array, value: Any) -> Any:
            batch, key, carry, total, good = value
            items, mask, _ = chunk_of(events, start, length, number, width)
            dtype = jax.tree.leaves((batch.shared, batch.tables))[0].dtype
            # a chunk has this share of what a prior counts
            weights, share = mask.sum(1).astype(dtype) / length, mask.sum().astype(dtype) / length.sum()
            args = (items, mask, carry)
            new, key, loss, carry, finite = self._update(batch, key, rate, users, args, kwargs, weights, share)
            good = good & finite
            new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, batch)
            return new, key, carry, total + jnp.where(good, loss, 0.0), good

        carry = of_each(carry, users.shape[0])
        initial = (parameters.take(users), key, carry, jnp.zeros(()), jnp.array(True))
        batch, key, _, total, good = lax.fori_loop(0, num_chunks, body, initial)
        return parameters.put(users, batch), key, total, good

    def _seen(
        self, values: dict[str, Array], key: Array, users: Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """Observed sites and the new carry, at one draw of the guide, given parameters of the rows."""
        model_key, guide_key = jax.random.split(key)
        batch = partial(InBatch, None, self.plate, users, self.sites.axes)
        with trace() as latents, seed(rng_seed=guide_key), substitute(data=values), batch():
            self.guide(users, *args, **kwargs)
        draws = replay(trace=latents)
        with trace() as sites, seed(rng_seed=model_key), substitute(data=values), draws, batch():
            carry = self.model(users, *args, **kwargs)
        seen = {name: site for name, site in sites.items() if site["type"] == "sample" and site["is_observed"]}
        return seen, carry

    def _rows_of(self, values: dict[str, Array], users: Array) -> dict[str, Array]:
        axes = self.sites.axes
        return {name: jnp.take(value, users, axes[name]) if name in axes else value for name, value in values.items()}

    def _score(
        self,
        scores: Array,
        values: dict[str, Array],
        key: Array,
        users: Array,
        num_chunks: Array,
        events: Events,
        carry: object,
        arrays: Mapping[str, object],
        width: int,
        setting: Setting,
    ) -> Array:
        """Write the log probability of each event given those before it into ``scores``; users of -1 are nobody."""
        length = jnp.where(users < 0, 0, jnp.asarray(events.lengths)[users])
        users = jnp.maximum(users, 0)
        start, rows = jnp.asarray(events.starts)[users], self._rows_of(values, users)
        kwargs = {**arrays, **setting.options}

        def body(number: Array, value: Any) -> Any:
            carry, scores = value
            items, mask, index = chunk_of(events, start, length, number, width)
            seen, carry = self._seen(rows, key, users, (items, mask, carry), kwargs)
            total = jnp.zeros(mask.shape, scores.dtype)
            for name, site in seen.items():
                log_prob = site["fn"].log_prob(site["value"])
                if log_prob.shape != mask.shape:
                    raise ValueError(
                        f"ChunkedSVI: scores need one log probability for each event, of shape (users, steps) = "
                        f"{mask.shape}; the site {name!r} has {log_prob.shape}."
                    )
                total += log_prob.astype(scores.dtype)
            return carry, scores.at[jnp.where(mask, index, scores.size)].set(total, mode="drop")

        initial = (of_each(carry, users.shape[0]), scores)
        scores = lax.fori_loop(0, num_chunks, body, initial)[1]
        return scores

    def event_scores(
        self, values: dict[str, Array], key: Array, events: Events, batch_size: int, setting: Setting
    ) -> np.ndarray:
        """Log probability of each event given those of its user before it, at one draw of the guide.

        :param values: of the parameters.
        :param events: of all users.
        :return: shape ``(total,)``.
        """
        lengths, on_device = np.asarray(events.lengths), Events(*map(jnp.asarray, events))
        if len(lengths) != self.sites.num_rows and self.sites.axes:
            raise ValueError(f"ChunkedSVI: the fit has {self.sites.num_rows} users; these are {len(lengths)}.")
        scores = jnp.zeros(np.size(events.items))
        assert self.chunk is not None
        for batch in batches_of_events(lengths, batch_size, self.chunk, np.zeros(2 * len(lengths))):
            users = np.pad(batch.users, (0, batch_size - len(batch.users)), constant_values=-1)
            scores = self.score(
                scores,
                values,
                key,
                users,
                batch.num_chunks,
                on_device,
                setting.carry,
                setting.arrays,
                width=batch.width,
                setting=setting,
            )
        return np.asarray(scores, float)

    def _next_logits(
        self,
        values: dict[str, Array],
        key: Array,
        user: Array,
        length: Array,
        items: Array,
        carry: object,
        arrays: Mapping[str, object],
        width: int,
        setting: Setting,
    ) -> Array:
        """Log probabilities of all items after the first ``length`` of ``items``, which has one cell more at least."""
        users, kwargs = user[None], {**arrays, **setting.options}
        rows = self._rows_of(values, users)
        events, start = Events(items, jnp.zeros(1, int), length[None]), jnp.zeros(1, int)

        def body(number: Array, carry: Any) -> Any:
            chunk, mask, _ = chunk_of(events, start, length[None], number, width)
            return self._seen(rows, key, users, (chunk, mask, carry), kwargs)[1]

        last = length // width
        carry = lax.fori_loop(0, last, body, of_each(carry, 1))
        chunk, mask, _ = chunk_of(events, start, length[None] + 1, last, width)
        seen, _ = self._seen(rows, key, users, (chunk, mask, carry), kwargs)
        return jax.nn.log_softmax(logits_of(seen, width)[0, length % width])


def logits_of(sites: Mapping[str, Any], num_steps: int) -> Array:
    """Logits of the one observed site of one user, shape ``(1, steps, items)``."""
    seen = [site["fn"] for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
    while len(seen) == 1 and hasattr(seen[0], "base_dist"):
        seen = [seen[0].base_dist]
    if len(seen) != 1 or not hasattr(seen[0], "logits"):
        raise ValueError("ChunkedFit: probabilities of the next event need one observed site, of a Categorical.")
    return jnp.broadcast_to(seen[0].logits, (1, num_steps, seen[0].logits.shape[-1]))


def of_each(carry: Any, number: int) -> Any:
    """The carry of one user, for each of several."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), carry)
