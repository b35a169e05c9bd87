"""Results on disk: one ``.npz`` file of arrays and a description in JSON, so that reading it runs no code."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....linalg.saved_names import class_of, field_names, name_of
from ....structure.model.running.pandas_arguments import is_pandas
from .tables import pandas_from_content, pandas_to_content

FORMAT_VERSION = 3
"""Version 2 held no tables of pandas and no arrays of words or dates, version 1 the modules of classes."""


def _make(name: str, fields: Mapping[str, object]) -> object:
    """An object from its fields; no constructor runs."""
    cls = class_of(name)
    if cls is None or field_names(cls) != tuple(fields):
        what = "no class" if cls is None else "another class"
        raise ValueError(
            f"The file holds an object of the class {name!r}, and there is {what} of that name. If the class is "
            "your own, import it before loading; the decorator numpyro_ext.linalg.saved_as gives it its name."
        )
    if issubclass(cls, tuple):
        return tuple.__new__(cls, fields.values())
    made = object.__new__(cls)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _name_in_first_version(path: str) -> str:
    """The name of a class in files of version 1, which held its module: all were classes of this package."""
    return path.rpartition(":")[2].lstrip("_")


def _encode(value: object, arrays: dict[str, np.ndarray], where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value if not isinstance(value, float) else float(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"Cannot save {where}: a dictionary with keys that are not strings.")
        return {"dict": {key: _encode(item, arrays, f"{where}[{key!r}]") for key, item in value.items()}}
    names, class_name = field_names(type(value)), name_of(type(value))
    if names is not None and class_name is not None:
        fields = {name: _encode(getattr(value, name), arrays, f"{where}.{name}") for name in names}
        return {"object": class_name, "fields": fields}
    if names is not None:
        raise TypeError(
            f"Cannot save {where}: an object of type {type(value).__name__}, which has no name in files. If the class "
            "is your own, give it one with the decorator numpyro_ext.linalg.saved_as."
        )
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        encoded = _encode(np.asarray(jax.random.key_data(value)), arrays, where)
        return {"key": encoded["array"], "impl": str(jax.random.key_impl(value))}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufcUmM":
            hint = " Give words as .astype(str), and numbers as such." if array.dtype == object else ""
            raise TypeError(f"Cannot save {where}: an array of dtype {array.dtype}.{hint}")
        name = f"array_{len(arrays)}"
        arrays[name] = array
        return {"array": name, "is_jax": isinstance(value, jax.Array)}
    if is_pandas(value):
        return {"pandas": _encode(pandas_to_content(value, where), arrays, where)}
    hint = " Files hold arrays: run the engine on .to_numpy() of it." if hasattr(value, "to_numpy") else ""
    raise TypeError(f"Cannot save {where}: an object of type {type(value).__name__}.{hint}")


def _decode(node: dict[str, Any], arrays: dict[str, np.ndarray], class_name: Callable[[str], str]) -> object:
    decode = partial(_decode, arrays=arrays, class_name=class_name)
    if "value" in node:
        return node["value"]
    if "dict" in node:
        return {key: decode(item) for key, item in node["dict"].items()}
    if "list" in node:
        return [decode(item) for item in node["list"]]
    if "tuple" in node:
        return tuple(decode(item) for item in node["tuple"])
    if "object" in node:
        return _make(class_name(node["object"]), {name: decode(item) for name, item in node["fields"].items()})
    if "key" in node:
        return jax.random.wrap_key_data(jnp.asarray(arrays[node["key"]]), impl=node["impl"])
    if "pandas" in node:
        return pandas_from_content({key: decode(item) for key, item in node["pandas"]["dict"].items()})
    array = arrays[node["array"]]
    return jnp.asarray(array) if node["is_jax"] else array


def write_archive(path: str | os.PathLike[str], content: Mapping[str, object]) -> None:
    """Write nested dictionaries, lists and tuples of arrays, numbers, words, random keys, pandas tables and objects.

    Objects are those of classes with a name in files (:func:`~numpyro_ext.linalg.saved_as`), as linear operators have.

    :param path: of the file; used as it is, whatever its ending.
    :param dict content: what to write.
    :raises TypeError: if something in it is of another kind; the message says where.
    """
    arrays: dict[str, np.ndarray] = {}
    tree = {name: _encode(value, arrays, name) for name, value in content.items()}
    header = json.dumps({"format": "numpyro_ext", "version": FORMAT_VERSION, "content": tree})
    members: dict[str, Any] = {"header": np.array(header), **arrays}
    # written beside the file and moved there, so that one is there at every moment, whole
    unfinished = Path(path).with_name(Path(path).name + ".unfinished")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, **members)
    os.replace(unfinished, path)


def read_archive(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`write_archive` wrote.

    :param path: of the file.
    :return: the content.
    :raises ValueError: if the file is damaged, of another kind or of a newer version, or holds an object of a class
        that has no name in files.
    """
    where = repr(os.fspath(path))
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as members:
                arrays = {name: members[name] for name in members.files}
        except (ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{where} is damaged, or no file of this package ({str(error).splitlines()[0]}). Take a copy of it, or "
                "run again; a damaged checkpoint has to be removed before the run can start anew."
            ) from error
    if "header" not in arrays:
        raise ValueError(f"{where} is not a file written by save().")
    header = json.loads(str(arrays["header"]))
    version = header.get("version")
    if header.get("format") != "numpyro_ext" or version not in range(1, FORMAT_VERSION + 1):
        raise ValueError(
            f"{where} has format {header.get('format')!r} version {version!r}; "
            f"this release reads versions 1 to {FORMAT_VERSION}."
        )
    class_name = _name_in_first_version if version == 1 else str
    return {name: _decode(node, arrays, class_name) for name, node in header["content"].items()}
