"""Compilation apart from run time, with the memory that a compiled function asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from numpyro_ext.infer.gaussian import expectation_propagation as ep
from numpyro_ext.structure.latent_gaussian.form import LatentGaussian

__all__ = ["Compiled", "compile_function", "compile_sweep"]


class Compiled(NamedTuple):
    """A compiled function with arguments."""

    executable: Callable[..., Any]
    args: tuple[Any, ...]
    seconds: float
    """Of tracing, lowering and compiling."""
    peak_bytes: int | None
    """Arguments, results and temporaries, without the workspaces of library calls; unknown on some backends."""

    def run(self) -> Any:
        """Compute, and wait for, the result."""
        return jax.block_until_ready(self.executable(*self.args))


def compile_function(function: Callable[..., Any], *args: Any) -> Compiled:
    """Compile ``function`` for ``args``."""
    start = time.perf_counter()
    executable = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = executable.memory_analysis()
    if memory is None:
        return Compiled(executable, args, seconds, None)
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(executable, args, seconds, kept + memory.temp_size_in_bytes)


def compile_sweep(form: LatentGaussian, num_sweeps: int = 2) -> Compiled:
    """A sweep of expectation propagation, from the state that some sweeps lead to."""
    sweep = compile_function(ep.step, form, jax.jit(ep.init)(form))
    for _ in range(num_sweeps):
        sweep = sweep._replace(args=(form, sweep.run()[0]))
    return sweep
