"""The table of results that a run of the benchmarks leaves in ``benchmarks/results``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .compilation import Compiled
from .pages import in_words, run_environment


@dataclasses.dataclass(frozen=True)
class Target:
    """Bound that a figure should keep; a benchmark says whether it is, and never fails for it."""

    limit: float
    is_upper: bool

    def is_met_by(self, figure: float) -> bool:
        return figure <= self.limit if self.is_upper else figure >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.is_upper else '≥'} {self.limit:g}"


def at_most(limit: float) -> Target:
    """Met up to ``limit``."""
    return Target(limit, True)


def at_least(limit: float) -> Target:
    """Met from ``limit`` on."""
    return Target(limit, False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. Seconds and bytes are those of one call, compilation apart unless the item says otherwise."""

    item: str
    dtype: str
    seconds: float | None
    peer: str
    peer_seconds: float | None
    figure: str
    """Name of ``value``."""
    value: float
    target: Target | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    peer_peak_bytes: int | None = None
    remark: str = ""
    is_lower_limit: bool = False
    """True if the figure is ``value`` or more: the peer was stopped before it was done."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Names that make it another row than others: the same item may be compared with several peers."""
        return self.item, self.dtype, self.peer, self.figure

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        is_met = self.target.is_met_by(self.value)
        # What is known to be large may be larger still.
        if self.is_lower_limit and is_met == self.target.is_upper:
            return "not decided"
        return "met" if is_met else "missed"

    @property
    def figure_and_value(self) -> str:
        """In words: ``speed-up 12`` or ``speed-up ≥ 12``."""
        return f"{self.figure} {'≥ ' if self.is_lower_limit else ''}{self.value:.3g}"


class ResultsTable:
    """Collects rows and writes them as Markdown, for people, and JSON."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Append a row, and print it for whoever watches.

        :raises ValueError: if this run has such a row: one of the two would be lost.
        """
        if row.key in {other.key for other in self._rows}:
            raise ValueError(f"There is a row {row.key} already: give items, peers or figures different names.")
        self._rows.append(row)
        target = f" (target {row.target}: {row.verdict})" if row.target else ""
        against = f", against {row.peer}" if row.peer else ""
        print(f"\n{row.item}, {row.dtype}{against}: {row.figure_and_value}{target} {row.remark}")

    def record(
        self,
        item: str,
        times: tuple[Any, Any] = (None, None),
        programs: Sequence[Compiled] = (),
        **fields: Any,
    ) -> None:
        """Append a row of double precision, whose figure is a ratio of its seconds to the peer's if no other is given.

        A ``figure`` that is called a speed-up is the inverse of this ratio, and one that is called seconds is them.

        :param times: seconds, and those of the peer.
        :param programs: compiled function and, if there is one, that of the peer, whose memory stands in the row.
        """
        fields = {"figure": "time ratio", "dtype": "float64", **fields}
        fields["seconds"], fields["peer_seconds"] = times
        for place, program in zip(("peak_bytes", "peer_peak_bytes"), programs, strict=False):
            fields[place] = program.peak_bytes
        if programs:
            fields["compile_seconds"] = programs[0].seconds
        if "value" not in fields and fields["figure"] in ("seconds", "CPU-seconds"):
            fields["value"] = times[0]
        elif "value" not in fields:
            ratio = times[0] / times[1]
            fields["value"] = 1.0 / ratio if fields["figure"] == "speed-up" else ratio
        self.add(Row(item, **fields))

    def write(self, folder: Path) -> None:
        """Write ``<date>-<backend>.md``, and ``.json`` beside it for later runs; nothing if there is no row.

        Rows that the same environment wrote on the same day and that were not measured again stay. Another machine, or
        other versions, write ``<date>-<backend>-2`` and so on.
        """
        if not self._rows:
            return
        folder.mkdir(parents=True, exist_ok=True)
        environment = run_environment()
        path, kept = _choose_file(folder / f"{environment['date']}-{jax.default_backend()}", environment)
        kept.update({row.key: row for row in self._rows})
        path.with_suffix(".md").write_text(_to_markdown(list(kept.values()), environment), encoding="utf-8")
        rows = [
            {**dataclasses.asdict(row), "target": str(row.target or ""), "verdict": row.verdict}
            for row in kept.values()
        ]
        content = json.dumps({"environment": environment, "rows": rows}, indent=1, ensure_ascii=False)
        path.with_suffix(".json").write_text(content + "\n", encoding="utf-8")


def _choose_file(first: Path, environment: dict[str, str]) -> tuple[Path, dict[tuple[str, str, str, str], Row]]:
    """Path that this environment writes to, without suffix, and the rows it wrote there before, by their keys."""
    path, number = first, 1
    while True:
        if path.with_suffix(".json").exists():
            content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if content["environment"] == environment:
                return path, _rows(content)
        elif not path.with_suffix(".md").exists():  # JSON stays on the machine that wrote it
            return path, {}
        number += 1
        path = first.with_name(f"{first.name}-{number}")


def _rows(content: dict[str, Any]) -> dict[tuple[str, str, str, str], Row]:
    rows = []
    for row in content["rows"]:
        del row["verdict"]
        target = row.pop("target")
        if target:
            sign, limit = target.split()
            row["target"] = Target(float(limit), sign == "≤")
        rows.append(Row(**row))
    return {row.key: row for row in rows}


def _to_markdown(rows: list[Row], environment: dict[str, str]) -> str:
    head = ["item", "dtype", "time", "peer", "its time", "figure", "target", "", "compiling", "memory", "peer's memory"]
    cells = [head, ["---"] * len(head)]
    remarks: list[str] = []
    for row in rows:
        mark = ""
        if row.remark:
            remarks.append(f"{len(remarks) + 1}. {row.remark}")
            mark = f" [{len(remarks)}]"
        cells.append(
            [
                row.item + mark,
                row.dtype,
                _time(row.seconds),
                row.peer,
                _time(row.peer_seconds),
                row.figure_and_value,
                str(row.target or ""),
                row.verdict,
                _time(row.compile_seconds),
                _size(row.peak_bytes),
                _size(row.peer_peak_bytes),
            ]
        )
    lines = [f"# Benchmarks, {environment['date']}", ""]
    lines += [in_words({name: value for name, value in environment.items() if name != "date"}) + ".", ""]
    lines += [
        "Times are the shortest of the rounds, taken in turns with the peer's. Memory is that of arguments, results",
        "and temporaries of the compiled function; for whole fits it is what the process grew by after its imports.",
        "",
    ]
    lines += ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([*lines, "", *remarks]).rstrip() + "\n"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _size(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
