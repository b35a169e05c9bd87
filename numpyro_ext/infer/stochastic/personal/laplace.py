"""Steps on the Laplace evidence of a batch's people: what all share is learned with each person integrated out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, lax
from numpyro.handlers import block, seed, trace
from numpyro.infer import Trace_ELBO

from ..chunks import Events, batches_of_events, chunk_of
from ..devices import OneDevice
from ..local_sites import by_rows, merged, parted, personal_site
from ..program import Parameters, Program
from ..setting import Setting
from .people import Given, Mode, PersonalPosterior

_CALLER = 'ChunkedSVI(local="laplace")'


class LaplaceProgram(Program):
    """Program whose steps raise the Laplace evidence of a batch of people.

    The Gaussians of the people are rows of tables, from which searches go on, and which make a guide for scores and
    predictions.
    """

    def __init__(
        self,
        model: Callable[..., object],
        optim: optax.GradientTransformation,
        plate: str,
        chunk: int | None,
        places: OneDevice | None = None,
    ) -> None:
        super().__init__(model, _gaussians(model, plate), optim, Trace_ELBO(), plate, chunk, None, places)
        self._step = jax.jit(self._evidence_step, static_argnames="length", donate_argnums=0)
        self._modes = jax.jit(self._modes_of, static_argnames="length", donate_argnums=0)
        self.run_chunks = self._run_people
        self._compiles_init = True
        self.people: PersonalPosterior

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
        # arrays in any case, which have their shapes: the model is looked at with them
        parameters = super().init(key, num_rows, users, args, setting, init_params)
        given = Given(self.constrain(parameters.shared), setting)
        self.people = PersonalPosterior(self, given, _CALLER)
        self.people.look_at_steps(given)
        return parameters

    def values_to_validate(self, parameters: Parameters) -> dict[str, Array]:
        """Values of all parameters without spread of the people, who are scored at their modes."""
        values, name = self.constrained(parameters), f"{self.people.name}_root"
        with self.places.home():
            return {**values, name: jnp.zeros_like(values[name])}

    def _run_people(
        self,
        parameters: Parameters,
        key: Array,
        rate: Array | float,
        users: Array,
        num_chunks: int,
        events: Events,
        setting: Setting,
        rows: Array | None = None,
        *,
        width: int,
    ) -> tuple[Parameters, Array, Array, Array]:
        """One step on whole sequences of some users: parameters, key, minus their evidence, and whether all is finite.

        Sequences are padded to few lengths, as each is a program.
        """
        given = (users, users if rows is None else rows, events, setting, _padded(width, num_chunks))
        parameters, loss, good = self._step(parameters, rate, *given)
        return parameters, key, loss, good

    def _evidence_step(
        self,
        parameters: Parameters,
        rate: Array | float,
        users: Array,
        rows: Array,
        events: Events,
        setting: Setting,
        length: int,
    ) -> tuple[Parameters, Array, Array]:
        batch, scale = parameters.take(rows), self.sites.num_rows / users.shape[0]

        def loss(shared: dict[str, Array], person: tuple[Array, ...]) -> tuple[Array, Mode]:
            value, mode = self.people.evidence(Given(self.constrain(shared), setting), *person)
            return -value, mode

        def add(total: Any, person: tuple[Array, ...]) -> tuple[Any, Mode]:
            # one after the other, so that memory is that of one person
            (value, mode), grads = jax.value_and_grad(loss, has_aux=True)(batch.shared, person)
            return jax.tree.map(jnp.add, total, (value, grads)), mode

        initial = (
            jnp.zeros_like(jax.tree.leaves(batch.shared)[0], shape=()),
            jax.tree.map(jnp.zeros_like, batch.shared),
        )
        (value, grads), modes = lax.scan(add, initial, self._people_of(batch.tables, users, events, length))
        state = (batch.shared_state, ())
        grads = jax.tree.map(lambda x: scale * x, grads)
        steps, (shared_state, _) = by_rows(self.optim, {}, rate=rate).update(
            grads, state, batch.shared, value=scale * value
        )
        shared = optax.apply_updates(batch.shared, steps)
        new = batch._replace(shared=shared, shared_state=shared_state, tables=self._rows_of_modes(batch.tables, modes))
        good = jnp.stack([jnp.isfinite(x).all() for x in (value, *jax.tree.leaves((new.shared, new.tables)))]).all()
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, batch)
        return parameters.put(rows, new), jnp.where(good, value, 0.0), good

    def _people_of(
        self, tables: dict[str, Array], users: Array, events: Events, length: int
    ) -> tuple[Array, Array, Array]:
        """Latent numbers to begin at, items and number of events of each user."""
        start, number = jnp.asarray(events.starts)[users], jnp.asarray(events.lengths)[users]
        items, _, _ = chunk_of(events, start, number, jnp.array(0), length)
        return tables[f"{self.people.name}_mean"].reshape(len(users), -1), items, number

    def _rows_of_modes(self, tables: dict[str, Array], modes: Mode) -> dict[str, Array]:
        names = (f"{self.people.name}_mean", f"{self.people.name}_root")
        values = (modes.mean, jax.vmap(covariance_root)(modes.precision))
        return {name: value.reshape(tables[name].shape) for name, value in zip(names, values, strict=True)}

    def _modes_of(
        self,
        tables: dict[str, Array],
        shared: dict[str, Array],
        users: Array,
        rows: Array,
        events: Events,
        setting: Setting,
        length: int,
    ) -> tuple[dict[str, Array], Array]:
        """Tables with some users at their modes, and which of the searches ended there."""
        own = jax.tree.map(lambda x: x[rows], tables)
        people = self._people_of(own, users, events, length)
        modes = lax.map(lambda person: self.people.mode(Given(shared, setting), *person), people)
        new = self._rows_of_modes(own, modes)
        return jax.tree.map(lambda x, y: x.at[rows].set(y), tables, new), modes.converged

    def settled(
        self, values: dict[str, Array], events: Events, batch_size: int, setting: Setting
    ) -> tuple[dict[str, Array], tuple[str, ...]]:
        """Values of the parameters with the Gaussians of all people at these, and a note on those not found."""
        assert self.chunk is not None
        lengths, failed = np.asarray(events.lengths), 0
        shared, tables = parted(values, self.sites.axes)
        tables = self.places.owned(tables)
        for batch in batches_of_events(lengths, batch_size, self.chunk, np.zeros(2 * len(lengths))):
            users, length = jnp.asarray(batch.users), _padded(batch.width, batch.num_chunks)
            lent, rows = self.places.lend(tables, batch.users)
            given = (shared, users, users if rows is None else rows, events, setting, length)
            lent, converged = self._modes(lent, *given)
            tables = self.places.take_back(tables, batch.users, lent)
            failed += int((~converged).sum())
        note = (
            f"the modes of {failed} of {len(lengths)} people were not found; their Gaussians are where the search ended"
        )
        return merged(shared, tables, self.sites.axes), (note,) if failed else ()


def covariance_root(precision: Array) -> Array:
    """Lower triangular root of the inverse of a curvature, which is no less than that of the prior."""
    values, vectors = jnp.linalg.eigh(precision)
    root = jnp.linalg.qr((vectors / jnp.sqrt(jnp.maximum(values, 1.0))).T, mode="r").T
    return root * jnp.sign(jnp.diagonal(root))


def _padded(width: int, num_chunks: int) -> int:
    return int(width * 2 ** (int(num_chunks) - 1).bit_length())


def _gaussians(model: Callable[..., Any], plate: str) -> Callable[..., None]:
    """Guide with a Gaussian for each member: tables of its mean and of the root of its covariance."""

    def guide(members: Any, *args: Any, **kwargs: Any) -> None:
        with block(), trace() as sites, seed(rng_seed=0):
            model(members, *args, **kwargs)
        site = personal_site(sites, plate, _CALLER)
        dim = next(frame.dim for frame in site["cond_indep_stack"] if frame.name == plate)
        size, num_rows = int(np.prod(site["fn"].event_shape)), sites[plate]["args"][0]
        shape = (num_rows, *(1,) * (-dim - 1), size)
        with numpyro.plate(plate, num_rows, subsample_size=len(members), dim=dim):
            mean = numpyro.param(f"{site['name']}_mean", jnp.zeros(shape), event_dim=1)
            start = jnp.broadcast_to(jnp.eye(size), (*shape, size))
            root = numpyro.param(f"{site['name']}_root", start, event_dim=2)
            is_vector = len(site["fn"].event_shape) == 1
            vector = dist.MultivariateNormal(mean, scale_tril=root)
            numpyro.sample(site["name"], vector if is_vector else dist.Normal(mean[..., 0], root[..., 0, 0]))

    return guide
