"""A model that is called once: a program of its free sites, of which all is made that a reading asks."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ....compilation.content import dtype_name
from ....compilation.pytree import PyTree
from ....compilation.store import Found, shared
from ...errors import ModelStructureError
from ...program.captured import Fingerprint
from ...program.program import Program, make_program
from ...program.run_compiled import as_function, run_traced
from .messages import Message
from .start_values import initial_value

_KNOWN = ("numpyro.", "numpyro_ext.")
NUMBERS = bool | int | complex | np.bool_ | np.integer
"""Types that stay in a recording as they were written; floating numbers may turn out to change."""

Sites = Callable[[Callable[["RecordedSite", Any, Any], Any]], dict[str, dict[str, Any]]]
"""The sites of a model by name, as a trace of NumPyro's has them, given what says the values of the free ones: a
function of the site, its distribution and its default."""


def message_without_arrays(site: Mapping[str, Any]) -> dict[str, Any]:
    """Message of a site in NumPyro's trace, without its arrays."""
    names = ("type", "kwargs", "args", "cond_indep_stack", "is_observed")
    said = {n: site[n] for n in names if n in site}
    return said | {"event_dims": tuple(site.get("infer", {}).get("event_dims", ()))}


class NotRecorded(Exception):
    """A model of which no recording is made."""


def log_fault(what: str) -> None:
    """Log the error at hand for who debugs: answers stay what they are, and take longer."""
    logging.getLogger("numpyro_ext").debug(what, exc_info=True)


class Tree(NamedTuple):
    """A tree of numbers, which are as they were written, and of values of a program (atoms)."""

    structure: Any
    leaves: tuple[Any, ...]
    is_number: tuple[bool, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        numbers = [leaf for leaf, is_number in zip(self.leaves, self.is_number, strict=True) if is_number]
        return self.structure, self.is_number, tuple((type(n).__name__, np.asarray(n).tobytes()) for n in numbers)

    def at(self, program: Program, env: dict[int, Any]) -> Any:
        """The tree at values of a program, to which those are added that it takes to compute it."""
        atoms = [leaf for leaf, is_number in zip(self.leaves, self.is_number, strict=True) if not is_number]
        found = map(jnp.asarray, program.extend(atoms, env))
        pairs = zip(self.leaves, self.is_number, strict=True)
        return jax.tree.unflatten(self.structure, [leaf if is_number else next(found) for leaf, is_number in pairs])


class Distribution(NamedTuple):
    """A distribution with values of a program in the place of its arrays, whether JAX takes these for its leaves or it
    keeps them beside them, as the covariance that was given."""

    template: Any
    atoms: tuple[Any, ...]
    key: tuple[Any, ...] | None
    """Equal where the same is computed of these arrays; none where that is not known."""
    structure: Any
    """Tree structure, as JAX has it."""

    def at(self, program: Program, env: dict[int, Any]) -> Any:
        """Distribution at given values; see :meth:`Tree.at`."""
        return _put_together(self.template, map(jnp.asarray, program.extend(self.atoms, env)))


class _Array:
    """Stands for an array."""


class _Object(NamedTuple):
    type: Any
    attributes: dict[str, Any]


_ARRAY = _Array()


def take_apart(part: Any, arrays: list[object], key: list[object]) -> Any:
    """A part of a distribution without its arrays, which are added to those.

    :param key: to which is added what it is, ``None`` where it may compute of its arrays whatever.
    """
    if isinstance(part, float | np.floating | jax.Array | np.ndarray):
        arrays.append(part)
        key.append("array")
        return _ARRAY
    if part is None or isinstance(part, NUMBERS | str):
        key.append((type(part).__name__, part if isinstance(part, str | None) else np.asarray(part).tobytes()))
        return part
    if type(part) in (tuple, list):
        key.append((type(part).__name__, len(part)))
        return type(part)([take_apart(item, arrays, key) for item in part])
    if type(part) in (dict, OrderedDict):
        key.append((type(part).__name__, tuple(part)))
        return type(part)((name, take_apart(item, arrays, key)) for name, item in part.items())
    is_ours = isinstance(part, dist.Distribution | dist.constraints.Constraint | dist.transforms.Transform)
    is_known = is_ours and type(part).__module__.startswith(_KNOWN) and hasattr(part, "__dict__")
    key.append(f"{type(part).__module__}.{type(part).__qualname__}" if is_known else None)
    if not is_ours or not hasattr(part, "__dict__"):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(part)):
            raise NotRecorded  # such as a forest: a reading asks for the values of what it is made of
        return part
    if isinstance(part, dist.constraints.Constraint):
        # NumPyro has one object of most kinds, which is told by its identity: it is not taken apart for its numbers.
        leaves = jax.tree.leaves(part)
        if not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
            key.append((str(jax.tree.structure(part)), tuple(np.asarray(leaf).tobytes() for leaf in leaves)))
            return part
    before, attributes = len(arrays), {}
    for name, value in vars(part).items():
        key.append(name)
        # A transform knows its inverse by a weak reference, which it makes again.
        attributes[name] = take_apart(None if name == "_inv" else value, arrays, key)
    if len(arrays) == before:
        return part
    return _Object(type(part), attributes)


