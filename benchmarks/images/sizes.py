"""What sweeps and fits cost as pictures grow: EP of dense rows against a Cholesky factor, denoising per pixel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro

from ..bench_images import read_problem
from ..harness import compile_function, compile_sweep, in_own_process, table_head

PROBLEMS = ("blurred by 9 x 9", "half of its Fourier transform")


def large_pictures() -> list[str]:
    """One fit in one basis of each size, in processes of their own."""
    heads = "picture | CPU-s | evaluations | converged | dB | memory, GiB | µs a pixel | and evaluation | ratio | ratio"
    lines, first = table_head(heads), None
    for side in (1024, 2048, 4096):
        found = in_own_process("images.large", side)
        whole = 1e6 * found["seconds"] / side**2
        each = whole / found["evaluations"]
        first = (whole, each) if first is None else first
        cells = [f"{side} x {side}", f"{found['seconds']:.1f}", str(found["evaluations"])]
        cells += ["yes" if found["converged"] else "no", f"{found['decibels']:.2f}", f"{found['bytes'] / 2**30:.1f}"]
        cells += [f"{whole:.1f}", f"{each:.3f}", f"{whole / first[0]:.2f}", f"{each / first[1]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


def dense_sweeps() -> list[str]:
    """A sweep of EP, and the Cholesky factorisation of as many unknowns, by turns; double precision."""
    numpyro.enable_x64()
    heads = "picture | seen | sweep, CPU-s | Cholesky, CPU-s | ratio | sweep, MiB | Cholesky, MiB"
    lines = table_head(heads)
    for side in (32, 64, 128):
        size = side * side
        floor = compile_function(jnp.linalg.cholesky, jnp.eye(size) + 0.5 / size)
        for name in PROBLEMS:
            reading = read_problem(name, side)
            sweep = compile_sweep(jax.jit(reading.form)({}, reading.data), num_sweeps=1)
            rounds = range(1 if side == 128 else 3)
            times = [(cpu_seconds(sweep.run), cpu_seconds(floor.run)) for _ in rounds]
            ours, peer = map(min, zip(*times, strict=True))
            memory = [f"{(part.peak_bytes or 0) / 2**20:.0f}" for part in (sweep, floor)]
            cells = [f"{side} x {side}", name, f"{ours:.3g}", f"{peer:.3g}", f"{ours / peer:.2f}", *memory]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
            del sweep
        jax.clear_caches()
    return lines


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Of one call that is compiled already, of all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start
