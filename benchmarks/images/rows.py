"""Tables of methods on one picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..harness import blocks, cpu_seconds, table
from .peers import Picture
from .pictures import decibels, inside


class Methods:
    """Rows of one problem, best first."""

    def __init__(self, title: str, figure: str, is_error: bool) -> None:
        self.title, self.figure, self.is_error = title, figure, is_error
        self.rows: list[tuple[float, list[str]]] = []

    def add(
        self, name: str, value: float, band: float | None = None, seconds: float | None = None, remark: str = ""
    ) -> None:
        places = 4 if self.is_error else 2
        held = "" if band is None else f"{100 * band:.1f} %"
        time_taken = "" if seconds is None else f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
        self.rows.append((value, [name, f"{value:.{places}f}", held, time_taken, remark]))
        print(self.title, self.rows[-1][1], flush=True)

    def fit(
        self,
        name: str,
        image: np.ndarray,
        engine: Any,
        *data: Any,
        where: Any = slice(None),
        remark: str = "",
        has_bands: bool = True,
        **options: Any,
    ) -> None:
        """Run an engine and add its row, with decibels and bands of the pixels ``where``."""

        def found() -> tuple[float, float | None]:
            engine.run(*data, **options)
            site = engine.posterior["image"]
            return decibels(image, np.asarray(site.mean)), inside(site, image, where) if has_bands else None

        (value, covered), seconds = cpu_seconds(found)
        self.add(name, value, covered, seconds, remark)

    def peers(self, found: dict[str, Picture], image: np.ndarray, value: Any = decibels) -> None:
        for name, peer in found.items():
            remark = f"best of {peer.num_settings}, seconds of one" if peer.num_settings > 1 else ""
            self.add(name, value(image, peer.image), None, peer.seconds, remark)

    def lines(self) -> list[str]:
        rows = sorted(self.rows, key=lambda row: row[0] if self.is_error else -row[0])
        heads = f"method | {self.figure} | 80 % bands hold | CPU-s | "
        return blocks(f"## {self.title}", table(heads, (cells for _, cells in rows)))


def risk_of(site: Any, pooling: str, noise: float = 1.0) -> str:
    """Words on the error of a mean, as the data estimate it; nothing where bands are not made of that."""
    if pooling != "risk":
        return ""
    found = site.risk
    value, estimate, error = (x / noise**2 for x in (found.value, found.estimate, found.standard_error))
    return f"error {value:.3f}, estimate {estimate:.3f} +- {error:.3f}"
