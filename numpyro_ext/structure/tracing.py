"""Run a model with innovations in place of its Gaussian sites, and collect what the reader needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.linalg import solve_triangular
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from ..distributions import RectifiedLinearPoisson, SoftplusPoisson
from .errors import ModelStructureError
from .priors import is_gaussian, location, mask_of, prior_block, shift_to_value, unwrap

__all__ = ["FactorTrace", "ModelTrace", "SiteInfo", "inspect_sites", "trace_with_innovations"]


class SiteInfo(NamedTuple):
    """What one concrete run of the model shows of a site."""

    name: str
    kind: str
    """``latent``, ``param``, ``observed`` (``numpyro.factor`` included) or ``deterministic``."""
    shape: tuple[int, ...]
    family: str
    """Name of the distribution."""
    is_candidate: bool
    """Whether it may join the Gaussian field: Gaussian (or flat) and not masked."""
    is_discrete: bool
    is_masked: bool
    transform: Any
    """From unconstrained values, for latent and param sites."""
    init: Any
    """A central value of the prior, or the initial value of a ``param``."""
    plates: tuple[tuple[str, int], ...]
    value: Any
    """The observed value."""
    support: Any
    """Support of the elementwise distribution of an observed site."""
    mask: Any
    batch_shape: tuple[int, ...]
    """Batch shape that the mask of an observed site covers."""
    full_shape: tuple[int, ...]
    """Shape of the distribution of an observed site."""
    is_event_support: bool
    """Whether the support is that of a vector, which cannot be tested elementwise."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A constant that is not an array, carried through a trace."""

    value: str | None


class FactorTrace(NamedTuple):
    """Arrays of one factor site, inside a trace."""

    log_prob: Any
    """Elementwise log probability, before mask and scale."""
    mask: Any
    scale: Any
    value: Any
    parameters: dict[str, Any]
    """Parameters of the distribution, if it is of a known family, broadcast to the shape of ``log_prob``."""
    constant: Any
    """A term to add to the log density (log determinants)."""
    family: Any
    """Key of the family in the recogniser, as a :class:`Static`, so that it passes through a trace."""


class ModelTrace(NamedTuple):
    """Everything that the reader looks at, as functions of innovations and hyperparameters."""

    locations: dict[str, Any]
    priors: dict[str, Any]
    factors: dict[str, FactorTrace]
    values: dict[str, Any]


# families whose parameters the recogniser understands
_FAMILIES: dict[type, tuple[str, tuple[str, ...]]] = {
    dist.Normal: ("normal", ("loc", "scale")),
    dist.StudentT: ("student_t", ("df", "loc", "scale")),
    dist.Laplace: ("laplace", ("loc", "scale")),
    dist.Poisson: ("poisson", ("rate",)),
    dist.BernoulliLogits: ("bernoulli_logits", ("logits",)),
    dist.BernoulliProbs: ("bernoulli_probs", ("probs",)),
    dist.BinomialLogits: ("binomial_logits", ("logits", "total_count")),
    dist.BinomialProbs: ("binomial_probs", ("probs", "total_count")),
    dist.GammaPoisson: ("gamma_poisson", ("concentration", "rate")),
    dist.NegativeBinomial2: ("gamma_poisson", ("concentration", "rate")),
    dist.NegativeBinomialLogits: ("negative_binomial_logits", ("total_count", "logits")),
    RectifiedLinearPoisson: ("rectified_linear_poisson", ("predictor", "exposure", "offset")),
    SoftplusPoisson: ("softplus_poisson", ("predictor", "exposure", "offset")),
}


class _Innovations(Messenger):
    """Give field sites the value of their location plus an innovation, and all other free sites a given value."""

    def __init__(self, fn: Any, innovations: Mapping[str, Any], given: Mapping[str, Any]):
        self.innovations = innovations
        self.given = given
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        name = msg.get("name")
        if msg["type"] == "sample" and not msg["is_observed"] and name in self.innovations:
            fn = msg["fn"]
            flat = self.innovations[name]
            msg["value"] = shift_to_value(fn, jnp.reshape(flat, fn.batch_shape + fn.event_shape))
        elif msg["type"] in ("sample", "param") and not msg.get("is_observed") and name in self.given:
            msg["value"] = self.given[name]


