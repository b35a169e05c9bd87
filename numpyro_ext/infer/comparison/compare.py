"""Engines on one model and one data set: seconds, evidence, k-hat, and how far each is from a reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from ...display import Shown, Table, number
from ...structure import ModelStructureError
from ...structure.model.running.execution import check_key, describe_value, is_key
from ..exact.gaps import NUM_ERRORS, Gaps, Moments, gaps_between
from ..front.display import kind_of_evidence
from ..front.results import LogEvidence
from ..front.running.chunks import Interruption
from ..front.running.progress import progress_bar, warn
from .contestants import USAGE, Contestant, as_contestants
from .picture import draw_picture
from .reference import known_reference, reference_by_nuts


class Row(NamedTuple):
    """Outcome of one engine."""

    engine: str
    status: str
    """``"converged"``, ``"not converged"``, ``"refused"`` (it cannot treat the model) or ``"failed"``."""
    first_seconds: float = np.nan
    """Wall-clock seconds of the first run and its draws, those of the compiler included."""
    first_cpu: float = np.nan
    """Processor seconds of the same; more than the former where several cores were at work."""
    compile_seconds: float = np.nan
    """Seconds of the first run in which a program was compiled, or fetched from the cache on disk."""
    next_seconds: float = np.nan
    """Wall-clock seconds of a second run on the same data with another key."""
    next_cpu: float = np.nan
    log_evidence: float = np.nan
    """A ``LogEvidence``, which also says what it is."""
    evidence_kind: str = ""
    k_hat: float = np.nan
    """Pareto k-hat of the field given the hyperparameters: below 0.7 importance weights could correct the
    approximation."""
    mean_gap: float = np.nan
    """Largest difference of a mean to the reference, in standard deviations of the reference."""
    mean_gap_error: float = np.nan
    """Monte Carlo error of the reference in ``mean_gap``; nan where it is unknown."""
    median_mean_gap: float = np.nan
    sd_ratio: float = np.nan
    """Ratio of standard deviations to the reference that is farthest from one."""
    sd_ratio_error: float = np.nan
    """Monte Carlo error of the reference in ``sd_ratio``, relative; nan where it is unknown."""
    median_sd_ratio: float = np.nan
    worst_site: str = ""
    note: str = ""
    """Reason of a refusal or failure, or the messages of the run."""

    @property
    def is_within_error(self) -> bool:
        """True if mean and standard deviation differ from the reference by no more than its Monte Carlo error."""
        if not np.isfinite([self.mean_gap_error, self.sd_ratio_error]).all() or not self.sd_ratio > 0.0:
            return False
        of_mean, of_sd = self.mean_gap / self.mean_gap_error, abs(np.log(self.sd_ratio)) / self.sd_ratio_error
        return bool(max(of_mean, of_sd) <= NUM_ERRORS)


class Comparison(Shown):
    """The outcome of :func:`compare_engines`: printed it is a table.

    :ivar rows: one :class:`Row` for each engine, in the order given.
    :ivar engines: by name, the engines (or chains, or guides) that could be run, as after their ``run``.
    :ivar reference: what the gaps are to, in words.
    """

    def __init__(self, rows: list[Row], engines: dict[str, Any], reference: str) -> None:
        self.rows = rows
        self.engines = engines
        self.reference = reference

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.engine == name)

    @property
    def table(self) -> Any:
        """All columns of all rows, as a pandas ``DataFrame`` indexed by engine."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=Row._fields).set_index("engine")

    def _shown(self) -> list[str | Table]:
        header = ["engine", "", "first s", "compile s", "next s", "log evidence", "k-hat", "mean gap", "sd ratio", "at"]
        rows, notes = [], []
        for row in self.rows:
            value = ""
            if isinstance(row.log_evidence, LogEvidence) and np.isfinite(row.log_evidence):
                sign = ">= " if row.log_evidence.is_lower_bound else ""
                kind = " (optimum)" if row.log_evidence.hyperparameters == "optimum" else ""
                error = row.log_evidence.standard_error
                value = f"{sign}{row.log_evidence:.2f}{kind}" + ("" if error is None else f" +- {error:.2g}")
            seconds = (row.first_seconds, row.compile_seconds, row.next_seconds)
            gaps = [
                _with_error(row.mean_gap, row.mean_gap_error),
                _with_error(row.sd_ratio, row.sd_ratio * row.sd_ratio_error),
            ]
            rows.append(
                [row.engine, row.status, *map(number, seconds), value, number(row.k_hat), *gaps, row.worst_site]
            )
            notes += [f"{row.engine}: {row.note}"] if row.note else []
        alike = [row.engine for row in self.rows if row.is_within_error]
        if alike:
            notes.insert(0, f"Within {NUM_ERRORS:g} errors of the reference, so no gap is seen: {', '.join(alike)}")
        return [f"{len(rows)} engines; gaps to {self.reference}", Table(header, rows), *notes]

    def plot(self, axis: object = None) -> Any:
        """Seconds against the largest gap of the means, on logarithmic axes: a filled point for the next run, an open
        one for the first.

        :param axis: of matplotlib, to draw into; a new figure by default.
        :return: the axis.
        :raises ValueError: if no engine has both a time and a gap.
        """
        return draw_picture(self.rows, self.reference, axis)


