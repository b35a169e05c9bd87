"""Errors of a model on its arguments, in words that name its line, its last site and its arguments."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ...errors import ModelStructureError, Reason
from ..priors import islands_of

if TYPE_CHECKING:
    from .recording import Recording

_MOST_ARGUMENTS = 8
_SETTING = bool | np.bool_ | str | type | None


class ModelCall(NamedTuple):
    """A model with what it is called with."""

    model: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    rng_key: jax.Array
    """For models that draw random numbers themselves."""
    changing: tuple[str, ...] = ()
    """Names of the arguments without whose values the model is read."""
    recording: Recording | None = None
    """Recording of the model on these arguments, in the place of further calls."""

    def changing_values(self) -> dict[str, Any]:
        """The arguments in :attr:`changing` as trees of arrays, by name.

        :raises ModelStructureError: if there is no such argument, or it holds anything but numbers.
        """
        if not self.changing:
            return {}
        check_call(self)
        there, _ = bound_arguments(self.model, self.args, self.kwargs)
        return {name: _as_arrays(name, there.get(name), there) for name in self.changing}

    def with_values(self, values: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Positional and keyword arguments with other values for some of them."""
        if not values:
            return self.args, self.kwargs
        there, make_call = bound_arguments(self.model, self.args, self.kwargs)
        return make_call({**there, **values})

    @property
    def origin(self) -> Hashable:
        """Equal for calls of the same source with the same settings (switches and words among the arguments, and what
        functions made within others have from these)."""
        return _source(self.model), _settings((*enumerate(self.args), *self.kwargs.items()))


