"""Results on disk: one ``.npz`` file of arrays and a description in JSON, so that reading it runs no code."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["FORMAT_VERSION", "read_archive", "write_archive"]

FORMAT_VERSION = 1
_PACKAGE = "numpyro_ext."


def _fields(cls: type) -> tuple[str, ...] | None:
    """Fields of a class of this package that is nothing but its fields (operators, forests), None for other classes."""
    if not cls.__module__.startswith(_PACKAGE) or "<locals>" in cls.__qualname__:
        return None
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return getattr(cls, "_fields", None)


def _make(path: str, fields: dict[str, Any]) -> Any:
    """An object of a class of this package, from its fields; no constructor runs."""
    module, _, name = path.partition(":")
    cls = getattr(importlib.import_module(module), name, None) if module.startswith(_PACKAGE) else None
    if cls is None or _fields(cls) != tuple(fields):
        raise ValueError(f"The file holds an object of {path!r}, which this release does not have in this form.")
    if issubclass(cls, tuple):
        return tuple.__new__(cls, fields.values())
    made = object.__new__(cls)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _encode(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value if not isinstance(value, float) else float(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"Cannot save {where}: a dictionary with keys that are not strings.")
        return {"dict": {key: _encode(item, arrays, f"{where}[{key!r}]") for key, item in value.items()}}
    names = _fields(type(value))
    if names is not None:
        fields = {name: _encode(getattr(value, name), arrays, f"{where}.{name}") for name in names}
        return {"object": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        encoded = _encode(np.asarray(jax.random.key_data(value)), arrays, where)
        return {"key": encoded["array"], "impl": str(jax.random.key_impl(value))}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"Cannot save {where}: an array of dtype {array.dtype}.")
        name = f"array_{len(arrays)}"
        arrays[name] = array
        return {"array": name, "is_jax": isinstance(value, jax.Array)}
    raise TypeError(f"Cannot save {where}: an object of type {type(value).__name__}.")


def _decode(node: dict[str, Any], arrays: Any) -> Any:
    if "value" in node:
        return node["value"]
    if "dict" in node:
        return {key: _decode(item, arrays) for key, item in node["dict"].items()}
    if "list" in node:
        return [_decode(item, arrays) for item in node["list"]]
    if "tuple" in node:
        return tuple(_decode(item, arrays) for item in node["tuple"])
    if "object" in node:
        return _make(node["object"], {name: _decode(item, arrays) for name, item in node["fields"].items()})
    if "key" in node:
        return jax.random.wrap_key_data(jnp.asarray(arrays[node["key"]]), impl=node["impl"])
    array = arrays[node["array"]]
    return jnp.asarray(array) if node["is_jax"] else array


def write_archive(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Write nested dictionaries, lists and tuples of arrays, numbers, strings, random keys and linear operators.

    :param path: of the file; used as it is, whatever its ending.
    :param dict content: what to write.
    :raises TypeError: if something in it is of another kind; the message says where.
    """
    arrays: dict[str, np.ndarray] = {}
    tree = {name: _encode(value, arrays, name) for name, value in content.items()}
    header = json.dumps({"format": "numpyro_ext", "version": FORMAT_VERSION, "content": tree})
    members: dict[str, Any] = {"header": np.array(header), **arrays}
    with open(path, "wb") as file:
        np.savez_compressed(file, **members)


def read_archive(path: str | os.PathLike) -> dict[str, Any]:
    """Read what :func:`write_archive` wrote.

    :param path: of the file.
    :return: the content.
    :raises ValueError: if the file is of another kind or of a newer version.
    """
    with np.load(path, allow_pickle=False) as arrays:
        if "header" not in arrays:
            raise ValueError(f"{os.fspath(path)!r} is not a file written by save().")
        header = json.loads(str(arrays["header"]))
        if header.get("format") != "numpyro_ext" or header.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"{os.fspath(path)!r} has format {header.get('format')!r} version {header.get('version')!r}; "
                f"this release reads version {FORMAT_VERSION}."
            )
        return {name: _decode(node, arrays) for name, node in header["content"].items()}
