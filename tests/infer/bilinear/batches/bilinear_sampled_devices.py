"""Drawn cells on the devices of one or several processes, to be compared with the same division on a single device.

``python -m tests.infer.bilinear.batches.bilinear_sampled_devices FOLDER``
writes ``0.npz`` and, where all parts are on one device,
``alone.npz``; with ``--processes``, ``--process`` and ``--port`` it joins others, and writes the file of its number.
"""

import argparse
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from numpyro_ext.infer import BilinearVG
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import BY_ROW, SeveralDevices
from numpyro_ext.infer.bilinear.sampling import parts
from numpyro_ext.models import binary_factorization
from tests.processes import joined

OPTIONS = {"bound": "jaakkola", "unlisted_cells": "zero", "progress_bar": False, "num_samples": 10}


def on_one_device(num_parts):
    """Let all parts be computed on the default device, side by side."""

    def shard_map(function, *, mesh, in_specs, out_specs, check_vma):
        def by_prefix(change, specs, trees):
            def change_part(spec, part):
                return jax.tree.map(lambda x: change(x, spec == BY_ROW), part)

            return jax.tree.map(change_part, specs, trees, is_leaf=lambda x: isinstance(x, PartitionSpec))

        def run(*arguments):
            axes = by_prefix(lambda x, is_divided: 0 if is_divided else None, in_specs, arguments)
            cut = by_prefix(
                lambda x, is_divided: x.reshape(num_parts, -1, *x.shape[1:]) if is_divided else x, in_specs, arguments
            )
            found = jax.vmap(function, in_axes=axes, axis_size=num_parts, axis_name="rows")(*cut)
            return by_prefix(
                lambda x, is_divided: x.reshape(-1, *x.shape[2:]) if is_divided else x[0], out_specs, found
            )

        return run

    jax.shard_map = shard_map
    parts.shared = lambda make, *given: make(*given)
    SeveralDevices._put = lambda self, x, spec: jnp.asarray(x)


def matrix(num_rows=24, num_cols=12, seed=0):
    """Ones of a matrix one row of which has most cells, and two have no ones."""
    rng = np.random.default_rng(seed)
    u, v = rng.normal(size=(num_rows, 2)), 1.5 * rng.normal(size=(num_cols, 2))
    x = rng.uniform(size=(num_rows, num_cols)) < 1.0 / (1.0 + np.exp(2.0 - u @ v.T))
    x[1] = x[-1] = False
    x[2, 1:] = True
    return x


# Fewer rows than devices, one of which is full.
FEW = np.array([[1, 1, 1, 1], [0, 1, 0, 0]], bool)


def fits(devices, num_steps=60):
    """Results by name, and estimates of the bound."""
    out = {}
    runs = {
        "balanced": (matrix(), {}),
        "biased": (matrix(), {"sampler": "biased", "batch_size": 6000}),
        "few": (FEW, {"sampler": "uniform", "batch_size": 50}),
    }
    for name, (x, options) in runs.items():
        rows, cols = np.nonzero(x)
        engine = BilinearVG(
            binary_factorization, zeros="sampled", devices=devices, num_steps=num_steps, **OPTIONS, **options
        )
        sizes = {"num_rows": x.shape[0], "num_cols": x.shape[1], "rank": 2}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*minibatches")
            engine.run(jax.random.key(0), rows, cols, np.ones(rows.size, int), **sizes)
        out |= {f"{name} {site}": np.asarray(engine.posterior[site].mean) for site in ("u", "v", "b", "g", "z")}
        out |= {f"{name} bound": float(engine.log_evidence), f"{name} trace": engine.diagnostics.objective_trace}
        out[f"{name} drawn"] = float(engine.diagnostics.messages[-1].split()[0])
    return out


def main():
    arguments = joined(argparse.ArgumentParser())
    jax.config.update("jax_disable_most_optimizations", True)
    devices = jax.devices()
    assert len(devices) == 4
    np.savez(arguments.folder / f"{arguments.process}.npz", **fits(devices))
    if arguments.processes == 1:
        on_one_device(len(devices))
        np.savez(arguments.folder / "alone.npz", **fits(devices))


if __name__ == "__main__":
    main()
