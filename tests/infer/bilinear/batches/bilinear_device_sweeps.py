"""Sweeps on one device and on all.

``python -m tests.infer.bilinear.batches.bilinear_device_sweeps FILE`` writes both results.
"""

import sys
from functools import partial

import jax
import numpy as np

from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import Division, OneDevice, SeveralDevices
from tests.infer.bilinear.batches.bilinear_devices import NUM_COLUMNS, NUM_ROWS, make_counts
from tests.infer.bilinear.bilinear_forms import factorisation

NUM_SWEEPS = 5


def sweep_on(devices, form, state):
    """Bound and state after some sweeps, as arrays of this process."""

    def step(prepared, state):
        state, info = devices.sweep(prepared, state)
        return state.objective, state, info

    prepared = devices.put_cells(jax.jit(devices.prepare)(form, state.rows, state.columns))
    sweep = devices.compile_solve(step)
    value, now = devices.put(state.objective, state)
    for _ in range(NUM_SWEEPS):
        value, now, _ = sweep(prepared, now)
    return devices.get(value, now)


def main():
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    rows, columns, counts = make_counts()
    form = factorisation(rows, columns, counts, (NUM_ROWS, NUM_COLUMNS), (1.0, 0.5), 2)
    state = jax.jit(partial(bg.init, row_family="diagonal", column_family="diagonal"))(form, jax.random.key(0))
    found = {"num_devices": len(jax.devices())}
    for name, devices in (
        ("one", OneDevice()),
        ("all", SeveralDevices(Division(jax.devices(), rows, columns, NUM_ROWS))),
    ):
        leaves = jax.tree.leaves(sweep_on(devices, form, state))
        found |= {f"{name}-{number}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
