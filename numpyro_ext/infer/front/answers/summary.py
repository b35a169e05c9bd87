"""The table that ``print_summary`` shows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....display import counted
from ..display import flatness
from ..labels import Coords, Dims, Labels
from ..options import nearest_name, suggests
from ..results import Diagnostics, HyperEstimate, LogEvidence
from .sites import PosteriorSites

_OF_HYPERPARAMETERS = {
    "none": "",
    "optimum": " (at these hyperparameters)",
    "integrated": " (integrated over hyperparameters{})",
}
_LONGEST, _FIRST, _LAST = 20, 5, 2
"""Elements of a site that are all shown, and of longer ones how many at the start and at the end."""


class Summary(NamedTuple):
    """Content of a summary that is not asked for by name."""

    default: Sequence[str]
    """Sites that are shown where none is named."""
    labels: Labels
    hyper: Mapping[str, object] = {}
    """Posteriors or estimates of the hyperparameters."""
    work: str = "Run"
    """Name of what has converged."""
    notes: Sequence[str] = ()


class PrintsSummary:
    """Mixin of engines that print their last run as NumPyro's samplers do."""

    @property
    @abstractmethod
    def posterior(self) -> PosteriorSites:
        """Marginals by name."""

    @property
    @abstractmethod
    def log_evidence(self) -> LogEvidence:
        """Log evidence of the last run."""

    @property
    @abstractmethod
    def diagnostics(self) -> Diagnostics:
        """End of the last run."""

    @abstractmethod
    def _summary(self, exclude_deterministic: bool) -> Summary: ...

    @suggests
    def print_summary(
        self,
        prob: float = 0.9,
        exclude_deterministic: bool = True,
        var_names: str | Iterable[str] | None = None,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> None:
        """Print hyperparameters, marginals, the log evidence and how the run ended.

        Of sites with more than twenty elements the first and the last ones are shown; name them to see all.

        :param float prob: the probability mass of the central interval.
        :param bool exclude_deterministic: whether to leave out deterministic sites (where there are others).
        :param var_names: sites to show, as ArviZ takes them: their names, or ``"~name"`` for all but these.
        :param dict coords: labels of the places along a dimension, beside those of the run.
        :param dict dims: names of the dimensions of a site, likewise.
        :raises ValueError: if there is no such site, or labels do not fit a site.
        :raises TypeError: for an unknown argument; the message says which one was probably meant.
        """
        found, posterior = self._summary(exclude_deterministic), self.posterior
        known = [*posterior, *posterior.large]
        names, are_named = chosen_names(var_names, known, found.default, posterior.reasons)
        print(
            format_summary(
                {name: posterior[name] for name in names if name not in found.hyper},
                {name: found.hyper[name] for name in names if name in found.hyper},
                self.log_evidence,
                self.diagnostics,
                prob,
                found.labels.updated(Labels.given(coords, dims)),
                shows_all=are_named,
                work=found.work,
                notes=found.notes,
            )
        )


def chosen_names(
    var_names: str | Iterable[str] | None, known: Sequence[str], default: Sequence[str], others: Mapping[str, str]
) -> tuple[list[str], bool]:
    """Names of the sites to show, as ArviZ takes them: exact ones, or such with ``~`` in front that are left out.

    >>> chosen_names("~u", ["tau", "c", "u"], ["tau", "c", "u"], {})
    (['tau', 'c'], False)

    :param var_names: what a person gave.
    :param known: names of all sites that can be shown.
    :param default: those that are shown where none is named.
    :param others: why other sites of the model are not among them.
    :return: the names, and whether they were named themselves.
    :raises ValueError: if one of them is none of the known ones, or both ways are taken.
    """
    if var_names is None:
        return list(default), False
    given = [var_names] if isinstance(var_names, str) else list(var_names)
    for name in given:
        plain = str(name).removeprefix("~")
        if plain not in known and name not in known:
            meant = nearest_name(plain, known)
            hint = "" if meant is None else f" Did you mean {meant!r}?"
            why = f" ({others[plain]})" if plain in others else ""
            raise ValueError(
                f"var_names names {plain!r}{why}; the sites of the posterior are {', '.join(known)}.{hint}"
            )
    left_out = [name[1:] for name in given if name.startswith("~") and name not in known]
    if not left_out:
        return given, True
    if len(left_out) < len(given):
        raise ValueError(f"var_names names sites, or leaves out sites by a '~' before each name, not both: {given}.")
    return [name for name in default if name not in left_out], False


def format_summary(
    sites: Mapping[str, object],
    hyper: Mapping[str, object],
    log_evidence: LogEvidence,
    diagnostics: Diagnostics,
    prob: float,
    labels: Labels,
    *,
    shows_all: bool = False,
    work: str = "Run",
    notes: Sequence[str] = (),
) -> str:
    """Lay out hyperparameters, marginals and the end of a run as text, in the manner of NumPyro's summaries.

    :param sites: exact marginals.
    :param hyper: posteriors or estimates of the hyperparameters.
    :param LogEvidence log_evidence: at these estimates.
    :param Diagnostics diagnostics: of the run.
    :param float prob: probability mass of the central interval.
    :param Labels labels: of the places of sites.
    :param bool shows_all: whether long sites are shown whole.
    :param str work: what has converged.
    :param notes: further lines.
    :return: several lines.
    :raises ValueError: if there are not as many dimensions or labels as a site has, or the mass is none.
    """
    if not 0.0 < prob < 1.0:
        raise ValueError(f"prob must be between 0 and 1, got {prob}.")
    ends = [f"{50 * (1 - prob):.1f}%", f"{50 * (1 + prob):.1f}%"]
    shapes = {name: tuple(np.shape(_value(site))) for name, site in {**hyper, **sites}.items()}
    named = {name: list(labels.places(name, shape)) for name, shape in shapes.items()}
    width = max([14, *(len(label) for places in named.values() for label, _ in _shortened(places, shows_all))])

    def table(title: str, columns: Sequence[str], found: Mapping[str, Sequence[object]]) -> list[str]:
        lines = [_row(width, title, columns)]
        for name, values in found.items():
            places = named[name]
            for number, (label, index) in enumerate(_shortened(places, shows_all)):
                if number == _FIRST and len(places) > _LONGEST and not shows_all:
                    lines.append(f"{f'... {len(places) - _FIRST - _LAST} more':>{width}}: var_names=[{name!r}]")
                lines.append(_row(width, label, [_cell(value, index) for value in values]))
        return [*lines, ""]

    lines = [""]
    drawn = {name: site for name, site in hyper.items() if not isinstance(site, HyperEstimate)}
    points = {name: site for name, site in hyper.items() if isinstance(site, HyperEstimate)}
    moments = ["mean", "std", "median", *ends]
    if drawn:
        lines += table("hyperparameter", moments, {name: _moments(site, prob) for name, site in drawn.items()})
    if points:
        columns = ["value", "std.error", *ends]
        lines += table("hyperparameter", columns, {name: _estimated(point, prob) for name, point in points.items()})
    if sites:
        title = "" if not hyper else "site"
        lines += table(title, moments, {name: _moments(site, prob) for name, site in sites.items()})

    kind = "Log evidence, at least" if log_evidence.is_lower_bound else "Log evidence"
    method = f": {log_evidence.method}" if log_evidence.method else ""
    of_hyper = _OF_HYPERPARAMETERS[log_evidence.hyperparameters].format(method)
    error = "" if log_evidence.standard_error is None else f" +- {log_evidence.standard_error:.2g}"
    ending = "converged" if diagnostics.converged else "NOT converged"
    lines.append(f"{kind}: {float(log_evidence):.3f}{error}{of_hyper}{flatness(log_evidence)}")
    lines.append(f"{work} {ending} after {counted(diagnostics.num_steps, 'step')}")
    if diagnostics.hyper is not None:
        lines[-1] += f"; hyperparameters learned with {counted(diagnostics.hyper.num_evaluations, 'fit')}"
    if diagnostics.points:
        lines.append(f"Set to a point, without uncertainty: {', '.join(diagnostics.points)}")
    if diagnostics.edges:
        lines.append(f"At the edge of the support: {', '.join(diagnostics.edges)}")
    return "\n".join([*lines, *notes, *diagnostics.messages, ""])


def _value(site: Any) -> Any:
    return site.value if isinstance(site, HyperEstimate) else np.empty(site.shape)


def _moments(site: Any, prob: float) -> list[Any]:
    q = np.array([0.5 * (1.0 - prob), 0.5, 0.5 * (1.0 + prob)])
    if getattr(site, "is_fixed", False):  # a value that was given
        return [np.asarray(site.mean), np.full(site.shape, "given", object), *3 * [np.full(site.shape, "", object)]]
    low, median, high = np.asarray(site.quantile(q))
    return [np.asarray(site.mean), np.asarray(site.sd), median, low, high]


def _estimated(point: HyperEstimate, prob: float) -> list[np.ndarray]:
    return [np.asarray(point.value), point.shown_errors(), *point.interval(prob)]


def _shortened(places: Sequence[object], shows_all: bool) -> list[Any]:
    is_whole = shows_all or len(places) <= _LONGEST
    return list(places) if is_whole else [*places[:_FIRST], *places[-_LAST:]]


def _cell(values: Any, index: tuple[int, ...]) -> str:
    value = values[index]
    if isinstance(value, str):
        return value
    size = abs(float(value))
    if np.isnan(size):
        return ""
    return f"{float(value):.2f}" if size == 0.0 or 1e-2 <= size < 1e6 else f"{float(value):.2e}"


def _row(width: int, label: str, cells: Sequence[str]) -> str:
    return "".join([label.rjust(width), *(cell.rjust(10) for cell in cells)]).rstrip()