def _put_together(template: Any, arrays: Iterator[Any]) -> object:
    if template is _ARRAY:
        return next(arrays)
    if type(template) in (tuple, list):
        return type(template)([_put_together(item, arrays) for item in template])
    if type(template) in (dict, OrderedDict):
        return type(template)((name, _put_together(item, arrays)) for name, item in template.items())
    if not isinstance(template, _Object):
        return template
    out = object.__new__(template.type)  # a class may have one instance, which is the model's
    vars(out).update({name: _put_together(value, arrays) for name, value in template.attributes.items()})
    return out


class RecordedSite(NamedTuple):
    """Record of one site; its arrays are values of the program."""

    name: str
    type: str
    is_observed: bool
    fn: Distribution
    value: Tree
    default: Tree | None
    """The value that the model has for a free site: of a ``param``, of a discrete site, of one with a given value."""
    scale: Tree
    message: Message
    """Other entries of NumPyro's message: arguments and plates."""

    @property
    def is_free(self) -> bool:
        """True if the site is latent or a ``param``."""
        return self.type == "param" or (self.type == "sample" and not self.is_observed)


class Recording:
    """A model as it was called once.

    :ivar sites: in the order of the model.
    :ivar data: the arrays that it closed over, its arguments among them.
    :ivar key: of the operations; ``None`` where distributions are not NumPyro's or ours, which may compute anything.
    """

    def __init__(self, program: Program, sites: Mapping[str, RecordedSite], families: Sequence[object]):
        self.sites = dict(sites)
        self.data = program.data
        self._literals = frozenset(p for p, number in enumerate(program.constants) if number in program.literals)
        self._program = program.with_data(())
        self._families = tuple(families)
        self.key: Fingerprint | None = None
        self._written: Fingerprint | None = None
        if all(site.fn.key is not None for site in sites.values()):
            own = tuple(
                (s.name, s.type, s.is_observed, s.fn.key, s.value.key, s.default and s.default.key, s.scale.key)
                for s in sites.values()
            )
            config = str(jnp.result_type(float)), str(jax.config.values["jax_default_matmul_precision"])
            # What is derived keeps the families, so that no other gets their identities.
            key = Fingerprint((program.fingerprint(), own, tuple(map(id, families)), config))
            if _has_hash(key):
                # Keys that there were before, if they are equal: no part of them is looked at again.
                self.key, self._written = shared(_first, key), shared(_first, Fingerprint((program.as_written, own)))

    @property
    def program(self) -> Program:
        """The operations, without :attr:`data`."""
        return self._program

    def num_observations(self, name: str) -> int:
        """Numbers that an observed site has."""
        value = self.sites[name].value
        leaves = zip(value.leaves, value.is_number, strict=True)
        return sum(math.prod(self._program.shape(leaf)) for leaf, is_number in leaves if not is_number)

    def at_central_values(self, given: Mapping[str, object]) -> dict[str, dict[str, Any]]:
        """The sites with their arrays at the values that are given, and at central ones of others.

        :raises ValueError: what the distributions raise at these.
        """

        def run(given: dict[str, Any], recorded: Sites) -> dict[str, Any]:
            def value(site: RecordedSite, fn: object, default: object) -> Any:
                message = {"name": site.name, "type": site.type, "is_observed": False, "fn": fn, "args": (default,)}
                found = initial_value(given, message | {"value": None if site.default is None else default})
                return default if found is None else found

            sites = recorded(value).items()
            return {n: {"fn": jax.tree.leaves(s["fn"]), "value": s["value"], "scale": s["scale"]} for n, s in sites}

        arrays = run_traced(as_function(*self.derive("central values", run, dict(given))), dict(given))
        return {n: {**s.message, **arrays[n], "structure": s.fn.structure} for n, s in self.sites.items()}

    def derive(self, key: Any, function: Callable[..., Any], *args: Any, num_unknowns: int = 0) -> tuple[Program, Any]:
        """``make_program(function, *args, sites)``, where ``sites`` are the :data:`Sites` of the model.

        Recordings of the same operations on the same numbers have the same programs, on data of their own: these are
        made once. Where distributions are not NumPyro's or ours, what they compute may depend on anything, and programs
        are made anew.

        :param key: equal keys mean equal functions.
        :param function: pure in ``args`` and ``sites``.
        :param args: arrays or their shapes.
        :param num_unknowns: as for :func:`~numpyro_ext.structure.program.program.make_program`.
        """

        def whole(*inputs: PyTree) -> PyTree:
            *others, data = inputs
            return function(*others, partial(self._at, data))

        def make() -> _Derived:
            program, output = make_program(whole, *args, self.data, num_unknowns=num_unknowns)
            inputs = program.inputs[len(program.inputs) - len(self.data) :]
            program = program.with_inputs_as_data(inputs, self.data)
            places = {number: place for place, number in enumerate(inputs)}
            origins = tuple(places.get(number) for number in program.constants)
            own = tuple(None if o is not None else d for o, d in zip(origins, program.data, strict=True))
            pairs = zip(program.constants, origins, strict=True)
            literals = program.literals | {n for n, o in pairs if o is not None and o in self._literals}
            return _Derived(program.replace(data=(), literals=literals), output, origins, own, self._families)

        if self.key is None:
            found = make()
        else:
            leaves, structure = jax.tree.flatten(args)
            avals = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf) for leaf in leaves]
            shapes = tuple((a.shape, dtype_name(a.dtype), getattr(a, "weak_type", False)) for a in avals)
            before = shared(DerivedProgram, self.key, key, structure, shapes, num_unknowns)
            before.value = found = before.value or make()
        data = [own if o is None else self.data[o] for o, own in zip(found.origins, found.own, strict=True)]
        program = found.program.with_data(data)
        if self._written is not None:
            program = program.replace(as_written=(key, self._written))
        return program, found.output

    def _at(
        self, data: Sequence[object], choose: Callable[[RecordedSite, object, object], object]
    ) -> dict[str, dict[str, Any]]:
        env = dict(zip(self._program.constants, data, strict=True))
        out = {}
        for name, site in self.sites.items():
            fn = site.fn.at(self._program, env)
            default = None if site.default is None else site.default.at(self._program, env)
            if site.is_free:
                value = choose(site, fn, default)
                env.update(zip(site.value.leaves, jax.tree.leaves(value), strict=True))
            else:
                value = site.value.at(self._program, env)
            scale = site.scale.at(self._program, env)
            out[name] = {**site.message, "name": name, "type": site.type, "is_observed": site.is_observed} | {
                "fn": fn, "value": value, "scale": scale
            }  # fmt: skip
        return out


def _first(key: Fingerprint) -> Fingerprint:
    return key


def _has_hash(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def make_or_derive(
    recording: Recording | None, key: object, function: Callable[..., object], *args: object, num_unknowns: int = 0
) -> tuple[Program, Any]:
    """:meth:`Recording.derive`, and ``make_program`` where there is no recording, or one that does not do.

    :param function: calls the model itself where it is given no sites.
    :raises Exception: what it raises then.
    """
    if recording is not None:
        try:
            return recording.derive(key, function, *args, num_unknowns=num_unknowns)
        except ModelStructureError:
            raise
        except Exception:  # the model itself says what is wrong, if anything is
            log_fault("What was asked of a recording is asked of the model")
    return make_program(function, *args, num_unknowns=num_unknowns)


class DerivedProgram(Found["_Derived"]):
    """The program that a function of a recording's sites was before."""


class _Derived(NamedTuple):
    program: Program
    output: Any
    origins: tuple[int | None, ...]
    """Number of the recording's array that each constant of the program is, if it is one."""
    own: tuple[Any, ...]
    families: tuple[Any, ...]
