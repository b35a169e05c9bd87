"""Bilinear forms made from arrays, for the tests of the algorithm alone."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from numpyro_ext.potentials import PoissonExpPotential
from numpyro_ext.structure.bilinear.form import Bilinear, GaussianSide, order_cells

REFERENCE = Path(__file__).parents[2] / "reference"


def factorisation(rows, columns, counts, num, variances, rank, *, exposure=1.0, weight=1.0):
    """Plain Poisson factorisation with isotropic priors: no linear terms and no offsets."""
    n = len(counts)
    sides = [
        GaussianSide(jnp.zeros((size, rank)), jnp.full((size, rank), 1.0 / variance))
        for size, variance in zip(num, variances, strict=True)
    ]
    none = jnp.zeros((1, 0))
    counts = jnp.asarray(counts, none.dtype)
    form = Bilinear(
        *sides,
        jnp.asarray(rows),
        jnp.asarray(columns),
        jnp.ones((1, rank)),
        none,
        none,
        jnp.zeros(n),
        PoissonExpPotential(counts, jnp.broadcast_to(jnp.asarray(exposure, counts.dtype), (n,))),
        jnp.full((n,), weight),
        jnp.zeros(()),
        jnp.zeros(n, int),
        jnp.zeros(n, int),
    )
    return order_cells(form)


def reference_problem():
    """The problem of the reference file: users are rows, items columns."""
    problem = json.loads((REFERENCE / "ko-pmf-bounds.json").read_text())
    found = problem["bound_problem"]
    items, users, counts = np.array(found["cells"]).T
    variances = found["sigma2_u"], found["sigma2_v"]
    form = factorisation(users, items, counts, (found["U"], found["I"]), variances, found["D"])
    return form, found


def synthetic_counts():
    """Training and test cells: rows are users, columns items."""
    table = np.genfromtxt(REFERENCE / "ko-pmf-synth-counts.csv", delimiter=",", skip_header=1, dtype=str)
    item, user, count = (table[:, i].astype(int) for i in range(3))
    is_train = table[:, 3] == "train"
    return tuple(tuple(x[chosen] for x in (user, item, count)) for chosen in (is_train, ~is_train))
