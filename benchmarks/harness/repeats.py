"""Repeats of a comparison on many data sets, kept in a folder so that a run that was ended goes on; and their means."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np


def standardised(x: np.ndarray) -> np.ndarray:
    """Columns with mean zero and standard deviation one, constant ones with mean zero."""
    return np.asarray((x - x.mean(0)) / np.where(x.std(0) > 0.0, x.std(0), 1.0))


def summary(values: np.ndarray) -> dict[str, float]:
    """Mean over repeats and its standard error, which is nan for one."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return {"mean": float(values.mean()), "standard_error": float(error)}


def mean_and_error(values: np.ndarray, sign: str = "", digits: int = 1) -> str:
    """The same in words of a table."""
    found = summary(values)
    return f"{found['mean']:{sign}.{digits}f} ± {found['standard_error']:.{digits}f}"


def keep(path: Path, experiment: Callable[[], Any], end: float = float("inf")) -> None:
    """Write what an experiment finds, unless the file is there already or ``time.monotonic`` is past the end."""
    if path.exists() or time.monotonic() > end:
        return
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fits that did not converge are counted
        path.write_text(json.dumps(experiment()))
    print(path.name, f"{time.process_time() - start:.0f} CPU-s", flush=True)


def kept_draws(folder: Path, name: str) -> list[Any]:
    """Findings of ``NAME-0.json``, ``NAME-1.json`` and so on, as far as they are there."""
    paths = sorted(folder.glob(f"{name}-[0-9]*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [json.loads(path.read_text()) for path in paths]


def read_repeats(folder: Path, name: str) -> dict[str, Any]:
    """What is kept of a data set: ``repeats``, and what its first run added."""
    path = _path(folder, name)
    return json.loads(path.read_text()) if path.exists() else {"repeats": []}


def make_repeats(
    folder: Path,
    num_repeats: Mapping[str, int],
    minutes: float,
    repeat: Callable[[str, Mapping[str, Any], int], dict[str, Any]],
    start: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> None:
    """All data sets in turn, so that they have as many repeats wherever this is ended.

    :param num_repeats: by the name of the data set.
    :param minutes: after which no other repeat is begun.
    :param repeat: makes one of a data set, given its name, what ``start`` made of it, and the number.
    :param start: what is made once for all repeats of a data set.
    """
    end = time.monotonic() + 60.0 * minutes
    for number in range(max(num_repeats.values())):
        for name, most in num_repeats.items():
            found = read_repeats(folder, name)
            if len(found["repeats"]) > number or number >= most:
                continue
            if time.monotonic() > end:
                return
            if not found["repeats"]:
                found = {**start(name), **found}
            found["repeats"].append(repeat(name, found, number))
            _path(folder, name).write_text(json.dumps(found))
            print(name, number, json.dumps(found["repeats"][-1]), flush=True)


def parser_of_work(description: str | None) -> argparse.ArgumentParser:
    """Parser of scripts that keep what they find in a folder, ``work``, so that a run that was ended goes on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("work", type=Path)
    return parser


def parser_of_draws(description: str | None, *, draws: int | None = 25) -> argparse.ArgumentParser:
    """Parser of scripts that keep each draw in a folder, and write a table of what is there.

    :param draws: their number where none is given; ``None`` leaves the argument out.
    """
    parser = parser_of_work(description)
    if draws is not None:
        parser.add_argument("--draws", type=int, default=draws)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true", help="write what is there, and compute nothing")
    return parser


def parser_of_repeats(description: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """Parser of scripts that repeat a comparison on data sets of these names."""
    parser = parser_of_draws(description, draws=None)
    parser.add_argument("--only", nargs="+", default=list(names), choices=list(names), metavar="DATA")
    parser.add_argument("--repeats", type=int, help="in the place of as many as are meant")
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Arguments of a script, with its folder made, in double precision."""
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    return arguments


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.partition(' (')[0].replace(', ', '-').replace(' ', '-')}.json"
