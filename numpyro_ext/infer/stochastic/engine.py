"""Engine of stochastic variational inference by minibatches and by chunks of sequences."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpyro.infer import Trace_ELBO

from ...structure.model.running.execution import check_key
from ..front.files.archive import read_archive
from .data import Rows, Sequences
from .devices import Host, OneDevice, SeveralDevices, checked_devices
from .fit import ChunkedFit, TrainingState
from .labels import Labels
from .local_sites import LocalSites, check_by_rows, check_first_steps
from .personal.laplace import LaplaceProgram
from .program import Program
from .setting import Setting
from .training import Checkpoint, Training


class ChunkedSVI:
    """NumPyro's SVI by minibatches that move only the rows they touch, for a plate's rows or for sequences in chunks.

    ``param`` sites in the plate with ``event_dim`` are local: they have a row for each member, and so do their
    optimiser's states. A step gathers the rows of its batch, runs ``SVI.update`` at that number and writes them back,
    so that its cost does not depend on the size of the plate, and rows that were not seen stay as they were. Local
    parameters take the gradient of their own rows, shared ones that of the batch scaled up by the plate.

    **Rows.** Without ``chunk`` the data are an array, or a tuple of arrays, with one row for each member of the plate.
    The model is called as ``model(members, *rows, **kwargs)`` with the indices of the batch, which the plate gets too;
    it writes ``numpyro.plate(name, size, subsample_size=len(members))``.

    **Sequences.** With ``chunk`` the data are sequences of events, and the model is called as ``model(users, events,
    mask, carry, *, num_users, num_items, **kwargs)`` with items of shape ``(users, steps)``, where these are events,
    and what the chunk before returned. It returns its new carry, through which no gradient goes (truncated
    backpropagation). Each chunk is one step, to which priors count by its share of the events. Users of like length
    come together.

    **People integrated out.** With ``local="laplace"`` a person is one standard normal latent site in the plate, of few
    numbers, and there is no guide. The loss is minus Laplace's approximation of the log evidence of the batch's people:
    each is a Gaussian at the mode of her numbers, and what is shared is learned with her
    integrated out (empirical Bayes). A step takes whole sequences, so its gradient is not truncated; ``chunk`` only
    sets the lengths that they are padded to. The Gaussians are kept as tables, ``NAME_mean`` and ``NAME_root`` (root of
    the covariance) of the site ``NAME``, and predictions draw from them; a validation is scored at the modes.

    **Many items.** With ``sampled_softmax=n`` a step scores its events against ``n`` items drawn for it, half of them
    uniformly and half as often as they occur, in the place of all; the sum of the softmax is without bias, its
    logarithm has one of the order ``1 / n``, downwards. The observed site is a
    :class:`~numpyro_ext.distributions.LinearCategorical`. Validation, scores and predictions are of all items, so that
    the two errors of a fit differ by that bias (``fit.losses`` and ``fit.validation_errors``).

    **Example:**

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> import optax
    >>> from jax import random
    >>> from numpyro_ext.infer import ChunkedSVI
    >>> def rates(shops, sales, num_shops):
    ...     with numpyro.plate("shops", num_shops, subsample_size=len(shops)):
    ...         rate = numpyro.param("rate", jnp.ones(num_shops), constraint=dist.constraints.positive, event_dim=0)
    ...         numpyro.sample("sales", dist.Poisson(rate), obs=sales)
    >>> engine = ChunkedSVI(rates, optim=optax.adam(0.1), plate="shops", batch_size=2, progress_bar=False)
    >>> fit = engine.run(random.key(0), np.array([2, 4, 6]), num_epochs=300, num_shops=3)
    >>> print(np.round(fit.params["rate"]))
    [2. 4. 6.]

    :param model: NumPyro model.
    :param guide: guide of its latent sites, autoguides as well; without one, ``param`` sites are fitted by maximum
        likelihood.
    :param optim: optax optimiser whose steps of one row do not depend on other rows. One whose first steps are ten
        times too long is warned of, as ``optax.rmsprop(0.0075, decay=0.997)`` without ``bias_correction=True``.
    :param loss: loss of NumPyro's SVI.
    :param str plate: name of the plate that comes in batches.
    :param int batch_size: members of a batch. With 1 and ``chunk``, this is gradient descent user by user.
    :param chunk: events of a step.
    :param local: ``"laplace"`` for the evidence of the members' latent site, above; ``None`` for SVI by the guide.
    :param sampled_softmax: items that stand for all in training, above; by default all are scored.
    :param max_chunks: only the last ``max_chunks * chunk`` events of each user are trained on.
    :param devices: between which members are divided, such as ``jax.devices()``: each has its rows of all tables and
        computes its part of a batch, and what is shared takes the same step on all. ``batch_size`` is a multiple of
        their number. By default JAX's default device.
    :param tables: ``"host"`` for tables that are larger than the device: local parameters and their optimiser's states
        stay in the host's memory as arrays of NumPy, and the rows of a batch travel. Numbers are the same.
    :param bool progress_bar: show a bar.
    :raises TypeError: for an optimiser that is not optax's.
    :raises ValueError: for numbers that are not positive.

    **Cost:** a step is one of SVI on the batch. Memory is that of the tables and of the optimiser's state, and the
    tables once more for the best on validation. A step with ``local="laplace"`` is some Newton steps of ``K + 1``
    forward passes for ``K`` numbers of a person, and about ``5 K`` for the gradient; its memory is ``K`` times the
    logits of one person's events.

    **Source:** Hoffman, Blei, Wang and Paisley (2013), *Stochastic variational inference*; for chunks Ko (2017),
    thesis, section 3.3, algorithms 7 and 8.
    """

    def __init__(
        self,
        model: Callable[..., object],
        guide: Callable[..., object] | None = None,
        optim: optax.GradientTransformation | None = None,
        loss: object = None,
        *,
        plate: str,
        batch_size: int,
        chunk: int | None = None,
        local: Literal["laplace"] | None = None,
        max_chunks: int | None = None,
        sampled_softmax: int | None = None,
        devices: Sequence[jax.Device] | None = None,
        tables: Literal["device", "host"] = "device",
        progress_bar: bool = True,
    ) -> None:
        if not isinstance(optim, optax.GradientTransformation):
            raise TypeError(f"ChunkedSVI: optim is an optax optimiser, such as optax.adam(0.01); got {optim!r}.")
        counts = {"batch_size": batch_size, "chunk": chunk, "max_chunks": max_chunks}
        for name, value in {**counts, "sampled_softmax": sampled_softmax}.items():
            if (value is not None or name == "batch_size") and not _is_count(value):
                raise ValueError(f"ChunkedSVI: {name} is a positive integer; got {value!r}.")
        if max_chunks is not None and chunk is None:
            raise ValueError("ChunkedSVI: max_chunks needs chunk=.")
        if chunk is not None and getattr(loss, "num_particles", 1) != 1:
            raise ValueError("ChunkedSVI: with chunk= there is one carry, so the loss has one particle.")
        if local not in (None, "laplace"):
            raise ValueError(f'ChunkedSVI: local is None or "laplace"; got {local!r}.')
        if local is not None and (guide is not None or loss is not None or chunk is None):
            raise ValueError(
                'ChunkedSVI: local="laplace" makes its own Gaussians and loss, for sequences: give chunk=, and neither '
                "guide nor loss."
            )
        if sampled_softmax is not None and (chunk is None or local is not None):
            raise ValueError(
                "ChunkedSVI: sampled_softmax= is for sequences trained by chunks: give chunk=, and no local=."
            )
        if tables not in ("device", "host"):
            raise ValueError(f'ChunkedSVI: tables is "device" or "host"; got {tables!r}.')
        if tables == "host" and devices is not None:
            raise ValueError(
                'ChunkedSVI: with devices= each device has its rows of the tables; with tables="host" none has. Leave '
                "one of them out."
            )
        check_first_steps(optim)
        self.model, self.guide, self.optim, self.plate, self.local = model, guide, optim, plate, local
        self.loss = Trace_ELBO() if loss is None else loss
        self.batch_size, self.progress_bar = int(batch_size), progress_bar
        self.chunk = None if chunk is None else int(chunk)
        self.max_chunks = None if max_chunks is None else int(max_chunks)
        self.sampled_softmax = None if sampled_softmax is None else int(sampled_softmax)
        self.devices = None if devices is None else checked_devices(devices, self.batch_size, local)
        self.tables = tables
        self._kept: tuple[object, Program] | None = None

    def run(
        self,
        rng_key: Array,
        data: object,
        *,
        num_epochs: int,
        carry: object = None,
        patience: int | None = None,
        init_params: Mapping[str, object] | None = None,
        init_state: TrainingState | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_minutes: float = 10.0,
        **kwargs: object,
    ) -> ChunkedFit:
        """Train.

        An interrupt from the keyboard ends the run after the batch that is being computed, and what it has is returned.
        A step whose loss or parameters are not finite is not taken, nor the rest of its batch, and the rate is halved;
        the third time the run ends. Both are warned of and told by ``fit.stopped``. A loss that ends far above that of
        the first epoch is warned of, too.

        :param rng_key: key of the initial values, the order of batches and the draws of the guide.
        :param data: rows, or sequences with ``items``, ``starts``, ``lengths`` and ``num_items``. A split (``train``
            and ``validation``) is scored on its validation after each epoch, and the best parameters are kept.
        :param int num_epochs: passes over the data, those of ``init_state`` among them.
        :param carry: state of one user before the first event, an array or a tree of arrays; by default zeros of the
            shape ``(width,)``, where ``width`` is an argument of the model.
        :param patience: epochs without a better validation after which to stop; by default all are run.
        :param init_params: values of some ``param`` sites to begin at, such as ``fit.params`` of a simpler model.
        :param init_state: ``fit.last_state`` of a run on the same data with the same options, to go on from: what
            comes is what an uninterrupted run would have computed, bit for bit.
        :param checkpoint: path of a file that the state is written to; if it exists, the run goes on from it.
        :param float checkpoint_minutes: minutes between two writes; it is written at the end as well.
        :param kwargs: further arguments of the model.
        :return: the fit.
        :raises TypeError: within a transformation of JAX.
        :raises ValueError: if the data or the state do not fit the model, or a parameter cannot be taken by rows; the
            message says what to write.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((rng_key, data, kwargs))):
            raise TypeError(
                "ChunkedSVI.run is a loop over batches in Python, so it cannot be called within jax.jit, vmap or grad, "
                "where data have no values."
            )
        check_key(rng_key, "run(jax.random.key(0), data, num_epochs=10)", "comes first")
        for name, value in (("num_epochs", num_epochs), ("patience", patience)):
            if not (_is_count(value) or (value is None and name == "patience")):
                raise ValueError(f"ChunkedSVI.run: {name} is a positive integer; got {value!r}.")
        source: Rows | Sequences = Sequences.of(data, self.chunk, self.max_chunks) if self.chunk else Rows.of(data)
        if isinstance(source, Sequences):
            kwargs = {"num_users": source.num_rows, "num_items": source.num_items, **kwargs}
            if carry is None and not _is_count(kwargs.get("width")):
                raise ValueError(
                    "ChunkedSVI.run: give the carry of one user before the first event, such as carry=jnp.zeros(32). "
                    "Only for models with an argument width it is zeros of that number by default."
                )
            carry = jnp.zeros(kwargs["width"]) if carry is None else jax.tree.map(jnp.asarray, carry)
        elif carry is not None:
            raise ValueError("ChunkedSVI.run: there is no carry without chunk=.")
        if patience is not None and source.validation is None:
            raise ValueError("ChunkedSVI.run: patience needs a validation, as a split of sequences has.")
        setting = Setting.of(kwargs, carry, source.num_rows)
        if checkpoint is not None and Path(checkpoint).exists():
            init_state = TrainingState.unpacked(read_archive(checkpoint)["training"])
        program = self._program(setting)
        state = self._begin(program, rng_key, source, setting, init_params, init_state)
        file = None if checkpoint is None else Checkpoint(Path(checkpoint), checkpoint_minutes)
        training = Training(program, source, setting, self.batch_size, state, file)
        stopped = training.run(int(num_epochs), patience, self.progress_bar)
        state = training.whole_state
        best = state.parameters if state.best is None else state.parameters._replace(**state.best)
        params, notes = program.constrained(best), (*source.notes, *training.notes)
        if isinstance(program, LaplaceProgram) and isinstance(source, Sequences):
            params, more = program.settled(params, source.events, self.batch_size, setting)
            notes = (*notes, *more)
        labels = Labels.learned(data) if self.chunk else Labels()
        return ChunkedFit(program, self.batch_size, params, state, stopped, notes, setting, labels)

    def load(self, path: str | os.PathLike[str]) -> ChunkedFit:
        """Fit from a file of :meth:`ChunkedFit.save`, by an engine of the same model and options.

        :param path: of the file.
        """
        content = read_archive(path)
        if "params" not in content:
            raise ValueError(f"{os.fspath(path)!r} is no fit of ChunkedSVI: a checkpoint is for run(checkpoint=...).")
        setting = Setting.of(**content["setting"])
        program = self._program(setting)
        program.sites = LocalSites(content["axes"], setting.num_rows)
        state = TrainingState.unpacked(content["training"])
        ended, labels = (content["stopped"], tuple(content["notes"])), Labels(**content.get("labels", {}))
        return ChunkedFit(program, self.batch_size, content["params"], state, *ended, setting, labels)

    def _program(self, setting: Setting) -> Program:
        """Compiled programs, those of the last run if its setting was the same."""
        if self._kept is None or self._kept[0] != setting.constants or not self._kept[1].can_be_kept:
            places = Host() if self.tables == "host" else OneDevice()
            if self.local == "laplace":
                program: Program = LaplaceProgram(self.model, self.optim, self.plate, self.chunk, places)
            else:
                given = (self.model, self.guide, self.optim, self.loss, self.plate, self.chunk)
                places = places if self.devices is None else SeveralDevices(self.devices)
                program = Program(*given, self.sampled_softmax, places)
            self._kept = (setting.constants, program)
        return self._kept[1]

    def _begin(
        self,
        program: Program,
        rng_key: Array,
        source: Rows | Sequences,
        setting: Setting,
        init_params: Mapping[str, object] | None,
        given: TrainingState | None,
    ) -> TrainingState:
        """State to begin with, from the model or from one that is given."""
        init_key, order_key, key = jax.random.split(rng_key, 3)
        users, args = source.first(self.batch_size, setting.carry)
        begin = partial(program.init, init_key, source.num_rows, users, args, setting, init_params)
        parameters = begin(only_shapes=given is not None)
        if program.sites.axes:
            check_by_rows(self.optim)
        if given is None:
            return TrainingState(parameters, None, 0, key, order_key, 1.0, 0, 0, 0, 0.0, 0, (), (), source.digest())
        found, structure = jax.tree.leaves(given.parameters), jax.tree.structure(parameters)
        wanted = jax.tree.leaves(parameters)
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in wanted]:
            raise ValueError(
                "ChunkedSVI.run: init_state (or the checkpoint) is of another model, optimiser or number of rows: its "
                f"arrays have the shapes {[x.shape for x in found]}, and these have {[x.shape for x in wanted]}."
            )
        if given.digest not in ("", source.digest()):  # files of before have none
            raise ValueError(
                "ChunkedSVI.run: init_state (or the checkpoint) is of a run on other data of this size. Give the same "
                "data, or begin anew at its values with init_params=fit.params."
            )
        return given._replace(parameters=program.owned(jax.tree.unflatten(structure, found)))


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value > 0)
