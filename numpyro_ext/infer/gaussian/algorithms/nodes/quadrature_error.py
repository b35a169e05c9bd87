"""Error of quadrature over blocks, from a finer rule than its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from .....compilation.quick_jit import quick_jit
from .....compilation.store import shared
from .....structure import LatentGaussianReading
from .....structure.latent_gaussian import LatentGaussian

WORTH_A_WORD = 1e-3
"""Error of the log evidence from which on it is told."""
_ROUNDINGS = 4.0
"""Units in the last place by which the log evidence of a block may be off."""
_MOST_QUICK_NUMBERS = 2_000_000
"""Numbers in an evaluation up to which the last one, by a finer rule, is compiled as quickly as may be."""


def quadrature_error(
    reading: LatentGaussianReading, algorithm: Any, hyper: dict[str, Array], state: Any
) -> tuple[float, float, int]:
    """Sum over blocks of the absolute change of their log evidence with a finer rule, its rounding, and the nodes of
    the coarse rule.

    No finer rule mends what is rounding, as the sum over many blocks in single precision is.

    :param LatentGaussianReading reading: of the model.
    :param algorithm: a :class:`Quadrature` or :class:`SharedColumns`.
    :param hyper: all hyperparameters.
    :param state: of the fit there.
    """
    form = reading.compiled_form(hyper)
    work = algorithm.numbers_in_evaluation(reading.abstract_form)
    error, rounding = shared(_change, algorithm, work is not None and work <= _MOST_QUICK_NUMBERS)(form, state)
    return float(error), float(rounding), algorithm.nodes_of(form)


def _change(algorithm: Any, is_small: bool) -> Callable[..., tuple[Array, Array]]:
    def change(form: LatentGaussian, state: object) -> tuple[Array, Array]:
        coarse, fine = algorithm.with_finer_rule(form, state)
        rounding = _ROUNDINGS * jnp.finfo(fine.dtype).eps * jnp.sum(1.0 + jnp.abs(fine))
        return jnp.sum(jnp.abs(fine - coarse)), rounding

    return quick_jit(change, is_small=is_small)
