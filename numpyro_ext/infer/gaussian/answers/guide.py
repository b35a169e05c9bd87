"""A fitted posterior as a NumPyro autoguide over all latent sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value

__all__ = ["field_importance_pair", "fitted_guide"]


def fitted_guide(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    field: Mapping[str, tuple[Array, Array]],
    hyper: Mapping[str, tuple[Array, Array]],
    params: Mapping[str, Array],
) -> tuple[AutoMultivariateNormal, dict[str, Array]]:
    r"""An :class:`~numpyro.infer.autoguide.AutoMultivariateNormal` and the parameters that make it a given Gaussian.

    The guide lives in the unconstrained space of all latent sample sites, in the order of the trace. The field and the
    hyperparameters are independent in it, as they are in an engine that learns the second by maximisation.

    :param model: the model.
    :param tuple args: its arguments.
    :param dict kwargs: its keyword arguments.
    :param field: for each site of the field its mean (in the shape of the site) and the rows, shape
        ``(size, k)``, of a factor :math:`F` of the joint covariance :math:`F F^\top`.
    :param hyper: the same for each hyperparameter that is a sample site; unconstrained.
    :param params: values of the ``param`` sites, which are passed on.
    :return: the guide, prepared, and its parameters.
    :raises ValueError: if the model has latent sites that are in neither.
    """
    seeded = handlers.seed(handlers.substitute(model, data=dict(params)), rng_seed=0)
    values = {name: mean for name, (mean, _) in field.items()}
    trace = handlers.trace(handlers.substitute(seeded, substitute_fn=_from(values, hyper))).get_trace(*args, **kwargs)
    order = [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]
    field = {name: _unconstrained(trace[name]["fn"], *part) for name, part in field.items()}
    parts = {**field, **hyper}
    unknown = [name for name in order if name not in parts]
    if unknown:
        raise ValueError(
            f"No guide for this model: its latent sites {unknown} belong neither to the field nor to the "
            "hyperparameters (missing observations, for example). Draw them with Predictive(model, get_samples())."
        )
    values = {name: trace[name]["value"] for name in order}

    guide = AutoMultivariateNormal(model, init_loc_fn=init_to_value(values=values))
    with handlers.block():
        handlers.seed(handlers.substitute(guide, data=dict(params)), rng_seed=0)(*args, **kwargs)

    width = {id(group): next((rows.shape[1] for _, rows in group.values()), 0) for group in (field, hyper)}
    blocks = []
    for name in order:
        _, rows = parts[name]
        blank = jnp.zeros((rows.shape[0], width[id(hyper if name in field else field)]), rows.dtype)
        blocks.append(jnp.concatenate([rows, blank] if name in field else [blank, rows], axis=1))
    loc = jnp.concatenate([jnp.reshape(parts[name][0], -1) for name in order])
    return guide, {"auto_loc": loc, "auto_scale_tril": _lower_factor(jnp.concatenate(blocks)), **params}


def _unconstrained(fn: Any, mean: Array, rows: Array) -> tuple[Array, Array]:
    """Mean and covariance rows of a field site in its unconstrained space, where it is a linear subspace."""
    transform = biject_to(fn.support)
    if transform.inverse_shape(mean.shape) == mean.shape:
        return mean, rows
    columns = jax.vmap(lambda column: jnp.reshape(transform.inv(column.reshape(mean.shape)), -1), 1, 1)(rows)
    return transform.inv(mean), columns


def field_importance_pair(
    log_density: Callable[[Array], Array], mean: Array, scale_tril: Array
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A model and a guide of the unknowns alone, the hyperparameters held: for importance weights of the field.

    :param log_density: joint log density of unknowns and data.
    :param mean: of the Gaussian posterior, shape ``(n,)``.
    :param scale_tril: its lower Cholesky factor, shape ``(n, n)``.
    :return: model and guide, both without arguments.
    """

    def model() -> None:
        unknowns = numpyro.sample("unknowns", dist.ImproperUniform(constraints.real_vector, (), mean.shape))
        numpyro.factor("log_density", log_density(unknowns))

    def guide() -> None:
        numpyro.sample("unknowns", dist.MultivariateNormal(mean, scale_tril=scale_tril))

    return model, guide


def _from(
    values: Mapping[str, Array], hyper: Mapping[str, tuple[Array, Array]]
) -> Callable[[dict[str, Any]], Array | None]:
    """Substitutes means: those of the hyperparameters have to pass through the support of their site first."""

    def substitute(site: dict[str, Any]) -> Array | None:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if site["name"] in hyper:
            constrained: Array = biject_to(site["fn"].support)(hyper[site["name"]][0])
            return constrained
        return values.get(site["name"])

    return substitute


def _lower_factor(factor: Array) -> Array:
    r"""Cholesky factor of :math:`F F^\top` by a QR decomposition, which does not fail when that is nearly singular."""
    lower = jnp.linalg.qr(factor.T, mode="r").T
    diagonal = jnp.diagonal(lower)
    lower = lower * jnp.where(diagonal < 0.0, -1.0, 1.0)
    floor = jnp.finfo(lower.dtype).eps * jnp.max(jnp.abs(lower))
    return lower + jnp.diag(jnp.maximum(floor - jnp.abs(diagonal), 0.0))
