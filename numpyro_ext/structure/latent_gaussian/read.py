"""Read a NumPyro model as latent Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Unpack

import numpyro.distributions as dist

from ...compilation.content import Structure
from ...compilation.store import Found, shared
from ..errors import Conflict, ModelStructureError
from ..model.priors import factor_potential, is_gaussian, is_one_sided
from ..model.running.execution import ModelCall
from ..model.running.inspection import SiteInfo
from ..model.search import Attempt, Form, ReadOptions, largest_field, read_first
from .costs import COSTS, LayoutCosts
from .looked_up import LookedUp
from .reading import LatentGaussianReading

LARGEST_SMALL_BLOCK = 3
"""Unknowns of a block that quadrature integrates over."""


def _is_candidate(fn: dist.Distribution) -> bool:
    return is_gaussian(fn) or factor_potential(fn) is not None


def _is_smooth_candidate(fn: dist.Distribution) -> bool:
    prior = factor_potential(fn)
    return is_gaussian(fn) or (prior is not None and prior.is_smooth and prior.is_log_concave)


class LastReading(Found[tuple[Structure[LatentGaussianReading], LookedUp]]):
    """The structure of the last reading of some operations, and what was looked up in its data."""


def _read(
    call: ModelCall, sites: Mapping[str, SiteInfo], field: Iterable[str], costs: LayoutCosts = COSTS
) -> LatentGaussianReading:
    """The :class:`LatentGaussianReading` of a call: one that was made before, of the same operations, with the data of
    this call, where all that was looked up in the data is the same.

    :param call: of the model.
    :param sites: of the call.
    :param field: names of the sites of the field.
    :param LayoutCosts costs: by which the layout of its form is chosen.
    """
    field = frozenset(field)
    if call.recording is None or call.recording.key is None:
        return LatentGaussianReading(call, sites, field, costs)
    found = [(n, s.kind, s.shape, s.family, s.is_candidate, s.is_masked, s.num_unknowns) for n, s in sites.items()]
    last = shared(LastReading, call.recording.key, field, tuple(found), costs)
    if last.value is not None:
        structure, looked_up = last.value
        again = structure.value.with_looked_up(call, sites, looked_up)
        if again is not None:
            again.structure = structure  # as all that it holds but data is from there
            return again
    reading = LatentGaussianReading(call, sites, field, costs)
    last.value = (reading.structure, reading.looked_up) if reading.serves_other_data else None
    return reading


LATENT_GAUSSIAN = Form(
    _read,
    _is_candidate,
    "the model has no Gaussian latent site (latent sites: {}), nor coefficients with another prior on the real line. "
    "This engine needs a field of Normal, MultivariateNormal, LowRankMultivariateNormal, GaussianRandomWalk, CAR or "
    "flat real sites, or of Laplace, StudentT, Cauchy, Logistic, SoftLaplace or AsymmetricLaplace ones; EP takes "
    "HalfNormal, Exponential and left-truncated Normal coefficients besides; or use NUTS.",
)
ONE_SIDED_LATENT_GAUSSIAN = LATENT_GAUSSIAN._replace(
    joins=is_one_sided,
    no_candidate="the model has no Gaussian latent site (latent sites: {}), nor coefficients with another prior on the "
    "real line or on a half line. This engine needs a field of Normal, MultivariateNormal, LowRankMultivariateNormal, "
    "GaussianRandomWalk, CAR or flat real sites, of Laplace, StudentT, Cauchy, Logistic, SoftLaplace or "
    "AsymmetricLaplace ones, or of HalfNormal, Exponential or left-truncated Normal ones in which predictors of known "
    "likelihoods are affine; use NUTS.",
)
"""For engines that match moments: these know a density on a half line, which has no expected logarithm and often no
mode inside."""
SMOOTH_LATENT_GAUSSIAN = LATENT_GAUSSIAN._replace(
    is_candidate=_is_smooth_candidate,
    no_candidate="the model has no Gaussian latent site (latent sites: {}), nor coefficients with another smooth and "
    "log-concave prior. This engine needs a field of Normal, MultivariateNormal, LowRankMultivariateNormal, "
    "GaussianRandomWalk, CAR or flat real sites, or of Logistic or SoftLaplace ones; EP and VariationalGaussian take "
    "Laplace, StudentT, Cauchy and AsymmetricLaplace ones besides, and EP HalfNormal, Exponential and left-truncated "
    "Normal coefficients; or use NUTS.",
)
"""For engines that need one mode and its curvature; sites with other priors are points to them."""


def with_costs(form: Form[LatentGaussianReading], costs: LayoutCosts) -> Form[LatentGaussianReading]:
    """The form with other thresholds for the layouts of its readings; forms of other kinds are left as they are."""
    return form if _costs_of(form) is None else form._replace(reading=partial(_read, costs=costs))


def with_largest_rest(form: Form[LatentGaussianReading], largest: float) -> Form[LatentGaussianReading]:
    """The form with another :attr:`LayoutCosts.largest_rest`; see :func:`with_costs`."""
    costs = _costs_of(form)
    return form if costs is None else with_costs(form, replace(costs, largest_rest=largest))


def _costs_of(form: Form[LatentGaussianReading]) -> LayoutCosts | None:
    reading = form.reading
    if isinstance(reading, partial) and reading.func is _read:
        return reading.keywords.get("costs", COSTS)
    return COSTS if reading is _read else None


def _read_small_blocks(call: ModelCall, sites: Mapping[str, SiteInfo], field: Iterable[str]) -> LatentGaussianReading:
    """A reading as of :func:`_read`, unless its unknowns are in larger blocks."""
    reading = _read(call, sites, field)
    form = reading.abstract_form
    width = form.num_columns if form.border is not None else form.blocks.columns.shape[1]
    if width <= LARGEST_SMALL_BLOCK:
        return reading
    sizes = {name: math.prod(reading.site_shapes[name]) for name in reading.field}
    least = min(sizes, key=lambda name: (sizes[name], name))
    if len(sizes) > 1:
        message = (
            f"{' and '.join(map(repr, reading.field))} have blocks of {width} unknowns together, and quadrature takes "
            f"at most {LARGEST_SMALL_BLOCK}: sites that many observations share are hyperparameters to it."
        )
        raise Conflict(message, frozenset(sizes), least)
    raise _WideBlocks(
        f"site '{least}' (shape {reading.site_shapes[least]}) has {width} unknowns that its prior or observations tie "
        f"together, and quadrature integrates over blocks of at most {LARGEST_SMALL_BLOCK}. EP, LaplaceApproximation "
        "and VariationalGaussian take blocks of any size.",
        site=least,
        number=1 if form.border is not None else form.blocks.columns.shape[0],
    )


class _WideBlocks(ModelStructureError):
    """A site alone has too many unknowns in each of a number of blocks."""

    def __init__(self, message: str, *, site: str, number: int) -> None:
        super().__init__(message, site=site)
        self.number = number


def _field_of_groups(attempt: Attempt[LatentGaussianReading], sizes: Mapping[str, int]) -> LatentGaussianReading:
    """The largest field, unless its members have hyperparameters of their own and those of another field have none.

    Items of a test have slopes and people have none: people are integrated over, also where there are fewer of them.

    :param sizes: of all candidates.
    :raises ModelStructureError: if the largest site falls into several blocks, such as people with traits, which are
        too wide: as hyperparameters of another field they would be points.
    """
    wide: list[_WideBlocks] = []

    def noted(names: frozenset[str]) -> LatentGaussianReading:
        try:
            return attempt(names)
        except _WideBlocks as error:
            wide.append(error)
            raise

    found = largest_field(noted, sizes)
    size = sum(sizes[name] for name in found.field)
    for error in wide:
        if error.number > 1 and error.site is not None and sizes[error.site] > size:
            names = list(found.field)
            raise ModelStructureError(
                f"{error} field={names} integrates over {' and '.join(map(repr, names))} instead, with a point for "
                "each of these.",
                site=error.site,
            )
    others = {name: size for name, size in sizes.items() if name not in found.field and size > 1}
    if not others or not _have_own_hyper(found):
        return found
    try:
        other = largest_field(attempt, others)
    except ModelStructureError:
        return found
    has_groups = other.abstract_form.blocks.columns.shape[0] > 1
    return other if has_groups and not _have_own_hyper(other) else found


def _have_own_hyper(reading: LatentGaussianReading) -> bool:
    """True if hyperparameters stand in the plates of the whole field."""
    plates = {name: {plate for plate, _ in site.plates} for name, site in reading.sites.items()}
    common = set.intersection(*(plates[name] for name in reading.field))
    return any(common & plates[name] for name in reading.hyper)


SMALL_BLOCKS = SMOOTH_LATENT_GAUSSIAN._replace(
    reading=_read_small_blocks,
    search=_field_of_groups,
    max_hyper_size=2000,
    no_candidate="the model has no Gaussian latent site (latent sites: {}), nor coefficients with another smooth and "
    "log-concave prior. This engine needs a field of those, in independent blocks of at most three unknowns; or use "
    "NUTS.",
)
"""For quadrature: the field falls into independent blocks of a few unknowns, and all else is a hyperparameter."""


def read_latent_gaussian(
    model: Callable[..., object],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    costs: LayoutCosts = COSTS,
    **options: Unpack[ReadOptions],
) -> LatentGaussianReading:
    """Read a model as latent Gaussian: the largest jointly Gaussian field, affine predictors, one factor each.

    Coefficients with another prior about a location (Laplace, Student-t, Cauchy, logistic) are flat unknowns, and their
    prior is a factor on them like those of observations.

    The field is the largest set of latent sites that is jointly Gaussian, and in which every predictor is jointly
    affine, given all other sites; among sets of equal size the one whose factors have closed forms. Everything else
    becomes a hyperparameter.

    :param model: a NumPyro model.
    :param tuple args: its arguments, which stay concrete.
    :param dict kwargs: its keyword arguments.
    :param LayoutCosts costs: by which the layout of the form is chosen, which does not change its values.
    :param options: ``field``, ``init_values``, ``rng_key`` and ``check``: see
        :func:`~numpyro_ext.structure.read_first`.
    :return: the reading.
    :raises ModelStructureError: naming the site that does not fit, what was found there and what to do.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro_ext.structure import read_latent_gaussian
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     f = numpyro.sample("f", dist.Normal(0.0, scale).expand([3]).to_event(1))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)
    >>> reading = read_latent_gaussian(model, (jnp.array([1, 0, 4]),))
    >>> reading.field, tuple(reading.hyper)
    (('f',), ('scale',))

    Cost: a few abstract traces of the model; with ``check`` one compilation, reused for data of the same shapes.
    """
    return read_first([with_costs(LATENT_GAUSSIAN, costs)], model, args, kwargs, **options)
