"""State of a run on disk while it goes on, so that a killed process loses no more than its last sweep."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp

from ..state import EngineState, fits, rebuilt
from .archive import read_archive, write_archive


def write_checkpoint(path: str | os.PathLike[str], state: EngineState) -> None:
    """Write a state: at every moment the file is the old one or the new one, whole.

    A plain file of arrays: a state is a few arrays on one host, and reading it back runs no code.

    :param path: of the file.
    :param EngineState state: without a search.
    """
    content = {
        "values": state.values,
        "state": jax.tree.leaves(state.state),
        "num_steps": state.num_steps,
        "data_digest": state.data_digest,
    }
    write_archive(path, content)


def read_checkpoint(path: str | os.PathLike[str], shapes: object, data_digest: str) -> EngineState | None:
    """The state in a file, or ``None`` if there is no file.

    :param path: of the file.
    :param shapes: the state's structure, from ``jax.eval_shape``.
    :param str data_digest: of the data and the given hyperparameters.
    :raises ValueError: if the file is damaged or no checkpoint, or holds the state of another model, or of a run on
        other data.
    """
    if not Path(path).exists():
        return None
    content = read_archive(path)
    if "state" not in content:
        raise ValueError(f"{os.fspath(path)!r} is a finished run, for load(...), and no checkpoint: give another path.")
    if not fits(shapes, content["state"]):
        raise ValueError(
            f"{os.fspath(path)!r} holds the state of another model, or of this one on data of other shapes or with "
            "other options: give another path, or remove it."
        )
    if content["data_digest"] != data_digest:
        raise ValueError(
            f"{os.fspath(path)!r} holds the state of a run on other data or other given hyperparameters: give another "
            "path, or remove it."
        )
    state = rebuilt(shapes, content["state"])
    return EngineState(jnp.asarray(content["values"]), state, None, content["num_steps"], content["data_digest"])
