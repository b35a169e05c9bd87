"""Measurements in a process of its own, which nothing that ran before it has warmed or filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpyro_ext.compilation.disk_cache import VARIABLE

COLD: Mapping[str, str | None] = {VARIABLE: "off", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of processes that compile all of their programs, with one thread for linear algebra."""


def in_own_process(
    module: str, *arguments: object, environment: Mapping[str, str | None] | None = None, timeout: float | None = None
) -> Any:
    """Run ``python -m benchmarks.MODULE ARGUMENTS`` and read the last line that it prints, which is JSON.

    :param environment: variables that it has besides those of this process; it lacks those that are ``None``.
    :param timeout: seconds of the clock.
    :raises RuntimeError: if it fails, with what it said.
    :raises subprocess.TimeoutExpired: if it takes longer.
    """
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args[1:]))} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main_module() -> str:
    """Name below ``benchmarks`` of the module that ``python -m`` runs."""
    spec = sys.modules["__main__"].__spec__
    return "" if spec is None else spec.name.removeprefix("benchmarks.").removesuffix(".__main__")
