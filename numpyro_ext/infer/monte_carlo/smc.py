"""Sequential Monte Carlo for any NumPyro model with proper priors: draws, and a log evidence with its error."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax import Array

from ...structure.model.running.execution import check_key
from ..front.files.kept_run import KeptRun
from ..front.labels import Coords, Dims, Labels, labels_of_call
from ..front.options import check_at_least, check_one_of, device_tuple, plain_number
from ..front.running.progress import progress_bar, warn
from ..front.state import data_digest
from .answers import Answers, shapes
from .checkpoints import resumed_state, state_content, state_of, write_state
from .kernels.moves import AnyKernel, Movement, kernel_for
from .kernels.path import Ladder, PathName
from .kernels.steps import Compiled, Programs, divided
from .program import SMCProgram, read_changing
from .run import MOST_STEPS, SMCRun, SMCState, impossible_data, no_history, record
from .target import Target
from .verification import check_target, refuse_other_priors

_MOST_MOVES = 300
_CORRELATION = 0.1
_PARENTS = 20
_RECENT: deque[Programs] = deque(maxlen=8)
"""Programs that were compiled last, for other samplers of the same model."""


class SMC(Answers, KeptRun):
    """Sequential Monte Carlo (Del Moral, Doucet and Jasra 2006; Chopin 2002), for models of any algebra.

    Particles are drawn from the prior and led to the posterior by a sequence of distributions, each so near to the one
    before that the weights of the particles stay even. At each, the particles are resampled and moved by a Markov
    kernel until they have forgotten where they were. The mean weights estimate the evidence, consistently as particles
    grow in number. So this is a judge of the deterministic engines and of NUTS: it finds several modes, where their
    basins hold particles of the prior, and says how wrong its evidence may be. A kernel that hardly moves is reported.

    Needs a proper prior for every latent site, and continuous ones; anything else of NumPyro is allowed. Discrete
    sites are to be summed out in the model. Locations and scales are taken out of sites before they are moved, so that
    centred models are sampled as their non-centred twins.

    Cost: ``num_particles`` times moves times steps evaluations of the model, side by side; steps grow with the
    information in the data, moves with the number of dimensions. All are in ``smc.history``.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.infer import SMC
    >>> def model(y):
    ...     level = numpyro.sample("level", dist.Normal(0, 1))
    ...     numpyro.sample("y", dist.Normal(level, 1), obs=y)
    >>> smc = SMC(model, num_particles=2000)
    >>> smc.run(random.key(0), jnp.array([0.5, 1.5, 1.0]))
    >>> abs(smc.log_evidence + 4.0750) < 3 * smc.log_evidence.standard_error  # the exact value
    True
    >>> smc.update(jnp.array([0.5, 1.5, 1.0, 0.2, 0.8]))  # two more
    >>> print(smc.get_samples()["level"].mean().round(1))
    0.7

    :param model: a NumPyro model.
    :param int num_particles: draws that go side by side, at least two.
    :param str path: how the data come in: ``"tempered"``, all of them to a power that grows from zero to one, or
        ``"data"``, one after the other along the leading axis of the observed sites.
    :param str kernel: ``"elliptical-slice"`` (Nishihara, Murray and Adams 2014), through draws from a Student
        distribution with the mean and covariance of the particles; ``"hmc"`` and ``"nuts"``, whose metric is that
        covariance; ``"random-walk"``, scaled by it; ``"pcn"``, preconditioned Crank-Nicolson (Cotter et al. 2013), for
        Gaussian priors. Steps of the last two are tuned to an acceptance of 0.27. ``"auto"``: slices up
        to 5 dimensions, HMC above. Slices need at least 40 particles for each of the squared dimensions.
    :param float ess_threshold: share of the particles that the effective sample size may fall to before they are
        resampled.
    :param int num_moves: of every particle after each resampling; by default as many as it takes until no coordinate's
        correlation with its start, nor that of the log likelihood, is above 0.1 (few particles: above what chance makes
        of it), at most 300.
    :param bool waste_free: keep all places that the moves visit as particles (Dau and Chopin 2022), so that
        ``num_particles / (num_moves + 1)`` particles are resampled; moves should then be many, 19 by default.
    :param watch: latent or deterministic sites whose elements decide how long moves go on and whether they were enough;
        all latent sites by default. Name what is identified where latent sites are not (rotations, labels, scales that
        cancel).
    :param dict hyper_values: values of latent and ``param`` sites that are given.
    :param int num_samples: draws made for :meth:`get_samples`; as many as there are particles by default.
    :param Sequence devices: over which particles are divided evenly; one by default.
    :param bool progress_bar: whether runs longer than a second show a bar.
    :param dict coords: labels of the places along a dimension, by its name, as ArviZ takes them.
    :param dict dims: names of the dimensions of a site, by its name; those of plates have them by themselves.
    :raises ValueError: for options outside their range.
    """

    def __init__(
        self,
        model: Callable[..., object],
        *,
        num_particles: int = 1000,
        path: PathName = "tempered",
        kernel: AnyKernel = "auto",
        ess_threshold: float = 0.5,
        num_moves: int | None = None,
        waste_free: bool = False,
        watch: str | Sequence[str] | None = None,
        hyper_values: Mapping[str, object] | None = None,
        num_samples: int | None = None,
        devices: Sequence[object] | None = None,
        progress_bar: bool = True,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be a callable with NumPyro primitives, got {type(model).__name__}.")
        num_particles, num_moves, num_samples = map(plain_number, (num_particles, num_moves, num_samples))
        check_at_least(2, num_particles=num_particles)
        check_one_of(PathName, path=path)
        check_one_of(AnyKernel, kernel=kernel)
        if isinstance(ess_threshold, str) or not 0.0 < ess_threshold < 1.0:
            raise ValueError(f"ess_threshold is a share of the particles between 0 and 1, got {ess_threshold!r}.")
        if num_moves is not None:
            check_at_least(1, num_moves=num_moves)
        if num_samples is not None:
            check_at_least(1, num_samples=num_samples)
        if not isinstance(hyper_values or {}, Mapping):
            raise TypeError(f"hyper_values are a dictionary of values by the names of sites, got {hyper_values!r}.")
        self.model, self.num_particles, self.path, self.kernel = model, num_particles, path, kernel
        self.ess_threshold, self.num_moves, self.waste_free = float(ess_threshold), num_moves, waste_free
        self.watch = (watch,) if isinstance(watch, str) else tuple(watch or ())
        self.hyper_values = dict(hyper_values or {})
        self.num_samples = num_particles if num_samples is None else num_samples
        self.devices, self.progress_bar = device_tuple(devices), progress_bar
        given = Labels.given(coords, dims)
        self.coords, self.dims = given.coords, given.dims
        if waste_free:
            each = (_PARENTS - 1 if num_moves is None else num_moves) + 1
            if num_particles % each or num_particles // each < 2:
                raise ValueError(
                    f"Waste-free runs keep {each} places of every parent: num_particles must be a multiple of {each} "
                    f"and at least {2 * each}, got {num_particles}."
                )
        if self.devices and num_particles % len(self.devices):
            raise ValueError(f"{num_particles} particles cannot be divided evenly over {len(self.devices)} devices.")
        self._run = None
        self._stopped: SMCState | None = None

    # Running

    def run(
        self,
        rng_key: Array,
        *args: object,
        init_state: SMCState | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        coords: Coords | None = None,
        dims: Dims | None = None,
        **kwargs: object,
    ) -> None:
        """Draw particles from the prior and lead them to the posterior given these arguments.

        Ctrl-C leaves the particles where they are, on the way: results are then of the model with its data to a power,
        and a warning says so. A run that fails leaves no results, and not those of the run before.

        :param rng_key: random number generator key.
        :param args: arguments of the model.
        :param SMCState init_state: ``last_state`` of a run on the same data that was interrupted: it goes on as if it
            had not been.
        :param checkpoint: path of a file that is written after every step. If it exists, the run goes on from it.
        :param dict coords: labels of the places along a dimension, by its name, as ArviZ takes them, beside those of
            the constructor. A model that has an argument of this name gets it.
        :param dict dims: names of the dimensions of a site, by its name, likewise.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model has sites that cannot be sampled: which, and what to do.
        :raises ValueError: if no particle explains the data (which datum), or a state is of another run.
        """
        kwargs, labels = labels_of_call(self.model, kwargs, coords, dims)
        with self._running(rng_key, args, kwargs):
            target = Target(self.model, rng_key, args, kwargs, self.hyper_values)
            programs = self._programs_of(target)
            digest = self._digest(target, rng_key)
            state = resumed_state(digest, (self.num_particles, target.size), init_state, checkpoint)
            if state is None:
                keys = jax.random.split(jax.random.fold_in(rng_key, 0), self.num_particles)
                with progress_bar(1, "SMC", enabled=self.progress_bar):  # says that it compiles
                    particles = programs.draw(divided(keys, self.devices), target.data)
                check_target(target, particles.vectors)
                target.check_left_out(particles.vectors[0])
                state = SMCState(particles, no_history(), 0, digest)
            state = self._go(rng_key, state, programs, target, None, checkpoint)
            self._keep(SMCRun(programs, target, state, rng_key, self.num_samples), labels)

    def update(
        self,
        *args: object,
        rng_key: Array | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        **kwargs: object,
    ) -> None:
        """Take in other data of the same model: more rows, another mask, larger counts.

        The particles are weighed by what the likelihood has changed by; where that leaves too few of them, they are
        led there by steps. Priors may not depend on what changes. Arrays of the same shapes compile nothing. Arrays
        that have more rows are filled up to a power of two and masked, so that updates compile once for each doubling;
        where rows depend on each other, or are in lists, each number of rows compiles.

        Ctrl-C leaves the posterior before; the same update again goes on where it was stopped.

        :param args: arguments of the model, all data so far included.
        :param rng_key: random number generator key; by default the one of the run, folded.
        :param checkpoint: path of a file that is written after every step, another one than that of the run. If it
            exists, the update goes on from it.
        :param kwargs: keyword arguments.
        :raises ValueError: if the prior of the particles is another one with these arguments (which site's), or none
            of them explains the data, and then the posterior before is kept; or a checkpoint is of another update.
        """
        run = self._finished()
        if not run.state.is_at_end:
            raise ValueError("The run was interrupted on its way: finish it by run(..., init_state=smc.last_state).")
        key = run.rng_key if rng_key is None else rng_key
        check_key(key)
        target = run.target.with_arguments(args, kwargs)
        if target.size != run.target.size or list(target.sites) != list(run.target.sites):
            raise ValueError(
                f"The latent sites are others with these arguments: {shapes(target)}, before {shapes(run.target)}."
            )
        programs, start, end = self._way(run, target)
        if not end.target.has_prior_of(start.target):
            vectors = run.state.particles.vectors
            before, after = (part.programs.priors(vectors, part.target.data) for part in (start, end))
            refuse_other_priors(target.sites, before, after, vectors.dtype)
        digest = f"{run.state.digest} {self._digest(target, key)}"
        state = resumed_state(digest, (self.num_particles, target.size), None, checkpoint)
        if state is None and self._stopped is not None and self._stopped.digest == digest:
            state = self._stopped
        if state is None:
            position: Any = np.zeros((), run.state.particles.position.dtype)
            particles = run.state.particles._replace(position=position)
            state = run.state._replace(particles=particles, digest=digest, stage=run.state.stage + 1)
        state = self._go(key, state, *end, (start.programs, start.target.data), checkpoint)
        if not state.is_at_end:
            self._stopped = state
            warn(
                f"The update was interrupted at {float(state.particles.position):.3g} of its way; the posterior is the "
                "one before it. The same update again goes on from there."
            )
            return
        state = state._replace(digest=self._digest(target, run.rng_key))
        updated = SMCRun(programs, target, state, run.rng_key, self.num_samples)
        updated.more_rows = run.more_rows
        self._keep(updated, run.labels)

    def _way(self, run: SMCRun, target: Target) -> tuple[Programs, Compiled, Compiled]:
        """Programs of a target after an update, and those that start and end the way there."""
        is_shared = target.shares_programs_with(run.target)
        filled = run.more_rows.targets(run.target, target)
        if filled is not None:
            steps = self._programs_of(filled.after)
            programs = run.programs if is_shared else Programs(target, steps.ladder)
            if run.more_rows.are_same(filled, steps, programs, target, run.state.particles):
                return programs, Compiled(steps, filled.before), Compiled(steps, filled.after)
        own = Compiled(run.programs if is_shared else self._programs_of(target), target)
        return own.programs, Compiled(run.programs, run.target), own

    def ladder(self, target: Target) -> Ladder:
        """Ladder that the options give for a model."""
        if unknown := [name for name in self.watch if name not in target.real_sites]:
            raise ValueError(f"watch names {unknown}; the sites of real numbers are {', '.join(target.real_sites)}.")
        kernel = kernel_for(self.kernel, self.num_particles, target.size, is_gaussian=target.is_gaussian)
        num_moves = _PARENTS - 1 if self.waste_free and self.num_moves is None else self.num_moves
        parents = self.num_particles // (num_moves + 1) if self.waste_free and num_moves else self.num_particles
        return Ladder(
            self.path, self.ess_threshold, Movement(kernel, num_moves, _MOST_MOVES, _CORRELATION), self.watch, parents
        )

    def _programs_of(self, target: Target) -> Programs:
        ladder = self.ladder(target)
        found = (p for p in _RECENT if p.ladder == ladder and p.target.shares_programs_with(target))
        if (programs := next(found, None)) is None:
            _RECENT.append(programs := Programs(target, ladder))
        return programs

    def _go(
        self,
        rng_key: Array,
        state: SMCState,
        programs: Programs,
        target: Target,
        old: tuple[Programs, list[Array]] | None,
        checkpoint: str | os.PathLike[str] | None,
    ) -> SMCState:
        """Steps until the end of the path, or Ctrl-C."""
        shown = 0.0
        with progress_bar(100, "SMC", enabled=self.progress_bar) as bar:
            try:
                for number in range(state.num_steps + 1, state.num_steps + 1 + MOST_STEPS):
                    if state.is_at_end:
                        break
                    particles, info = programs.step(
                        rng_key, number, state.particles, target.data, old, is_lazy=bool(old)
                    )
                    if int(info.num_alive) == 0:
                        raise impossible_data(programs, target, state.particles)
                    state = record(state, particles, info)
                    if checkpoint is not None:
                        write_state(checkpoint, state)
                    done = 100.0 * float(particles.position)
                    bar.update(int(done) - int(shown))
                    shown = done
            except KeyboardInterrupt:
                pass
        return state

    def _digest(self, target: Target, rng_key: Array) -> str:
        numbers = [leaf for leaf in jax.tree.leaves((target.args, target.kwargs)) if not isinstance(leaf, str)]
        return data_digest((numbers, rng_key), self.hyper_values, target.fingerprint)

    def _keep(self, run: SMCRun, labels: Labels) -> None:
        self._run, self._stopped = run, None
        for message in run.keep_labels(Labels(self.coords, self.dims).updated(labels)):
            warn(f"SMC: {message}")
        if not run.diagnostics.converged:
            warn(f"SMC did not end well. {' '.join(run.diagnostics.messages)}")

    # Pure functions

    def program(self, *args: object, changing: str | Sequence[str] | None = None, **kwargs: object) -> SMCProgram:
        """This sampler as pure functions of some arguments of the model: for experiments as loops of JAX.

        A run and its updates without anything of Python between them, so that a ``scan`` may ask, measure and update,
        and ``lax.map`` may do so many times over. With the same key the particles are those of :meth:`run` and
        :meth:`update`. What the values of the arguments that change decide in Python (lengths, branches) is refused by
        name; observations without counts and masked rows tell nothing, so arrays of full length stand for data that
        come bit by bit. Values are not checked, and nothing warns: look at ``state.converged``.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import SMC
        >>> def model(y, seen):
        ...     level = numpyro.sample("level", dist.Normal(0, 1))
        ...     with numpyro.handlers.mask(mask=seen):
        ...         numpyro.sample("y", dist.Normal(level, 1), obs=y)
        >>> program = SMC(model).program(jnp.zeros(5), jnp.zeros(5, bool))
        >>> def experiment(key):
        ...     y = 0.5 + jax.random.normal(key, (5,))
        ...     def look(state, number):
        ...         state = program.update({"y": y, "seen": jnp.arange(5) <= number}, state)
        ...         return state, state.weights @ program.particles(state)["level"]
        ...     return jax.lax.scan(look, program.init(key), jnp.arange(5))[1]
        >>> jax.lax.map(experiment, jax.random.split(jax.random.key(0), 3)).shape
        (3, 5)

        :param args: arguments of the model; those that change as an example of their shapes.
        :param changing: their names; by default all that hold arrays of numbers and whose values the model does not
            need, which ``program.changing`` names.
        :param kwargs: keyword arguments of the model.
        :return: with ``init``, ``update`` and ``particles``.
        :raises ModelStructureError: if the model needs the values of an argument that changes, or cannot be sampled.
        """
        if self.devices is not None:
            raise ValueError("A program runs where its arrays are: leave devices= out.")
        target, values, places = read_changing(self.model, args, kwargs, changing, self.hyper_values)
        return SMCProgram(self._programs_of(target), target, values, places, self.num_particles)

    # Persistence

    def _content(self) -> dict[str, object]:
        run = self._finished()
        target = run.target
        return {
            "args": target.args,
            "kwargs": target.kwargs,
            "rng_key": run.rng_key,
            "state": state_content(run.state),
            "labels": {"coords": dict(run.labels.coords), "dims": dict(run.labels.dims)},
        }

    def _with_content(self, content: Mapping[str, Any]) -> Self:
        target = Target(self.model, content["rng_key"], content["args"], content["kwargs"], self.hyper_values)
        state = state_of(content["state"])
        if state.particles.vectors.shape[1] != target.size:
            raise ValueError(
                f"The model has {target.size} unconstrained values and the run in the file "
                f"{state.particles.vectors.shape[1]}: it was another model."
            )
        self._run = SMCRun(self._programs_of(target), target, state, content["rng_key"], self.num_samples)
        self._run.keep_labels(Labels(**content.get("labels", {})))
        return self
