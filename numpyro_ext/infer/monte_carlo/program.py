"""Sequential Monte Carlo as pure functions of some arguments of its model: for experiments that are loops of JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro import handlers

from ...compilation.pytree import PyTree
from ...structure import ModelStructureError
from ...structure.model.running.changing import needs_value, other_values, read_with_changing
from ...structure.model.running.execution import ModelCall, check_key
from ...structure.model.running.plain_sites import PlainSites
from .kernels.path import Particles
from .kernels.steps import Programs
from .kernels.weights import effective_sample_size, normalised
from .run import LEAST_SIZE, MOST_STEPS
from .target import Target


class SMCProgramState(NamedTuple):
    """Particles of a posterior, as a tree of arrays: what one call hands to the next."""

    particles: Particles
    data: list[Array]
    """Data of the posterior: values of the arguments that change."""
    rng_key: Array
    standard_error: Array
    """Standard error of :attr:`log_evidence`, as that of :class:`~numpyro_ext.infer.SMC`."""
    converged: Array
    """True if the end of the path was reached by particles that are worth their number, and had moved enough."""
    num_steps: Array
    num_evaluations: Array
    """Evaluations of the likelihood by all particles so far."""
    correlation: Array
    """The largest one that a coordinate had with its start after the last moves."""

    @property
    def log_evidence(self) -> Array:
        """Log evidence of all data so far."""
        return self.particles.log_evidence

    @property
    def weights(self) -> Array:
        """Weights of the particles, summing to one."""
        return normalised(self.particles.log_weights)

    @property
    def effective_sample_size(self) -> Array:
        """Effective number of particles."""
        return effective_sample_size(self.particles.log_weights)


class SMCProgram:
    """Pure functions of arrays for one sampler and one shape of its data; obtained as ``smc.program(...)``.

    ``arrays`` are values of the arguments that change, by name; those that are left out are what the program was made
    with. Every function may be given to ``jit``, ``scan``, ``lax.map`` and ``vmap``. Under ``vmap`` all runs move
    whenever one of them does; under ``lax.map`` each does what it needs.

    :ivar changing: the arguments that change, with the values that the program was made with.
    """

    def __init__(
        self, programs: Programs, target: Target, changing: Mapping[str, object], places: list[int], num_particles: int
    ) -> None:
        self._programs, self._target, self._places, self._number = programs, target, places, num_particles
        self.changing: dict[str, Any] = dict(changing)
        self._init, self._update = jax.jit(self._from_prior), jax.jit(self._from_posterior)
        self._sites = jax.jit(self._constrained)

    def __repr__(self) -> str:
        shapes = {name: jax.tree.map(np.shape, value) for name, value in self.changing.items()}
        return f"SMCProgram({', '.join(f'{name} {shape}' for name, shape in shapes.items())})"

    def init(self, rng_key: Array, arrays: Mapping[str, object] | None = None) -> SMCProgramState:
        """Draw particles from the prior and lead them to the posterior, as ``smc.run`` with the same key does.

        :param rng_key: random number generator key, of all updates too.
        :param arrays: values of the arguments that change, by name.
        """
        check_key(rng_key, "program.init(jax.random.key(0), arrays)")
        return self._init(rng_key, other_values(self.changing, arrays or {}))

    def update(self, arrays: Mapping[str, object], state: SMCProgramState) -> SMCProgramState:
        """Take in other data of the same model: see ``smc.update``.

        :param arrays: values of the arguments that change, by name; of those left out what the program was made with.
        :param state: of :meth:`init` or of an earlier update.
        :raises ValueError: if priors depend on what changes.
        """
        if self._target.prior_knows(self._places):
            raise ValueError(
                f"Priors of this model depend on {' or '.join(self.changing)}, and particles keep the prior that they "
                "were drawn from: leave it out of changing=, or take init for each of its values."
            )
        return self._update(other_values(self.changing, arrays), state)

    def particles(self, state: SMCProgramState) -> dict[str, Array]:
        """All latent and deterministic sites of the particles, which have ``state.weights``."""
        return self._sites(state)

    def _data(self, leaves: list[Array]) -> list[Array]:
        """Data of the target, with these arrays in their places."""
        found = list(self._target.data)
        for place, leaf in zip(self._places, leaves, strict=True):
            found[place] = leaf
        return found

    def _from_prior(self, rng_key: Array, leaves: list[Array]) -> SMCProgramState:
        keys = jax.random.split(jax.random.fold_in(rng_key, 0), self._number)
        particles = self._programs.from_prior(keys, self._data(leaves))
        zero, count = jnp.zeros((), particles.vectors.dtype), jnp.zeros((), int)
        state = SMCProgramState(particles, leaves, rng_key, zero, jnp.asarray(False), count, count, zero)
        return self._led(None, state, leaves, jnp.asarray(True))

    def _from_posterior(self, leaves: list[Array], state: SMCProgramState) -> SMCProgramState:
        start = state.particles._replace(position=jnp.zeros_like(state.particles.position))
        # particles that did not get to the posterior before have none to start from
        return self._led(self._target, state._replace(particles=start), leaves, state.particles.position >= 1.0)

    def _constrained(self, state: SMCProgramState) -> dict[str, Array]:
        data = self._data(state.data)
        return jax.vmap(lambda x: self._target.constrained(x, data))(state.particles.vectors)

    def _led(
        self, before: Target | None, state: SMCProgramState, leaves: list[Array], is_ready: Array
    ) -> SMCProgramState:
        """To the end of the path."""
        programs, data, old = self._programs, self._data(leaves), self._data(state.data)

        def goes_on(carry: PyTree) -> Array:
            state, is_alive, steps = carry
            return (state.particles.position < 1.0) & is_alive & (steps < MOST_STEPS)

        def advance(carry: PyTree) -> PyTree:
            state, _, steps = carry
            particles, info = programs.advance(
                before, before is not None, state.rng_key, state.num_steps + 1, state.particles, data, old
            )
            state = state._replace(
                particles=particles,
                standard_error=info.log_evidence_error,
                num_steps=state.num_steps + 1,
                num_evaluations=state.num_evaluations + info.num_evaluations,
                correlation=jnp.where(info.num_moves > 0, info.correlation, state.correlation),
            )
            return state, info.num_alive > 0, steps + 1

        begun = state, is_ready, jnp.zeros((), int)
        state, is_alive, _ = lax.while_loop(goes_on, advance, begun)
        number = len(state.particles.log_weights)
        is_well = (
            is_alive
            & (state.particles.position >= 1.0)
            & (state.correlation <= programs.largest_correlation)
            & (state.effective_sample_size >= LEAST_SIZE * number)
        )
        return state._replace(data=leaves, converged=is_well)


def read_changing(
    model: Any,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    names: str | Sequence[str] | None,
    given: Mapping[str, object],
) -> tuple[Target, dict[str, Any], list[int]]:
    """The target of a model, the arguments that change by name, and their places among its data.

    :raises ModelStructureError: if the model needs the values of one of them.
    """
    call = ModelCall(model, tuple(args), dict(kwargs), jax.random.key(0))
    return read_with_changing(call, names, lambda names: _read_changing(call._replace(changing=names), given))


def _read_changing(call: ModelCall, given: Mapping[str, object]) -> tuple[Target, dict[str, Any], list[int]]:
    model, names = call.model, call.changing
    changing = call.changing_values()
    target = Target(model, call.rng_key, *call.with_values(changing), given)
    places = target.places_of([leaf for name in sorted(changing) for leaf in jax.tree.leaves(changing[name])])
    if places is not None:
        return target, changing, places

    def trace(values: Mapping[str, object]) -> None:
        seeded = handlers.seed(handlers.substitute(PlainSites(model), data=dict(given)), call.rng_key)
        args, kwargs = call.with_values({**changing, **values})
        for site in handlers.trace(seeded).get_trace(*args, **kwargs).values():
            if site["type"] == "sample":
                site["fn"].log_prob(site["value"])

    try:
        jax.eval_shape(trace, changing)
    except Exception as error:
        raise needs_value(call, error, trace) from error
    raise ModelStructureError(f"the density of the model needs the values of {' or '.join(names)}.")
