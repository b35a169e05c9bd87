"""Orderings that Khan (2012, figure 4.14) found on data: evidence surfaces of a Gaussian process.

The file is not a part of the project; see :func:`numpyro_ext.datasets.data_path`.
"""

import csv
import gzip
from functools import partial

import jax
import numpy as np
import pytest

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import EP, VariationalGaussian
from numpyro_ext.models import gp_classification

pytestmark = pytest.mark.slow


def read_table(name):
    try:
        path = data_path("uci-classification", name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with gzip.open(path, "rt") as file:
        header, *rows = csv.reader(file)
    return header, rows


def bits_and_evidence(engine, X, label, is_training):
    engine.run(jax.random.key(0), X, label, is_training)
    held_out = np.asarray(engine.log_predictive()["y"])[~is_training]
    return float(engine.log_evidence), -held_out.mean() / np.log(2.0)


def settings(scales, lengths):
    return [{"scale": float(np.exp(scale)), "length": float(np.exp(length))} for scale in scales for length in lengths]


def test_evidence_surfaces_of_ionosphere():
    """200 rows to learn from and 151 to predict; the kernel at points of a grid."""
    _, rows = read_table("ionosphere.csv.gz")
    rng = np.random.default_rng(0)
    rows = [rows[i] for i in rng.permutation(len(rows))]
    X = np.array([row[:-1] for row in rows], float)
    label = np.array([row[-1] == "good" for row in rows]).astype(int)
    is_training = np.arange(len(rows)) < 200
    engines = {
        "EP": EP,
        "exact": VariationalGaussian,
        "piecewise": partial(VariationalGaussian, bound="piecewise-quadratic"),
        "jaakkola": partial(VariationalGaussian, bound="jaakkola"),
        "bohning": partial(VariationalGaussian, bound="bohning"),
    }
    grid = settings((-1.0, 0.5, 2.0, 4.0), (0.0, 1.0))
    evidence, bits = {}, {}
    for name, make in engines.items():
        found = [
            bits_and_evidence(
                make(gp_classification, hyper_values=values, tol=1e-5, num_steps=1000, progress_bar=False),
                X, label, is_training,
            )
            for values in grid
        ]  # fmt: skip
        evidence[name], bits[name] = np.array(found).T
        print(f"{name:10}", evidence[name].round(1), bits[name].round(3))
    # Each bound is below the next at every setting.
    for low, high in (("bohning", "jaakkola"), ("jaakkola", "exact"), ("piecewise", "exact")):
        assert np.all(evidence[low] < evidence[high] + 1e-6)
    best = {name: int(values.argmax()) for name, values in evidence.items()}
    # Tight bounds follow EP: the optimum is where EP's is, at a scale far above one. Bohning's bound shrinks the
    # process, and its evidence collapses at large scales.
    assert best["exact"] == best["piecewise"] == best["EP"]
    assert grid[best["bohning"]]["scale"] < grid[best["EP"]]["scale"]
    assert evidence["bohning"].max() - evidence["bohning"][-2:].max() > 30.0
    assert evidence["exact"].max() - evidence["exact"][-2:].max() < 30.0
    # Predictions at the chosen setting.
    chosen = {name: bits[name][best[name]] for name in engines}
    assert abs(chosen["exact"] - chosen["EP"]) < 0.02
    assert max(chosen["exact"], chosen["piecewise"]) < chosen["jaakkola"] < chosen["bohning"]
