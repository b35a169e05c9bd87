"""Options of engines: those that all have, the checks of what is given for one, and the
name that was probably meant by an unknown one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypedDict, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...compilation.content import array_key


class EngineOptions(TypedDict, total=False):
    """The options that every engine has, for the constructors of subclasses; see :class:`~.engine.BaseEngine`."""

    field: Sequence[str] | str | None
    hyper_values: Mapping[str, Any] | None
    init_values: Mapping[str, Any] | None
    num_samples: int
    progress_bar: bool
    coords: Mapping[str, Sequence[Any]] | None
    dims: Mapping[str, Sequence[str]] | None


def plain_number(value: object) -> Any:
    """A number of NumPy as one of Python, which files give back as they were given; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def option_key(value: object) -> Hashable:
    """A hashable key of an option: equal for equal numbers, text, arrays, tables and trees of these, and otherwise for
    objects that are equal and have a hash, or are the same object.

    >>> option_key([1, {"a": np.ones(2)}]) == option_key([1, {"a": np.ones(2)}])
    True
    >>> option_key(1) == option_key(1.0), option_key(np.zeros(2)) == option_key(np.ones(2))
    (False, False)
    """
    try:
        leaves, structure = jax.tree.flatten(value, is_leaf=lambda part: hasattr(part, "__array__"))
        key = (structure, *map(_leaf_key, leaves))
        hash(key)
    except (TypeError, ValueError):  # a dictionary whose names have no order, or static parts without a hash
        return (_Itself(value),)
    return key


def _leaf_key(value: Any) -> Hashable:
    if hasattr(value, "__array__"):
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = value if is_key else np.asarray(value)
        return (type(value), _Itself(value) if array.dtype == object else array_key(array))
    if isinstance(value, set):
        return (set, frozenset(value))
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return (type(value), value)


class _Itself:
    """An object by its identity, which no other gets while this holds it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value


def check_at_least(least: int, **values: object) -> None:
    """Refuse options that are not integers of at least ``least``, as booleans are to Python.

    :raises ValueError: naming the option.
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_one_of(kinds: object, **values: object) -> None:
    """Refuse options that are none of the strings of a ``Literal``.

    :raises ValueError: naming the option.
    """
    for name, value in values.items():
        if value not in get_args(kinds):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kinds)))}, got {value!r}.")


def check_kind(function: str, given: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuse anything but an object of the classes that a function takes: engines, mostly.

    :raises TypeError: see :func:`wrong_kind`.
    """
    if not isinstance(given, kinds):
        raise wrong_kind(function, given, wanted)


def wrong_kind(function: str, given: object, wanted: str) -> TypeError:
    """Refusal of an object by a function, with the way from a class or a model to an engine.

    :param str function: the function, or the question that it answers.
    :param wanted: the words for what it takes.
    """
    name = getattr(given, "__name__", "model")
    if isinstance(given, type):
        got = f"the class {name}, of which {name}(model, ...) makes one"
    elif given is None:
        got = "None"
    elif inspect.isroutine(given):
        got = f"the function {name}; if it is a model, EP({name}) makes an engine of it"
    else:
        got = f"an object of class {type(given).__name__}"
    return TypeError(f"{function} takes {wanted}; got {got}.")


def device_tuple(devices: object) -> tuple[jax.Device, ...] | None:
    """Devices that were given for an option, one or several, in a tuple; ``None`` if the option was left out.

    :raises TypeError: for anything but a device or several, such as their number.
    :raises ValueError: for none.
    """
    if devices is None:
        return None
    found = tuple(devices) if isinstance(devices, Iterable) else (devices,)
    if not all(isinstance(device, jax.Device) for device in found):
        raise TypeError(f"devices are a sequence, such as jax.devices()[:2]; got {devices!r}.")
    if not found:
        raise ValueError("devices is empty: give one of this process at least, or leave it out.")
    return found


def check_positive(**values: float | None) -> None:
    """Refuse tolerances that are neither ``None`` nor positive.

    :raises ValueError: naming the option.
    """
    for name, value in values.items():
        if value is not None and not value > 0.0:
            raise ValueError(f"{name} must be positive, got {value!r}.")


def default_tolerance(given: float | None, double: float, single: float) -> float:
    """A tolerance as it was given, or else its default in the floating dtype at work, float64 or float32."""
    if given is not None:
        return given
    return double if jnp.finfo(jnp.result_type(float)).bits == 64 else single


_Question = ParamSpec("_Question")
_Answer = TypeVar("_Answer")

_USUAL_NAMES = {
    "num_samples": ("n", "num", "size", "draws", "num_draws", "ndraws", "n_samples", "nsamples", "n_draws", "samples"),
    "var_names": ("names", "sites", "vars", "variables", "return_sites", "sites_to_show", "site", "var_name"),
    "prob": ("hdi_prob", "ci_prob", "credible_interval", "probability", "level"),
    "seed": ("rng_key", "key", "random_seed", "random_state", "rng"),
    "resample": ("psis", "importance", "reweight"),
    "group_by_chain": ("chains", "num_chains", "by_chain"),
    "exclude_deterministic": ("deterministic", "include_deterministic"),
    "num_particles": ("particles",),
}
"""Names that things have elsewhere, by those that they have here."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if there is one.

    >>> nearest_name("n", ["group_by_chain", "seed", "num_samples"]), nearest_name("integrat", ["integrate", "tol"])
    ('num_samples', 'integrate')
    """
    known = list(known)
    usual = [right for right, others in _USUAL_NAMES.items() if right in known and name in others]
    return next(iter(usual or get_close_matches(name, known, n=1)), None)


def suggests(question: Callable[_Question, _Answer]) -> Callable[_Question, _Answer]:
    """Decorator of methods whose unknown keyword arguments are refused with the name that was probably meant."""
    known = [name for name in inspect.signature(question).parameters if name != "self"]

    @wraps(question)
    def method(*args: _Question.args, **kwargs: _Question.kwargs) -> _Answer:
        unknown = next((name for name in kwargs if name not in known), None)
        if unknown is not None:
            meant = nearest_name(unknown, known)
            hint = "" if meant is None else f" Did you mean {meant!r}?"
            raise TypeError(
                f"{question.__name__}() has no argument {unknown!r}; it has {', '.join(known) or 'none'}.{hint}"
            )
        return question(*args, **kwargs)

    return method
