"""Compilation for little memory instead of speed: for functions that see all observations at once, and run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["lean_jit"]


def lean_jit(function: Callable[..., Any]) -> Any:
    """``jax.jit`` that computes one thing after the other.

    On CPUs the default is to start whatever is ready, in any order, so that large intermediate arrays which could share
    their memory exist together.

    :param function: to be compiled.
    """
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    return jax.jit(function, compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})
