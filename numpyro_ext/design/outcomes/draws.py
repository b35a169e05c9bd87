"""Outcomes of any NumPyro model under draws from its posterior, by the distributions of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import entr

from ...compilation.content import Structure
from ...compilation.store import shared
from ...infer.front.options import wrong_kind
from ...infer.monte_carlo.smc import SMC
from ...structure.program.run_compiled import TracedFunction, traced
from .drawn_sites import (
    check_complete,
    check_same_members,
    latents_among,
    outcome_distribution,
    outcome_sites,
    without_mask,
)
from .outlooks import LARGEST_TABLE, DrawnOutlook, Outlook, RealOutlook

_TAIL = 1e-8
"""Mass of counts that may be left out."""
_MOST_COUNTS = 16384
_FURTHEST = 8.5
_STEPS_PER_DEVIATION = 4
_MOST_NODES = 20_000


@dataclass
class PosteriorDraws:
    """Draws from a posterior with the model and the arguments that they are of; made by :func:`draws_of`."""

    model: Callable[..., Any]
    samples: dict[str, Array]
    weights: Array | None = None
    effective_sample_size: float | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        weighted = "" if self.weights is None else " weighted"
        return f"PosteriorDraws({self.num_draws}{weighted} draws of {', '.join(self.samples)})"

    @property
    def num_draws(self) -> int:
        return len(next(iter(self.samples.values())))


def draws_of(
    source: object,
    params: Mapping[str, object] | None = None,
    *,
    model: Callable[..., object] | None = None,
    args: tuple[object, ...] | None = None,
    kwargs: Mapping[str, object] | None = None,
    weights: object = None,
    effective_sample_size: float | None = None,
    num_samples: int = 1000,
    rng_key: Array | None = None,
) -> PosteriorDraws:
    """Draws from any posterior as a source of scores: NUTS, a fitted guide, weighted particles, a dictionary.

    :param source: NumPyro's ``MCMC`` after its run, an autoguide (with ``params``), an engine or sampler with
        ``get_samples()``, or a dictionary of draws by the names of the latent sites.
    :param params: of the guide, as ``svi.run`` returns them.
    :param model: which the draws are of, where the source does not know.
    :param args: arguments of the model, where the source does not know or others are meant; a focus needs those of the
        fit, with what was observed.
    :param kwargs: keyword arguments of the model.
    :param weights: of the draws; equal if left out.
    :param float effective_sample_size: what the draws are worth, for corrections of the bias.
    :param int num_samples: draws to make from a guide.
    :param rng_key: for these; a fixed key if left out.
    :return: the draws, which every score takes in the place of an engine.
    :raises TypeError: if the source is none of these, or does not know its model.
    :raises ValueError: for weights of another length, negative ones or only zeros, and a single draw.

    **Example:**

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.design import draws_of, expected_information_gain
    >>> def model(x, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
    ...     numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)
    >>> draws = draws_of({"slope": jnp.array([-1.0, 0.5, 2.0])}, model=model)
    >>> print(expected_information_gain(draws, jnp.array([0.0, 1.0, 3.0]))["y"].round(3))
    [0.    0.14  0.436]
    """
    if isinstance(source, type):
        raise _no_draws(source)
    if isinstance(source, Mapping):
        samples = dict(source)
    elif hasattr(source, "sample_posterior"):
        if params is None:
            raise TypeError("Give the parameters of the guide: draws_of(guide, svi_result.params).")
        model = model or getattr(source, "model", None)
        key = jax.random.key(0) if rng_key is None else rng_key
        samples = source.sample_posterior(key, params, sample_shape=(num_samples,))
    elif hasattr(source, "get_samples"):
        samples = source.get_samples()
        if isinstance(source, SMC) and weights is None:  # as they are, without the noise of resampling
            samples, weights = source.particles, source.weights
        model = model or getattr(source, "model", None) or getattr(getattr(source, "sampler", None), "model", None)
        args = getattr(source, "_args", ()) if args is None else args
        kwargs = getattr(source, "_kwargs", {}) if kwargs is None else kwargs
    else:
        raise _no_draws(source)
    if model is None:
        raise TypeError("Which model are the draws of? Give draws_of(..., model=model).")
    samples = {name: jnp.asarray(value) for name, value in samples.items()}
    lengths = {value.shape[0] if value.ndim else 0 for value in samples.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "Every site needs draws on its first axis, as many as the others; got the shapes "
            f"{ {name: value.shape for name, value in samples.items()} }."
        )
    found = PosteriorDraws(model, samples, None, effective_sample_size, tuple(args or ()), dict(kwargs or {}))
    if weights is not None:
        found.weights = _checked_weights(weights, found.num_draws)
    return found


def _no_draws(source: object) -> TypeError:
    wanted = "an engine or MCMC after its run, a guide with its parameters, or a dictionary of draws by site"
    return wrong_kind("A score of designs", source, wanted)


def _checked_weights(weights: object, number: int) -> Array:
    w = np.asarray(weights, float)
    if w.shape != (number,):
        raise ValueError(f"There are {number} draws, and the weights have the shape {w.shape}.")
    if not np.isfinite(w).all() or (w < 0.0).any() or not w.sum() > 0.0:
        raise ValueError("Weights of draws must be finite and not negative, and not all zero.")
    if np.count_nonzero(w) < min(2, number):
        raise ValueError(f"Of {number} draws one alone has a weight, and knows nothing of its uncertainty.")
    return jnp.asarray(w / w.sum())


def outlooks_of_draws(
    draws: PosteriorDraws,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    is_candidate: Callable[[str, np.ndarray, bool], np.ndarray],
    names: set[str] | None = None,
) -> dict[str, Outlook]:
    """The outcomes of the observed sites of a model.

    :param PosteriorDraws draws: from its posterior.
    :param args: arguments of the model.
    :param is_candidate: of a site's name, its mask and whether it has observations, which could be observed next.
    :param names: of the sites that are asked for; all of them if left out.
    :raises ValueError: if draws lack a site, or outcomes are vectors that cannot be counted.
    """
    if draws.num_draws < 2:
        raise ValueError("One draw knows nothing of its uncertainty: give more of them.")
    call = args, kwargs
    drawn = latents_among(draws.model, draws.samples, call)
    first = {name: value[0] for name, value in drawn.items()}
    sites = outcome_sites(draws.model, first, call)
    check_complete(draws.model, first, sites, call, sorted(draws.samples))
    if args is not draws.args and (draws.args or draws.kwargs):
        check_same_members(draws.model, first, sites, call, (draws.args, draws.kwargs))
    out: dict[str, Outlook] = {}
    for name, site in sites.items():
        if names is not None and name not in names:
            continue
        fn, mask = without_mask(site["fn"])
        shape = tuple(fn.batch_shape)
        if fn.event_shape:
            raise ValueError(
                f"The observations of {name!r} are vectors of shape {tuple(fn.event_shape)} ({type(fn).__name__}), "
                "whose outcomes cannot be counted. Write observations that are seen one by one under a plate."
            )
        common: dict[str, Any] = {
            "name": name,
            "shape": shape,
            "is_candidate": is_candidate(name, np.broadcast_to(mask, shape), bool(site["is_observed"])),
        }
        outcomes = _Outcomes(draws.model, drawn, args, dict(kwargs), name)
        if fn.support.is_discrete:
            table = _table(outcomes, fn, draws.weights)
            log_p = jnp.moveaxis(table.reshape(*table.shape[:2], -1), 1, -1)
            out[name] = DrawnOutlook(
                **common, log_p=log_p, weights=draws.weights, effective_sample_size=draws.effective_sample_size
            )
        else:
            entropy, conditional = _real_entropies(outcomes, name, shape, draws)
            out[name] = RealOutlook(**common, entropy=entropy, conditional=conditional)
    if not out:
        raise ValueError("The model has no site that could be observed: nothing is left to be measured.")
    return out


class _Outcomes:
    """The distribution of a site's observations, draw by draw, in programs that other draws and arguments share."""

    def __init__(
        self,
        model: Callable[..., object],
        latents: dict[str, Array],
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        name: str,
    ) -> None:
        self.latents, self.name = latents, name

        def outcome(one: dict[str, Array]) -> object:
            return outcome_distribution(model, one, (args, kwargs), name)

        one = {site: value[0] for site, value in latents.items()}
        self._outcome = _TracedOutcome(traced(outcome, one), tuple(one))

    def compute(self, rule: Callable[..., object], *arrays: object) -> Any:
        """``rule(at, latents, *arrays)`` in a program that is kept; ``at`` makes the distribution of one draw."""
        return shared(_over_draws, self._outcome, rule)(self._outcome.function.data, self.latents, *arrays)


