"""The search for the field of a model: choose it, refuse what cannot be treated, verify what was read."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array

from ...first_look import first_look
from ..errors import Conflict, ModelStructureError, Reason
from .field_checks import MAX_HYPER_SIZE, check_field, check_hyper, check_values
from .joining import joined_field
from .priors import is_gaussian, unwrap, why_not_read
from .reading import ModelReading
from .running.calling import record
from .running.execution import ModelCall, check_key
from .running.inspection import SiteInfo, inspect_sites, mark_candidates, model_key
from .running.pandas_arguments import run_or_with_arrays
from .validation import check_data
from .verification import check_form

_MAX_ATTEMPTS = 48


_Reading_co = TypeVar("_Reading_co", bound=ModelReading, covariant=True)

Attempt = Callable[[frozenset[str]], _Reading_co]
"""Reads a model with these sites as field, or raises the :class:`Conflict` for which it cannot."""


def largest_field(attempt: Attempt[_Reading_co], sizes: Mapping[str, int]) -> _Reading_co:
    """Largest workable field first: drop one site of each conflict at a time.

    Of a conflict of many sites each two are tried alone: sets of sites with a pair that has one need no attempt.
    A field that enters an observation as pairs of no known family, as the first weights of a network do, gives way to
    the largest that does not, if it was a conflict there that put the two beside each other.

    :param sizes: of all candidates.
    """
    order = itertools.count()
    start = frozenset(sizes)
    queue = [(-sum(sizes.values()), next(order), start)]
    because: dict[frozenset[str], str | None] = {start: None}  # where the last conflict was, for each field
    first_error: Conflict | ModelStructureError | None = None
    best: _Reading_co | None = None
    best_score: tuple[bool, int, int] | None = None
    bad_pairs: dict[frozenset[str], str | None] = {}
    num_attempts = 0

    def leave_out_each(left_out: Iterable[str], names: frozenset[str], at: str | None) -> None:
        for site in sorted(left_out):
            rest = names - {site}
            if rest and rest not in because:
                because[rest] = at
                heapq.heappush(queue, (-sum(sizes[n] for n in rest), next(order), rest))

    while queue and num_attempts < _MAX_ATTEMPTS:
        negative_size, _, names = heapq.heappop(queue)
        if best is not None and -negative_size < sum(sizes[n] for n in best.field):
            if because[names] not in best.unknown_pairs:
                continue
        known = next((pair for pair in bad_pairs if pair <= names), None)
        if known is not None:
            leave_out_each(known, names, bad_pairs[known])
            continue
        num_attempts += 1
        try:
            reading = attempt(names)
            score = (not reading.unknown_pairs, -negative_size, reading.num_closed_forms)
            if best_score is None or score > best_score:
                best, best_score = reading, score
        except Conflict as conflict:
            first_error = first_error or conflict
            if len(conflict.sites & names) > 2 and conflict.site not in sizes:
                bad_pairs.update(dict.fromkeys(_bad_pairs(attempt, conflict, names), conflict.site))
            leave_out_each(conflict.sites & names, names, conflict.site)
        except ModelStructureError as error:
            first_error = first_error or error
    if isinstance(first_error, Conflict) and best is None:
        raise ModelStructureError(str(first_error), site=first_error.site) from first_error
    if best is None:
        raise first_error or ModelStructureError("no field was tried.")
    return best


def is_anything(fn: dist.Distribution) -> bool:
    """True for every distribution."""
    return True


def is_nothing(fn: dist.Distribution) -> bool:
    """False for every distribution."""
    return False


def whole_field(attempt: Attempt[_Reading_co], sizes: Mapping[str, int]) -> _Reading_co:
    """All candidates or none, where another form has room for what this one would leave out.

    :param sizes: of all candidates.
    """
    try:
        return attempt(frozenset(sizes))
    except Conflict as conflict:
        raise ModelStructureError(str(conflict), site=conflict.site) from conflict


def _bad_pairs(attempt: Attempt[_Reading_co], conflict: Conflict, names: frozenset[str]) -> set[frozenset[str]]:
    """Pairs of the sites of a conflict at an observation that have one there without the others, as in every field."""
    found = set()
    for pair in map(frozenset, itertools.combinations(sorted(conflict.sites & names), 2)):
        try:
            attempt(pair)
        except Conflict as alone:
            if alone.site == conflict.site:
                found.add(pair)
        except ModelStructureError:
            pass
    return found


class Form(NamedTuple, Generic[_Reading_co]):
    """Form into which a model is read."""

    reading: Callable[..., _Reading_co]
    """Makes a reading of a :class:`~numpyro_ext.structure.model.running.execution.ModelCall`, its sites, and the
    field."""
    is_candidate: Callable[[Any], bool]
    """True if a distribution may belong to the field."""
    no_candidate: str
    """Says that none does, with ``{}`` for the latent sites there are."""
    search: Callable[[Attempt[_Reading_co], Mapping[str, int]], _Reading_co] = largest_field
    """Tries fields until a model can be read, given the sizes of all candidates."""
    makes_field: Callable[[Any], bool] = is_anything
    """True if a candidate of this distribution is enough to ask for the form; one of the field has to be."""
    joins: Callable[[Any], bool] = is_nothing
    """True if a site of a distribution that is no candidate joins the field where nothing else is read in another way:
    as a coefficient, and not as a scale. See :func:`~numpyro_ext.structure.model.joining.joined_field`."""
    max_hyper_size: int = MAX_HYPER_SIZE
    """Elements that a hyperparameter with a prior may have."""
    integrates: Collection[str] = ()
    """Families of which hyperparameters may have any number of elements, as an engine may integrate over them: it
    refuses the others by :func:`~numpyro_ext.structure.model.field_checks.check_hyper`."""

    def without_joining(self) -> Form[_Reading_co]:
        """The form without the sites that would join."""
        return self._replace(joins=is_nothing)


def field_names(field: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The names in ``field``, which may be a single one."""
    return (field,) if isinstance(field, str) else None if field is None else tuple(field)