def trace_with_innovations(
    model: Callable[..., Any], args: tuple, kwargs: dict, field: tuple[str, ...], rng_key: Array
) -> Callable[[dict[str, Any], dict[str, Any]], ModelTrace]:
    """A function of flat innovations per field site and values of all other free sites, to be traced."""

    def run(innovations: dict[str, Any], given: dict[str, Any]) -> ModelTrace:
        seeded = handlers.seed(model, rng_key)
        sites = handlers.trace(_Innovations(seeded, innovations, given)).get_trace(*args, **kwargs)
        out = ModelTrace({}, {}, {}, {})
        for name, site in sites.items():
            if site["type"] == "sample" and name in field:
                fn = site["fn"]
                is_walk = isinstance(unwrap(fn), dist.GaussianRandomWalk)
                out.locations[name] = jnp.zeros(()) if is_walk else location(fn)
                out.priors[name] = prior_block(fn)
                out.values[name] = site["value"]
            elif site["type"] == "sample":
                out.factors[name] = _factor(site)
                if not site["is_observed"]:
                    out.values[name] = site["value"]
            elif site["type"] == "deterministic":
                out.values[name] = site["value"]
        return out

    return run


def _factor(site: dict[str, Any]) -> FactorTrace:
    fn, value = site["fn"], site["value"]
    base, mask, scale = unwrap(fn), mask_of(fn), site["scale"]
    value = jnp.asarray(value)
    constant: Any = 0.0
    if isinstance(base, dist.MultivariateNormal | dist.LowRankMultivariateNormal):
        # whitening makes one scalar factor of each coordinate
        tril = base.scale_tril if isinstance(base, dist.MultivariateNormal) else _low_rank_tril(base)
        residual = value - base.loc
        tril = jnp.broadcast_to(tril, (*residual.shape[:-1], *tril.shape[-2:]))
        white = solve_triangular(tril, residual[..., None], lower=True)[..., 0]
        log_diagonal = jnp.log(jnp.diagonal(tril, axis1=-2, axis2=-1))
        keep = True if mask is True else jnp.broadcast_to(jnp.asarray(mask)[..., None], white.shape)
        weight = jnp.ones(()) if scale is None else jnp.asarray(scale)[..., None]
        constant = -jnp.sum(jnp.where(keep, weight * log_diagonal, 0.0))
        base, value, mask = dist.Normal(-white, 1.0, validate_args=False), jnp.zeros(()), keep
        scale = None if scale is None else weight
    log_prob = base.log_prob(value)
    # the event dimensions of a to_event are elementwise here; those of a genuine vector distribution are summed
    event_dim = fn.event_dim - len(base.event_shape)
    batch = fn.batch_shape + (fn.event_shape[:event_dim] if event_dim > 0 else ())
    shape = np.broadcast_shapes(jnp.shape(log_prob), batch)
    family, names = _FAMILIES.get(type(base), (None, ()))
    parameters = {n: jnp.broadcast_to(getattr(base, n), shape) for n in names}
    full_value = jnp.broadcast_to(value, shape) if names else value
    if scale is not None:
        scale = jnp.asarray(scale)
        scale = jnp.broadcast_to(scale.reshape(scale.shape + (1,) * max(event_dim, 0)), shape)
    return FactorTrace(
        jnp.broadcast_to(log_prob, shape), jnp.broadcast_to(mask, shape), scale, full_value, parameters, constant, Static(family)
    )


def _low_rank_tril(base: Any) -> Array:
    factor = base.cov_factor
    diagonal = jnp.eye(factor.shape[-2]) * jnp.asarray(base.cov_diag)[..., None]
    return jnp.linalg.cholesky(factor @ jnp.swapaxes(factor, -1, -2) + diagonal)


class _LastSite(Messenger):
    """Remember the last site that went by, to say where a model failed."""

    name: str | None = None

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        self.name = msg.get("name") or self.name


