"""Bilinear models fitted to batches of rows or columns, for data that do not fit in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

import numpy as np
from jax import Array

from ...front.options import check_kind
from ...front.results import Diagnostics
from ...front.running.progress import progress_bar, warn
from ...front.state import EngineState
from ..engines.engine import BilinearVG
from .call import Batch, Call
from .parts import BatchStore
from .run import BatchRun


def fit_batches(
    engine: BilinearVG,
    rng_key: Array,
    batches: Iterable[Batch],
    *,
    over: str,
    num_epochs: int = 50,
    init_state: EngineState | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **kwargs: object,
) -> BilinearVG:
    """Fit a bilinear model to data that come in batches, each with some vectors of one side and all of their cells.

    The other side is shared. Every batch is read once; its cells, ordered, are kept in a file of the folder for
    temporary files, about 100 bytes each, and memory holds those of one batch at a time. An epoch visits all batches;
    the end is an optimum of the objective of :class:`BilinearVG` on all data together, not only near one.

    Where updates of ``engine`` are closed (Normal observations, ``bound="jaakkola"`` or ``"bohning"``) a visit is a
    sweep over its batch, and one over all data if there is one batch; Gaussian sites that all cells see are shared,
    too. After each epoch comes the exact step along directions in which data are silent, by moments of the vectors of
    all batches, but not where pairs are censored. With other updates more epochs are needed than sweeps where there are
    such directions.

    Unlisted zeros (``unlisted_cells="zero"``) are those of the rows of a batch, with tangents ``zeros="by_row"`` or
    ``"shared"``, which then is that of all batches; with tangents by row batches are of rows.
    Those of counts are by row, on one device. ``zeros="exact"`` and ``"sampled"`` are refused, as is
    ``solver="lbfgs"``.

    Of censored pairs (:class:`~numpyro_ext.distributions.CensoredPairs`) a batch has some rows or columns and all of
    their pairs, and ``num_censored`` is that of *all* pairs in every batch. The shares of the batches in what is
    censored are renewed after each epoch, all else in each visit. Nothing is visited while batches are read, and the
    values of the trace need not rise.

    Hyperparameters are given and not learned: fit some of the batches with ``engine.run`` first, and pass what it
    learned.

    With ``devices`` of the engine the vectors of every batch are divided between these. Where they belong to several
    processes (``jax.distributed``, ``devices=jax.devices()``), each process gives batches of its own vectors, which no
    other reads, and all else is the same in all of them; the first batches of all are visited together, then the second
    ones, and only sums over the shared vectors are exchanged. What fails or differs while batches are read ends all
    processes, with its reason; an interrupted process ends without an answer.

    :param BilinearVG engine: its model and options are used; what it has run itself is not.
    :param rng_key: random number generator key.
    :param batches: for each batch the arguments of the model on its vectors alone, numbered from zero: a tuple of
        positional or a dictionary of keyword arguments. It may be a generator that loads one after the other.
    :param str over: a site of the side that is divided into batches, such as ``"w"``.
    :param int num_epochs: visits of each batch at most.
    :param EngineState init_state: ``last_state`` of an engine, to go on from its shared vectors: of an earlier call,
        also one that was interrupted, or of a run on some of the data.
    :param checkpoint: file to which the end of each epoch is written, and from which the same call goes on. Of several
        processes each has two of its own, named ``checkpoint`` with its number and 0 or 1, and all go on from the last
        epoch that all have. Batches are read again.
    :param kwargs: keyword arguments of the model that are the same for all batches.
    :return: an engine that has run. Its ``log_evidence`` is that of all batches, its posterior that of the shared
        vectors and of the *last* batch of this process; for the vectors of another use ``fold_in`` with its arguments,
        in a process that has them. Where pairs are censored there is no ``fold_in``: go on with ``init_state`` and
        the batch that is asked for at the end; probabilities of selection of its vectors are those among them.
        ``diagnostics.objective_trace`` has the sums over the visits of each epoch, and at its end the value that
        ``log_evidence`` has.
    :raises ValueError: if there is no batch, hyperparameters are left to learn, ``over`` is no Gaussian site, the
        shared vectors of batches have other shapes or priors, an objective is not finite, processes disagree, a
        checkpoint is of other data, or the engine has options that are not for batches.
    :raises TypeError: if batches are none.
    :raises RuntimeError: if another process failed.

    Cost: per epoch about ten to twenty sweeps over all cells, or one where updates are closed. Memory, beside that of
    one batch: for each batch its own posterior, and ``size * (size + 1)`` numbers for each shared vector, in every
    process.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import numpy as np
        >>> from numpyro_ext.infer import BilinearVG, fit_batches
        >>> from numpyro_ext.models import poisson_factorization

        >>> rng = np.random.default_rng(0)
        >>> def load(number):
        ...     rows, cols = np.divmod(np.arange(60), 6)
        ...     return {"rows": rows, "cols": cols, "counts": rng.poisson(2.0, 60), "num_rows": 10}

        >>> scales = {"row_scale": 0.5, "row_bias_scale": 0.5, "col_bias_scale": 0.5}
        >>> engine = BilinearVG(poisson_factorization, hyper_values=scales, progress_bar=False)
        >>> batches = (load(number) for number in range(3))
        >>> fitted = fit_batches(engine, jax.random.key(0), batches, over="w", num_cols=6, rank=1)
        >>> bool(fitted.log_evidence.is_lower_bound), fitted.posterior["z"].mean.shape
        (True, (6, 1))
    """
    check_kind("fit_batches", engine, BilinearVG, "a BilinearVG")
    call = Call(engine, rng_key, over, num_epochs, init_state, kwargs)
    with tempfile.TemporaryDirectory(prefix="numpyro_ext_") as folder:
        return _iterate(BatchRun(call, batches, checkpoint, BatchStore(folder)))


def _iterate(run: BatchRun) -> BilinearVG:
    """Epochs, and a last one that leaves the shared vectors where they are and finds the objective."""
    engine, progress = run.call.engine, run.progress
    messages: list[str] = []
    with progress_bar(None, "BilinearVG", unit="batches", enabled=engine.progress_bar) as bar:
        try:
            while run.add():
                bar.update()
            run.begin()
            progress = run.progress
            while len(progress.trace) < run.call.num_epochs and progress.num_quiet < 2:
                for i in range(run.num_batches):
                    run.visit(i)
                    bar.update()
                run.end_epoch()
        except KeyboardInterrupt:
            if not run.may_be_cut_short:
                raise
            messages.append(f"Interrupted after {len(progress.trace)} epochs.")
        for i in range(run.num_batches):
            run.visit(i, moves_shared=False)
            bar.update()
    bound = run.objective()
    if progress.num_quiet < 2 and not messages:
        messages.append(
            f"The relative change of the objective in the last of {len(progress.trace)} epochs is "
            f"{progress.change:.2g}, the tolerance {engine._tolerance():.2g}. Give more epochs (num_epochs)."
        )
    if messages:
        warn("fit_batches did not converge. " + " ".join(messages))
    values = np.array([*progress.trace, bound])
    num_epochs = len(progress.trace)
    diagnostics = Diagnostics(not messages, num_epochs, values, progress.change, 0, {}, None, (*messages, *run.remarks))
    return run.finish(bound, diagnostics)
