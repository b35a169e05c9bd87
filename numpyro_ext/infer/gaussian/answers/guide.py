"""A fitted posterior as a NumPyro autoguide over all latent sites."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value

from ....structure.model.running.messages import Message


class FittedGuide(AutoMultivariateNormal):
    """An autoguide that knows the arguments of its fit: its sites are the elements and points that were fitted.

    ``Predictive(model, guide=engine.guide, params=engine.params)(rng_key, *new_args)`` draws these whatever the
    arguments. Where the priors of the latent sites are other distributions at the new arguments, other elements are
    meant than those that come back, and the guide says so.
    """

    fitted_priors: dict[str, Any] | None = None
    fitted_call: tuple[tuple[object, ...], dict[str, object]] = ((), {})
    prior_trace: Callable[..., Any]

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Draws of all latent sites.

        :raises ValueError: if a latent site has another shape at these arguments.
        :warns UserWarning: if its prior has other parameters, such as the covariance at other inputs of a process.
        """
        if self.fitted_priors is not None and not _are_same((args, kwargs), self.fitted_call):
            self._check_priors(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _check_priors(self, *args: object, **kwargs: object) -> None:
        if not self._has_fitted_priors(args, kwargs):
            return
        # A shift of all inputs leaves a stationary covariance what it was; half of them moved does not.
        old_args, old_kwargs = self.fitted_call
        half_args = tuple(_half(*pair) for pair in zip(args, old_args, strict=False))
        half_kwargs = {name: _half(kwargs[name], value) for name, value in old_kwargs.items() if name in kwargs}
        self._has_fitted_priors((*half_args, *args[len(half_args) :]), {**kwargs, **half_kwargs})

    def _has_fitted_priors(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        assert self.fitted_priors is not None
        with handlers.block(), jax.ensure_compile_time_eval():  # Predictive maps guides, and what is mapped is traced
            trace = self.prior_trace(*args, **kwargs)
        for name, prior in self.fitted_priors.items():
            if name not in trace:
                continue
            now = trace[name]["fn"]
            if now.shape() != prior.shape():
                raise ValueError(
                    f"The latent site {name!r} has shape {now.shape()} at these arguments and {prior.shape()} in the "
                    "fit of this guide. engine.predict(rng_key, *new_args) predicts new elements."
                )
            if not _are_same(now, prior):
                warnings.warn(
                    f"The prior of the latent site {name!r} depends on arguments that have other values than in the "
                    "fit of this guide, which draws the elements of the fit (for a process, its values at the old "
                    "inputs). engine.predict(rng_key, *new_args) predicts at new ones.",
                    stacklevel=4,
                )
                return False
        return True


def _half(new: Any, old: Any) -> object:
    """An argument with every other number from the fit, if it is an array of the same shape."""
    if not isinstance(new, np.ndarray | jax.Array) or isinstance(new, jax.core.Tracer):
        return new
    if np.shape(new) != np.shape(old) or jax.dtypes.issubdtype(new.dtype, jax.dtypes.prng_key):
        return new
    is_old = np.arange(new.size).reshape(new.shape) % 2 == 0
    return np.where(is_old, np.asarray(old), np.asarray(new))


def _are_same(new: object, old: object) -> bool:
    """True if two trees hold the same numbers up to rounding; what is traced is not known and taken as equal."""
    new_leaves, old_leaves = jax.tree.leaves(new), jax.tree.leaves(old)
    return len(new_leaves) == len(old_leaves) and all(map(_is_same, new_leaves, old_leaves))


def _is_same(new: object, old: object) -> bool:
    if new is old or isinstance(new, jax.core.Tracer) or isinstance(old, jax.core.Tracer):
        return True
    if jax.dtypes.issubdtype(getattr(new, "dtype", None), jax.dtypes.prng_key):
        return True
    try:
        first, second = np.asarray(new), np.asarray(old)
        return first.shape == second.shape and bool(np.allclose(first, second, rtol=1e-5, atol=1e-8, equal_nan=True))
    except (TypeError, ValueError):  # no numbers: an option, a data set
        return bool(new == old)


def fitted_guide(
    model: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
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
    means = {name: mean for name, (mean, _) in field.items()}
    prior_trace = handlers.trace(handlers.substitute(seeded, substitute_fn=_from(means, hyper))).get_trace
    trace = prior_trace(*args, **kwargs)
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

    guide = FittedGuide(model, init_loc_fn=init_to_value(values=values))
    with handlers.block():
        handlers.seed(handlers.substitute(guide, data=dict(params)), rng_seed=0)(*args, **kwargs)
    guide.fitted_priors, guide.fitted_call = {name: trace[name]["fn"] for name in order}, (args, kwargs)
    guide.prior_trace = prior_trace

    width = {id(group): next((rows.shape[1] for _, rows in group.values()), 0) for group in (field, hyper)}
    blocks = []
    for name in order:
        _, rows = parts[name]
        blank = jnp.zeros((rows.shape[0], width[id(hyper if name in field else field)]), rows.dtype)
        blocks.append(jnp.concatenate([rows, blank] if name in field else [blank, rows], axis=1))
    loc = jnp.concatenate([jnp.reshape(parts[name][0], -1) for name in order])
    return guide, {"auto_loc": loc, "auto_scale_tril": _lower_factor(jnp.concatenate(blocks)), **params}


def _unconstrained(fn: dist.Distribution, mean: Array, rows: Array) -> tuple[Array, Array]:
    """Mean and covariance rows of a field site in its unconstrained space, where it is a linear subspace; of one on a
    half line those of the log-normal with the same moments."""
    transform = biject_to(fn.support)
    if transform.inverse_shape(mean.shape) == mean.shape:
        lower = transform(jnp.full_like(mean, -jnp.inf))
        height = jnp.where(jnp.isfinite(lower), mean - lower, 1.0)
        deviation = jnp.linalg.norm(rows, axis=-1)
        width = jnp.sqrt(jnp.log1p(jnp.square(deviation / height.reshape(-1))))
        bounded = jnp.isfinite(lower).reshape(-1, 1)
        center = jnp.log(height) - 0.5 * jnp.square(width).reshape(mean.shape)
        rows = jnp.where(bounded, rows * (width / deviation)[:, None], rows)
        return jnp.where(jnp.isfinite(lower), center, mean), rows
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

    def substitute(site: Message) -> Array | None:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if site["name"] in hyper:
            return biject_to(site["fn"].support)(hyper[site["name"]][0])
        return values.get(site["name"])

    return substitute


def _lower_factor(factor: Array) -> Array:
    r"""Cholesky factor of :math:`F F^\top` by a QR decomposition, which does not fail when that is nearly singular."""
    missing = max(0, factor.shape[0] - factor.shape[1])  # of points, which have no covariance
    lower = jnp.linalg.qr(jnp.pad(factor, ((0, 0), (0, missing))).T, mode="r").T
    diagonal = jnp.diagonal(lower)
    lower = lower * jnp.where(diagonal < 0.0, -1.0, 1.0)
    floor = jnp.finfo(lower.dtype).eps * jnp.max(jnp.abs(lower))
    return lower + jnp.diag(jnp.maximum(floor - jnp.abs(diagonal), 0.0))
