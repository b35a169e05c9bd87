"""State from which a run goes on, and its outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.content import array_key
from ...structure.program.captured import stable_text
from ..hyper.search import SearchState
from .results import Diagnostics


class EngineState(NamedTuple):
    """State from which a run goes on exactly where it stopped: ``engine.last_state``."""

    values: Array
    """Unconstrained hyperparameters, shape ``(d,)``."""
    state: Any
    """State of the algorithm, at these hyperparameters."""
    search: SearchState | None
    """State of the search for the hyperparameters; ``None`` where there are none to learn."""
    num_steps: int
    """Steps of the algorithm so far, where there are no hyperparameters to learn."""
    data_digest: str
    """Digest of data, model, algorithm and fixed hyperparameters: where it is another one a state is only a place to
    start from."""

    def __repr__(self) -> str:
        return f"EngineState({np.size(self.values)} hyperparameters, {self.num_steps} steps)"


NO_ERRORS = np.zeros(0, bool)
"""No standard errors: the hyperparameters of a fit, if it has some, are points."""


class Fit(NamedTuple):
    """The outcome of a run."""

    last_state: EngineState
    hyper: dict[str, Array]
    """All hyperparameters, constrained."""
    covariance: np.ndarray | None
    """Covariance of the unconstrained free hyperparameters, from the curvature; ``None`` if it was not computed."""
    has_error: np.ndarray
    """Free hyperparameters that have a standard error, in the order of the covariance; shape ``(d,)``, boolean;
    empty without a covariance."""
    log_evidence: float
    diagnostics: Diagnostics

    @property
    def has_curvature(self) -> bool:
        """True if the objective curves downwards in every direction, so that all standard errors exist."""
        return self.covariance is not None and bool(np.all(self.has_error))


def as_numbers(leaf: Any) -> np.ndarray:
    """An array as NumPy has it; of a random key its numbers."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def data_digest(data: object, fixed: Mapping[str, object], *keys: object) -> str:
    """A fingerprint of what a run is of: equal where an earlier one can be gone on with.

    :param data: arrays.
    :param fixed: hyperparameters that are given.
    :param keys: of the model, whose numbers need not be among the data, and of the algorithm; see
        :func:`~numpyro_ext.structure.program.captured.stable_text`.
    """
    arrays = tuple(map(array_key, jax.tree.leaves((data, dict(fixed)))))
    return hashlib.sha256(stable_text((keys, arrays)).encode()).hexdigest()


def check_init_state(init_state: EngineState, shapes: object, num_hyper: int) -> None:
    """Refuse a state that is of another model.

    :param EngineState init_state: what a caller gave.
    :param shapes: the structure that its state should have, from ``jax.eval_shape``.
    :param int num_hyper: the number of unconstrained hyperparameters.
    :raises TypeError: if it is no state at all.
    :raises ValueError: if it does not fit.
    """
    if not isinstance(init_state, EngineState):
        raise TypeError(f"init_state must be the last_state of an earlier run, got {type(init_state).__name__}.")
    structure: Any = jax.tree.structure(shapes)
    same = structure == jax.tree.structure(init_state.state) and jnp.shape(init_state.values) == (num_hyper,)
    if not same or not jax.tree.all(jax.tree.map(lambda x, y: x.shape == jnp.shape(y), shapes, init_state.state)):
        raise ValueError(
            "init_state comes from a run of another model, or of this one on data of other shapes or with other "
            "options: its state and hyperparameters do not match."
        )


def fits(shapes: object, leaves: list[Array]) -> bool:
    """True if arrays, as a file holds them, are those of a tree.

    :param shapes: of the tree, from ``jax.eval_shape``.
    :param leaves: its arrays in order.
    """
    return [x.shape for x in jax.tree.leaves(shapes)] == [jnp.shape(x) for x in leaves]


def rebuilt(shapes: object, leaves: list[Array]) -> Any:
    """A tree from its arrays, which fit it, in the dtypes that it has now."""
    expected, structure = jax.tree.flatten(shapes)
    return jax.tree.unflatten(structure, [jnp.asarray(leaf, x.dtype) for x, leaf in zip(expected, leaves, strict=True)])
