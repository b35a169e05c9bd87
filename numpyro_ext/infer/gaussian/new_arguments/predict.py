"""Prediction at new arguments of the model: the posterior of a fit on a form that has old and new rows, without refit.

The model is read on old and new rows together. The Gaussian sites that stand for the old observations in the fit go to
their rows in that form, and the new rows have none: this is the posterior of the model fitted with the new observations
masked, as long as the form on all rows contains that of the fit, which is checked. Where new rows see no other unknowns
than the fit has, nothing is conditioned again (:mod:`.known_field`), and draws of new members of groups are made by the
model at those of the fit (:mod:`.new_members`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....display import Shown, Table
from ....structure import LatentGaussianReading, ModelStructureError, Reason
from ....structure.model.running.execution import bound_arguments, check_key
from ...front.answers.arviz import by_chain, prediction_to_arviz
from ...front.answers.joint_arguments import JointCall, NotJoined, joint_calls
from ...front.answers.model_draws import model_draws, observed_leaves
from ...front.answers.sites import PosteriorSites, SitePosterior
from ...front.labels import Labels
from ...front.options import suggests
from ..answers.prediction import OtherField
from ..runs.run import GaussianRun
from .containment import ADVICE, row_places
from .given_sites import check_equal, check_left_out, on_all_rows
from .known_field import KnownField, known_field
from .new_members import NewMembers, new_members
from .outcome_probabilities import probabilities_by_predictors, probabilities_of_draws
from .sites_of_calls import NewCall


class Prediction(Shown, Mapping[str, Array]):
    """The posterior of a fit at new arguments of its model: marginals without sampling error, and draws.

    It is a mapping from sites to draws, as the dictionary that NumPyro's ``Predictive`` returns.

    Obtained as ``engine.predict(rng_key, ...)``. Axes that count observations are those of the new arguments. Other
    axes, such as the members of a group, are those of old and new arguments together; so is what the model computes
    over all rows (the mean of a field).
    """

    def __init__(
        self,
        run: GaussianRun | Callable[[], GaussianRun],
        old: LatentGaussianReading,
        call: JointCall,
        rng_key: Array,
        other: LatentGaussianReading | None = None,
        known: KnownField | None = None,
        alone: NewCall | None = None,
        members: NewMembers | None = None,
    ) -> None:
        self._make_run = run
        self._known = known
        self._members = members
        self._old = old
        self._call = call
        self._rng_key = rng_key
        self._other = other
        self._alone = alone

    def _shown(self) -> list[str | Table]:
        reading: LatentGaussianReading = (self._known or self._members or self._run).reading
        rows = []
        kinds = dict.fromkeys(reading.hyper, "hyperparameter") | dict.fromkeys(reading.field, "field")
        for name, site in reading.sites.items():
            shape = tuple(site.shape)
            if site.kind == "observed" and site.family != "Unit":
                shape, kind = self._new_shape(name, tuple(site.shape)), f"to be observed, {site.family}"
            elif site.kind in ("latent", "param", "deterministic"):
                shape, kind = self._new_shape(name, shape), kinds.get(name, "deterministic")
            else:
                continue
            rows.append([name, str(shape), kind])
        ask = (
            "get_samples() draws all of these; posterior has exact marginals, probabilities() those of counted outcomes"
        )
        return [f"Prediction({', '.join(row[0] for row in rows)})", Table(["site", "shape", ""], rows), ask]

    @cached_property
    def _run(self) -> GaussianRun:
        """The run on all rows, which is made where the field is not known without it."""
        return self._make_run if isinstance(self._make_run, GaussianRun) else self._make_run()

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Exact marginals by name, for hyperparameters, every field site and every deterministic site affine in it."""
        if self._known is not None:
            known, traced = self._known, self._known.reading.sites
            labels = Labels(plates={name: site.dims for name, site in traced.items() if site.dims})
            shapes = {name: tuple(site.shape) for name, site in traced.items()}
            kept, _ = labels.updated(known.run.labels).fitting(shapes)
            return known.posterior(self._new_slices).with_hyper(known.run.hyper_posterior, kept)
        sites = self._run.posterior
        found = PosteriorSites({name: self._new_part(site) for name, site in sites.items()}, sites.reasons)
        return found.with_hyper(self._run.hyper_posterior, self._run.all_labels)

    def probabilities(self) -> dict[str, np.ndarray]:
        """Probability of each category, ordered outcome or count of the new observations, over all uncertainty.

        Where an observation sees one predictor these are integrals over it, without sampling error; elsewhere (softmax
        of several predictors) averages of the model's own probabilities over ``num_samples`` draws of its latent sites.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
        ...     cuts = jnp.array([-1.0, 1.0])
        ...     numpyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=y)
        >>> engine = EP(model)
        >>> engine.run(jax.random.key(0), jnp.array([-1.0, 0.0, 1.0, 2.0]), jnp.array([0, 1, 2, 2]))
        >>> print(engine.predict(jax.random.key(1), jnp.array([0.0, 1.0])).probabilities()["y"].round(2))
        [[0.27 0.46 0.27]
         [0.11 0.32 0.57]]

        :return: of shape ``(*observations, outcomes)`` by observed site; the last axis counts ``0, 1, ...``, counts
            without end up to where less than ``1e-10`` of the mass is left.
        :raises ValueError: if no site has outcomes that can be counted.
        """
        run, reading = self._run, self._run.reading
        found = probabilities_by_predictors(run, self._new_slices)
        others = [
            name
            for name in reading.observed_names
            if name not in found and getattr(reading.sites[name].support, "is_discrete", False)
        ]
        if others:
            drawn, _ = run.draw(self._rng_key)
            latents = {name: drawn[name] for name in (*reading.field, *reading.hyper)}
            found |= probabilities_of_draws(reading, latents, others, self._new_slices)
        if not found:
            observed = ", ".join(map(repr, reading.observed_names))
            raise ValueError(
                f"Outcomes of {observed} cannot be counted: draws of them are in get_samples(), marginals of what they "
                "depend on in posterior."
            )
        return found

    @suggests
    def get_samples(self, group_by_chain: bool = False) -> dict[str, Array]:
        """Draws of every site of the model by name: latent and deterministic ones, and what is to be observed.

        Latent sites are drawn from the posterior, all else by the model itself, given these. Where the new arguments
        bring no new latent sites, the draws of these are those of ``engine.get_samples()``, in another order for each
        key.

        :param bool group_by_chain: whether to put a chain dimension in front, as engines do.
        :return: arrays of shape ``(num_samples, ...)``, or ``(num_chains, num_samples // num_chains, ...)``.
        """
        return by_chain(self._draws) if group_by_chain else dict(self._draws)

    def __getitem__(self, site: str) -> Array:
        """Draws of a site, ``get_samples()[site]``.

        :raises KeyError: if the model has no such site.
        """
        if site not in self._draws:
            raise KeyError(f"Draws are of the sites {', '.join(self._draws)}; got {site!r}.")
        return self._draws[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._draws)

    def __len__(self) -> int:
        return len(self._draws)

    def log_predictive(self) -> dict[str, Array]:
        """Log predictive density of the new observations, where the new arguments hold them; masked ones as well.

        :return: for each observed site an array in the shape of its new observations.
        :raises ValueError: if they were left out.
        """
        if self._call.left_out:
            raise NotJoined("Give the observations that are to be scored: predict(rng_key, x, y).log_predictive().")
        scores = self._run.log_predictive() if self._known is None else self._known.log_predictive()
        return {name: value[self._new_slices(name, value.shape)] for name, value in scores.items()}

    def to_arviz(self, **options: object) -> Any:
        """The draws as the group ``predictions`` of ArviZ's data.

        :param options: ``coords`` and ``dims``, as for ``arviz.from_dict``.
        """
        return prediction_to_arviz(self.get_samples(), **options)

    @cached_property
    def _draws(self) -> dict[str, Array]:
        if self._members is not None:
            return self._members.draws(self._rng_key)
        run = self._known or self._run
        reading = run.reading
        drawn, _ = run.draw(self._rng_key)
        latents = {name: drawn[name] for name in (*reading.field, *reading.hyper)}
        if self._known is not None and self._alone is not None:
            return self._known.model_draws(self._alone, latents, self._rng_key)
        missing = self._call.left_out | observed_leaves(self._old)
        found = model_draws(reading, latents, jax.random.fold_in(self._rng_key, 1), missing, self._other)
        return {name: value[(slice(None), *self._new_slices(name, value.shape[1:]))] for name, value in found.items()}

    def _new_slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of a site that belongs to the new rows."""
        return _new_slices(self._old, self._call, name, shape)

    def _new_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(len(range(*part.indices(n))) for part, n in zip(self._new_slices(name, shape), shape, strict=True))

    def _new_part(self, site: SitePosterior) -> SitePosterior:
        places = np.arange(site.size).reshape(site.shape)[self._new_slices(site.name, site.shape)]
        return site if places.size == site.size else site.part(places)


def predict(
    run: GaussianRun,
    read: Callable[..., LatentGaussianReading],
    rng_key: Array,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    joint: Mapping[str, object] | None,
) -> Prediction:
    """See :meth:`~numpyro_ext.infer.Engine.predict`.

    :param GaussianRun run: of the engine.
    :param read: reads the model on arguments and keyword arguments.
    """
    check_key(rng_key, "predict(jax.random.key(0), new_x)")
    reading = run.reading
    old, make_call = bound_arguments(reading.model, reading.args, reading.kwargs)
    unknown = sorted(set(joint or {}) - set(old))
    if unknown:
        raise NotJoined(f"joint= names {unknown}, and the arguments of the model are {sorted(old)}.")
    try:
        new, call_new = old, make_call
        if args or kwargs or joint:
            new, call_new = bound_arguments(reading.model, args, kwargs, joint)
    except TypeError as error:
        raise NotJoined(
            f"the model cannot be called like this: {error}. predict(rng_key, ...) takes the arguments of the model, "
            f"{inspect.signature(reading.model)}; what is observed is left out, by its default or as None."
        ) from error
    seeing = dict(zip(reading.observed_names, reading.factor_shapes, strict=False))
    # Observations that see hyperparameters alone have rows, too.
    observed = {name: site.shape for name, site in reading.sites.items() if site.kind == "observed"} | seeing
    lengths = {length for shape in observed.values() for length in shape}
    refusals: list[ValueError] = []
    calls = [joint_calls(old, new, lengths, dict(joint or {}), fill=fill) for fill in (0, 1)]
    for call, again in zip(*calls, strict=True):
        if not call.is_new:
            return Prediction(run, reading, call, rng_key)
        try:
            whole = read(*make_call(call.arguments))
            read_other = partial(read, *make_call(again.arguments)) if call.left_out else lambda: None
            alone = None if joint else NewCall(*call_new(new))
            return _on_joint_reading(run, whole, call, rng_key, read_other, alone)
        except ModelStructureError as error:
            hint = "Observations have to be an argument of the model, so that they can be left out."
            hint = f" {hint}" if error.reason is Reason.DATA else ""
            refusals.append(NotJoined(f"The model cannot be read on old and new arguments together: {error}{hint}"))
            refusals[-1].__cause__ = error
        except NotJoined as error:
            refusals.append(error)
    changed = [name for name in old if name in new and _is_another_number(old[name], new[name])]
    if changed and not joint:
        raise NotJoined(
            f"{refusals[0]} Besides, {', '.join(map(repr, changed))} is another number than in the fit, and holds for "
            "all rows: where it belongs to the new ones, as an exposure does, give an array of it for each of them."
        ) from refusals[0].__cause__
    raise refusals[0]


def _on_joint_reading(
    run: GaussianRun,
    whole: LatentGaussianReading,
    call: JointCall,
    rng_key: Array,
    read_other: Callable[[], LatentGaussianReading | None],
    alone: NewCall | None,
) -> Prediction:
    """Prediction by the shortest way that holds: maps of the known field, draws of new members given those of the fit,
    or conditioning on all rows.

    :param whole: reading of old and new arguments together.
    :param read_other: reads them with other values of what is observed, where that is left out.
    :param alone: the call at the new arguments alone, if there is one.
    :raises NotJoined: if the joint reading does not contain the fitted one.
    """
    reading, places = run.reading, _places(run, whole)
    new_part = partial(_new_slices, reading, call)
    known = known_field(run, whole, places, _hypers(run))
    if known is None:
        members = alone and new_members(run, whole, alone, new_part, _hypers(run))
        if members is not None:
            on_all = partial(_on_all_rows, run, whole, places, is_contained=True)
            return Prediction(on_all, reading, call, rng_key, members=members)
        found, other = _on_all_rows(run, whole, places), read_other()
        if other is not None:
            check_left_out(found, other)
        return Prediction(found, reading, call, rng_key, other)
    other = None
    if alone is None or not known.is_same_alone(alone, new_part):
        alone, other = None, read_other()
        if other is not None:
            check_equal(known.affine_values(whole), known.affine_values(other))
    on_all = partial(on_all_rows, run, whole, places)
    return Prediction(on_all, reading, call, rng_key, other, known, alone)


def _on_all_rows(run: GaussianRun, *of_all: Any, **options: Any) -> GaussianRun:
    """The run of :func:`on_all_rows` with the labels of the fit, of which those of groups with new members fit no
    more."""
    found = on_all_rows(run, *of_all, **options)
    found.keep_labels(run.labels)
    return found


def _is_another_number(old: object, new: object) -> bool:
    kinds = int, float, np.number, np.ndarray, jax.Array
    are_numbers = all(isinstance(value, kinds) and np.ndim(value) == 0 for value in (old, new))
    return are_numbers and bool(np.any(np.asarray(old) != np.asarray(new)))


def log_predictive(
    run: GaussianRun, read: Callable[..., LatentGaussianReading], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, Array]:
    """Log predictive density of the observations of other arguments; see :func:`predict`.

    :raises OtherField: if the field is another one, and its posterior cannot be predicted.
    """
    try:
        return run.log_predictive(read(args, kwargs))
    except OtherField as error:
        try:
            return predict(run, read, run.rng_key, args, kwargs, None).log_predictive()
        except NotJoined as refusal:
            raise error from refusal


def _new_slices(
    reading: LatentGaussianReading, call: JointCall, name: str, shape: tuple[int, ...]
) -> tuple[slice, ...]:
    """The part of a site on old and new rows that belongs to the new ones."""
    old, appended = reading.sites.get(name), call.appended
    if old is None or len(old.shape) != len(shape):
        return tuple(slice(None) for _ in shape)
    are_rows = [a in appended and b == a + appended[a] for a, b in zip(old.shape, shape, strict=True)]
    return tuple(slice(a if is_row else None, None) for a, is_row in zip(old.shape, are_rows, strict=True))


def _hypers(run: GaussianRun) -> Iterator[dict[str, Any]]:
    """The hyperparameters of the fit, and two about a standard deviation away."""
    yield run.fit.hyper
    space, values = run.space, np.asarray(run.fit.last_state.values)
    if not space.size:
        return
    covariance = run.fit.covariance
    deviations = np.ones(space.size) if covariance is None else np.sqrt(np.maximum(np.diagonal(covariance), 0.0))
    steps = np.clip(deviations, 1e-2, 1.0) * np.random.default_rng(1).uniform(0.5, 1.0, space.size)
    for sign in (-1.0, 1.0):
        yield space.unpack(jnp.asarray(values + sign * steps, values.dtype), space.fixed)


def _places(run: GaussianRun, found: LatentGaussianReading) -> np.ndarray:
    """The rows of a fit in a reading of old and new rows.

    :raises NotJoined: if the sites or the hyperparameters of the fit have no place there.
    """
    places = row_places(run.reading, found)
    if set(found.hyper) != set(run.fit.hyper) or any(
        tuple(site.shape) != np.shape(run.fit.hyper[name]) for name, site in found.hyper.items()
    ):
        old = {name: np.shape(value) for name, value in run.fit.hyper.items()}
        raise NotJoined(
            f"With old and new arguments together the hyperparameters have the shapes "
            f"{ {name: tuple(site.shape) for name, site in found.hyper.items()} }, in the fit {old}: what the fit has "
            f"not learned has no value to predict with. {ADVICE}"
        )
    return places
