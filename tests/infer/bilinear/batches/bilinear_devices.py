"""Bilinear counts fitted on the devices of one or several processes, to be compared with a fit on a single device.

``python -m tests.infer.bilinear.batches.bilinear_devices FOLDER``
writes ``0.npz``; with ``--processes``, ``--process`` and ``--port``
it joins others, and writes the file of its number.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.infer import BilinearVG
from numpyro_ext.models import gaussian_factorization, paired_symbols, poisson_factorization
from tests.processes import joined

NUM_ROWS, NUM_COLUMNS, RANK = 14, 6, 2
SCALES = {"row_scale": 0.8, "row_bias_scale": 0.5, "col_bias_scale": 0.5}


def make_counts():
    """Rows of very different lengths; the last has no cells."""
    rng = np.random.default_rng(4)
    rows, columns = np.divmod(np.arange(NUM_ROWS * NUM_COLUMNS), NUM_COLUMNS)
    kept = (rng.uniform(size=rows.size) < np.linspace(0.2, 1.0, NUM_ROWS)[rows]) & (rows < NUM_ROWS - 1)
    rows, columns = rows[kept], columns[kept]
    w, z = rng.normal(size=(NUM_ROWS, RANK)), rng.normal(size=(NUM_COLUMNS, RANK))
    return rows, columns, rng.poisson(np.exp(1.0 + (w[rows] * z[columns]).sum(-1)))


def side_features(rows, columns, feature, counts):
    """Coefficients that differ between cells, and a level in the predictor to learn."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", NUM_ROWS):
        w = numpyro.sample("w", dist.Normal(0.0, 0.8).expand([RANK]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0.0, 0.5))
    with numpyro.plate("columns", NUM_COLUMNS):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
    eta = level + (w[rows] * z[columns]).sum(-1) + slope[rows] * feature
    numpyro.sample("counts", dist.Poisson(jnp.exp(eta)), obs=counts)


def answers(rows, columns, y):
    """Binary data, whose expectations are by quadrature."""
    with numpyro.plate("rows", NUM_ROWS):
        w = numpyro.sample("w", dist.Normal(0.0, 0.9).expand([RANK]).to_event(1))
    with numpyro.plate("columns", NUM_COLUMNS):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=(w[rows] * z[columns]).sum(-1)), obs=y)


def ones(rows, columns, x, num_rows=NUM_ROWS):
    """Binary data with a level that has a posterior, and a scale to learn."""
    scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.2))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, scale).expand([RANK]).to_event(1))
    with numpyro.plate("columns", NUM_COLUMNS):
        z = numpyro.sample("z", dist.Normal(0.0, 2.0).expand([RANK]).to_event(1))
    numpyro.sample("x", dist.Bernoulli(logits=level + (w[rows] * z[columns]).sum(-1)), obs=x)


