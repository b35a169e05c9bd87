"""Models of censored pairs as models of the pairs that were emitted, whose zeros are a background.

The density of :class:`~numpyro_ext.distributions.CensoredPairs` visits all pairs of a row and a column. What is read in
its place has a factor for each emitted pair, and is checked against that density where this is not too large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from ...compilation.quick_jit import quick_jit
from ...compilation.transfer import generator_of
from ...distributions.censored_pairs import CensoredPairs, PairTable
from ..errors import ModelStructureError, Reason
from ..model.running.execution import ModelCall
from ..model.running.inspection import SiteInfo
from ..model.running.untouched import untouched_log_densities
from ..model.verification import tolerance_of_densities
from .form import Background, Selection

MOST_PAIRS = 10_000_000
"""Pairs of a row and a column up to which the density of a model is computed for comparison."""


class HasCensoredPairs(Exception):
    """A model that observes censored pairs, and has to be read as one of those that were emitted."""


class PairSites(NamedTuple):
    """Sites of a model of censored pairs besides its vectors."""

    name: str
    """The observed site."""
    shares: tuple[str, str]
    """Sites of the probabilities of rows and columns."""
    concentrations: tuple[np.ndarray, ...]
    """Concentrations of their Dirichlet priors."""
    num_censored: float

    def without_data(self) -> PairSites:
        """The names of the sites alone."""
        return self._replace(concentrations=(), num_censored=0.0)

    def background(self) -> Background:
        """Zeros of the form."""
        dtype = jnp.result_type(float)
        rows, columns = (jnp.asarray(x, dtype) for x in self.concentrations)
        return Background(jnp.asarray(self.num_censored, dtype), Selection(rows, columns))


class EmittedPairs(Messenger):
    """Give a model a Bernoulli outcome for each different pair that was emitted, with its count as weight.

    Pairs stand in the order in which they come first.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"] or not isinstance(msg["fn"], CensoredPairs):
            return
        rows, columns, counts = _added_up(msg["name"], msg["value"], msg["fn"].support)
        scale = msg["scale"]
        if scale is not None and (isinstance(scale, jax.core.Tracer) or np.any(np.asarray(scale) != 1.0)):
            raise ModelStructureError(
                f"site '{msg['name']}' is scaled, and its censored pairs have no scale: multiply counts and "
                "num_censored instead.",
                site=msg["name"],
            )
        msg["fn"] = dist.Bernoulli(logits=msg["fn"].logits(jnp.asarray(rows), jnp.asarray(columns)))
        msg["value"], msg["scale"] = np.ones(len(counts), int), counts


