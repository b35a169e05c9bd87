"""Files with the state of a sampler, from which a run goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..front.files.archive import read_archive, write_archive
from ..front.files.content import Content
from .kernels.path import Particles
from .run import SMCState


def state_content(state: SMCState) -> Content:
    """State as plain containers."""
    return {
        "particles": jax.tree.map(np.asarray, state.particles)._asdict(),
        "history": dict(state.history),
        "stage": state.stage,
        "digest": state.digest,
    }


def state_of(content: Mapping[str, Any]) -> SMCState:
    """From :func:`state_content`.

    :raises ValueError: if it was written by another version.
    """
    if set(content["particles"]) != set(Particles._fields):
        raise ValueError("The file holds a run of SMC by another version of numpyro_ext: run again.")
    particles = Particles(**{name: jnp.asarray(value) for name, value in content["particles"].items()})
    return SMCState(particles, dict(content["history"]), int(content["stage"]), str(content["digest"]))


def write_state(path: str | os.PathLike[str], state: SMCState) -> None:
    """Write a state; the file is whole at every moment."""
    write_archive(path, {"smc_state": state_content(state)})


def read_state(path: str | os.PathLike[str]) -> SMCState:
    """The state in a file.

    :raises ValueError: if the file is damaged or no checkpoint of SMC.
    """
    content = read_archive(path)
    if "smc_state" not in content:
        raise ValueError(f"{os.fspath(path)!r} is no checkpoint of SMC: give another path.")
    return state_of(content["smc_state"])


def resumed_state(
    digest: str,
    shape: tuple[int, int],
    init_state: SMCState | None,
    checkpoint: str | os.PathLike[str] | None,
) -> SMCState | None:
    """State to go on from, if there is one: that of a checkpoint, or the given one.

    :param str digest: of the run.
    :param shape: of its particles.
    :raises TypeError: if what is given is no state.
    :raises ValueError: if the state is of another run.
    """
    if init_state is not None and not isinstance(init_state, SMCState):
        raise TypeError(f"init_state must be the last_state of an earlier run, got {type(init_state).__name__}.")
    state = init_state
    if checkpoint is not None and Path(checkpoint).exists():
        state = read_state(checkpoint)
    if state is not None and (state.digest != digest or state.particles.vectors.shape != shape):
        raise ValueError(
            "The state is of a run on other data, with another key or with other options; leave it out, or remove "
            "the checkpoint."
        )
    return state