class ReadOptions(TypedDict, total=False):
    """The options of every function that reads a model, described at :func:`read_first`."""

    field: Sequence[str] | str | None
    init_values: Mapping[str, Any] | None
    held: Collection[str]
    rng_key: Array | None
    check: bool
    learns_hyper: bool
    check_observations: bool
    changing: Sequence[str]


def read_first(
    forms: Sequence[Form[_Reading_co]],
    model: Callable[..., object],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    field: Sequence[str] | str | None = None,
    init_values: Mapping[str, object] | None = None,
    held: Collection[str] = (),
    rng_key: Array | None = None,
    check: bool = True,
    learns_hyper: bool = True,
    check_observations: bool = True,
    changing: Sequence[str] = (),
) -> _Reading_co:
    """Read a model into the first of several forms that it has. The model is run, and its data checked, once; models
    with NumPyro's control flow, or that need the values of their sites, are run three times.

    :param forms: in the order of preference.
    :param model: a NumPyro model.
    :param tuple args: its arguments, which stay concrete.
    :param dict kwargs: its keyword arguments.
    :param field: names of the sites to use as field, instead of searching.
    :param dict init_values: starting values of hyperparameters (constrained), instead of the centres of their priors;
        the model need not have a density elsewhere.
    :param held: names of hyperparameters that keep the values in ``init_values``: of these there may be many.
    :param rng_key: for models that draw random numbers themselves.
    :param bool check: compare the form with NumPyro's log density at random points, and operators with their adjoints.
    :param bool learns_hyper: whether hyperparameters are to be maximised over, for which there must not be too many.
    :param bool check_observations: whether observed values have to be finite and inside their support.
    :param changing: names of arguments without whose values the model is read: the form is a function of them.
    :return: the reading.
    :raises ModelStructureError: if it has none of them, that of the first form for which it has candidates; if
        there are none, what each form needs.
    """
    key = jax.random.key(0) if rng_key is None else rng_key
    call = ModelCall(model, args, dict(kwargs or {}), key, tuple(changing))
    field = field_names(field)
    check_key(call.rng_key)
    call.changing_values()  # says what there is not
    values = dict(init_values or {})

    def look(tried: ModelCall) -> tuple[ModelCall, dict[str, SiteInfo]]:
        with first_look(check and not held):
            recorded = tried._replace(recording=record(tried))
        return recorded, inspect_sites(recorded, values)

    _, (call, sites) = run_or_with_arrays(call, look)
    check_values(sites, values)
    check_data(sites, check_observations)
    refusals: list[ModelStructureError] = []
    for form in forms:
        try:
            return _read(form, call, sites, field, check, learns_hyper, frozenset(values), frozenset(held))
        except ModelStructureError as error:
            refusals.append(error)
    telling = [error for error in refusals if error.reason is not Reason.NO_FIELD]
    if telling:
        first = telling[0]
        own = {n: s for n, s in sites.items() if n == first.site and first.reason is Reason.STRUCTURE}
        if hint := _hint_of_a_function(own):
            raise ModelStructureError(str(first) + hint, reason=first.reason, site=first.site) from first
        raise first
    words = " Nor in another form: ".join(dict.fromkeys(map(str, refusals)))
    raise ModelStructureError(words + _hint_of_a_process(sites) + _hint_of_a_function(sites), reason=Reason.NO_FIELD)


