"""Random number generator keys, as users hand them in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["check_key"]


def check_key(rng_key: Any) -> None:
    """Refuse what is no key, before a model is run on arguments that are shifted by one.

    :param rng_key: ``jax.random.key(0)``, or an array of the older ``jax.random.PRNGKey(0)``.
    :raises TypeError: saying what was found in its place.
    """
    dtype, shape = getattr(rng_key, "dtype", None), getattr(rng_key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return
    if dtype == np.uint32 and shape in ((2,), (4,)):
        return
    found = "None" if rng_key is None else type(rng_key).__name__
    found += "" if shape is None else f" of shape {shape}"
    raise TypeError(
        f"The first argument is a random number generator key, such as jax.random.key(0), and those of the model come "
        f"after it: run(jax.random.key(0), ...). Got {found}."
    )
