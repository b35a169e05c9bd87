"""Compilation apart from run time, with the memory that a compiled function asks for, and a log of what is compiled."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax

from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.structure.latent_gaussian.form import LatentGaussian

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


class Compiled(NamedTuple):
    """A compiled function with arguments."""

    executable: Callable[..., Any]
    args: tuple[Any, ...]
    seconds: float
    """Seconds of tracing, lowering and compiling."""
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


class ProgramLog:
    """Log of what JAX traces, lowers and compiles within a ``with`` block, by the name of the function, in CPU-seconds.

    The time of what is traced inside another trace is counted there alone.

    :ivar stages: for each stage (``trace``, ``lower``, ``compile``) a dictionary from names to lists of CPU-seconds.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, list[float]]] = {stage: defaultdict(list) for stage in _STAGES.values()}
        self._open: list[list[float]] = []

    def __enter__(self) -> Self:
        jax.monitoring.register_scalar_listener(self._start)
        jax.monitoring.register_event_duration_secs_listener(self._stop)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_scalar_listener(self._start)
        jax.monitoring.unregister_event_duration_listener(self._stop)

    def _start(self, event: str, value: float | int, **_: str | int) -> None:
        if event in _STAGES:
            self._open.append([time.process_time(), 0.0])

    def _stop(self, event: str, duration_secs: float, **info: str | int) -> None:
        if event not in _STAGES or not self._open:
            return
        start, inner = self._open.pop()
        seconds = time.process_time() - start
        if self._open:
            self._open[-1][1] += seconds
        self.stages[_STAGES[event]][str(info.get("fun_name", "?"))].append(seconds - inner)

    @property
    def num_programs(self) -> int:
        """Number of programs that the backend compiled."""
        return sum(map(len, self.stages["compile"].values()))

    def totals(self) -> dict[str, float]:
        """The number of programs, and the CPU-seconds of each stage."""
        seconds = {stage: sum(map(sum, names.values())) for stage, names in self.stages.items()}
        return {"programs": self.num_programs, **seconds}


def program_table(log: ProgramLog) -> str:
    """One line for each name of a compiled function: how often, and the CPU-seconds of each stage, longest first."""
    compiled = log.stages["compile"]
    names = sorted(compiled, key=lambda name: -sum(compiled[name]))
    lines = [f"{'program':40} {'count':>5} {'trace':>7} {'lower':>7} {'compile':>7}"]
    for name in names:
        # Tracing is reported under the name of the function, compilation under that of the program.
        bare = name.removeprefix("jit(").removesuffix(")").removeprefix("jit_")
        seconds = (sum(log.stages[stage].get(key, ())) for stage, key in (("trace", bare), ("lower", bare)))
        figures = " ".join(f"{value:7.3f}" for value in (*seconds, sum(compiled[name])))
        lines.append(f"{name:40.40} {len(compiled[name]):5} {figures}")
    return "\n".join(lines)
