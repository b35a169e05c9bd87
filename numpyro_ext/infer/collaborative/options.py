"""Options of :func:`~.em.collaborative_em`, and the prior that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...linalg.cholesky import cholesky
from ..front.options import check_one_of
from .user_inference import Method, SharedPrior

Covariance = Literal["factor", "free"]
Accelerator = Literal["none", "squarem", "lbfgs"]


def checked_kernel(kernel: ArrayLike) -> Array:
    """The kernel as an array.

    :raises ValueError: if it is no covariance.
    """
    K = jnp.asarray(kernel, float)
    if K.ndim != 2 or K.shape[0] != K.shape[1]:
        raise ValueError(f"kernel must be a square matrix, with the items on both axes; got shape {K.shape}.")
    if not np.allclose(K, K.T, rtol=1e-6) or not bool(jnp.all(jnp.isfinite(cholesky(K)))):
        raise ValueError(
            "kernel must be symmetric and positive definite: items that are alike in all features, or no noise of "
            "their own, make it singular. Add a share of the identity, such as 0.1 * np.eye(len(kernel))."
        )
    return K


def check_options(
    K: Array,
    rank: int,
    method: str,
    covariance: str,
    accelerator: str,
    num_pairs_per_user: int | None,
    batch_size: int | None,
    num_steps: int,
) -> None:
    """Refuse options that are none, or that do not go together.

    :raises ValueError: with what would do.
    """
    check_one_of(Method, method=method)
    check_one_of(Covariance, covariance=covariance)
    check_one_of(Accelerator, accelerator=accelerator)
    whole = {"rank": rank, "num_pairs_per_user": num_pairs_per_user, "batch_size": batch_size, "num_steps": num_steps}
    for name, number in whole.items():
        if number is not None and not isinstance(number, int | np.integer):
            raise ValueError(f"{name} must be an integer; got {number!r}.")
    if num_steps < 0:
        raise ValueError(f"num_steps must not be negative; got {num_steps}.")
    if not 0 <= rank < K.shape[0]:
        raise ValueError(f"rank must be in 0, ..., {K.shape[0] - 1}, below the number of items; got {rank}.")
    for name, number in (("num_pairs_per_user", num_pairs_per_user), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be one or more; got {number}.")
    if accelerator == "lbfgs" and method == "laplace":
        raise ValueError(
            "accelerator='lbfgs' needs the gradient of the objective, which by method='laplace' lacks how the modes "
            "move. Take accelerator='squarem', or another method."
        )
    is_stochastic = num_pairs_per_user is not None or batch_size is not None
    if accelerator == "lbfgs" and (covariance == "free" or is_stochastic):
        raise ValueError("accelerator='lbfgs' goes with covariance='factor' and all pairs of all users at once.")


def continued_prior(prior: SharedPrior, K: Array, rank: int, covariance: str) -> SharedPrior:
    """The prior of a fit, where it is one of these items."""
    size = prior.mean.shape[0]
    if size != K.shape[0]:
        raise ValueError(f"init is a fit of {size} items, and kernel has {K.shape[0]}.")
    if covariance == "free":
        return prior
    if prior.loadings.shape[1] != rank or not np.allclose(prior.kernel, K):
        raise ValueError(
            f"init is a fit of rank {prior.loadings.shape[1]} with the kernel init.prior.kernel; with covariance="
            "'factor' rank and kernel must be the same. Parts of it go into init_values."
        )
    return prior


def first_prior(K: Array, rank: int, given: Mapping[str, Any], key: Array) -> SharedPrior:
    """Prior of given values; where there are none, random whitened loadings of size 0.3, mean zero and scale one."""
    size = K.shape[0]
    white = 0.3 * jax.random.normal(key, (size, rank), K.dtype)
    values = {"V": cholesky(K) @ white, "b": jnp.zeros(size, K.dtype), "sigma": jnp.ones((), K.dtype)}
    for name, value in given.items():
        if name not in values or jnp.shape(value) != values[name].shape:
            shapes = ", ".join(f"{n} {v.shape}" for n, v in values.items())
            raise ValueError(f"init_values may hold {shapes}; got {name!r} of shape {jnp.shape(value)}.")
        values[name] = jnp.asarray(value, K.dtype)
    return SharedPrior(values["b"], values["V"], values["sigma"] ** 2, K)
