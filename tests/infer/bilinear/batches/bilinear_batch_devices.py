"""Batches on the devices of one or several processes, to be compared with batches on a single device.

``python -m tests.infer.bilinear.batches.bilinear_batch_devices FOLDER``
writes ``0.npz``; with ``--processes``, ``--process`` and
``--port`` it joins others, each with rows of its own, and writes the file of its number. ``--killed counts``
ends process 1 after process 0 has written the checkpoint of an epoch, ``--killed pairs`` within an epoch of pairs.
"""

import argparse
import json
import os
import signal
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.infer import BilinearVG, fit_batches
from numpyro_ext.infer.bilinear.batches.checkpoints import BatchCheckpoints
from numpyro_ext.infer.bilinear.batches.run import BatchRun
from numpyro_ext.infer.front.files.archive import read_archive
from numpyro_ext.models import binary_factorization, paired_symbols, poisson_factorization
from tests.processes import joined

NUM_ROWS, NUM_COLUMNS, RANK = 19, 6, 2
SCALES = {"row_scale": 0.8, "row_bias_scale": 0.5, "col_bias_scale": 0.5}
SIZES = {"num_cols": NUM_COLUMNS, "rank": RANK}
# Rows of the batches of two processes: of unequal numbers, one alone, and a third batch for the first process only.
ROWS = [[range(7), range(7, 9), range(9, 13)], [range(13, 14), range(14, 19)]]
KILLED_IN = 3


def make_counts():
    """Rows of very different lengths; the third and the last have no cells."""
    rng = np.random.default_rng(4)
    rows, columns = np.divmod(np.arange(NUM_ROWS * NUM_COLUMNS), NUM_COLUMNS)
    kept = rng.uniform(size=rows.size) < np.linspace(0.2, 1.0, NUM_ROWS)[rows]
    kept = (kept | (rows == 5)) & (rows != 2) & (rows != NUM_ROWS - 1)
    rows, columns = rows[kept], columns[kept]
    w, z = rng.normal(size=(NUM_ROWS, RANK)), rng.normal(size=(NUM_COLUMNS, RANK))
    return rows, columns, rng.poisson(np.exp(1.0 + (w[rows] * z[columns]).sum(-1)))


def answers(rows, columns, y, num_rows):
    """Binary data, whose expectations are by quadrature."""
    with numpyro.plate("rows", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, 0.9).expand([RANK]).to_event(1))
    with numpyro.plate("columns", NUM_COLUMNS):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=(w[rows] * z[columns]).sum(-1)), obs=y)


def batches_of(processes):
    """The batches of some processes, joined; rows in the order of the processes."""
    rows, columns, counts = make_counts()
    found = []
    for number in range(max(len(ROWS[process]) for process in processes)):
        held = [row for process in processes if number < len(ROWS[process]) for row in ROWS[process][number]]
        place = np.full(NUM_ROWS, -1)
        place[held] = np.arange(len(held))
        mine = place[rows] >= 0
        found.append((place[rows[mine]], columns[mine], counts[mine], len(held)))
    return found


def count_batches(processes):
    return [
        {"rows": rows, "cols": columns, "counts": counts, "num_rows": num}
        for rows, columns, counts, num in batches_of(processes)
    ]


def make_engine(devices, **options):
    return BilinearVG(poisson_factorization, hyper_values=SCALES, progress_bar=False, devices=devices, **options)


def kept(name, fitted, sites):
    out = {f"{name} bound": np.asarray(fitted.log_evidence), f"{name} trace": fitted.diagnostics.objective_trace}
    return out | {f"{name} {site}": np.asarray(fitted.posterior[site].mean) for site in sites}


def fits(devices, processes, checkpoint=None):
    """Results by name."""
    out, key = {}, jax.random.key(0)
    batches = count_batches(processes)
    engine = make_engine(devices, covariance="full", tol=1e-300)
    fitted = fit_batches(engine, key, iter(batches), over="w", num_epochs=5, checkpoint=checkpoint, **SIZES)
    out |= kept("counts", fitted, ("z", "col_bias", "w"))
    if len(processes) == 1:
        numbers = [len(rows) for rows in ROWS]
        assert any(f"had {numbers} batches" in message for message in fitted.diagnostics.messages)
    if len(processes) == 2:
        new = fitted.fold_in(jax.random.key(1), **count_batches([1])[-1], **SIZES)
        out["last w of process 1"] = np.asarray(new.posterior["w"].mean)
    engine = BilinearVG(answers, progress_bar=False, devices=devices, tol=1e-300)
    binary = [(rows, columns, (counts > 2).astype(int), num) for rows, columns, counts, num in batches_of(processes)]
    out |= kept("answers", fit_batches(engine, key, binary, over="w", num_epochs=3), ("z",))
    ones = [
        {"rows": rows[counts > 2], "cols": columns[counts > 2], "x": np.ones(np.sum(counts > 2), int), "num_rows": num}
        for rows, columns, counts, num in batches_of(processes)
    ]
    options = {"bound": "jaakkola", "unlisted_cells": "zero", "zeros": "shared"}
    # The first batch of the second process has one row, from which it is not seen that all cells share the level.
    options |= {"field": ["u", "b", "v", "g"], "hyper_values": {"z": -0.5}}
    engine = BilinearVG(binary_factorization, progress_bar=False, devices=devices, tol=1e-300, **options)
    return out | kept("ones", fit_batches(engine, key, ones, over="u", num_epochs=4, **SIZES), ("v", "g"))


