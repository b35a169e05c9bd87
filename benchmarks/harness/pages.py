"""Pages of ``benchmarks/results`` with the machine that made them, and the results of the scoreboard."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from .processes import main_module

RESULTS = Path(__file__).parents[1] / "results"
SCOREBOARD = RESULTS / "scoreboard.json"
"""All that ``docs/scoreboard.md`` is made from."""
_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "numpyro", "statsmodels", "scikit-image")


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


def write_report(
    name: str,
    lines: Sequence[str],
    script: str | None = None,
    data: Mapping[str, Any] | None = None,
    remarks: Path | None = None,
) -> Path:
    """Write a page of today, with the script that made it and the machine.

    :param name: of the page, to which the date is added.
    :param script: with its options; the module that runs by default.
    :param data: what is on the page for programs, written beside it as JSON.
    :param remarks: a file whose text follows the lines, if there is one.
    """
    if remarks is not None and remarks.exists():
        lines = [*lines, "", remarks.read_text().strip()]
    found = run_environment()
    command = f"python -m benchmarks.{script or main_module()}"
    environment = ", ".join(f"{key} {value}" for key, value in found.items())
    path = RESULTS / f"{found['date']}-{name}.md"
    path.write_text("\n".join([*lines, "", f"Measured by `{command}`: {environment}.", ""]))
    if data is not None:
        content = json.dumps({"environment": found, "command": command, **data}, indent=1, ensure_ascii=False)
        path.with_suffix(".json").write_text(content + "\n", encoding="utf-8")
    print(path)
    return path


def keep_on_scoreboard(section: str, name: str, entry: Mapping[str, Any]) -> None:
    """Write one entry into the results of the scoreboard, which are read anew: another process may write too.

    :param section: of the file, whose environment is renewed.
    :param name: of the entry in it.
    """
    results = json.loads(SCOREBOARD.read_text())
    results.setdefault(section, {})[name] = entry
    results[f"{section}_environment"] = run_environment()
    SCOREBOARD.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


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