class _TracedOutcome(NamedTuple):
    """The distribution of a site's observations as a function of one draw."""

    function: TracedFunction
    names: tuple[str, ...]
    """Sites of a draw."""

    @property
    def structure(self) -> Structure[_TracedOutcome]:
        """The function without data."""
        return Structure(self._replace(function=self.function.structure.value))

    def at(self, data: Any, one: object) -> Any:
        """The distribution at one draw."""
        return jax.tree.unflatten(self.function.tree, self.function.leaves(data, one))


def _over_draws(outcome: _TracedOutcome, rule: Callable[..., object]) -> Callable[..., Any]:
    return jax.jit(lambda data, latents, *arrays: rule(lambda one: outcome.at(data, one), latents, *arrays))


def _log_table(at: Callable[[object], object], latents: dict[str, Array], column: Array) -> Array:
    return jax.lax.map(lambda one: _log_density(at(one), column), latents)


def _moments(at: Callable[[Any], Any], latents: dict[str, Array]) -> Any:
    def moments(one: dict[str, Array]) -> tuple[Array, Array]:
        fn = at(one)
        return fn.mean, fn.variance

    return jax.lax.map(moments, latents)


def _mixed(
    at: Callable[[object], object], latents: dict[str, Array], weights: Array, grid: Array, step: Array
) -> tuple[Array, Array, Array]:
    """Entropy of the mixture over draws, the mean entropy of its parts, and the mass of these on a grid."""

    def add(sums: tuple[Array, Array], one: tuple[dict[str, Array], Array]) -> tuple[tuple[Array, Array], Array]:
        density = jnp.exp(_log_density(at(one[0]), grid))
        total, conditional = sums
        mass = step * jnp.sum(density, axis=0)
        return (total + one[1] * density, conditional + one[1] * step * jnp.sum(entr(density), axis=0)), mass

    zeros = jnp.zeros_like(grid), jnp.zeros(grid.shape[1:], grid.dtype)
    (density, conditional), masses = jax.lax.scan(add, zeros, (latents, weights))
    return step * jnp.sum(entr(density), axis=0), conditional, masses


