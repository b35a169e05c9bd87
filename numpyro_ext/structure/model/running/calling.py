"""The call of a model that is recorded: without values of its free sites, all else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.ad_checkpoint import checkpoint_name
from numpyro import handlers
from numpyro.primitives import Messenger

from ...families import family_of
from ...program.program import make_program
from ..priors import is_gaussian, unwrap
from .execution import ModelCall
from .messages import Message
from .plain_sites import PlainSites, to_real
from .recording import (
    NUMBERS,
    Distribution,
    NotRecorded,
    RecordedSite,
    Recording,
    Tree,
    log_fault,
    message_without_arrays,
    take_apart,
)

_GET_ARGS = dist.Distribution.get_args


def _is_given(msg: Message) -> bool:
    """True if a recording has a value for a site where the model has none."""
    if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
        return False
    return is_gaussian(msg["fn"]) or not msg["fn"].support.is_discrete


class _Seed(Messenger):
    """``numpyro.handlers.seed``, with the same keys, of which those are made that somebody asks for: what splits one is
    compiled by itself, and takes as long as all else that is done for a site."""

    def __init__(self, fn: Any, rng_key: Any) -> None:
        self._key, self._num_passed_over = rng_key, 0
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] not in ("sample", "prng_key", "plate", "control_flow"):
            return
        if msg["kwargs"]["rng_key"] is not None or msg["value"] is not None:
            return
        if _is_given(msg):
            self._num_passed_over += 1
            return
        for _ in range(self._num_passed_over):
            self._key, _ = jax.random.split(self._key)
        self._num_passed_over = 0
        self._key, msg["kwargs"]["rng_key"] = jax.random.split(self._key)


class _Free(Messenger):
    """Give free sites values that the program knows by the names of the sites; which they are does not matter."""

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        super().__init__(None)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "control_flow":
            raise NotRecorded
        if _is_given(msg):
            # Of NumPy, which runs no program for it.
            msg["value"] = np.zeros(msg["fn"].batch_shape + msg["fn"].event_shape, jnp.result_type(float))
            self.defaults[msg["name"]] = None

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] not in ("sample", "param") or msg.get("is_observed"):
            return
        value = to_real(msg["value"]) if msg["type"] == "param" else msg["value"]
        self.defaults.setdefault(msg["name"], value)
        leaves, structure = jax.tree.flatten(value)
        # Each has a name of its own: equal operations on equal values are one value of a program.
        names = (f"value {number} of site {msg['name']}" for number in range(len(leaves)))
        marked = [checkpoint_name(jnp.asarray(leaf), name) for leaf, name in zip(leaves, names, strict=True)]
        msg["value"] = jax.tree.unflatten(structure, marked)


@contextmanager
def _checking_what_is_known() -> Iterator[None]:
    """NumPyro checks no parameters that are traced: what it has computed of them is thrown away, after a program for
    each of the constants on the way, such as the mask of a triangle: a fifth of the first fit of a small process."""

    def known(self: dist.Distribution) -> dict[str, Any]:
        return {name: value for name, value in _GET_ARGS(self).items() if not isinstance(value, jax.core.Tracer)}

    dist.Distribution.get_args = known
    try:
        yield
    finally:  # whatever others in other threads have made of it meanwhile
        dist.Distribution.get_args = _GET_ARGS


def record(call: ModelCall) -> Recording | None:
    """Call a model once, without values of its free sites, and keep the program of what it does.

    :return: the recording; none of a model that needs the values of its sites, that has NumPyro's control flow (whose
        bodies take values from handlers around them), that fails, or some of whose arguments are to change: such a
        model is called whenever something is asked of it, and says itself what is wrong.
    """
    if call.changing:
        return None
    found: dict[str, _Found] = {}

    def run() -> dict[str, Any]:
        free = _Free()
        with free, _checking_what_is_known():
            seeded = _Seed(PlainSites(call.model), call.rng_key)
            sites = handlers.trace(seeded).get_trace(*call.args, **call.kwargs)
        out = {}
        for name, site in sites.items():
            found[name] = _Found(site)
            out[name] = found[name].arrays(site, free.defaults.get(name))
        return out

    try:
        program, atoms = make_program(run)
    except NotRecorded:
        return None
    except Exception:  # whatever a model does without values
        log_fault("The model is not recorded, and is called for all that is asked of it")
        return None
    families = [part.family for part in found.values()]
    return Recording(program, {name: part.recorded(atoms[name]) for name, part in found.items()}, families)


class _Found:
    """Parts of a site that are no arrays, while its arrays are on their way through a trace."""

    def __init__(self, site: Message) -> None:
        self._message = message_without_arrays(site)
        self._name = site["name"]
        self._is_sample = site["type"] == "sample"
        self._trees: dict[str, tuple[Any, list[Any]]] = {}
        self._key: list[Any] = []
        self.family = family_of(unwrap(site["fn"])) if self._is_sample else None

    def arrays(self, site: Mapping[str, object], default: Any) -> dict[str, list[Any]]:
        """All arrays of the site."""
        fn = site["fn"] if self._is_sample else None
        value = site["value"] if self._is_sample or site["type"] in ("param", "deterministic") else None
        out: dict[str, list[Any]] = {"fn": []}
        self._template = take_apart(fn, out["fn"], self._key)
        self._structure = jax.tree.structure(fn)
        scale = site["scale"] if self._is_sample else None
        for part, tree in (("value", value), ("default", default), ("scale", scale)):
            leaves, structure = jax.tree.flatten(tree)
            self._trees[part] = structure, [leaf if isinstance(leaf, NUMBERS) else None for leaf in leaves]
            out[part] = [leaf for leaf in leaves if not isinstance(leaf, NUMBERS)]
        return out

    def recorded(self, atoms: Mapping[str, Sequence[Any]]) -> RecordedSite:
        """The site with the atoms of a program in the place of its arrays."""

        def tree(part: str) -> Tree:
            structure, known = self._trees[part]
            found = iter(atoms[part])
            leaves = tuple(next(found) if leaf is None else leaf for leaf in known)
            return Tree(structure, leaves, tuple(leaf is not None for leaf in known))

        key = None if None in self._key else tuple(self._key)
        fn = Distribution(self._template, tuple(atoms["fn"]), key, self._structure)
        default, is_observed = tree("default"), bool(self._message.get("is_observed"))
        return RecordedSite(
            self._name, self._message["type"], is_observed, fn, tree("value"), default if default.leaves else None,
            tree("scale"), self._message,
        )  # fmt: skip
