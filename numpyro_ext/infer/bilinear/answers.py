"""Answers of engines on bilinear models after a run, whatever their algorithm."""

from __future__ import annotations

from typing import Literal, Self

from jax import Array

from ...structure.bilinear.factors import Unlisted
from ...structure.model.running.execution import check_key
from ..front.engine import BaseEngine
from ..front.labels import Labels
from ..front.run import ask
from .marginals.pairs import CensoredShares
from .remarks import remarks
from .runs.run import BilinearRun


class BilinearAnswers(BaseEngine[BilinearRun]):
    """Answers from Gaussian vectors of both sides."""

    unlisted_cells: Unlisted = "missing"

    def _keep(self, run: BilinearRun, labels: Labels | None = None) -> None:
        super()._keep(run, labels)
        diagnostics = run.fit.diagnostics
        found = (remark.words for remark in remarks(run.reading, run.vectors))
        run.fit = run.fit._replace(diagnostics=diagnostics._replace(messages=(*found, *diagnostics.messages)))

    predict = ask(BilinearRun.predict)
    log_predictive = ask(BilinearRun.log_predictive)
    predictive_mean = ask(BilinearRun.predictive_mean)
    expected_ranks = ask(BilinearRun.expected_ranks)
    similar = ask(BilinearRun.similar)

    @property
    def background(self) -> CensoredShares:
        """Shares of rows and columns in the censored pairs, and the tangent of their bound.

        :raises ValueError: if the model has no censored pairs.
        """
        selected = self._finished().inputs[2].selected
        if selected is None:
            raise ValueError("There is no background: the model has no CensoredPairs.")
        return CensoredShares.of(selected)

    def fold_in(
        self, rng_key: Array, *args: object, side: Literal["rows", "columns"] = "rows", **kwargs: object
    ) -> Self:
        """Posteriors of new rows (or columns) while the other side and the hyperparameters stay as they were fitted.

        They maximise the bound of :class:`~numpyro_ext.infer.BilinearVG` given the other side, whatever fitted that.
        The optimum is unique, and costs a few passes over the new cells. Where :class:`~numpyro_ext.infer.BilinearEP`
        has integrated over noise or cut points of ratings, its messages find the vectors, with full covariances, and
        the noise and cut points that new rows have of their own; noise that is held stands at its mode.

        :param rng_key: random number generator key.
        :param args: arguments of the model with the new rows alone: their number, and their cells.
        :param str side: ``"rows"`` or ``"columns"``, which side is new.
        :param kwargs: keyword arguments of the model.
        :return: an engine that answers for the new rows as this one for those of the fit. Its ``log_evidence`` is the
            lower bound of the log predictive density of the new cells under the posterior of the other side; with
            latent noise an estimate of it at the modes of all noise.
        :raises ValueError: if the other side has another size than in the fit, or if the likelihood is none that
            BilinearVG takes.
        """
        check_key(rng_key, "fold_in(jax.random.key(0), new_rows, columns, values)", "comes first")
        args, kwargs = self._as_fitted(args, kwargs)
        found = self._finished().fold_in(rng_key, args, kwargs, side=side, unlisted_cells=self.unlisted_cells)
        return self._with_run(found)

    def _with_run(self, run: BilinearRun) -> Self:
        """An engine of the same options that has made this run."""
        return type(self)(self.model, **self._options_given())._with(run)