def values(rows, columns, x):
    """Real numbers, whose noise is learned."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("rows", NUM_ROWS):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 0.5))
    with numpyro.plate("columns", NUM_COLUMNS):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
    numpyro.sample("x", dist.Normal(bias[rows] + (w[rows] * z[columns]).sum(-1), noise), obs=x)


def closed_fits(devices):
    """Results of closed updates by name."""
    rows, columns, counts = make_counts()
    out = {}

    def keep(name, model, *args, sites=("w", "z"), model_options=None, **options):
        engine = BilinearVG(
            model, num_steps=12, tol=1e-300, num_restarts=0, progress_bar=False, devices=devices, **options
        )
        engine.run(jax.random.key(0), *args, **(model_options or {}))
        out[f"{name} trace"] = engine.diagnostics.objective_trace
        found = {site: (engine.hyper if site in engine.hyper else engine.posterior)[site] for site in sites}
        out.update({f"{name} {site}": np.asarray(one.mean) for site, one in found.items()})

    x, logistic = (counts > 2).astype(int), {"bound": "jaakkola", "sites": ("w", "z", "level")}
    keep("grid", ones, rows, columns, x, **logistic)
    keep("full", ones, rows, columns, x, covariance="full", **logistic)
    keep("bohning", ones, rows, columns, x, bound="bohning", update="coordinate")
    # Fewer rows than devices, one of which has most cells, and so few cells that they are in tiles.
    few = np.array([0, 0, 0, 2]), np.array([0, 2, 5, 1]), np.array([1, 0, 1, 1])
    keep("tiles", ones, *few, model_options={"num_rows": 3}, **logistic)
    is_one = (x == 1) & (np.arange(rows.size) % 2 == 0)
    for zeros in ("by_row", "shared", "exact"):
        found = {**logistic, "unlisted_cells": "zero", "zeros": zeros}
        keep(zeros, ones, rows[is_one], columns[is_one], x[is_one], **found)
    keep("values", values, rows, columns, np.log1p(counts), sites=("w", "z", "bias"))
    sizes = {"num_rows": NUM_ROWS, "num_cols": NUM_COLUMNS, "rank": RANK, "heteroscedastic": True}
    noisy = {"sites": ("u", "v", "row_noise", "column_noise"), "model_options": sizes}
    keep("noise", gaussian_factorization, rows, columns, np.log1p(counts), **noisy)
    sizes = {"num_users": NUM_ROWS, "num_items": NUM_COLUMNS, "rank": RANK, "num_censored": 50.0}
    pairs = np.stack([rows, columns, 1 + counts % 3], axis=1)
    for selection in ("learned", "constant"):
        found = {"bound": "jaakkola", "selection": selection, "model_options": sizes}
        keep(f"pairs {selection}", paired_symbols, pairs, sites=("u", "v", "b", "pi", "psi"), **found)
    return out


def fits(devices, folder=None):
    """Results by name: the bound after each sweep and posterior means."""
    rows, columns, counts = make_counts()
    sizes = {"num_rows": NUM_ROWS, "num_cols": NUM_COLUMNS, "rank": RANK, "log_rate": 1.0}
    out = {}

    def keep(name, engine, sites):
        out[f"{name} bound"] = np.asarray(engine.log_evidence)
        out[f"{name} trace"] = engine.diagnostics.objective_trace
        out.update({f"{name} {site}": np.asarray(engine.posterior[site].mean) for site in sites})

    for family in ("full", "diagonal"):
        options = {"covariance": family, "hyper_values": SCALES, "progress_bar": False, "devices": devices}
        engine = BilinearVG(poisson_factorization, tol=1e-10, num_steps=3000, **options)
        engine.run(jax.random.key(0), rows, columns, counts, **sizes)
        keep(family, engine, ("w", "z", "row_bias", "col_bias"))
    if folder is not None:
        # the same run in two parts, of which the second goes on from the file
        for num_steps in (4, 3000):
            engine.num_steps = num_steps
            engine.run(jax.random.key(0), rows, columns, counts, checkpoint=folder / "checkpoint", **sizes)
        keep("resumed", engine, ("w", "z"))
    engine = BilinearVG(side_features, num_steps=25, tol=1e-300, progress_bar=False, devices=devices)
    engine.run(jax.random.key(0), rows, columns, np.sin(np.arange(rows.size)), counts)
    keep("features", engine, ("w", "z", "slope"))
    engine = BilinearVG(answers, num_steps=25, tol=1e-300, progress_bar=False, devices=devices)
    engine.run(jax.random.key(0), rows, columns, (counts > 2).astype(int))
    keep("answers", engine, ("w", "z"))
    return out | closed_fits(devices)


def main():
    arguments = joined(argparse.ArgumentParser())
    assert len(jax.devices()) == 4
    np.savez(arguments.folder / f"{arguments.process}.npz", **fits(jax.devices(), arguments.folder))


if __name__ == "__main__":
    main()
