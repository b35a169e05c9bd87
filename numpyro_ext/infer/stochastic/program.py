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
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.primitives import mutable

from ...compilation.quick_jit import quick_jit
from .chunks import Events, chunk_of
from .devices import OneDevice
from .local_sites import InBatch, Recorder, by_rows, merged, parted
from .sampled_softmax import Candidates, SampledSoftmax, draw_candidates
from .scoring import Scoring, of_each
from .setting import Setting

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


class _Beginning(NamedTuple):
    """Initial values of arguments of some shapes, and what a trace has told of the sites."""

    recorder: Recorder
    svi: SVI
    begin: Callable[..., Any]
    compiled: Callable[..., Any]


class Program(Scoring):
    """Steps of one model and guide by batches, and its answers.

    :param loss: of NumPyro's SVI.
    :param plate: name of the plate whose rows come in batches.
    :param chunk: events of a chunk, for models that take these and return their carry.
    :param sampled_softmax: items that stand for all when a step scores its events; ``None`` for all.
    :param places: of tables and batches.
    """

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
        sampled_softmax: int | None = None,
        places: OneDevice | None = None,
    ) -> None:
        super().__init__(model, guide, plate, chunk, OneDevice() if places is None else places)
        self.sampled_softmax = sampled_softmax
        self.optim, self.loss, self.has_carry = optim, loss, chunk is not None
        # not with an autoguide, which keeps arrays of its first call
        self._compiles_init = guide is None
        init_state = optax.with_extra_args_support(optim).init
        self._state_of, self._states_of = jax.jit(init_state), jax.jit(jax.vmap(init_state))
        self._begun: dict[object, _Beginning] = {}
        self.run_chunks: Callable[..., tuple[Parameters, Array, Array, Array]] = jax.jit(
            self._run_chunks, static_argnames="width", donate_argnums=0
        )
        self.run_rows = jax.jit(self._run_rows, donate_argnums=0)

    def init(
        self,
        key: Array,
        num_rows: int | None,
        users: Array,
        args: tuple[object, ...],
        setting: Setting,
        init_params: Mapping[str, object] | None = None,
        *,
        only_shapes: bool = False,
    ) -> Parameters:
        """Initial parameters; finds the local ones.

        :param users: rows of a first batch.
        :param args: arguments of the model for it.
        :param setting: further arguments of the model.
        :param init_params: values of some parameters to begin at.
        :param bool only_shapes: shapes and types in the place of arrays, which costs no more than a trace.
        :raises ValueError: if a parameter cannot be taken by rows, or the model does not return its carry.
        """
        with self.places.home():
            init_params = init_params and jax.tree.map(jnp.asarray, dict(init_params))
            given = (users, args, init_params, setting)
            shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(given))
            recorder, svi, begin, compiled = self._begun.setdefault(
                (jax.tree.structure(given), shapes), self._beginning(users, args)
            )
            if init_params:
                own = self._own_shapes(key, users, args, setting)
                _check_shapes(jax.tree.map(jnp.shape, init_params), own)
            run = begin if not self._compiles_init else partial(jax.eval_shape, begin) if only_shapes else compiled
            values = run(key, *given)
            bounds = jax.tree.leaves(svi.constrain_fn.args)
            if any(isinstance(bound, jax.core.Tracer) for bound in bounds):  # they were made inside
                values = begin(key, *given)
        self.can_be_kept = not bounds  # these are constants of the programs
        if not self.has_guide and recorder.latents:
            raise ValueError(
                f"ChunkedSVI: the model has latent sites ({', '.join(sorted(recorder.latents))}) and there is no guide."
                " Give one, such as numpyro.infer.autoguide.AutoNormal(model), or make them numpyro.param."
            )
        if not values:
            raise ValueError("ChunkedSVI: there is nothing to train, as neither model nor guide has a param site.")
        self.sites, self.constrain = recorder.local_sites(num_rows), svi.constrain_fn
        if only_shapes:
            whole = by_rows(self.optim, self.sites.axes)
            return jax.eval_shape(lambda x: Parameters(*parted(x, self.sites.axes), *whole.init(x)), values)
        # copies: a model may give the same array to two parameters, and buffers are donated
        shared, values = parted(values, self.sites.axes)
        shared = jax.tree.map(jnp.array, shared)
        # one after the other, so that no two of all tables are held at once
        tables = {name: self.places.owned(values.pop(name)) for name in list(values)}
        shared_state = self._state_of(shared) if shared else ()
        return Parameters(shared, tables, shared_state, self.places.states(self._states_of, tables) if tables else ())

    def _beginning(self, users: Array, args: tuple[Any, ...]) -> _Beginning:
        recorder = Recorder(self.plate, users)
        svi = SVI(self._returning_carry(args[-1] if self.has_carry else None), self.guide, optax.identity(), self.loss)

        def begin(key: Array, users: Array, args: tuple[Any, ...], init_params: Any, setting: Setting) -> Any:
            recorder.rows = users
            with recorder:
                state = svi.init(key, users, *args, init_params=init_params, **setting.kwargs)
                return svi.optim.get_params(state.optim_state)

        return _Beginning(recorder, svi, begin, quick_jit(begin))

    def _own_shapes(
        self, key: Array, users: Array, args: tuple[object, ...], setting: Setting
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters as the model begins them by itself."""
        _, svi, begin, _ = self._beginning(users, args)

        def values() -> dict[str, Array]:
            begun = begin(key, users, args, None, setting)
            found: dict[str, Array] = svi.constrain_fn(begun)
            return found

        # a guide may keep what it is begun with, so that it is begun with arrays
        own = jax.eval_shape(values) if self._compiles_init else values()
        return {name: value.shape for name, value in own.items()}

    def constrained(self, parameters: Parameters) -> dict[str, Array]:
        """Values of all parameters as the model has them."""
        tables = self.places.whole(parameters.tables, self.sites.num_rows)
        with self.places.home():
            local: dict[str, Array] = self.constrain(merged({}, tables, self.sites.axes))
        return {**self.constrain(parameters.shared), **local}

    def owned(self, parameters: Parameters) -> Parameters:
        """Copies that steps may overwrite."""
        tables, states = self.places.owned((parameters.tables, parameters.row_states))
        shared, state = jax.tree.map(jnp.array, (parameters.shared, parameters.shared_state))
        return Parameters(shared, tables, state, states)

    def put(self, parameters: Parameters) -> Parameters:
        """Parameters with their rows on the devices that these belong to."""
        tables, states = self.places.put((parameters.tables, parameters.row_states))
        return parameters._replace(tables=tables, row_states=states)

    def whole(self, parameters: Parameters) -> Parameters:
        """Parameters as one device would have them, from :meth:`put`."""
        tables, states = self.places.whole((parameters.tables, parameters.row_states), self.sites.num_rows)
        return parameters._replace(tables=tables, row_states=states)

    def lend(self, parameters: Parameters, users: np.ndarray) -> tuple[Parameters, Array | None]:
        """Parameters for a compiled step, and where the rows of a batch are in their tables, or ``None``."""
        (tables, states), rows = self.places.lend((parameters.tables, parameters.row_states), users)
        return parameters._replace(tables=tables, row_states=states), rows

    def take_back(self, parameters: Parameters, users: np.ndarray, lent: Parameters) -> Parameters:
        """Parameters after a step that got them by :meth:`lend`."""
        whole, new = ((one.tables, one.row_states) for one in (parameters, lent))
        tables, states = self.places.take_back(whole, users, new)
        return lent._replace(tables=tables, row_states=states)

    def values_to_validate(self, parameters: Parameters) -> dict[str, Array]:
        """Values of all parameters that the validation is scored at."""
        return self.constrained(parameters)

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
        candidates: Candidates | None = None,
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
        if candidates is not None:
            model = SampledSoftmax(model, candidates)
        svi = SVI(model, guide, optim, self.loss)
        svi.constrain_fn = self.constrain
        values = merged(batch.shared, batch.tables, self.sites.axes)
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
        setting: Setting,
        rows: Array | None = None,
    ) -> tuple[Parameters, Array, Array, Array]:
        """One step on some rows: parameters, key, loss, and whether it was finite; what was not is not taken.

        :param rows: where they are in the tables, from :meth:`lend`.
        """
        users = self.places.divided(users)
        rows = users if rows is None else rows
        batch = parameters.take(rows)
        args = jax.tree.map(lambda x: x[users], data)
        new, key, loss, _, good = self._update(batch, key, rate, users, args, setting.kwargs)
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, batch)
        return self._put_back(parameters, rows, new), key, jnp.where(good, loss, 0.0), good

    def _put_back(self, parameters: Parameters, rows: Array, batch: Parameters) -> Parameters:
        new = parameters.put(rows, batch)
        tables, states = self.places.divided((new.tables, new.row_states))
        return new._replace(tables=tables, row_states=states)

    def _run_chunks(
        self,
        parameters: Parameters,
        key: Array,
        rate: Array | float,
        users: Array,
        num_chunks: Array,
        events: Events,
        setting: Setting,
        log_proposal: Array | None = None,
        rows: Array | None = None,
        *,
        width: int,
    ) -> tuple[Parameters, Array, Array, Array]:
        """One step for each chunk of some users, in order; from the first that is not finite on nothing is taken.

        :param log_proposal: of candidates for the softmax, where these stand for all items.
        :param rows: where the users are in the tables, from :meth:`lend`.
        """
        users = self.places.divided(users)
        rows = users if rows is None else rows
        start, length = jnp.asarray(events.starts)[users], jnp.asarray(events.lengths)[users]
        kwargs = setting.kwargs

        def body(number: Array, value: Any) -> Any:
            batch, key, carry, total, good = value
            items, mask, _ = chunk_of(events, start, length, number, width)
            dtype = jax.tree.leaves((batch.shared, batch.tables))[0].dtype
            # a chunk has this share of what a prior counts
            weights, share = mask.sum(1).astype(dtype) / length, mask.sum().astype(dtype) / length.sum()
            args, candidates = (items, mask, carry), None
            if self.sampled_softmax is not None and log_proposal is not None:
                own_key = jax.random.fold_in(key, 1)  # SVI.update splits the key itself
                candidates = draw_candidates(own_key, self.sampled_softmax, events, log_proposal)
            given = (args, kwargs, weights, share, candidates)
            new, key, loss, carry, finite = self._update(batch, key, rate, users, *given)
            good = good & finite
            new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, batch)
            return new, key, carry, total + jnp.where(good, loss, 0.0), good

        carry = of_each(setting.carry, users.shape[0])
        initial = (parameters.take(rows), key, carry, jnp.zeros(()), jnp.array(True))
        batch, key, _, total, good = lax.fori_loop(0, num_chunks, body, initial)
        return self._put_back(parameters, rows, batch), key, total, good


def _check_shapes(given: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse values of parameters that the model does not have, or has with another shape."""
    unknown = sorted(set(given) - set(shapes))
    if unknown:
        raise ValueError(
            f"ChunkedSVI: init_params has {', '.join(map(repr, unknown))}, and the parameters are "
            f"{', '.join(map(repr, shapes))}."
        )
    for name, shape in given.items():
        if shape != shapes[name]:
            raise ValueError(
                f"ChunkedSVI: init_params has {name!r} with the shape {shape}, and the model has it with "
                f"{shapes[name]}. Parameters of a network begin one of the same width, items and users."
            )