def fits_over_columns(devices):
    """The other side in batches: two of three columns."""
    rows, columns, counts = make_counts()
    batches = []
    for start in (0, 3):
        mine = (columns >= start) & (columns < start + 3)
        batches.append((rows[mine], columns[mine] - start, counts[mine]))
    engine, sizes = make_engine(devices, tol=1e-300), {"num_rows": NUM_ROWS, "num_cols": 3, "rank": RANK}
    fitted = fit_batches(engine, jax.random.key(0), batches, over="z", num_epochs=4, **sizes)
    return kept("columns", fitted, ("w", "z"))


def fits_of_pairs(devices, processes, checkpoint=None):
    """Pairs of which some are censored; the last batch is of the first process alone."""
    tables = [
        {"pairs": np.stack([rows, columns, counts], axis=1), "num_users": num}
        for rows, columns, counts, num in batches_of(processes)
    ]
    options = {"bound": "jaakkola", "progress_bar": False, "devices": devices, "tol": 1e-300}
    engine = BilinearVG(paired_symbols, field=["u", "b", "v", "g"], **options)
    sizes = {"num_items": NUM_COLUMNS, "rank": RANK, "num_censored": 300.0}
    options = {"over": "u", "num_epochs": 5, "checkpoint": checkpoint, **sizes}
    fitted = fit_batches(engine, jax.random.key(0), iter(tables), **options)
    out = kept("pairs", fitted, ("u", "v", "pi", "psi"))
    return out | {"pairs tangent": np.asarray(fitted.background.tangent)}


def fits_of_common(devices):
    """Outcomes with an unknown that all cells see, of one process."""
    binary = [
        {"rows": rows, "cols": columns, "x": (counts > 2).astype(int), "num_rows": num}
        for rows, columns, counts, num in batches_of([0, 1])
    ]
    engine = BilinearVG(binary_factorization, bound="jaakkola", progress_bar=False, devices=devices, tol=1e-300)
    fitted = fit_batches(engine, jax.random.key(0), binary, over="u", num_epochs=3, **SIZES)
    return kept("common", fitted, ("z", "u", "v"))


def refusals(number):
    """Errors of process ``number`` of two where the processes disagree, as text, by the reason."""
    devices, key, batches = jax.devices(), jax.random.key(0), count_batches([number])
    is_second = number == 1

    def broken():
        yield batches[0]
        raise OSError("the disk is full")

    outside = {**batches[0], "cols": np.full_like(batches[0]["cols"], NUM_COLUMNS)}
    given = {
        "rank": (batches, {"rank": 3 if is_second else RANK}),
        "items": (batches, {"num_cols": NUM_COLUMNS + is_second}),
        "epochs": (batches, {"num_epochs": 3 - is_second}),
        "invalid": (batches, {"num_epochs": 1 - is_second}),
        "empty": ([] if is_second else batches, {}),
        "no list": (None if is_second else batches, {}),
        "broken": (broken() if is_second else batches, {}),
        "outside": ([outside] if is_second else batches, {}),
        "key": (batches, {"rng_key": jax.random.key(int(is_second))}),
        "floats": ([{**b, "counts": b["counts"].astype(float)} for b in batches] if is_second else batches, {}),
        "checkpoint": (batches, {"checkpoint": "somewhere"} if is_second else {}),
    }
    out = {}
    for name, (found, changes) in given.items():
        options = {"over": "w", "num_epochs": 1, "rng_key": key, **SIZES, **changes}
        try:
            fit_batches(make_engine(devices), batches=found, **options)
            out[name] = "no error"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def record_epochs():
    """The list of epochs that fits go on from."""
    found, read = [], BatchCheckpoints.read

    def read_and_record(self, *arguments):
        out = read(self, *arguments)
        found.append(len(out[2].trace))
        return out

    BatchCheckpoints.read = read_and_record
    return found


def kill_within_an_epoch(first):
    """End this process where it would write the checkpoint of an epoch, once the file of process 0 is there."""
    write = BatchCheckpoints.write

    def write_or_die(self, shared, visited, progress, digest):
        if len(progress.trace) == KILLED_IN:
            while read_archive(first)["num_steps"] != KILLED_IN:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, shared, visited, progress, digest)

    BatchCheckpoints.write = write_or_die


def kill_within_a_visit():
    """End this process in the second visit of an epoch."""
    visit = BatchRun.visit

    def visit_or_die(self, number, **options):
        if number == 1 and len(self.progress.trace) == KILLED_IN - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        visit(self, number, **options)

    BatchRun.visit = visit_or_die


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed", choices=("counts", "pairs"))
    arguments = joined(parser)
    jax.config.update("jax_disable_most_optimizations", True)
    folder, number = arguments.folder, arguments.process
    if arguments.processes > 1:
        if arguments.killed == "counts" and number == 1:
            kill_within_an_epoch(folder / f"counts.0.{KILLED_IN % 2}")
        if arguments.killed == "pairs" and number == 1:
            kill_within_a_visit()
        epochs = record_epochs()
        found = {} if arguments.killed == "pairs" else fits(jax.devices(), [number], folder / "counts")
        found |= fits_of_pairs(jax.devices(), [number], folder / "pairs")
        found["epochs"] = np.array(epochs)
        (folder / f"{number}.json").write_text(json.dumps(refusals(number)))
    else:
        assert len(jax.devices()) == 4
        found = fits(jax.devices(), [0, 1]) | fits_over_columns(jax.devices())
        found |= fits_of_pairs(jax.devices(), [0, 1]) | fits_of_common(jax.devices())
    np.savez(folder / f"{number}.npz", **found)


if __name__ == "__main__":
    main()