def _log_density(fn: dist.Distribution, value: Array) -> Array:
    """Log density of values, some of which may be outside of the support."""
    value = jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, fn.batch_shape))
    inside = fn.support(value)
    safe = jnp.where(inside, value, fn.support.feasible_like(value))
    return jnp.where(inside, fn.log_prob(safe), -jnp.inf)


def _table(outcomes: _Outcomes, fn: dist.Distribution, weights: Array | None) -> Array:
    """Log probabilities of outcomes that can be counted, shape ``(draws, outcomes, ...)``."""
    num_draws = len(next(iter(outcomes.latents.values())))
    size = max(1, int(np.prod(fn.batch_shape)))

    def of(values: np.ndarray) -> Array:
        if num_draws * len(values) * size > LARGEST_TABLE:
            raise ValueError(
                f"{num_draws} draws, {size} observations of {outcomes.name!r} and {len(values)} outcomes are too many "
                "at once: give fewer draws, or score the candidates in parts."
            )
        column = values.reshape(-1, *(1,) * len(fn.batch_shape))
        return outcomes.compute(_log_table, jnp.asarray(column))

    try:
        return of(np.asarray(fn.enumerate_support(expand=False)).reshape(-1))
    except NotImplementedError:
        pass
    number = 16
    while number <= _MOST_COUNTS:
        table = of(np.arange(number))
        mass = jnp.min(jax.nn.logsumexp(table, axis=1), axis=0)
        if bool(jnp.all(mass > np.log1p(-_TAIL))):
            return table
        number *= 4
    raise ValueError(
        f"Counts up to {number // 4} do not hold the mass of some observations of {outcomes.name!r} under some draws: "
        "leave such candidates out."
    )


def _real_entropies(
    outcomes: _Outcomes, name: str, shape: tuple[int, ...], draws: PosteriorDraws
) -> tuple[Array, Array]:
    """Entropy of the mixture over draws, and the mean entropy of its parts, on a grid for each observation."""
    means, variances = outcomes.compute(_moments)
    means, deviations = np.asarray(means, float), np.sqrt(np.asarray(variances, float))
    if not (np.isfinite(means).all() and np.isfinite(deviations).all() and (deviations > 0.0).all()):
        raise ValueError(
            f"The observations of {name!r} have no finite variance under some draws, by which a grid could be laid: "
            "give draws whose likelihood has one, or use an engine with Gaussian predictors."
        )
    low = (means - _FURTHEST * deviations).min(0)
    high = (means + _FURTHEST * deviations).max(0)
    needed = np.max((high - low) / deviations.min(0), initial=1.0) * _STEPS_PER_DEVIATION
    if needed > _MOST_NODES:
        raise ValueError(
            f"The narrowest density of {name!r} among the draws is {needed / _STEPS_PER_DEVIATION:.0f} times narrower "
            "than their range, too little for a grid of outcomes: leave out draws that fit the data badly."
        )
    share = np.linspace(0.0, 1.0, int(2 ** np.ceil(np.log2(needed))) + 1)
    grid = jnp.asarray(low + share.reshape(-1, *(1,) * len(shape)) * (high - low))
    step = jnp.asarray((high - low) * share[1])
    equal = jnp.full(draws.num_draws, 1.0 / draws.num_draws)
    weights = equal if draws.weights is None else draws.weights

    entropy, conditional, masses = outcomes.compute(_mixed, weights, grid, step)
    if not bool(jnp.all(jnp.abs(masses - 1.0) < 1e-3)):
        raise ValueError(
            f"The densities of {name!r} do not integrate to one on a grid (a tail too long, or a peak too sharp): its "
            "information cannot be computed from draws."
        )
    return entropy.reshape(-1), conditional.reshape(-1)