def bound_arguments(
    model: Any, args: tuple[object, ...], kwargs: Mapping[str, object], given: Mapping[str, object] | None = None
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], tuple[tuple[object, ...], dict[str, object]]]]:
    """The arguments of a model by the names of its parameters, defaults included, and what makes a call of such.

    :param model: a NumPyro model.
    :param args: positional arguments.
    :param kwargs: keyword arguments.
    :param given: values of parameters that are in neither.
    :raises TypeError: if they do not fit its signature.
    """
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # callables without one
        names = [f"argument {number + 1}" for number in range(len(args))]

        def plain_call(arguments: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
            rest = {name: value for name, value in arguments.items() if name not in names}
            return tuple(arguments[name] for name in names if name in arguments), rest

        return dict(zip(names, args, strict=True)) | dict(kwargs), plain_call
    there = signature.bind_partial(*args, **kwargs).arguments
    rest = {name: value for name, value in (given or {}).items() if name not in there}
    found = signature.bind(*args, **kwargs, **rest)
    found.apply_defaults()

    def call(arguments: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        again = inspect.BoundArguments(signature, dict(arguments))
        return again.args, again.kwargs

    return dict(found.arguments), call


def _as_arrays(name: str, value: object, there: Mapping[str, object]) -> object:
    if name not in there:
        raise ModelStructureError(
            f"changing= names {name!r}, and the arguments of the model are {sorted(there)}.", reason=Reason.DATA
        )
    leaves, structure = jax.tree.flatten(value)
    arrays = [np.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    if not leaves or any(not isinstance(a, jax.Array) and a.dtype.kind not in "iufb" for a in arrays):
        raise ModelStructureError(
            f"argument {name!r} is to change, and is {describe_value(value)}: give an array of numbers of the shape "
            "that it will have.",
            reason=Reason.DATA,
        )
    return jax.tree.unflatten(structure, [jnp.asarray(a) for a in arrays])


def check_key(
    rng_key: Any,
    usage: str = "run(jax.random.key(0), x, y)",
    place: str = "comes first, before the arguments of the model",
) -> None:
    """Refuse what is no random key, as the first argument of a model in its place.

    :param str usage: how the function is called that got it.
    :param str place: where a key belongs there.
    :raises TypeError: saying what was given.
    """
    if is_key(rng_key):
        return
    are_keys = jnp.issubdtype(getattr(rng_key, "dtype", object), jax.dtypes.prng_key)
    found = f"{np.size(rng_key)} keys, where one is needed" if are_keys else describe_value(rng_key)
    raise TypeError(f"A random key {place}, as in {usage}; got {found}.")


def is_key(value: Any) -> bool:
    """True for one random key, as ``jax.random.key`` or ``jax.random.PRNGKey`` makes it."""
    dtype = getattr(value, "dtype", np.dtype(object))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.ndim(value) == 0
    return dtype == np.uint32 and np.ndim(value) == 1


def check_call(call: ModelCall) -> None:
    """Refuse arguments that do not fit the signature of a model.

    :raises ModelStructureError: with the signature.
    """
    try:
        signature = inspect.signature(call.model)
    except (TypeError, ValueError):  # callables without one
        return
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        unknown = [name for name in call.kwargs if name not in signature.parameters]
        hint = f" Options of an engine go where it is made, as in EP(model, {unknown[0]}=...)." if unknown else ""
        raise ModelStructureError(
            f"the model cannot be called like this: {error}. It is {_name(call.model)}{_plain(signature)}; it was "
            f"given {describe_arguments(call, is_named=False)}.{hint}",
            reason=Reason.EXECUTION,
        ) from error


def execution_error(error: Exception, last_site: str | None, call: ModelCall) -> ModelStructureError:
    """The error for a model that fails while it runs, to be raised from what it failed with.

    :param error: that the model raised.
    :param str last_site: the last site before it.
    """
    where = f"after site '{last_site}'" if last_site else "before its first site"
    line = line_of_model(error, call.model)
    if islands := _islands_of_car(error):
        name = re.search(r"sample\(\s*(['\"])(.+?)\1", line)
        field = f"site '{name[2]}'{line} is" if name else f"the model has {where}{line}"
        return ModelStructureError(
            f"{field} a CAR field of a graph with islands, which has no density. {islands}",
            reason=Reason.EXECUTION,
            site=name[2] if name else None,
        )
    what = _without_columns(str(error).strip(), call) or type(error).__name__
    if str(error) and _is_raised_by_model(error, call.model):
        return ModelStructureError(f"the model refuses these arguments: {what.rstrip('.')}.", reason=Reason.EXECUTION)
    return ModelStructureError(
        f"the model does not run on these arguments; {where}{line} it fails with: "
        f"{what.rstrip('.')}. It was given {describe_arguments(call)}. {_remedy(what)}",
        reason=Reason.EXECUTION,
    )


def _is_raised_by_model(error: Exception, model: Callable[..., object]) -> bool:
    """True if a model, or a part of the models of this package, has raised an error in words of its own."""
    code, trace = _code(model), error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if code is None or trace is None or not (traceback.extract_tb(trace)[0].line or "").startswith("raise "):
        return False
    frame = trace.tb_frame
    is_of_package = str(frame.f_globals.get("__name__")).startswith("numpyro_ext.models")
    return is_of_package or frame.f_code.co_filename == code.co_filename


def _remedy(what: str) -> str:
    """Advice on a failure, by its words."""
    if re.search(r"(?i)\b(index|indexer|indices)\b.*\binteger", what):
        return (
            "What elements are looked up by must be integers: give group.astype(int). Columns of pandas become floats "
            "where a value is missing; these rows need a number, or have to go."
        )
    if "not a valid JAX type" in what and "pandas" in what:
        return "JAX computes with arrays: write jnp.asarray(table['x']) where the model takes a column of a table."
    return (
        "Check their order and shapes, and data and covariates for NaN, infinity and values outside their range; "
        "scales and variances must be positive."
    )


def _islands_of_car(error: Exception) -> str:
    """Nodes without neighbours, where NumPyro's CAR field has failed for these."""
    trace = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("self"), dist.CAR) and "adj_matrix" in names:
            return islands_of(names["adj_matrix"])
        trace = trace.tb_next
    return ""


def _without_columns(words: str, call: ModelCall) -> str:
    """A message without the columns and tables of pandas that it quotes line by line."""
    for value in jax.tree.leaves((call.args, call.kwargs)):
        if type(value).__module__.split(".")[0] == "pandas":
            columns = [column for _, column in value.items()] if np.ndim(value) == 2 else []
            for part in (value, *columns):
                words = words.replace(repr(part), f"a {type(part).__name__} of shape {np.shape(part)}")
    return re.sub(r"'[^']*\bdtype: \w+'", "a column", words)  # those that were computed of them


def tracing_error(error: Exception, call: ModelCall) -> ModelStructureError:
    """The error for a model that cannot be traced because it needs values, to be raised from what JAX says.

    :param error: that JAX raised.
    """
    says = f"JAX says{line_of_model(error, call.model)}: {str(error).splitlines()[0]}"
    return ModelStructureError(
        "the model needs the values of traced arrays (it indexes a NumPy array with one, branches on one, or takes one "
        "for a length), so NumPyro cannot compile it either. Pass the data as jax arrays where it indexes them "
        "with sites, and as NumPy arrays where it branches on them (what NumPy computes of these has a value); use "
        "jnp.where for branches on sites, and take lengths from shapes of the data or as arguments of the model. "
        f"It was given {describe_arguments(call)}. {says}"
    )


def line_of_model(error: BaseException, model: Callable[..., object]) -> str:
    """Place in the file of a model where an error arose, as `` (line 7: mean = x @ b)``; empty if it is not known."""
    code = _code(model)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if code is not None and f.filename == code.co_filename]
    if not lines:
        return ""
    return f" (line {lines[-1].lineno}{f': {lines[-1].line}' if lines[-1].line else ''})"


def describe_value(value: object) -> str:
    """An argument in a few words: dtype and shape of arrays, numbers as they are, else the type."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        is_foreign = not getattr(value.dtype, "isnative", True)
        hint = f" (in the byte order of another machine: .astype('{value.dtype.kind}8'))" if is_foreign else ""
        return f"{value.dtype}{list(value.shape)}{hint}"
    if isinstance(value, bool | int | float | None):
        return repr(value)
    library = type(value).__module__.split(".")[0]
    if library in ("pandas", "polars"):
        return f"a {type(value).__name__} of {library} (give the model .to_numpy() of it)"
    hint = " (jnp.asarray makes an array of numbers)" if isinstance(value, list) else ""
    return f"a {type(value).__name__}{hint}"


def describe_arguments(call: ModelCall, *, is_named: bool = True) -> str:
    """Describe the arguments of a model, by the names of its parameters where it takes them."""
    named: Mapping[str, Any] = {f"argument {i + 1}": value for i, value in enumerate(call.args)} | call.kwargs
    if is_named:
        try:
            bound = inspect.signature(call.model).bind(*call.args, **call.kwargs)
        except (TypeError, ValueError):
            pass
        else:
            bound.apply_defaults()
            named = bound.arguments
    found = [f"{name} = {describe_value(value)}" for name, value in named.items()]
    return ", ".join(found[:_MOST_ARGUMENTS] + ["..."] * (len(found) > _MOST_ARGUMENTS)) or "no arguments"


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """The signature without its annotations."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


def _name(model: Callable[..., object]) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _source(model: Callable[..., object]) -> Hashable:
    """The code of a function, the handlers and partial applications around it, and what it has from a function around
    it, as far as these are settings, classes or functions."""
    around: list[Any] = []
    while not hasattr(model, "__code__"):
        around.append((type(model), _settings(getattr(model, "keywords", {}).items())))
        inner = model.func if isinstance(model, functools.partial) else getattr(model, "fn", None)
        if inner is None:
            return tuple(around), getattr(type(model).__call__, "__code__", None)
        model = inner
    model = inspect.unwrap(model)
    closure = zip(model.__code__.co_freevars, model.__closure__ or (), strict=False)
    return tuple(around), model.__code__, _settings((name, _contents(cell)) for name, cell in closure)


def _settings(named: Iterable[tuple[object, object]]) -> tuple[object, ...]:
    """Names and values of switches, words, classes and (by their code) functions."""
    found = []
    for name, value in named:
        code = getattr(value, "__code__", None)
        if code is not None or isinstance(value, _SETTING):
            found.append((name, str(value) if code is None else code))
    return tuple(found)


def _contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


def _code(model: Any) -> Any:
    """The code of a function behind handlers and partial applications."""
    while not hasattr(model, "__code__"):
        inner = model.func if isinstance(model, functools.partial) else getattr(model, "fn", None)
        if inner is None:
            return getattr(type(model).__call__, "__code__", None)
        model = inner
    return inspect.unwrap(model).__code__