def _with_error(value: float, error: float) -> str:
    return number(value) + (f" +- {error:.1g}" if np.isfinite(error) else "")


def compare_engines(
    model: Callable[..., object],
    engines: object,
    rng_key: Array,
    *args: object,
    reference: object = None,
    **kwargs: object,
) -> Comparison:
    """Run several engines on one model and the same data, and put what they found side by side.

    The order of arguments is that of :func:`recommend` and of ``EP(model).run(rng_key, ...)``: the model first, then
    what is to run it, the key, and the arguments of the model. The former order, with the key first, still works for
    this version and warns.

    Each is run twice, so that the time of the compiler is known apart. An engine that refuses the model or fails has a
    row that says why, and the others run; Ctrl-C lets the engine at work end and keeps what is done, and a second one
    keeps what was done before it. What engines warn of is in their notes.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import compare_engines
    >>> def model(y):
    ...     level = numpyro.sample("level", dist.Normal(0, 2))
    ...     numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)
    >>> found = compare_engines(model, ["EP", "BilinearVG"], jax.random.key(0), jnp.array([3, 5, 2]), reference="EP")
    >>> [(row.engine, row.status) for row in found.rows]
    [('EP', 'converged'), ('BilinearVG', 'refused')]

    Cost: that of all runs, twice, and of the reference once.

    :param model: a NumPyro model.
    :param engines: a sequence, or a dictionary by names of your own, of names (``"EP"``, ``"NUTS"``), classes, a
        ``functools.partial`` of them with options, or instances made for this model; NumPyro's ``NUTS`` and ``MCMC``
        (2000 draws after 1000 of warm-up, if that is left open) and its automatic guides (5000 steps of SVI) as well.
    :param rng_key: random number generator key.
    :param args: arguments of the model.
    :param reference: what the gaps are to: a run ``MCMC``, a dictionary of draws with the samples first, the name of
        one of the engines, or ``False`` for none. By default NUTS is run for it after the engines: 2000 draws after
        1000 of warm-up, doubled up to 16,000 while the Monte Carlo error of a standard deviation is above 5 %. Errors
        of the reference stand beside the gaps.
    :param kwargs: keyword arguments of the model.
    :return: the comparison: ``print`` it, or ask for ``rows``, ``table``, ``engines`` and ``plot()``.
    :raises ValueError: if there is no engine, one is unknown, or one was made for another model.
    :raises TypeError: if something is no engine, the reference none of the above, or the order another one.
    :raises KeyboardInterrupt: if interrupted before the first engine has ended.
    """
    if is_key(model):
        warnings.warn(
            "compare_engines(rng_key, model, engines, ...) is now compare_engines(model, engines, rng_key, ...), as "
            "elsewhere; the order with the key first goes with the next minor version.",
            FutureWarning,
            stacklevel=2,
        )
        former: Any = model, engines, rng_key
        rng_key, model, engines = former
    if is_key(engines) or not callable(model):
        got = ", ".join(map(describe_value, (model, engines, rng_key)))
        raise TypeError(f"The model comes first, then the engines and a random key, as in {USAGE}; got {got}.")
    check_key(rng_key, USAGE, "comes third, after the model and the engines")
    contestants = as_contestants(model, engines)
    known = known_reference(reference, contestants)
    rows: list[Row] = []
    moments: dict[str, Moments] = {}
    words = known.words if known else "nothing"
    needs_chain = reference is None
    total = len(contestants) + needs_chain
    with progress_bar(total, "engines") as bar, Interruption() as interruption:
        try:
            for place, contestant in enumerate(contestants):
                bar.set_postfix_str(contestant.name)
                keys = jax.random.split(jax.random.fold_in(rng_key, place), 3)
                rows.append(_row(contestant, keys, args, kwargs, moments))
                bar.update()
                if interruption:
                    break
            if needs_chain and not interruption:
                bar.set_postfix_str("NUTS as reference")
                known = reference_by_nuts(jax.random.fold_in(rng_key, total), model, args, kwargs)
                words = known.words
                if any(contestant.has_params for contestant in contestants):
                    words += "; param sites at their initial values, which NUTS does not learn"
                bar.update()
        except KeyboardInterrupt:
            if not rows:
                raise
            interruption.is_asked = True
    if interruption:
        warn(f"Interrupted: {len(rows)} of {len(contestants)} engines were run.")
        words = words if known else "nothing (interrupted)"
    if known is not None:
        against = moments.get(known.moments, {}) if isinstance(known.moments, str) else known.moments
        rows = [_with_gaps(row, gaps_between(moments.get(row.engine, {}), against, known.errors)) for row in rows]
    ran = {c.name: c.engine for c in contestants if c.name in moments}
    return Comparison(rows, ran, words)


