"""Prediction where old and new arguments together have the field of the fit, whose posterior is known already.

New rows then see unknowns that the fit has. Nothing is conditioned again: what is asked of new rows is an affine map of
these unknowns, and what is drawn there is drawn by the model at the new arguments alone, once it is known to be the
same there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....linalg.gaussian.design import DenseDesign, SparseRows, rows_at
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian import AffineMap
from ...front.answers.model_draws import predictive_draws, shuffled
from ...front.answers.sites import PosteriorSites, missing_sites
from ..answers.prediction import Slices, by_site
from ..programs import Programs
from ..runs.run import GaussianRun, Point
from .sites_of_calls import NewCall, are_part, is_close, sites_of_call

_NUM_POINTS = 3
"""Unknowns at which affine functions are compared."""


class _Look(NamedTuple):
    """A form at one value of the hyperparameters, and its predictors and sites at a few unknowns."""

    prior: Any
    potentials: Any
    observed: tuple[Array, ...]
    predictor: Array
    """Shape ``(points, num_rows)``."""
    values: dict[str, Array]
    """Values of latent and deterministic sites."""


def known_field(
    run: GaussianRun, reading: LatentGaussianReading, places: np.ndarray, points: Iterator[Any]
) -> KnownField | None:
    """The posterior on old and new rows, where the form on both has the unknowns, the prior, the predictors and the
    factors of the fit, to rounding; ``None`` where it has not, or this is not known.

    :param GaussianRun run: of the fit.
    :param LatentGaussianReading reading: of old and new arguments together.
    :param places: its rows that are those of the fit.
    :param points: hyperparameters at which the forms are compared.
    """
    old = run.reading
    is_plain = all(isinstance(r.abstract_form.design, DenseDesign | SparseRows) for r in (old, reading))
    shapes = [{name: tuple(r.site_shapes[name]) for name in r.field} for r in (old, reading)]
    if not is_plain or shapes[0] != shapes[1] or old.field != reading.field or old.large_sites or reading.large_sites:
        return None
    unknowns = _unknowns(reading)
    latents: list[dict[str, Any]] = []
    for hyper in points:
        before, after = (_looked(r, hyper, unknowns) for r in (old, reading))
        affine = [after.predictor, *(after.values[name] for name in reading.affine_sites)]
        is_finite = all(np.isfinite(values).all() for values in affine)
        if not (is_finite and _is_same(before, after, places, old)):
            return None
        for k in range(_NUM_POINTS):
            latents.append({name: after.values[name][k] for name in reading.field} | dict(hyper))
    is_old = np.zeros(reading.abstract_form.num_rows, bool)
    is_old[places] = True
    ends: Any = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), latents[0], latents[-1])
    return KnownField(run, reading, is_old, ends)


def _unknowns(reading: LatentGaussianReading) -> np.ndarray:
    """A few values of the unknowns; small ones, as likelihoods are not finite everywhere."""
    size = reading.num_columns
    drawn = min(1.0, 3.0 / np.sqrt(max(size, 1))) * np.random.default_rng(0).standard_normal((_NUM_POINTS, size))
    return np.asarray(drawn, jnp.result_type(float))


def _looked(reading: LatentGaussianReading, hyper: Mapping[str, Array], unknowns: np.ndarray) -> _Look:
    return jax.tree.map(np.asarray, shared(_look, reading)(dict(hyper), unknowns, reading.data))


def _of_elements(reading: LatentGaussianReading, programs: Programs) -> tuple[Callable[..., Any], Callable[..., Array]]:
    """Marginals and covariance of elements of sites, as functions of the inputs of the programs of the fit, the data of
    all rows and the numbers of the elements."""

    def maps(hyper: dict[str, Array], data: Sequence[object], places: Mapping[str, Array]) -> dict[str, AffineMap]:
        found = reading.maps(hyper, data, tuple(places))
        return {n: AffineMap(rows_at(found[n].design, at), found[n].offset[at]) for n, at in places.items()}

    def marginals(
        data: Sequence[object], hyper: Any, state: Any, new: Any, places: Any, *, marginals_fn: Callable[..., Any]
    ) -> Any:
        return marginals_fn(programs.posterior(data, hyper, state), maps(hyper, new, places))

    def covariance(
        data: Sequence[object] | None, hyper: Any, state: Any, new: Any, places: Array, *, name: str
    ) -> Array:
        return programs.posterior(data, hyper, state).covariance(maps(hyper, new, {name: places})[name])

    return (
        quick_jit(marginals, static_argnames="marginals_fn", is_small=programs.is_small),
        quick_jit(covariance, static_argnames="name", is_small=programs.is_small),
    )


def _look(reading: LatentGaussianReading) -> Callable[..., _Look]:
    def look(hyper: dict[str, Array], unknowns: Array, data: Sequence[object]) -> _Look:
        form = reading.form(hyper, data)
        predictor, values = jax.vmap(lambda e: (form.predictor(e), reading.values(hyper, e, data)))(unknowns)
        return _Look(form.prior, form.potentials, form.observed, predictor, values)

    return quick_jit(look, is_small=True)


def _is_same(before: _Look, after: _Look, places: np.ndarray, reading: LatentGaussianReading) -> bool:
    """True if the rows of the fit are the same among all rows: numbers as they are, or to the rounding of sums."""
    scale = np.max(np.abs(before.predictor), axis=0, initial=0.0)
    sees_same = is_close(before.predictor, after.predictor[:, places], scale)
    has_same_prior = _are_close(before.prior, after.prior)
    sites = [{name: look.values[name] for name in reading.field} for look in (before, after)]
    if not (sees_same and has_same_prior and _are_close(*sites)):
        return False
    start = 0
    if len(before.observed) != len(after.observed):
        return False
    ends = np.cumsum([0, *(len(mask) for mask in after.observed)])
    for number, mask in enumerate(before.observed):
        own = places[start : start + len(mask)] - ends[number]
        start += len(mask)
        if not np.array_equal(mask, after.observed[number][own]):
            return False
        num_rows = reading.rows_per_observation[number]
        factors = own[::num_rows] // num_rows, len(after.observed[number]) // num_rows
        if not _is_part(before.potentials[number], after.potentials[number], *factors):
            return False
    return True


def _is_part(old: object, new: object, places: np.ndarray, size: int) -> bool:
    """True if factors are those at some places among new ones: each number is one for all, or has an axis of them.

    :param int size: how many there are among the new ones.
    """
    if _structure(old) != _structure(new):
        return False
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        has_rows = np.ndim(after) > 0 and np.ndim(before) > 0 and len(after) == size and len(before) == len(places)
        part = after[places] if has_rows else after
        if np.shape(before) != np.shape(part) or not is_close(before, part, np.abs(before)):
            return False
    return True


def _structure(tree: object) -> Any:
    return jax.tree.structure(tree)


def _are_close(old: object, new: object) -> bool:
    if _structure(old) != _structure(new):
        return False
    pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    return all(np.shape(x) == np.shape(y) and is_close(x, y, np.max(np.abs(x), initial=0.0)) for x, y in pairs)


@dataclass(eq=False)
class KnownField:
    """The posterior of a fit on old and new rows together, of which the new ones are asked for.

    :param run: of the fit.
    :param reading: of old and new arguments together.
    :param is_old: its rows that are those of the fit, boolean.
    :param latents: values of the latent sites where models may be compared, with an axis of these in front.
    """

    run: GaussianRun
    reading: LatentGaussianReading
    is_old: np.ndarray
    latents: dict[str, Any]

    def posterior(self, slices: Slices) -> PosteriorSites:
        """Marginals by name: of the field those of the fit, of other sites affine in it those of their new part."""
        sites, reading = dict(self.run.posterior), self.reading
        places = {
            name: np.arange(int(np.prod(shape))).reshape(shape)[slices(name, shape)]
            for name in reading.affine_sites
            if name not in reading.field and (shape := tuple(reading.site_shapes[name])) is not None
        }
        marginals, covariance = shared(_of_elements, self.reading, self.run.programs)
        flat = {name: place.reshape(-1) for name, place in places.items()}

        def marginals_at(inputs: Point, marginals_fn: Callable[..., object]) -> Any:
            return marginals(*inputs, reading.data, flat, marginals_fn=marginals_fn)

        found = self.run.affine_sites(
            {name: place.shape for name, place in places.items()},
            marginals_at,
            lambda inputs, name: covariance(*inputs, reading.data, flat[name], name=name),
        )
        sites = {name: (sites | found)[name] for name in reading.affine_sites}
        return PosteriorSites(sites, missing_sites(reading))

    def log_predictive(self) -> dict[str, Array]:
        """Log predictive density of the new observations, masked ones as well, and zero for the others."""
        return by_site(self.reading, self.run.log_predictive_of(self.reading)[0], ~self.is_old)

    def affine_values(self, reading: LatentGaussianReading) -> dict[str, Array]:
        """Values of the sites affine in the field at a few unknowns, with an axis of these in front."""
        look = _looked(reading, self.run.fit.hyper, _unknowns(reading))
        return {name: look.values[name] for name in reading.affine_sites}

    def draw(self, rng_key: Array) -> tuple[dict[str, Array], None]:
        """The draws of the run, in an order of their own for each key, without their log densities."""
        return shuffled(self.run.draws[0], rng_key), None

    def is_same_alone(self, call: NewCall, slices: Slices) -> bool:
        """True if the model called at the new arguments alone has, at given latent sites, the deterministic sites
        and the densities of outcomes that it has in the new rows of a call on all."""
        reading = self.reading
        known = {*reading.field, *reading.hyper}
        factors = {name for name, site in reading.sites.items() if site.family == "Unit"}
        try:
            # Outcomes are those of the call on all, where some stand for what was left out.
            outcomes, parts = {}, {}
            for name, site in reading.sites.items():
                if site.kind == "observed" and name not in factors:
                    outcomes[name] = np.broadcast_to(site.value, (2, *site.full_shape))
                    parts[name] = outcomes[name][:, *slices(name, site.full_shape)]
            alone = sites_of_call(reading.model, call, self.latents, parts, known | factors)
            whole_call = NewCall(reading.args, reading.kwargs)
            together = sites_of_call(reading.model, whole_call, self.latents, outcomes, known | factors)
            return are_part(alone, together, slices, scaled=False)
        except Exception:  # whatever a model does at arguments that it is not made for
            return False

    def model_draws(self, call: NewCall, latents: Mapping[str, Array], rng_key: Array) -> dict[str, Array]:
        """Draws of all sites but ``numpyro.factor`` at the new arguments, those of latent sites as they are given."""
        found = predictive_draws(handlers.uncondition(self.reading.model), latents, rng_key, *call)
        factors = [name for name, site in self.reading.sites.items() if site.family == "Unit"]
        return {name: value for name, value in {**latents, **found}.items() if name not in factors}