def _read(
    form: Form[_Reading_co],
    call: ModelCall,
    inspected: Mapping[str, SiteInfo],
    field: Sequence[str] | None,
    check: bool,
    learns_hyper: bool,
    given: frozenset[str],
    held: frozenset[str],
) -> _Reading_co:
    sites = mark_candidates(inspected, form.is_candidate)
    held |= {n for n, s in sites.items() if s.family in form.integrates}
    may_join = {n for n, s in mark_candidates(inspected, form.joins).items() if s.is_candidate and n not in given}

    def attempt(names: frozenset[str]) -> _Reading_co:
        for name in sorted(names):
            if told := why_not_read(inspected[name].prior):
                raise ModelStructureError(f"site '{name}' {told}.", site=name)
        reading = form.reading(call, sites, names)
        # Those that may join are no hyperparameters yet.
        check_hyper(reading, sites, learns_hyper, without=may_join, max_size=form.max_hyper_size, held=held)
        return reading

    if field is None:
        sizes = {n: int(np.prod(s.shape)) for n, s in sites.items() if s.is_candidate}
        joining = {n: int(np.prod(sites[n].shape)) for n in sites if n in may_join}
        if not any(form.makes_field(inspected[n].prior) for n in (*sizes, *joining)):
            raise ModelStructureError(_nothing_to_read(form.no_candidate, sites), reason=Reason.NO_FIELD)
        found = form.search(attempt, sizes) if sizes else None
        if joining:
            found = joined_field(call, attempt, found, joining)
        if found is None:
            raise ModelStructureError(_nothing_to_read(form.no_candidate, sites), reason=Reason.NO_FIELD)
        reading = found
        check_hyper(reading, sites, learns_hyper, max_size=form.max_hyper_size, held=held)
    else:
        sites = {n: s._replace(is_candidate=s.is_candidate or (n in may_join and n in field)) for n, s in sites.items()}
        check_field(field, sites)
        if not any(form.makes_field(inspected[n].prior) for n in field):
            raise ModelStructureError(_nothing_to_read(form.no_candidate, sites), reason=Reason.NO_FIELD)
        try:
            reading = attempt(frozenset(field))
        except Conflict as conflict:
            raise ModelStructureError(f"With field={list(field)}: {conflict}", site=conflict.site) from conflict
    if check:
        # What distributions of others compute may depend on anything: the check is by the model itself.
        recording = call.recording if call.recording is not None and call.recording.key is not None else None
        try:
            check_form(reading, call.rng_key, recording=recording)
        except ModelStructureError as error:
            if error.reason is Reason.MISREAD and _is_another_each_time(call):
                raise ModelStructureError(
                    "the model was misread, as it is another one each time it is called: something that it has from "
                    "outside changes, such as a generator of NumPy, a counter or a list that grows. Draw such numbers "
                    "before and give them as arguments, or draw them with numpyro.prng_key().",
                    reason=Reason.MISREAD,
                ) from error
            raise
    return reading


def _is_another_each_time(call: ModelCall) -> bool:
    try:
        return model_key(call) != model_key(call)
    except Exception:  # of models that need concrete values, whatever they raise without
        return False


def _nothing_to_read(no_candidate: str, sites: Mapping[str, SiteInfo]) -> str:
    latents = {n: s.family for n, s in sites.items() if s.kind == "latent"}
    discrete = [n for n, s in sites.items() if s.kind == "latent" and s.is_discrete]
    masked = [n for n, s in sites.items() if s.kind == "latent" and s.is_masked]
    more = f" The discrete sites {discrete} can be summed out in the model (a mixture)." if discrete else ""
    if masked:
        more += f" The sites {masked} are masked: mask their observations alone, with the handler around these."
    return no_candidate.format(latents or "none") + more


def _hint_of_a_process(sites: Mapping[str, SiteInfo]) -> str:
    """Hint on regressions whose Gaussian process is integrated out by hand."""
    whole = [n for n, s in sites.items() if s.kind == "observed" and s.family == "MultivariateNormal"]
    if not whole:
        return ""
    return (
        f" If observed site '{whole[0]}' is a Gaussian process with noise: written as f = numpyro.sample('f', "
        f"dist.MultivariateNormal(mean, kernel)) and dist.Normal(f, noise) for '{whole[0]}', it is read, and its "
        "evidence is exact."
    )


def _hint_of_a_function(sites: Mapping[str, SiteInfo]) -> str:
    """Hint on sites that are functions of Gaussian ones, such as log-normal rates."""

    def is_function(fn: object) -> bool:
        return isinstance(fn, dist.TransformedDistribution) and is_gaussian(fn.base_dist)

    found = [n for n, s in sites.items() if s.kind == "latent" and is_function(unwrap(s.prior))]
    if not found:
        return ""
    config = ", ".join(f"{n!r}: TransformReparam()" for n in found)
    return (
        f" The sites {found} are functions of Gaussian ones: numpyro.handlers.reparam(model, config={{{config}}}), of "
        "numpyro.infer.reparam, makes these the sites."
    )
