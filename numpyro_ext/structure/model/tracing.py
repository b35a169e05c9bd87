"""Run a model with innovations in place of its Gaussian sites, and collect what the reader needs;
sites that nothing depends on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from ...linalg.gaussian.prior import FlatPrior
from ..families import Family, family_of, parameter_of
from ..program.equations import Atom
from ..program.program import Program
from .priors import (
    density_of_innovation,
    innovation_shape,
    is_factor,
    is_one_sided,
    location,
    mask_of,
    shift_to_value,
    unwrap,
)
from .running.execution import ModelCall
from .running.inspection import SiteInfo
from .running.messages import Message
from .running.plain_sites import PlainSites, is_scan
from .running.recording import RecordedSite, Sites


class FactorTrace(NamedTuple):
    """Arrays of one factor site, inside a trace."""

    log_prob: Any
    """Elementwise log probability, before mask and scale."""
    mask: Any
    scale: Any
    value: Any
    parameters: dict[str, Any]
    """Parameters of the family, if there is one, broadcast to the shape of ``log_prob``, and for those that are
    vectors one axis more."""
    constant: Any
    """A term to add to the log density (log determinants)."""
    family: Family | None
    """Family that is registered for the distribution; static, so that it passes through a trace."""


class ModelTrace(NamedTuple):
    """Everything that the reader looks at, as functions of innovations and hyperparameters."""

    locations: dict[str, Any]
    priors: dict[str, Any]
    factors: dict[str, FactorTrace]
    """Factors of all sites outside the field, and of those of the field whose prior is a factor on their
    innovations."""
    values: dict[str, Any]
    bounds: dict[str, Any]
    """Bounds of the supports of latent sites outside the field, where they are computed in the model."""

    def in_order(self, names: Iterable[str]) -> ModelTrace:
        """The same in the order of the model: passing through a trace sorts dictionaries by name."""
        names = list(names)
        return ModelTrace(*({n: part[n] for n in names if n in part} for part in self))


class _Innovations(Messenger):
    """Give field sites the value of their location plus an innovation, and all other free sites a given value."""

    def __init__(self, fn: Any, innovations: Mapping[str, Any], given: Mapping[str, Any]):
        self.innovations = innovations
        self.given = given
        super().__init__(fn)

    def process_message(self, msg: dict[str, object]) -> None:
        name = str(msg.get("name"))
        if is_scan(msg):
            self._enter_scan(msg)
        elif msg.get("_control_flow_done"):
            return
        elif msg["type"] == "sample" and not msg["is_observed"] and name in self.innovations:
            fn = msg["fn"]
            flat = self.innovations[name]
            msg["value"] = shift_to_value(fn, jnp.reshape(flat, innovation_shape(fn)))
        elif msg["type"] in ("sample", "param") and not msg.get("is_observed") and name in self.given:
            msg["value"] = self.given[name]

    def _enter_scan(self, msg: Message) -> None:
        """Hand what is given for all steps to the steps, one slice to each, since the body hides its sites."""
        function, start, slices, length, reverse = msg["args"]
        length = len(jax.tree.leaves(slices)[0]) if length is None else length
        # What has another length belongs to sites outside, and so may what has this one: nobody asks for it then.
        innovations = {n: v.reshape(length, -1) for n, v in self.innovations.items() if v.size % max(length, 1) == 0}
        given = {n: v for n, v in self.given.items() if np.shape(v)[:1] == (length,)}

        def step(carry: Any, now: tuple[Any, dict[str, Any], dict[str, Any]]) -> Any:
            own, innovations, given = now
            return _Innovations(function, innovations, {**self.given, **given})(carry, own)

        msg["args"] = (step, start, (slices, innovations, given), length, reverse)


def trace_with_innovations(
    call: ModelCall, field: tuple[str, ...], prior: Callable[[Any], Any]
) -> Callable[..., ModelTrace]:
    """A function of flat innovations per field site, values of all other free sites, of arguments that change and
    perhaps of the sites that were recorded, to be traced.

    :param prior: from the distribution of a field site, what describes that of its innovation.
    """

    def run(
        innovations: dict[str, Any], given: dict[str, Any], changing: dict[str, Any], recorded: Sites | None = None
    ) -> ModelTrace:
        if recorded is None:
            seeded = handlers.seed(PlainSites(call.model), call.rng_key)
            args, kwargs = call.with_values(changing)
            sites = handlers.trace(_Innovations(seeded, innovations, given)).get_trace(*args, **kwargs)
        else:

            def value(site: RecordedSite, fn: Any, default: Any) -> Any:
                if site.type == "sample" and site.name in innovations:
                    return shift_to_value(fn, jnp.reshape(innovations[site.name], innovation_shape(fn)))
                return given[site.name]

            sites = recorded(value)
        out = ModelTrace({}, {}, {}, {}, {})
        for name, site in sites.items():
            if site["type"] == "sample" and name in field:
                fn = site["fn"]
                is_walk = isinstance(unwrap(fn), dist.GaussianRandomWalk)
                out.locations[name] = jnp.zeros(()) if is_walk else location(fn)
                out.priors[name] = prior(fn)
                out.values[name] = site["value"]
                if isinstance(out.priors[name], FlatPrior) and (is_factor(fn) or is_one_sided(fn)):
                    innovation = jnp.reshape(innovations[name], innovation_shape(fn))
                    out.factors[name] = _factor(fn, density_of_innovation(fn, innovation), jnp.zeros(()), None)
            elif site["type"] == "sample":
                out.factors[name] = _factor(site["fn"], unwrap(site["fn"]), jnp.asarray(site["value"]), site["scale"])
                if not site["is_observed"]:
                    out.values[name] = site["value"]
                    if bounds := _computed_bounds(site["fn"]):
                        out.bounds[name] = bounds
            elif site["type"] == "deterministic":
                out.values[name] = site["value"]
        return out

    return run


def _computed_bounds(fn: Any) -> list[object]:
    if fn.support.is_discrete:
        return []
    return [leaf for leaf in jax.tree.leaves(biject_to(fn.support)) if isinstance(leaf, jax.core.Tracer)]


def _factor(fn: Any, base: Any, value: Array, scale: Any) -> FactorTrace:
    """The factor of a site of distribution ``fn``, which is ``base`` below its wrappers."""
    # of the event dimensions, those of a to_event are elementwise below; those of a vector distribution are not
    event_dim = fn.event_dim - base.event_dim
    shape: tuple[int, ...] = fn.batch_shape + fn.event_shape[:event_dim]
    mask = jnp.asarray(mask_of(fn))
    scale = None if scale is None else jnp.asarray(scale)
    if scale is not None:
        scale = jnp.reshape(scale, scale.shape + (1,) * event_dim)
    log_diagonal = jnp.zeros(())
    if isinstance(base, dist.MultivariateNormal | dist.LowRankMultivariateNormal):
        # whitening makes one scalar factor of each coordinate
        white, log_diagonal = _whiten(base, value)
        shape = shape + white.shape[-1:]
        mask = mask[..., None]
        scale = None if scale is None else scale[..., None]
        base, value = dist.Normal(-white, 1.0, validate_args=False), jnp.zeros(())
    if isinstance(value, jax.core.Tracer):
        # values joined with imputed ones: that they are in the support was checked, and a check here would hide that
        # only their difference from the location matters
        base = copy.copy(base)
        base._validate_args = False
    log_prob = base.log_prob(value)
    shape = np.broadcast_shapes(jnp.shape(log_prob), shape, mask.shape, () if scale is None else scale.shape)
    mask = jnp.broadcast_to(mask, shape)
    weight = 1.0 if scale is None else scale
    constant = -jnp.sum(jnp.where(mask, weight * jnp.broadcast_to(log_diagonal, shape), 0.0))
    family = family_of(base)
    return FactorTrace(
        jnp.broadcast_to(log_prob, shape),
        mask,
        None if scale is None else jnp.broadcast_to(scale, shape),
        value if family is None else jnp.broadcast_to(value, (*shape, *base.event_shape)),
        {} if family is None else _parameters(family, base, shape),
        constant,
        family,
    )


def _parameters(family: Family, base: object, shape: tuple[int, ...]) -> dict[str, Array]:
    values = {n: parameter_of(base, n) for n in (family.predictor, *family.parameters)}
    own = {n: jnp.shape(v)[-1:] if n in family.vectors else () for n, v in values.items()}
    return {n: jnp.broadcast_to(v, (*shape, *own[n])) for n, v in values.items()}


def _whiten(base: Any, value: Array) -> tuple[Array, Array]:
    """Whitened residual of a multivariate normal, and the log of the diagonal of its Cholesky factor."""
    tril = base.scale_tril if isinstance(base, dist.MultivariateNormal) else _low_rank_tril(base)
    residual = value - base.loc
    tril = jnp.broadcast_to(tril, (*residual.shape[:-1], *tril.shape[-2:]))
    white = solve_triangular(tril, residual[..., None], lower=True)[..., 0]
    return white, jnp.log(jnp.diagonal(tril, axis1=-2, axis2=-1))


def _low_rank_tril(base: Any) -> Array:
    factor = base.cov_factor
    diagonal = jnp.eye(factor.shape[-2]) * jnp.asarray(base.cov_diag)[..., None]
    return jnp.linalg.cholesky(factor @ jnp.swapaxes(factor, -1, -2) + diagonal)


def unused_sites(
    program: Program, trace: ModelTrace, given: Mapping[str, object], free: Sequence[SiteInfo]
) -> tuple[str, ...]:
    """Names of the sites among ``free`` that can be left out of a fit and drawn by the model afterwards.

    :param given: the atoms of each site.
    """
    out = []
    for site in free:
        if site.kind == "latent" and not is_used(program, trace, site.name, jax.tree.leaves(given[site.name])):
            out.append(site.name)
    return tuple(out)


def is_used(program: Program, trace: ModelTrace, name: str, atoms: Sequence[Atom]) -> bool:
    """True if anything but the prior of a site depends on its values."""
    priors = [p for n, p in trace.priors.items() if n != name]
    locations = [a for n, a in trace.locations.items() if n != name]
    others = [f for n, f in trace.factors.items() if n != name]
    return bool(program.ancestors(jax.tree.leaves((locations, priors, others))) & set(atoms))
