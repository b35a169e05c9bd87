"""Measurements in a process of its own, which nothing that ran before it has warmed or filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def in_own_process(
    module: str, *arguments: object, environment: Mapping[str, str | None] | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """Run ``python -m benchmarks.MODULE ARGUMENTS`` and read the last line that it prints, which is JSON.

    :param environment: variables that it has besides those of this process; it lacks those that are ``None``.
    :param timeout: seconds of the clock.
    :raises RuntimeError: if it fails, with what it said.
    :raises subprocess.TimeoutExpired: if it takes longer.
    """
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args[1:]))} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