def inspect_sites(model: Callable[..., Any], args: tuple, kwargs: dict, rng_key: Array) -> dict[str, SiteInfo]:
    """Run the model once, with cheap central values for its latent sites, and describe its sites.

    :raises ModelStructureError: for models that fail on their arguments, subsampled plates and scaled latent sites.
    """
    central = _LastSite(handlers.substitute(model, substitute_fn=_central_value))
    try:
        sites = handlers.trace(handlers.seed(central, rng_key)).get_trace(*args, **kwargs)
    except ValueError as error:
        after = f"after site '{central.name}'" if central.name else "before its first site"
        raise ModelStructureError(
            f"the model does not run on these arguments; {after} it fails with: {error} Check the shapes of the "
            "arguments, and the data and covariates for NaN, infinity and values outside their range."
        ) from error
    return {name: _inspect(name, site) for name, site in sites.items() if site["type"] in _KINDS}


_KINDS = ("sample", "param", "deterministic", "plate")


def _inspect(name: str, site: dict[str, Any]) -> SiteInfo:
    kind, value = site["type"], site["value"]
    nothing: dict[str, Any] = dict.fromkeys(SiteInfo._fields)
    nothing |= {"name": name, "kind": kind, "family": "", "shape": np.shape(value), "plates": ()}
    nothing |= {"is_candidate": False, "is_discrete": False, "is_masked": False, "is_event_support": False}
    nothing |= {"batch_shape": (), "full_shape": ()}
    if kind == "plate":
        size, subsample = site["args"]
        if subsample is not None and subsample != size:
            raise ModelStructureError(
                f"plate '{name}' draws a random subsample of {subsample} out of {size}: this engine needs all the data "
                "at once. Call the model with subsample_size=None, or use SVI for minibatches."
            )
        return SiteInfo(**nothing)
    if kind == "deterministic":
        return SiteInfo(**nothing)
    if kind == "param":
        constraint = site["kwargs"].get("constraint", dist.constraints.real)
        return SiteInfo(**(nothing | {"family": "param", "transform": biject_to(constraint), "init": value}))
    fn, scale = site["fn"], site["scale"]
    mask = mask_of(fn)
    plates = tuple((frame.name, frame.size) for frame in site["cond_indep_stack"])
    if site["is_observed"]:
        base = unwrap(fn)
        found = {
            "kind": "observed",
            "value": value,
            "support": getattr(base, "support", None),
            "mask": mask,
            "full_shape": fn.batch_shape + fn.event_shape,
            "batch_shape": (fn.batch_shape + fn.event_shape)[: len(fn.batch_shape) + fn.event_dim - base.event_dim],
            "is_event_support": base.event_dim > 0,
        }
        return SiteInfo(**(nothing | found | {"family": type(unwrap(fn)).__name__, "plates": plates}))
    is_masked = not (mask is True or bool(np.all(mask)))
    if scale is not None and not bool(np.all(np.asarray(scale) == 1.0)):
        raise ModelStructureError(
            f"latent site '{name}' is inside a scale of {np.ravel(scale)[0]:g}: only observed sites may be scaled. "
            "Move the sample statement out of the handler."
        )
    is_discrete = bool(fn.support.is_discrete)
    found = {
        "kind": "latent",
        "family": type(unwrap(fn)).__name__,
        "is_candidate": is_gaussian(fn) and not is_masked,
        "is_discrete": is_discrete,
        "is_masked": is_masked,
        "transform": None if is_discrete else biject_to(fn.support),
        "init": value,
        "plates": plates,
    }
    return SiteInfo(**(nothing | found))


def _central_value(site: dict[str, Any]) -> Any:
    """A central value of a latent site without drawing a sample: median, mean, or the image of zero."""
    if site["type"] != "sample" or site["is_observed"] or site["value"] is not None:
        return None
    fn = site["fn"]
    shape = fn.batch_shape + fn.event_shape
    if is_gaussian(fn):
        return location(fn)
    if fn.support.is_discrete:
        return None
    for attempt in (lambda: fn.icdf(0.5), lambda: fn.mean):
        try:
            value = jnp.broadcast_to(attempt(), shape)
            inside = bool(jnp.all(fn.support(value)) & jnp.all(jnp.isfinite(value)))
        except (NotImplementedError, AttributeError, TypeError, ValueError):
            continue
        if inside and _is_interior(fn.support, value):
            return value
    transform = biject_to(fn.support)
    unconstrained = transform.inverse_shape(shape)
    return transform(jnp.zeros(unconstrained))


def _is_interior(support: Any, value: Array) -> bool:
    return bool(jnp.all(jnp.isfinite(biject_to(support).inv(value))))
