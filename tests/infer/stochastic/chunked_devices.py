"""Fits on all devices of a process and on the default one, for a process that has several."""

import sys
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer.autoguide import AutoNormal

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences


def slopes(rows, x, y, *, num_rows):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", num_rows, subsample_size=len(rows)):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal((slope + effect) * x, 1.0), obs=y)


def fits(devices, folder):
    """Numbers by name. Neither users nor rows are a multiple of the devices, nor are they of batches."""
    found = {}
    rng = np.random.default_rng(0)
    lengths = (9, 31, 14, 20, 3, 26, 12, 17, 40, 8, 11)
    log = EventSequences.from_lists([rng.integers(0, 6, length) for length in lengths])
    split = log.split(least=1)
    options = {"batch_size": 4, "chunk": 8, "progress_bar": False, "devices": devices}
    engine = ChunkedSVI(collaborative_rnn, optim=optax.adam(0.02), plate="users", **options)
    fit = engine.run(random.key(0), split, num_epochs=3, width=4)
    found |= {f"network-{name}": value for name, value in fit.params.items()}
    found |= {"losses": fit.losses, "errors": fit.validation_errors, "test": fit.log_predictive(split)}
    found["next"] = fit.next_log_probabilities([0, 1, 2], user=10)
    # from a file in the middle, and a file of the end
    for num_epochs in (1, 3):
        again = engine.run(random.key(0), split, num_epochs=num_epochs, checkpoint=folder / "checkpoint", width=4)
    assert all(np.array_equal(again.params[name], value) for name, value in fit.params.items())
    fit.save(folder / "fit")
    assert np.array_equal(engine.load(folder / "fit").log_predictive(split), found["test"])
    assert again.last_state.parameters.tables["W_h"].shape[0] == len(lengths)
    y = rng.normal(size=(2, 10))
    options = {"batch_size": 4, "progress_bar": False, "devices": devices}
    engine = ChunkedSVI(slopes, AutoNormal(slopes), optim=optax.adam(0.05), plate="rows", **options)
    fit = engine.run(random.key(1), tuple(y), num_epochs=3, num_rows=10)
    return found | {f"rows-{name}": value for name, value in fit.params.items()}


def main(folder):
    jax.config.update("jax_enable_x64", True)
    assert len(jax.devices()) == 4
    (folder / "all").mkdir()
    found = {"one": fits(None, folder), "all": fits(jax.devices(), folder / "all")}
    flat = {f"{where}-{name}": value for where, values in found.items() for name, value in values.items()}
    np.savez(folder / "fits.npz", **flat)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
