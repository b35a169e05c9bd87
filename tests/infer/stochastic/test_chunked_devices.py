"""Members of a plate divided between devices: the same numbers as on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.models import collaborative_rnn

ROOT = Path(__file__).parents[3]


@pytest.mark.thorough
def test_four_devices(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.infer.stochastic.chunked_devices", str(tmp_path)]
    subprocess.run(command, env={**os.environ, **flags}, check=True, timeout=600)
    with np.load(tmp_path / "fits.npz") as found:
        names = [name.removeprefix("one-") for name in found if name.startswith("one-")]
        assert "network-W_h" in names and "rows-effect_auto_loc" in names
        for name in names:
            np.testing.assert_allclose(found[f"all-{name}"], found[f"one-{name}"], rtol=1e-11, atol=1e-12)


def test_one_device_may_be_named_and_what_cannot_be_divided_is_refused():
    options = {"optim": optax.adam(0.1), "plate": "users", "batch_size": 3, "chunk": 4}
    assert ChunkedSVI(collaborative_rnn, devices=jax.devices()[:1], **options).devices == tuple(jax.devices()[:1])
    with pytest.raises(ValueError, match="of this process"):
        ChunkedSVI(collaborative_rnn, devices=[], **options)
    with pytest.raises(ValueError, match="multiple of 2"):
        ChunkedSVI(collaborative_rnn, devices=2 * jax.devices()[:1], **options)
    with pytest.raises(ValueError, match="one after the other"):
        ChunkedSVI(collaborative_rnn, devices=jax.devices()[:1], local="laplace", **options)
