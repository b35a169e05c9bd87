"""A study: experiments on numbered draws, each kept as it ends, and a page of what is there."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpyro

from .pages import write_report
from .processes import in_own_process, main_module

Experiment = Callable[[int], Any]


class Study:
    """Experiments by name, functions of the number of a draw that return what JSON can hold.

    ``python -m benchmarks.MODULE [WORK]`` runs what the folder ``WORK`` does not have yet, all experiments of a draw
    before the next draw; without a folder it makes one and says where. Options are those of :attr:`parser`, to which a
    study adds its own before :meth:`run`.

    :param doc: docstring of the module, shown by ``--help``.
    :param experiments: by names that make names of files.
    :param draws: numbers of draws, one for all or by name.
    :param environment: variables of a process of its own for each draw; ``None`` runs all in this process.
    """

    def __init__(
        self,
        doc: str | None,
        experiments: Mapping[str, Experiment],
        *,
        draws: int | Mapping[str, int] = 1,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        self.experiments, self.environment = experiments, environment
        self.draws = draws if isinstance(draws, Mapping) else dict.fromkeys(experiments, draws)
        self.parser = parser = argparse.ArgumentParser(description=doc)
        parser.add_argument("work", type=Path, nargs="?", help="folder that keeps each draw, so that a run can go on")
        parser.add_argument("--only", nargs="+", choices=list(experiments), metavar="NAME", help=", ".join(experiments))
        parser.add_argument("--draws", type=int, help="of each experiment, in the place of as many as are meant")
        parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no other draw is begun")
        parser.add_argument("--write", action="store_true", help="write what is there, and compute nothing")
        parser.add_argument("--loaded", action="store_true", help="other processes run beside it: the page says so")
        parser.add_argument("--one", nargs=2, metavar=("NAME", "DRAW"), help=argparse.SUPPRESS)
        self.options = argparse.Namespace()
        self.work = Path()

    def run(self, argv: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Findings of each experiment by draws: those that are kept, and those of this run."""
        self.options = options = self.parser.parse_args(argv)
        numpyro.enable_x64()
        if options.one:
            print(json.dumps(self._measured(options.one[0], int(options.one[1]))))
            sys.exit()
        self.work = options.work or Path(tempfile.mkdtemp())
        self.work.mkdir(parents=True, exist_ok=True)
        print(f"Draws are kept in {self.work}.", flush=True)
        if not options.write:
            names = options.only or list(self.experiments)
            draws = {name: self.draws[name] if options.draws is None else options.draws for name in names}
            self._run(draws, time.monotonic() + 60.0 * options.minutes)
        return {name: kept_draws(self.work, name) for name in self.experiments}

    def write(self, page: str, lines: Sequence[str], remarks: str = "remarks.md") -> None:
        """Write a page, with the text of a file of the folder after its lines, if there is such a file."""
        page += "-loaded" if self.options.loaded else ""
        write_report(page, lines, remarks=self.work / remarks)

    def _run(self, draws: Mapping[str, int], end: float) -> None:
        for draw in range(max(draws.values())):
            for name, number in draws.items():
                path = self.work / f"{name}-{draw}.json"
                if path.exists() or draw >= number or time.monotonic() > end:
                    continue
                start = time.monotonic()
                found = self._measured(name, draw) if self.environment is None else self._elsewhere(name, draw)
                path.write_text(json.dumps(found))
                print(f"{path.stem}: {time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)

    def _elsewhere(self, name: str, draw: int) -> Any:
        return in_own_process(main_module(), "--one", name, draw, environment=self.environment)

    def _measured(self, name: str, draw: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # fits that did not converge are counted
            return self.experiments[name](draw)


def kept_draws(folder: Path, name: str) -> list[Any]:
    """Findings of ``NAME-0.json``, ``NAME-1.json`` and so on, as far as they are there."""
    paths = sorted(folder.glob(f"{name}-[0-9]*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [json.loads(path.read_text()) for path in paths]
