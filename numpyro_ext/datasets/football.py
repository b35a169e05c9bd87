"""The 380 matches of one season of English football."""

from __future__ import annotations

import csv
from importlib import resources
from typing import NamedTuple

import numpy as np

from ..linalg.saved_names import saved_as


@saved_as("Season")
class Season(NamedTuple):
    """Matches in the order in which they were played."""

    home: np.ndarray
    """The team that plays at home, integers of shape ``(matches,)``."""
    away: np.ndarray
    """Its guest, shape ``(matches,)``."""
    home_goals: np.ndarray
    """Shape ``(matches,)``."""
    away_goals: np.ndarray
    """Shape ``(matches,)``."""
    date: np.ndarray
    """Days, ``datetime64[D]`` of shape ``(matches,)``."""
    teams: tuple[str, ...]
    """Names, in alphabetical order."""

    @property
    def result(self) -> np.ndarray:
        """Two where the home team wins, one for a draw and zero where the guest wins, shape ``(matches,)``."""
        return 1 + np.sign(self.home_goals - self.away_goals)


def load_premier_league() -> Season:
    """The Premier League of 2015-16: 20 teams, each twice against each, won by Leicester City.

    The dates and scores are public facts, as published by the league and collected, among others, by the football.db
    project, which gives them to the public domain.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.datasets import load_premier_league
        >>> season = load_premier_league()
        >>> leicester = season.teams.index("Leicester City")
        >>> points = 3 * np.sum(season.result[season.home == leicester] == 2)
        >>> print(season.home.shape, points, np.bincount(season.result))
        (380,) 36 [116 107 157]

    :return: the matches.
    """
    with resources.files(__package__).joinpath("premier_league_2015_16.csv").open(encoding="utf-8") as lines:
        date, home, away, *goals = zip(*list(csv.reader(lines))[1:], strict=True)
    teams = tuple(sorted(set(home)))
    number = {team: k for k, team in enumerate(teams)}
    home_goals, away_goals = np.array(goals, int)
    return Season(
        np.array([number[team] for team in home]),
        np.array([number[team] for team in away]),
        home_goals,
        away_goals,
        np.array(date, "datetime64[D]"),
        teams,
    )