def _added_up(name: str, table: object, support: PairTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and total counts of the different pairs of a table."""
    if isinstance(table, jax.core.Tracer):
        raise ModelStructureError(f"the pairs of site '{name}' must be known when the model is read.", site=name)
    values = np.asarray(table)
    if values.ndim != 2 or values.shape[1] != 3:
        raise ModelStructureError(
            f"observed site '{name}' has data of shape {values.shape}; it takes {support!r}.",
            reason=Reason.DATA,
            site=name,
        )
    # By NumPy, as all that JAX computes here is traced.
    is_good = ((values >= 0) & (values == np.floor(values))).all(1) & (values[:, :2] < support.sizes).all(1)
    if not is_good.all():
        row = int(np.argmin(is_good))
        raise ModelStructureError(
            f"observed site '{name}': {int((~is_good).sum())} rows are no pairs with counts; the first is "
            f"{values[row].tolist()} in row {row}. It takes {support!r}.",
            reason=Reason.DATA,
            site=name,
        )
    pairs = values[:, :2].astype(int)
    _, first, place = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    counts = np.bincount(place.reshape(-1), values[:, 2].astype(float), minlength=first.size)
    order = np.argsort(first)
    order = order[counts[order] > 0.0]
    if not order.size:
        raise ModelStructureError(
            f"site '{name}' has no pair with a positive count: there is nothing to learn from.",
            reason=Reason.DATA,
            site=name,
        )
    rows, columns = pairs[first[order]].T
    return rows, columns, counts[order]


def refuse_censored(sites: Mapping[str, SiteInfo]) -> None:
    """Say that a model has to be read in another way, if it observes censored pairs.

    :raises HasCensoredPairs: with the name of the site.
    """
    for site in sites.values():
        if site.kind == "observed" and site.family == CensoredPairs.__name__:
            raise HasCensoredPairs(site.name)


def find_pair_sites(call: ModelCall, given: Collection[str]) -> PairSites:
    """The sites that censored pairs know of besides the vectors.

    :param ModelCall call: of the model as the user wrote it.
    :param given: sites that are given values.
    :raises ModelStructureError: if the number of censored pairs or a prior is not known, or probabilities are no sites.
    """
    first, second = (_pair_sites(call, number) for number in (0, 1))
    if first.num_censored != second.num_censored:
        raise ModelStructureError(
            f"the num_censored of site '{first.name}' depends on latent sites, and the bound cannot say how many pairs "
            "were censored: it falls with each further one. Give a number, such as half, one, two or four times the "
            "number of pairs, and choose it on pairs that are held out (ranking_quality).",
            site=first.name,
        )
    if not first.num_censored > 0.0:
        raise ModelStructureError(
            f"the num_censored of site '{first.name}' is {first.num_censored}, and must be positive.", site=first.name
        )
    pairs = zip(first.shares, first.concentrations, second.concentrations, strict=True)
    for share, one, other in pairs:
        if share in given:
            raise ModelStructureError(
                f"site '{share}' has a posterior beside the vectors, and takes no value (hyper_values, init_values).",
                site=share,
            )
        if not np.array_equal(one, other):
            raise ModelStructureError(
                f"the concentration of site '{share}' depends on latent sites: give numbers.", site=share
            )
    return first


def _pair_sites(call: ModelCall, number: int) -> PairSites:
    """The same at one of two sets of values of all latent sites."""
    found = iter(range(1, 1 << 20))

    def value(site: dict[str, Any]) -> Any:
        if site["type"] != "sample" or site["is_observed"] or site["fn"].support.is_discrete:
            return None
        fn, place = site["fn"], next(found)
        if isinstance(fn, dist.Dirichlet):
            weights = place + number + np.arange(1.0, 1.0 + fn.event_shape[0])
            return jnp.asarray(np.broadcast_to(weights / weights.sum(), fn.batch_shape + fn.event_shape))
        to_support = biject_to(fn.support)
        shape = to_support.inverse_shape(fn.batch_shape + fn.event_shape)
        return to_support(jnp.asarray(np.full(shape, 0.1 * place + number, jnp.result_type(float))))

    model = handlers.substitute(handlers.seed(call.model, call.rng_key), substitute_fn=value)
    # Checks of parameters would be compiled one by one.
    with numpyro.validation_enabled(False):
        sites = handlers.trace(model).get_trace(*call.args, **call.kwargs)
    observed = [s for s in sites.values() if s["type"] == "sample" and s["is_observed"]]
    name = next(s["name"] for s in observed if isinstance(_unwrapped(s["fn"]), CensoredPairs))
    fn = sites[name]["fn"]
    if not isinstance(fn, CensoredPairs):
        raise ModelStructureError(
            f"site '{name}' is masked, expanded or wrapped otherwise: censored pairs are one observation, without "
            "handlers and plates around them.",
            site=name,
        )
    shares = tuple(_share(name, part, sites, getattr(fn, part)) for part in ("pi", "psi"))
    concentrations = tuple(np.asarray(sites[share]["fn"].concentration, float) for share in shares)
    return PairSites(
        name, (shares[0], shares[1]), (concentrations[0], concentrations[1]), float(np.asarray(fn.num_censored))
    )


def _share(name: str, part: str, sites: Mapping[str, Any], value: Array) -> str:
    """Name of the Dirichlet site with a value."""
    for site in sites.values():
        is_free = site["type"] == "sample" and not site["is_observed"] and isinstance(site["fn"], dist.Dirichlet)
        if is_free and np.array_equal(site["value"], value):
            return str(site["name"])
    raise ModelStructureError(
        f"the {part} of site '{name}' is no latent site with a Dirichlet prior of its own. Write "
        f"{part} = numpyro.sample('{part}', dist.Dirichlet(...)) and give it as it is.",
        site=name,
    )


def _unwrapped(fn: Any) -> Any:
    while not isinstance(fn, CensoredPairs) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def check_pairs(call: ModelCall, reading: Any, pair_sites: PairSites, most_pairs: int = MOST_PAIRS) -> None:
    """Compare the form with NumPyro's log density of the model as it was given, at a random point.

    Above ``most_pairs`` pairs of a row and a column that density is not to be had. Then predictors of a thousand random
    pairs are compared.

    :param ModelCall call: of the model as the user wrote it.
    :param BilinearReading reading: of its emitted pairs.
    :param PairSites pair_sites: what else it has.
    :param int most_pairs: up to which densities are compared.
    :raises ModelStructureError: if they differ by more than rounding.
    """
    rng = generator_of(call.rng_key)
    dtype: Any = jnp.result_type(float)
    sizes = [x.size for x in pair_sites.concentrations]
    hyper = reading.initial_hyper() | {n: jnp.full(reading.hyper[n].shape, 0.3, dtype) for n in reading.common_sites}
    unknowns = np.asarray(0.5 * rng.standard_normal(reading.num_columns), dtype)
    shares = tuple(jnp.asarray(rng.dirichlet(np.ones(size)), dtype) for size in sizes)
    chosen = tuple(rng.integers(size, size=1000) for size in sizes)
    has_density, structure = sizes[0] * sizes[1] <= most_pairs, reading.structure.value

    def at_point(hyper: Any, unknowns: Any, shares: Any, chosen: Any, data: Any) -> Any:
        form, (u, v) = structure.form(hyper, data), structure.vectors(unknowns)
        z = None
        if form.common is not None:
            z = jnp.concatenate([jnp.reshape(hyper[n], -1) for n in structure.common_sites])
        values = structure.site_values(hyper, unknowns, data)
        if not has_density:
            return values, form.predictor_of_pairs(u, v, z, *chosen)
        log_prior = structure.log_prior(hyper, data)
        if z is not None:
            log_prior += jnp.sum(form.common.prior.log_density(z[None]))
        return values, form.log_density(u, v, z, shares) + log_prior

    values, found = quick_jit(at_point, is_lean=True)(hyper, unknowns, shares, chosen, reading.data)
    point = {n: values.get(n, hyper.get(n)) for n in (*reading.field, *reading.hyper)}
    point |= dict(zip(pair_sites.shares, shares, strict=True))
    if has_density:
        density = untouched_log_densities(call, [point], ())
        expected, dtype, error = density.values, density.dtype, density.errors[0]
    else:
        model = handlers.substitute(handlers.seed(call.model, call.rng_key), data=point)
        fn = handlers.trace(model).get_trace(*call.args, **call.kwargs)[pair_sites.name]["fn"]
        expected, error = np.asarray(fn.logits(*chosen)), 0.0
    worst = int(np.argmax(np.abs(np.atleast_1d(found) - expected)))
    ours, theirs = float(np.atleast_1d(found)[worst]), float(expected[worst])
    if not abs(ours - theirs) <= tolerance_of_densities(dtype) * (1.0 + abs(theirs)) + error:
        what = "log density" if has_density else "logit of a pair"
        raise ModelStructureError(
            f"the model was misread: its {what} is {theirs:.10g} at a random point, the form gives {ours:.10g}. What "
            f"was read:\n{reading.describe()}\nPlease report this model; NUTS is not affected.",
            reason=Reason.MISREAD,
        )