def _with_gaps(row: Row, gaps: Gaps) -> Row:
    return row._replace(
        mean_gap=gaps.largest_mean,
        mean_gap_error=gaps.mean_error,
        median_mean_gap=gaps.median_mean,
        sd_ratio=gaps.farthest_sd,
        sd_ratio_error=gaps.sd_error,
        median_sd_ratio=gaps.median_sd,
        worst_site=gaps.at,
    )


def _row(
    contestant: Contestant,
    keys: Array,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    moments: dict[str, Moments],
) -> Row:
    """Run one of them twice, and ask it; the moments of those that ended are kept."""
    row = Row(contestant.name, "failed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with _compile_seconds() as compiling:
                first, first_cpu = _timed(contestant, keys[0], args, kwargs)
            row = row._replace(first_seconds=first, first_cpu=first_cpu, compile_seconds=compiling[0])
            later, later_cpu = _timed(contestant, keys[1], args, kwargs)
            contestant.judge(keys[2])
            found = contestant.moments()
            row = row._replace(
                status="converged" if contestant.has_converged else "not converged",
                next_seconds=later,
                next_cpu=later_cpu,
                log_evidence=np.nan if contestant.log_evidence is None else contestant.log_evidence,
                evidence_kind="" if contestant.log_evidence is None else kind_of_evidence(contestant.log_evidence),
                k_hat=contestant.k_hat,
            )
            moments[contestant.name] = found
            said = list(contestant.notes)
        except ModelStructureError as error:
            row, said = row._replace(status="refused"), [str(error)]
        except Exception as error:  # whatever ends one of them does not end the others
            said = [f"{type(error).__name__}: {error}"]
    told = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    new = [text for text in told if not any(note in text for note in said)]
    return row._replace(note=" | ".join(dict.fromkeys([*said, *new])))


def _timed(
    contestant: Contestant, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[float, float]:
    """Wall-clock and processor seconds of a run."""
    wall, cpu = time.perf_counter(), time.process_time()
    contestant.run(rng_key, args, kwargs)
    return time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def _compile_seconds() -> Iterator[list[float]]:
    """A list whose only element grows by the seconds in which programs are lowered and compiled."""
    total = [0.0]

    def listen(event: str, duration_secs: float, **info: str | int) -> None:
        if event in ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"):
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield total
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
