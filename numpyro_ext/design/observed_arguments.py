"""Search for the arguments that hold the observations and masks of sites, and their update with more of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from ..compilation.pytree import PyTree
from ..infer.front.answers.joint_arguments import numbers_of
from ..infer.front.engine import AnyEngine
from ..infer.monte_carlo.run import SMCRun
from ..infer.monte_carlo.smc import SMC
from ..structure.model.running.pandas_arguments import is_pandas

Given = str | Mapping[str, str] | None


class Observed(NamedTuple):
    """Observed sites of a finished run, by name."""

    shapes: dict[str, tuple[int, ...]]
    values: dict[str, Any]
    masks: dict[str, np.ndarray]

    @classmethod
    def of(cls, engine: AnyEngine | SMC) -> Self:
        """Observed sites of the last run of an engine."""
        run = engine._finished()
        if isinstance(run, SMCRun):
            shapes = {n: tuple(site.batch_shape) for n, site in run.observations.items()}
            masks = {n: np.broadcast_to(np.asarray(run.observations[n].mask), shape) for n, shape in shapes.items()}
            return cls(shapes, {n: site.value for n, site in run.observations.items()}, masks)
        reading = run.reading
        shapes = {n: tuple(s) for n, s in zip(reading.observed_names, reading.factor_shapes, strict=False)}
        masks = {n: np.asarray(reading.known_mask(n)) for n in shapes}
        return cls(shapes, {n: reading.sites[n].value for n in shapes}, masks)


def argument_names(
    arguments: Mapping[str, object], observed: Observed, observations: Given, mask: Given
) -> dict[str, tuple[str, str | None]]:
    """For each observed site the names of the arguments with its observations and its mask, the latter ``None`` where
    observations that are not seen are nan.

    :param arguments: of the model, by name.
    :param observations: as it was named by the user, or ``None``; as is ``mask``.
    :raises ValueError: if it cannot be told.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for site, is_seen in observed.masks.items():
        value = np.asarray(observed.values[site])
        name = _name(observations, site, arguments, "observations") or _found(arguments, site, value, is_seen)
        named = _name(mask, site, arguments, "mask")
        numbers = numbers_of(arguments[name])
        is_missing = numbers is not None and numbers.dtype.kind == "f" and np.array_equal(np.isnan(numbers), ~is_seen)
        found[site] = name, named or _found_mask(arguments, site, is_seen, may_be_nan=is_missing)
    return found


def with_observations(
    arguments: Mapping[str, object],
    names: Mapping[str, tuple[str, str | None]],
    values: Mapping[str, np.ndarray],
    seen: Mapping[str, np.ndarray],
) -> dict[str, object]:
    """Arguments with other observations and masks, which are copies: a reading keeps what it was given.

    :param names: as :func:`argument_names` finds them.
    :param values: by site, in the shape of its observations; as is ``seen``.
    :raises ValueError: if sites with one mask were not told together.
    """
    told, masks = dict(arguments), dict[str, np.ndarray]()
    for site, (name, mask) in names.items():
        numbers = values[site].astype(np.asarray(arguments[name]).dtype)
        if mask is None:
            numbers[~seen[site]] = np.nan
        elif not np.array_equal(masks.setdefault(mask, seen[site]), seen[site]):
            raise ValueError(
                f"The sites {[s for s, (_, other) in names.items() if other == mask]} have one mask, the argument "
                f"{mask!r}: tell what is seen of all of them at a place at once, "
                "observe([(site, place), ...], [value, ...]), or give each a mask of its own."
            )
        else:
            told[mask] = _like(arguments[mask], seen[site].copy())
        told[name] = _like(arguments[name], numbers)
    return told


def _like(old: PyTree, new: np.ndarray) -> object:
    if not is_pandas(old):
        return new
    labels = {axis: getattr(old, axis) for axis in ("index", "columns") if hasattr(old, axis)}
    return type(old)(new, **labels)


def _name(given: Given, site: str, arguments: Mapping[str, object], kind: str) -> str | None:
    name = given.get(site) if isinstance(given, Mapping) else given
    if name is not None and name not in arguments:
        raise ValueError(f"{kind}={name!r}: the arguments of the model are {sorted(arguments)}.")
    return name


def _alike(arguments: Mapping[str, object], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    arrays = {name: numbers_of(value) for name, value in arguments.items()}
    return {n: a for n, a in arrays.items() if a is not None and a.shape == shape and a.dtype.kind in "iufb"}


def _found(arguments: Mapping[str, object], site: str, value: np.ndarray, is_seen: np.ndarray) -> str:
    arrays = _alike(arguments, is_seen.shape)
    value = np.broadcast_to(value, is_seen.shape).astype(float)

    def equal(where: np.ndarray, is_bool: bool) -> list[str]:
        # in the precision of the model, which is perhaps less than that of the argument
        return [
            name
            for name, array in arrays.items()
            if (array.dtype == bool) == is_bool
            and np.array_equal(np.asarray(jnp.asarray(array), float)[where], value[where])
        ]

    every = np.ones(is_seen.shape, bool)
    # a reading replaces placeholders that are no values; labels may be booleans, as masks are
    fitting = equal(every, False) or equal(is_seen, False) or equal(every, True) or equal(is_seen, True)
    return _only(fitting, "observations", site, is_seen.shape, "hold the values observed")


def _found_mask(arguments: Mapping[str, object], site: str, is_seen: np.ndarray, *, may_be_nan: bool) -> str | None:
    arrays = _alike(arguments, is_seen.shape)
    fitting = [name for name, array in arrays.items() if array.dtype == bool and np.array_equal(array, is_seen)]
    if not fitting and may_be_nan:
        return None
    return _only(fitting, "mask", site, is_seen.shape, "be true where data are in use")


def _only(fitting: list[str], kind: str, site: str, shape: tuple[int, ...], what: str) -> str:
    if len(fitting) == 1:
        return fitting[0]
    found = "none does" if not fitting else f"{fitting} do"
    raise ValueError(
        f"Which argument of the model holds the {kind} of site {site!r}? It should have the shape {shape} and {what}; "
        f"{found}. Name it, so that the engine can run again: SequentialDesign(engine, {kind}=...)."
    )
