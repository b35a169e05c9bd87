"""Read a NumPyro model as a bilinear model of counts, or of other observations with log-concave factors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Unpack

import jax
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from ...distributions.gaussian_markov_random_field import GaussianMarkovRandomField
from ...potentials.base import Potential
from ..errors import Conflict, ModelStructureError
from ..model.priors import is_gaussian, is_unweighted, unwrap
from ..model.running.execution import ModelCall
from ..model.running.inspection import SiteInfo, inspect_sites, mark_candidates
from ..model.running.pandas_arguments import run_or_with_arrays
from ..model.search import Attempt, Form, ReadOptions, read_first
from ..model.validation import check_data
from .factors import Unlisted
from .pairs import EmittedPairs, HasCensoredPairs, check_pairs, find_pair_sites
from .reading import BilinearReading


def _is_candidate(fn: object) -> bool:
    # values of these are not one innovation each, or have joint priors over two axes
    mixing = dist.GaussianRandomWalk | dist.GaussianStateSpace | dist.ZeroSumNormal | dist.MatrixNormal
    mixing |= GaussianMarkovRandomField
    return is_gaussian(fn) and not is_unweighted(fn) and not isinstance(unwrap(fn), mixing)


def _without_conflicts(attempt: Attempt[BilinearReading], sizes: Mapping[str, int]) -> BilinearReading:
    """All sites of a conflict leave the field together, as a compilation is too much for trying them one by one."""
    names, reasons = frozenset(sizes), []
    while True:
        try:
            return attempt(names)
        except Conflict as conflict:
            reasons.append(str(conflict))
            if not names & conflict.sites or names <= conflict.sites:
                raise ModelStructureError(" ".join(reasons)) from conflict
            names -= conflict.sites


BILINEAR = Form(
    BilinearReading,
    _is_candidate,
    "the model has no Gaussian latent site (latent sites: {}). This engine needs two blocks of Normal or "
    "MultivariateNormal sites; use NUTS.",
    _without_conflicts,
)


def read_bilinear(
    model: Callable[..., object],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    unlisted_cells: Unlisted = "missing",
    by_component: Collection[str] | bool = False,
    takes_any_factor: bool = False,
    takes_common: Callable[[Potential], bool] | None = None,
    given: Collection[str] = (),
    takes_pairs: bool = False,
    integrates: Collection[str] = (),
    **options: Unpack[ReadOptions],
) -> BilinearReading:
    """Read a model as bilinear: the predictors of its observations are affine in each of two Gaussian blocks.

    Observations are Poisson counts with the rate ``exp(predictor)`` or ``softplus(predictor)``, negative binomial
    counts, Bernoulli or binomial outcomes, or ordered categories, of one kind in a model.

    Products between Gaussian sites are found and two-coloured; sites that enter linearly (biases) join the block with
    which they share their index. What belongs to neither block becomes a hyperparameter: a common intercept, scales,
    the means of hierarchical priors.

    :param model: a NumPyro model.
    :param tuple args: its arguments, which stay concrete.
    :param dict kwargs: its keyword arguments.
    :param str unlisted_cells: ``"zero"`` adds counts of zero in all pairs of a row and a column that the model does not
        list, which it then knows nothing of.
    :param by_component: sites, or plates with sites, of blocks whose vectors may depend on each other by component, as
        in a Gaussian process over items, and of which a cell may touch several with known weights; true for all. Other
        blocks of this kind are one vector.
    :param bool takes_any_factor: whether observations may be of any family with one predictor.
    :param takes_common: of which potentials Gaussian sites that all cells see, such as an intercept, have a block of
        the form of their own, if all cells have the same coefficients; by default they are hyperparameters.
    :param given: sites that are given values, and are no unknowns.
    :param bool takes_pairs: whether an observation may be :class:`~numpyro_ext.distributions.CensoredPairs`.
    :param integrates: families of which hyperparameters may have any number of elements: the engine integrates over
        them, or refuses them itself.
    :param options: ``field`` (the sites of both blocks), ``init_values``, ``rng_key`` and ``check``: see
        :func:`~numpyro_ext.structure.read_first`.
    :return: the reading.
    :raises ModelStructureError: naming the site that does not fit, what was found there and what to do.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro_ext.structure import read_bilinear
    >>> def model(rows, cols, y):
    ...     with numpyro.plate("rows", 3):
    ...         w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("cols", 2):
    ...         z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp((w[rows] * z[cols]).sum(-1))), obs=y)
    >>> rows, cols = jnp.array([0, 1, 2, 2]), jnp.array([0, 0, 0, 1])
    >>> reading = read_bilinear(model, (rows, cols, jnp.array([1, 0, 4, 2])))
    >>> reading.sides, [e.shape for e in reading.elements]
    ((('w',), ('z',)), [(3, 2), (2, 2)])

    Cost: a few abstract traces of the model and three compilations, reused for data of the same shapes.
    """
    reading = partial(
        BilinearReading,
        unlisted_cells=unlisted_cells,
        by_component=by_component,
        takes_any_factor=takes_any_factor,
        takes_common=takes_common,
        given=given,
    )
    form = BILINEAR._replace(reading=reading, integrates=integrates)
    try:
        return read_first([form], model, args, kwargs, **options)
    except HasCensoredPairs as found:
        if takes_pairs and unlisted_cells == "missing":
            return _read_pairs(reading, model, args, dict(kwargs or {}), options)
        raise ModelStructureError(
            f"observed site '{found}' has censored pairs. They are for BilinearVG(model, bound='jaakkola') without "
            "unlisted_cells, which are zeros of another kind, and for NUTS.",
            site=str(found),
        ) from None


def _read_pairs(
    reading: partial[BilinearReading],
    model: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    options: ReadOptions,
) -> BilinearReading:
    """A model of censored pairs as one of those that were emitted."""
    key = options.get("rng_key")
    call = ModelCall(model, args, kwargs, jax.random.key(0) if key is None else key)
    pair_sites = find_pair_sites(call, (*options.get("held", ()), *(options.get("init_values") or {})))
    form = BILINEAR._replace(reading=partial(reading, pair_sites=pair_sites))
    found = read_first([form], EmittedPairs(model), args, kwargs, **options)
    if options.get("check", True):
        check_pairs(call, found, pair_sites)
    return found


def read_like(
    reading: BilinearReading,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    rng_key: Array,
    *,
    is_held_out: bool = False,
    needs_observations: bool = True,
    unlisted_cells: Unlisted = "missing",
    has_sizes: bool = True,
    with_censored: bool = False,
) -> BilinearReading:
    """Read the model of a reading on other arguments, with the same split, sides and order of components.

    :param BilinearReading reading: of the fit.
    :param bool is_held_out: take the masked observations instead of the others.
    :param bool needs_observations: otherwise those that are left out are given values, as only their cells are of use.
    :param str unlisted_cells: as for :func:`read_bilinear`.
    :param bool has_sizes: whether hyperparameters have the shapes of the fit.
    :param bool with_censored: whether pairs that are censored are read, too, where the fit has such.
    :raises ModelStructureError: if the model has other sites on these arguments.
    """
    call = ModelCall(reading.model, args, dict(kwargs), rng_key)
    values = reading.initial_hyper() if has_sizes else {}
    call, inspected = _inspect(call, values)
    left_out = {
        n: inspected[n].init for n in reading.observed_names if n in inspected and inspected[n].kind == "latent"
    }
    if left_out and not needs_observations:
        call, inspected = _inspect(call._replace(model=handlers.condition(call.model, data=left_out)), values)
    sites = mark_candidates(inspected, _is_candidate)
    missing = [n for n in reading.field if n not in sites]
    if missing:
        raise ModelStructureError(
            f"on these arguments the model has no site '{missing[0]}', which was fitted.", site=missing[0]
        )
    if not is_held_out:
        check_data(sites)
    pair_sites = None
    if with_censored and isinstance(reading.model, EmittedPairs):
        pair_sites = find_pair_sites(call._replace(model=reading.model.fn), ())
    return BilinearReading(
        call,
        sites,
        reading.field,
        like=reading,
        pair_sites=pair_sites,
        is_held_out=is_held_out,
        unlisted_cells=unlisted_cells,
        takes_any_factor=reading.takes_any_factor,
    )


def _inspect(call: ModelCall, values: Mapping[str, object]) -> tuple[ModelCall, dict[str, SiteInfo]]:
    """The sites of a call, with arrays in the place of columns of pandas where the model asks for them."""
    return run_or_with_arrays(call, lambda tried: inspect_sites(tried, values))
