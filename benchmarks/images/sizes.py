"""Cost of sweeps and fits as pictures grow: EP of dense rows against a Cholesky factor, denoising per pixel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from ..bench_images import read_problem
from ..harness import compile_function, compile_sweep, in_own_process, in_turns, table

PROBLEMS = ("blurred by 9 x 9", "half of its Fourier transform")


def large_pictures() -> list[str]:
    """One fit in one basis of each size, in processes of their own."""

    def rows() -> Iterator[Iterable[Any]]:
        first = np.ones(2)
        for side in (1024, 2048, 4096):
            found = in_own_process("images.once", "large", side)
            each = 1e6 * found["seconds"] / side**2 * np.array([1.0, 1.0 / found["evaluations"]])
            first = each if side == 1024 else first
            own = [f"{found['seconds']:.1f}", found["evaluations"], found["converged"], f"{found['decibels']:.2f}"]
            yield f"{side} x {side}", *own, f"{found['bytes'] / 2**30:.1f}", *each, *(each / first)

    heads = "picture | CPU-s | evaluations | converged | dB | memory, GiB | µs a pixel | and evaluation | ratio | ratio"
    return table(heads, rows())


def dense_sweeps() -> list[str]:
    """A sweep of EP, and the Cholesky factorisation of as many unknowns, by turns; double precision."""
    numpyro.enable_x64()

    def rows() -> Iterator[Iterable[Any]]:
        for side in (32, 64, 128):
            size = side * side
            floor = compile_function(jnp.linalg.cholesky, jnp.eye(size) + 0.5 / size)
            for name in PROBLEMS:
                reading = read_problem(name, side)
                sweep = compile_sweep(jax.jit(reading.form)({}, reading.data), num_sweeps=1)
                ours, peer = in_turns(1 if side == 128 else 3, sweep.run, floor.run)
                memory = [f"{(part.peak_bytes or 0) / 2**20:.0f}" for part in (sweep, floor)]
                yield f"{side} x {side}", name, ours, peer, f"{ours / peer:.2f}", *memory
                del sweep
            jax.clear_caches()

    heads = "picture | seen | sweep, CPU-s | Cholesky, CPU-s | ratio | sweep, MiB | Cholesky, MiB"
    return table(heads, rows())
