"""Engines on one model and one data set: seconds, evidence, k-hat, and how far each is from a reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro.infer import MCMC, NUTS, init_to_median

from ...display import Shown, Table, number
from ...structure import ModelStructureError
from ...structure.model.running.execution import check_key
from ..front.answers.display import kind_of_evidence
from ..front.results import LogEvidence
from ..front.running.chunks import Interruption
from ..front.running.progress import progress_bar, warn
from .contestants import NUM_SAMPLES, NUM_WARMUP, Chain, Contestant, Moments, as_contestants, moments_of
from .gaps import Gaps, gaps_between
from .picture import draw_picture

__all__ = ["Comparison", "Row", "compare_engines"]


class Row(NamedTuple):
    """What one engine did."""

    engine: str
    status: str
    """``"converged"``, ``"not converged"``, ``"refused"`` (it cannot treat the model) or ``"failed"``."""
    first_seconds: float = np.nan
    """Wall-clock seconds of the first run and its draws, those of the compiler included."""
    first_cpu: float = np.nan
    """Processor seconds of the same; more than the former where several cores were at work."""
    compile_seconds: float = np.nan
    """Those of the first run in which a program was compiled, or fetched from the cache on disk."""
    next_seconds: float = np.nan
    """Wall-clock seconds of a second run on the same data with another key."""
    next_cpu: float = np.nan
    log_evidence: float = np.nan
    """A ``LogEvidence``, which also says what it is."""
    evidence_kind: str = ""
    k_hat: float = np.nan
    """Of the field given the hyperparameters: below 0.7 importance weights could correct the approximation."""
    mean_gap: float = np.nan
    """The largest difference of a mean to the reference, in standard deviations of the reference."""
    median_mean_gap: float = np.nan
    sd_ratio: float = np.nan
    """The ratio of standard deviations to the reference that is farthest from one."""
    median_sd_ratio: float = np.nan
    worst_site: str = ""
    note: str = ""
    """Why it was refused or failed, or what it said."""


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
            gaps = (row.mean_gap, row.sd_ratio)
            rows.append(
                [row.engine, row.status, *map(number, seconds), value, number(row.k_hat), *map(number, gaps)]
                + [row.worst_site]
            )
            notes += [f"{row.engine}: {row.note}"] if row.note else []
        return [f"{len(rows)} engines; gaps to {self.reference}", Table(header, rows), *notes]

    def plot(self, axis: Any = None) -> Any:
        """Seconds against the largest gap of the means, on logarithmic axes: a filled point for the next run, an open
        one for the first.

        :param axis: of matplotlib, to draw into; a new figure by default.
        :return: the axis.
        :raises ValueError: if no engine has both a time and a gap.
        """
        return draw_picture(self.rows, self.reference, axis)


def compare_engines(
    rng_key: Array, model: Callable[..., Any], engines: Any, *args: Any, reference: Any = None, **kwargs: Any
) -> Comparison:
    """Run several engines on one model and the same data, and put what they found side by side.

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
    >>> found = compare_engines(jax.random.key(0), model, ["EP", "BilinearVG"], jnp.array([3, 5, 2]), reference="EP")
    >>> [(row.engine, row.status) for row in found.rows]
    [('EP', 'converged'), ('BilinearVG', 'refused')]

    Cost: that of all runs, twice, and of the reference once.

    :param rng_key: random number generator key.
    :param model: a NumPyro model.
    :param engines: a sequence, or a dictionary by names of your own, of names (``"EP"``, ``"NUTS"``), classes, a
        ``functools.partial`` of them with options, or instances made for this model; NumPyro's ``NUTS`` and ``MCMC``
        (2000 draws after 1000 of warm-up, if that is left open) and its automatic guides (5000 steps of SVI) as well.
    :param args: arguments of the model.
    :param reference: what the gaps are to: a run ``MCMC``, a dictionary of draws with the samples first, the name of
        one of the engines, or ``False`` for none. By default NUTS with 2000 draws after 1000 of warm-up is run for it,
        after the engines.
    :param kwargs: keyword arguments of the model.
    :return: the comparison: ``print`` it, or ask for ``rows``, ``table``, ``engines`` and ``plot()``.
    :raises ValueError: if there is no engine, one is unknown, or one was made for another model.
    :raises TypeError: if something is no engine, or the reference none of the above.
    :raises KeyboardInterrupt: if interrupted before the first engine has ended.
    """
    check_key(rng_key, "compare_engines(jax.random.key(0), model, [EP, VariationalGaussian], x, y)")
    contestants = as_contestants(model, engines)
    known = _known_reference(reference, contestants)
    rows: list[Row] = []
    moments: dict[str, Moments] = {}
    words = known[1] if known else "nothing"
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
                known = _chain_reference(jax.random.fold_in(rng_key, total), model, args, kwargs)
                words = known[1]
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
        against = moments.get(known[0], {}) if isinstance(known[0], str) else known[0]
        rows = [_with_gaps(row, gaps_between(moments.get(row.engine, {}), against)) for row in rows]
    ran = {c.name: c.engine for c in contestants if c.name in moments}
    return Comparison(rows, ran, words)


def _with_gaps(row: Row, gaps: Gaps) -> Row:
    return row._replace(
        mean_gap=gaps.largest_mean,
        median_mean_gap=gaps.median_mean,
        sd_ratio=gaps.farthest_sd,
        median_sd_ratio=gaps.median_sd,
        worst_site=gaps.at,
    )


def _row(
    contestant: Contestant,
    keys: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
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
    contestant: Contestant, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def _known_reference(reference: Any, contestants: list[Contestant]) -> tuple[Moments | str, str] | None:
    """The moments of a reference that has been run, or the name of one of the engines; and what it is in words."""
    if reference is None or reference is False:
        return None
    if isinstance(reference, str):
        names = [contestant.name for contestant in contestants]
        if reference not in names:
            raise ValueError(f"reference={reference!r} is none of the engines: {', '.join(names)}.")
        return reference, reference
    if isinstance(reference, MCMC):
        try:
            draws = reference.get_samples()
        except AttributeError:
            draws = None
        if not draws:
            raise ValueError("The MCMC given as reference has no draws: run it first.")
        return moments_of(draws), _chain_words(Chain("reference", reference))
    if isinstance(reference, Mapping):
        sizes = {np.shape(value)[:1] for value in reference.values()}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError("The draws given as reference must have the samples as their first axis, as many for all.")
        draws = {name: np.asarray(value, float) for name, value in reference.items()}
        return moments_of(draws), f"{sizes.pop()[0]} given draws"
    raise TypeError(
        "reference must be a run MCMC, a dictionary of draws, the name of an engine or False; "
        f"got {type(reference).__name__}."
    )


def _chain_words(chain: Chain) -> str:
    mcmc = chain.engine
    many = f"{mcmc.num_chains} x " if mcmc.num_chains > 1 else ""
    return (
        f"{type(mcmc.sampler).__name__} with {many}{mcmc.num_samples} draws after {mcmc.num_warmup} of warm-up "
        f"(standard error of its means up to {chain.rounding():.2f} sd)"
    )


def _chain_reference(
    rng_key: Array, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Moments | str, str]:
    kernel = NUTS(model, init_strategy=init_to_median)
    chain = Chain("reference", MCMC(kernel, num_warmup=NUM_WARMUP, num_samples=NUM_SAMPLES, progress_bar=False))
    try:
        chain.run(rng_key, args, kwargs)
    except Exception as error:  # the engines have run, and their rows are worth keeping
        return {}, f"nothing: NUTS failed ({type(error).__name__}: {error})"
    chain.judge(rng_key)
    return chain.moments(), f"{_chain_words(chain)}; {', '.join(chain.notes)}"
