"""Texts that engines and their answers show: the run, its end, and the numbers that are at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import numpy as np

from ...display import MOST_ROWS, Shown, Table, counted, number

_LARGEST_SHOWN = 1000
"""Elements of a site whose moments are computed only to be shown."""
_OF_HYPERPARAMETERS = {
    "none": "",
    "optimum": " at the best hyperparameters",
    "integrated": ", hyperparameters integrated out",
}


def evidence(value: Any) -> str:
    """A log evidence in words: ``"at least -12.30 at the best hyperparameters"``.

    :param LogEvidence value: of a run.
    """
    sign = "at least " if value.is_lower_bound else ""
    error = "" if value.standard_error is None else f" +- {value.standard_error:.2g}"
    over = f", hyperparameters integrated over {value.method}" if value.method else ""
    return f"{sign}{float(value):.2f}{error}{over or _OF_HYPERPARAMETERS[value.hyperparameters]}{flatness(value)}"


def flatness(value: Any) -> str:
    """The words of an arbitrary constant; empty where all priors are proper.

    :param LogEvidence value: of a run.
    """
    sites = ", ".join(map(repr, value.flat_sites))
    return f", up to a constant (flat prior of {sites})" if sites else ""


def kind_of_evidence(value: Any) -> str:
    """The words without the number; ``"approximate"`` where there are none.

    :param LogEvidence value: of a run.
    """
    sign = "at least" if value.is_lower_bound else ""
    return f"{sign}{_OF_HYPERPARAMETERS[value.hyperparameters]}{flatness(value)}".strip(" ,") or "approximate"


def ending(diagnostics: Any) -> list[str]:
    """Lines about the end of a run, the sites that it set to a point, and those at the edge of their support.

    :param Diagnostics diagnostics: of the run.
    """
    end = "converged" if diagnostics.converged else "NOT converged"
    lines = [f"{end} after {counted(diagnostics.num_steps, 'step')}"]
    if diagnostics.hyper is not None:
        lines[0] += f", {counted(diagnostics.hyper.num_evaluations, 'fit')} for hyperparameters"
    if diagnostics.num_skipped:
        lines.append(f"{counted(diagnostics.num_skipped, 'factor')} refused in the last step")
    if diagnostics.points:
        lines.append(f"set to a point, without uncertainty: {', '.join(diagnostics.points)}")
    if diagnostics.edges:
        lines.append(f"at the edge of the support: {', '.join(diagnostics.edges)}")
    return lines + list(diagnostics.messages)


class ShownEngine(Shown):
    """An engine with its model and the outcome of its run."""

    model: Any
    _run: Any
    _failure: str | None

    def _shown(self) -> list[str | Table]:
        model = getattr(self.model, "func", self.model)  # of a functools.partial
        name = f"{type(self).__name__}({getattr(model, '__name__', type(model).__name__)})"
        run = self._run
        if run is None:
            return [f"{name}: {'not run yet' if self._failure is None else 'the last run failed'}"]
        diagnostics = run.diagnostics if run.is_at_hand else run.fit.diagnostics
        end, *lines = ending(diagnostics)
        out: list[str | Table] = [f"{name}: {end}"]
        if run.is_at_hand:
            out.append(f"log evidence: {evidence(run.log_evidence)}")
        common = run.judged.common_sites
        learned = tuple(n for n in run.judged.hyper if n not in common)
        for role, names in (("field", (*run.judged.field, *common)), ("hyperparameters", learned)):
            if names:
                out.append(f"{role}: {', '.join(f'{n} {run.labelled_shapes[n]}' for n in names)}")
        return out + list(lines)


class ShownSite(Shown):
    """The posterior of one site, with the mean and standard deviation of its first elements."""

    name: str
    coordinates: Sequence[Sequence[Any]] | None = None
    """Labels of the places along each axis; numbers by default."""
    note: str = ""
    """Remark beside the name, for a reader of the numbers."""

    def _shown(self) -> list[str | Table]:
        site: Any = self
        shape = tuple(site.shape)
        title, size = f"{type(self).__name__}({self.name!r}, shape={shape}){self.note}", math.prod(shape)
        if not 0 < size <= _LARGEST_SHOWN:
            return [title]
        try:
            moments = [np.asarray(value) for value in (site.mean, site.sd)]
        except FloatingPointError:
            return [title, "its moments are not finite"]
        places = islice(product(*map(range, shape)), MOST_ROWS)
        rows = [[self._label(place), *(number(value[place]) for value in moments)] for place in places]
        more = [f"and {size - MOST_ROWS} more"] if size > MOST_ROWS else []
        return [title, Table(["", "mean", "sd"], rows), *more]

    def _label(self, place: tuple[int, ...]) -> str:
        names: Sequence[Any] = place
        if self.coordinates is not None:
            names = [labels[index] for labels, index in zip(self.coordinates, place, strict=True)]
        return f"{self.name}[{','.join(map(str, names))}]" if place else self.name


class ShownSites(Shown):
    """Posteriors by name, each with its shape and the range of its means."""

    _sites: Mapping[str, Any]

    def _shown(self) -> list[str | Table]:
        title = f"{type(self).__name__}({', '.join(self._sites)})"
        return [title, Table(["site", "shape", "mean", "sd"], [*self._rows()])]

    def _rows(self) -> Iterator[list[str]]:
        for name, site in self._sites.items():
            row = [name, str(tuple(site.shape)), "", ""]
            if 0 < site.size <= _LARGEST_SHOWN:
                try:
                    row[2:] = [_range(site.mean), _range(site.sd)]
                except FloatingPointError:
                    row[2] = "not finite"
            yield row


def _range(values: Any) -> str:
    low, high = number(np.min(values)), number(np.max(values))
    return low if low == high else f"{low} to {high}"
