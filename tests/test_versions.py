"""Faults of libraries below."""

import os
import subprocess
import sys
import warnings
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.compilation.versions import warn_of_wrong_sums


def test_sums_of_products_of_many_rows_are_right():
    """With jaxlib 0.10.2 they are not, here in double precision, and the test fails."""
    rows = np.random.default_rng(0).normal(size=(40_000, 3))

    @jax.jit
    def lengths(x):
        return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x)

    np.testing.assert_allclose(lengths(jnp.asarray(rows)), np.sum(rows**2, axis=1), rtol=1e-5)


def test_the_version_with_wrong_sums_is_told_unless_its_flag_is_set(monkeypatch):
    monkeypatch.setattr(metadata, "version", {"jaxlib": "0.10.2"}.__getitem__)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with pytest.warns(RuntimeWarning, match="jaxlib 0.10.2 adds up products wrongly.*Install another version"):
        warn_of_wrong_sums()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
        warn_of_wrong_sums()
        monkeypatch.delenv("XLA_FLAGS")
        monkeypatch.setattr(metadata, "version", {"jaxlib": "0.10.1"}.__getitem__)
        warn_of_wrong_sums()


def test_the_import_tells():
    program = (
        "import warnings; from importlib import metadata; metadata.version = lambda name: '0.10.2'\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always'); import numpyro_ext\n"
        "print([str(w.message)[:15] for w in told if w.category is RuntimeWarning])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['jaxlib 0.10.2 a']"


IN_ONE_THREAD = """
import jax, jax.numpy as jnp, numpy as np
from numpyro_ext.linalg.sparse_cholesky import SparsePattern, factorise

nodes = np.arange(200 * 200).reshape(200, 200)
ends = [(nodes[1:], nodes[:-1]), (nodes[:, 1:], nodes[:, :-1])]
pattern = SparsePattern.of(nodes.size, *(np.concatenate([pair[k].ravel() for pair in ends]) for k in (0, 1)))
values = jnp.where(jnp.asarray(pattern.rows) == jnp.asarray(pattern.columns), 5.0, -1.0)


@jax.jit
def solve(values, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: factorise(pattern, (1 + i) * values).solve(x), x)


for k in range(6):  # of values that are not computed when the program begins
    x = solve(1.1 * values, solve((1.0 + 0.1 * k) * values, jnp.ones(nodes.size)))
print(bool(jnp.all(x > 0)))
"""


@pytest.mark.thorough
def test_calls_of_the_host_end_in_one_thread():
    """A call whose arguments are copied on another thread of JAX's pool waits for ever here."""
    environment = {**os.environ, "PJRT_NPROC": "1"}
    command = [sys.executable, "-c", IN_ONE_THREAD]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "True"
