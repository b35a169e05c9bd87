"""Faults of versions of libraries below."""

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
