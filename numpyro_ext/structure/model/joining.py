"""Sites that join a field as coefficients: those whose prior is a factor on a half line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ...compilation.store import Found, shared
from ..errors import Conflict, ModelStructureError
from .reading import ModelReading
from .running.execution import ModelCall

_Reading = TypeVar("_Reading", bound=ModelReading)


class _Joined(Found[tuple[str, ...]]):
    """Sites that have joined the field of a model before."""


def joined_field(
    call: ModelCall, attempt: Callable[[frozenset[str]], _Reading], base: _Reading | None, sizes: Mapping[str, int]
) -> _Reading | None:
    """The reading whose field has those of the sites that are coefficients besides.

    A site joins if the predictors are jointly affine in it and in all that is in the field before, if every factor that
    the field had is read as before, and if every other that sees the site is one of a known family in one predictor.
    So a scale of the field, of noise or of other coefficients stays a hyperparameter.

    :param ModelCall call: of the model.
    :param attempt: reads it with a field.
    :param base: the reading without these sites, if there is one.
    :param sizes: of the sites that may join.
    :return: the last reading that was accepted: the base, where no site joins.
    """
    field = frozenset() if base is None else frozenset(base.field)
    order = sorted(sizes, key=lambda name: -sizes[name])
    kept = _Joined()
    if call.recording is not None and call.recording.key is not None:
        kept = shared(_Joined, call.recording.key, field, tuple(sorted(sizes.items())))

    def joined_by(names: Sequence[str], before: _Reading | None) -> _Reading | None:
        fields = field if before is None else frozenset(before.field)
        try:
            found = attempt(fields | frozenset(names))
        except (Conflict, ModelStructureError):
            return None
        return found if _are_coefficients(found, before) else None

    if kept.value is not None:
        again = joined_by(kept.value, base) if kept.value else base
        if again is not None or not kept.value:
            return again
    found = joined_by(order, base)
    if found is None and len(order) > 1:
        found = base
        for name in order:
            found = joined_by([name], found) or found
    found = found or base
    kept.value = tuple(n for n in order if found is not None and n in found.field)
    return found


def _are_coefficients(found: ModelReading, before: ModelReading | None) -> bool:
    """True if the factors of a reading are those of the one before, or of a family of one predictor."""
    known = {} if before is None else before.treatments
    for name, treatment in found.treatments.items():
        if name in known:
            if treatment != known[name]:
                return False
        elif not treatment.is_family_of_one:
            return False
    return set(known) <= set(found.treatments)
