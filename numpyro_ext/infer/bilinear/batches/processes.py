"""Small records that processes exchange before they compute together, so that none waits for one that has stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .devices import BatchDevices

Record: TypeAlias = dict[str, Any]
"""Numbers, words, lists and dictionaries of these."""

_LENGTH = 1 << 14
_LONGEST_MESSAGE = 2000


class Processes:
    """The processes that a fit runs in.

    All call :meth:`share` equally often. What goes wrong in one of them while it makes its record ends all of them;
    what goes wrong elsewhere, the runtime notices when the others wait.

    :param BatchDevices devices: of the fit.
    """

    def __init__(self, devices: BatchDevices) -> None:
        self._devices = devices
        self.numbers = devices.processes

    @property
    def is_alone(self) -> bool:
        return len(self.numbers) == 1

    @property
    def place(self) -> int:
        """Place of this process among them."""
        return self.numbers.index(self._devices.local[0].process_index)

    def share(self, make: Callable[[], Record], where: str) -> list[Record]:
        """Records of all processes.

        :param make: makes that of this process.
        :param str where: in words, for messages.
        :raises RuntimeError: if it failed in another process.
        """
        if self.is_alone:
            return [make()]
        try:
            own = make()
        except BaseException as error:
            self._exchange({"error": f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]})
            raise
        records = self._exchange(own)
        for number, record in zip(self.numbers, records, strict=True):
            if "error" in record:
                raise RuntimeError(f"Process {number} stopped {where}: {record['error']}")
        return records

    def check_equal(self, records: Sequence[Mapping[str, object]]) -> None:
        """Refuse records that differ.

        :raises ValueError: if they do, in every process.
        """
        for number, record in zip(self.numbers[1:], records[1:], strict=True):
            for name in {**records[0], **record}:
                expected, found = records[0].get(name), record.get(name)
                if not _is_equal(expected, found):
                    raise ValueError(
                        f"{name}: {expected} in process {self.numbers[0]}, {found} in process {number}. All "
                        "processes make the same call, each with batches of its own, which share all else."
                    )

    def _exchange(self, own: Record) -> list[Record]:
        text = json.dumps(own).encode()
        if len(text) > _LENGTH:
            text = json.dumps({"error": f"a record of {len(text)} bytes is longer than {_LENGTH}"}).encode()
        padded = np.zeros(_LENGTH, np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        return [json.loads(row.tobytes().rstrip(b"\0")) for row in self._devices.of_all_processes(padded)]


def _is_equal(x: object, y: object) -> bool:
    """True if numbers are the same but for rounding, and all else is equal."""
    if isinstance(x, float) and isinstance(y, float):
        return bool(np.isclose(x, y, equal_nan=True))
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(_is_equal, x, y))
    return x == y
