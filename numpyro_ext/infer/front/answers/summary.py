"""The table that ``print_summary`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from ..results import Diagnostics, HyperEstimate, LogEvidence
from .sites import SitePosterior

__all__ = ["format_summary"]

_OF_HYPERPARAMETERS = {
    "none": "",
    "optimum": " (at these hyperparameters)",
    "integrated": " (integrated over hyperparameters)",
}


def format_summary(
    sites: Mapping[str, SitePosterior],
    hyper: Mapping[str, HyperEstimate],
    log_evidence: LogEvidence,
    diagnostics: Diagnostics,
    prob: float,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Lay out marginals, hyperparameters and the end of a run as text, in the manner of NumPyro's summaries.

    :param sites: exact marginals.
    :param hyper: estimates of the hyperparameters.
    :param LogEvidence log_evidence: at these estimates.
    :param Diagnostics diagnostics: of the run.
    :param float prob: probability mass of the central interval.
    :param coords: labels of the places along a dimension, by its name.
    :param dims: names of the dimensions of a site.
    :return: several lines.
    :raises ValueError: if there are not as many dimensions or labels as the site has.
    """

    def labels(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        return _labels(name, shape, _coordinates(name, shape, coords or {}, (dims or {}).get(name)))

    ends = [f"{50 * (1 - prob):.1f}%", f"{50 * (1 + prob):.1f}%"]
    rows: list[list[str]] = []
    for name, site in sites.items():
        lower, upper = site.interval(prob)
        columns = [np.asarray(value) for value in (site.mean, site.sd, lower, upper)]
        rows += [[label, *(_number(column[index]) for column in columns)] for label, index in labels(name, site.shape)]
    lines = _table(["", "mean", "std", *ends], rows)

    rows = []
    for name, estimate in hyper.items():
        value = np.asarray(estimate.value)
        error = None if estimate.standard_error is None else np.asarray(estimate.standard_error)
        absent = "fixed" if estimate.is_fixed else "none"
        rows += [
            [label, _number(value[index]), absent if error is None else _number(error[index])]
            for label, index in labels(name, value.shape)
        ]
    if rows:
        lines += ["", *_table(["hyperparameter", "value", "std.error"], rows)]

    kind = "Log evidence, at least" if log_evidence.is_lower_bound else "Log evidence"
    of_hyper = _OF_HYPERPARAMETERS[log_evidence.hyperparameters]
    ending = "converged" if diagnostics.converged else "NOT converged"
    lines += ["", f"{kind}: {float(log_evidence):.3f}{of_hyper}", f"Field {ending} after {diagnostics.num_steps} steps"]
    if diagnostics.hyper is not None:
        lines[-1] += f"; hyperparameters learned with {diagnostics.hyper.num_evaluations} fits"
    if diagnostics.points:
        lines.append(f"Set to a point, without uncertainty: {', '.join(diagnostics.points)}")
    if diagnostics.edges:
        lines.append(f"At the edge of the support: {', '.join(diagnostics.edges)}")
    return "\n".join(["", *lines, *diagnostics.messages, ""])


def _labels(
    name: str, shape: tuple[int, ...], coordinates: Sequence[Sequence[Any]]
) -> list[tuple[str, tuple[int, ...]]]:
    if not shape:
        return [(name, ())]
    places = zip(product(*coordinates), product(*map(range, shape)), strict=True)
    return [(f"{name}[{','.join(map(str, labels))}]", index) for labels, index in places]


def _coordinates(
    name: str, shape: tuple[int, ...], coords: Mapping[str, Sequence[Any]], dims: Sequence[str] | None
) -> list[Sequence[Any]]:
    """Labels along each axis of a site: numbers where none are known."""
    if dims is not None and len(dims) != len(shape):
        raise ValueError(f"Site {name!r} has the shape {shape}, and dims gives it {len(dims)} dimensions: {dims}.")
    out: list[Sequence[Any]] = [range(size) for size in shape]
    for axis, (dim, size) in enumerate(zip(dims or (), shape, strict=dims is not None)):
        labels = out[axis] = coords.get(dim, out[axis])
        if len(labels) != size:
            raise ValueError(f"coords has {len(labels)} labels of {dim!r}; site {name!r} has {size} places along it.")
    return out


def _number(value: float) -> str:
    size = abs(float(value))
    return f"{float(value):.2f}" if size == 0.0 or 1e-2 <= size < 1e6 else f"{float(value):.2e}"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    width = max([10, *(len(row[0]) for row in [header, *rows])])
    return ["".join([row[0].rjust(width), *(cell.rjust(10) for cell in row[1:])]) for row in [header, *rows]]
