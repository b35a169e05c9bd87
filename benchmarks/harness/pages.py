"""Pages of ``benchmarks/results`` with the machine that made them, and the results of the scoreboard."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpyro

from numpyro_ext import keep_compiled_programs

from .processes import main_module

SCOREBOARD = Path(__file__).parents[1] / "results" / "scoreboard.json"
"""All that ``docs/scoreboard.md`` is made from."""
_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "numpyro", "statsmodels", "scikit-image")


def results_folder() -> Path:
    """Folder of the pages."""
    return SCOREBOARD.parent


def run_environment() -> dict[str, str]:
    """Date, machine and versions, each by its name."""
    environment = {
        "date": datetime.date.today().isoformat(),
        "backend": f"{jax.default_backend()} ({jax.devices()[0].device_kind})",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
    }
    return environment | {package: _version(package) for package in _PACKAGES}


def in_words(environment: Mapping[str, str]) -> str:
    """One line of all that :func:`run_environment` found."""
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def write_report(
    name: str,
    lines: Sequence[str],
    script: str | None = None,
    remarks: Path | None = None,
) -> Path:
    """Write a page of today, with the script that made it and the machine.

    :param name: of the page, to which the date is added.
    :param script: with its options; the module that runs by default.
    :param remarks: a file whose text follows the lines, if there is one.
    """
    if remarks is not None and remarks.exists():
        lines = [*lines, "", remarks.read_text().strip()]
    found = run_environment()
    command = f"python -m benchmarks.{script or main_module()}"
    path = results_folder() / f"{found['date']}-{name}.md"
    path.write_text("\n".join([*lines, "", f"Measured by `{command}`: {in_words(found)}.", ""]))
    print(path)
    return path


def complete_scoreboard(
    section: str,
    names: Iterable[str],
    measure: Callable[[str], Mapping[str, Any]],
    needed: Iterable[str] = (),
    path: Path = SCOREBOARD,
) -> None:
    """Measure the entries that the results of the scoreboard lack, and write each as it ends.

    The file is read anew before it is written: another process may write too.

    :param section: of the file, whose environment is renewed.
    :param needed: keys without which an entry is measured again.
    :param path: file of the results.
    """
    numpyro.enable_x64()
    keep_compiled_programs(False)
    for name in names:
        known = json.loads(path.read_text()).get(section, {}).get(name)
        if known is not None and set(needed) <= set(known):
            continue
        entry = measure(name)
        print(name, {key: value for key, value in entry.items() if key not in ("mean", "sd")}, flush=True)
        results = json.loads(path.read_text())
        results.setdefault(section, {})[name] = entry
        results[f"{section}_environment"] = run_environment()
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        jax.clear_caches()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a peer that is not installed has no rows
        return "not installed"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
