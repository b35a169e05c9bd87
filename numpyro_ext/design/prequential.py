"""Test of predictions by a bet against them, one observation after the other.

Predictions are judged by what they said before each outcome was seen, and by nothing else (Dawid 1984). Whoever bets
against a density :math:`p` at odds that it finds fair, by another density :math:`q`, has :math:`q(y) / p(y)` times the
stake afterwards. Under :math:`p` the expected capital stays what it was, so that it ever reaches twenty times the first
stake has a probability of at most one in twenty, however long one goes on (Ville 1939; Shafer and Vovk 2019).

- Dawid, A. P. (1984). Present position and potential developments: some personal views. Statistical theory: the
  prequential approach. *Journal of the Royal Statistical Society A* 147, 278-292.
- Ville, J. (1939). *Étude critique de la notion de collectif*. Gauthier-Villars.
- Shafer, G. and Vovk, V. (2019). *Game-theoretic foundations for probability and finance*. Wiley.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import numpy as np

from .outcomes.outlooks import Outlook

ENOUGH = 20.0
"""Times the first stake, at which predictions are taken for wrong."""
_POWERS = np.array([0.5, 2.0])
r"""Bets are on :math:`q \propto \sqrt p`, for outcomes wilder than predicted, and on :math:`p^2`, for tamer ones."""


class Bets(NamedTuple):
    """Value of each of the two bets, which begin with half of the stake."""

    log_capital: tuple[float, float] = (float(np.log(0.5)), float(np.log(0.5)))

    def after(self, gains: list[np.ndarray]) -> Self:
        """After outcomes that were told together, each with its :func:`log_gains`.

        The stake is spread evenly over them, which is fair however they depend on each other.
        """
        gained = np.logaddexp.reduce(gains, axis=0) - np.log(len(gains))
        return self._replace(log_capital=tuple(np.add(self.log_capital, gained).tolist()))

    @property
    def are_won(self) -> bool:
        """True if predictions are taken for wrong."""
        return bool(np.logaddexp.reduce(self.log_capital) >= np.log(ENOUGH))


class RefitRule(NamedTuple):
    """Time at which hyperparameters are learned anew."""

    every: int | Literal["evidence"] | None
    """After so many observations, when predictions are taken for wrong, or never."""
    since: int = 0
    """Observations since the last fit."""
    bets: Bets = Bets()

    def after(self, taken: list[tuple[Outlook, int, float]]) -> Self:
        """After observations that were told together: what was known of each before, its number and its value."""
        bets = self.bets.after([log_gains(*one) for one in taken]) if self.every == "evidence" else self.bets
        return self._replace(since=self.since + len(taken), bets=bets)

    @property
    def is_due(self) -> bool:
        """True if it is time."""
        return self.since >= self.every if isinstance(self.every, int) else self.bets.are_won


def log_gains(outlook: Outlook, number: int, value: float) -> np.ndarray:
    """Log of what each of the bets makes of its capital with an outcome.

    :param Outlook outlook: before it was seen.
    :param int number: of the observation.
    :param float value: the outcome.
    """
    log_p = outlook.log_predictive(np.array([number]), np.array([value]))[0]
    return (_POWERS - 1.0) * log_p - outlook.log_power_masses(number, _POWERS)
