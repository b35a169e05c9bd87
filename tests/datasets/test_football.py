"""The embedded season against the published final table."""

import numpy as np

from numpyro_ext.datasets import load_premier_league

# Won, drawn, lost, goals for and against, in the order of the final table.
FINAL_TABLE = {
    "Leicester City": (23, 12, 3, 68, 36),
    "Arsenal": (20, 11, 7, 65, 36),
    "Tottenham Hotspur": (19, 13, 6, 69, 35),
    "Manchester City": (19, 9, 10, 71, 41),
    "Manchester United": (19, 9, 10, 49, 35),
    "Southampton": (18, 9, 11, 59, 41),
    "West Ham United": (16, 14, 8, 65, 51),
    "Liverpool": (16, 12, 10, 63, 50),
    "Stoke City": (14, 9, 15, 41, 55),
    "Chelsea": (12, 14, 12, 59, 53),
    "Everton": (11, 14, 13, 59, 55),
    "Swansea City": (12, 11, 15, 42, 52),
    "Watford": (12, 9, 17, 40, 50),
    "West Bromwich Albion": (10, 13, 15, 34, 48),
    "Crystal Palace": (11, 9, 18, 39, 51),
    "Bournemouth": (11, 9, 18, 45, 67),
    "Sunderland": (9, 12, 17, 48, 62),
    "Newcastle United": (9, 10, 19, 44, 65),
    "Norwich City": (9, 7, 22, 39, 67),
    "Aston Villa": (3, 8, 27, 27, 76),
}


def test_matches_add_up_to_the_final_table():
    season = load_premier_league()
    assert set(season.teams) == set(FINAL_TABLE) and len(set(zip(season.home, season.away, strict=True))) == 380
    assert np.all(np.diff(season.date) >= np.timedelta64(0, "D"))
    for team, expected in FINAL_TABLE.items():
        at_home, away = (side == season.teams.index(team) for side in (season.home, season.away))
        assert at_home.sum() == away.sum() == 19
        won, drawn, lost = (
            np.sum(season.result[at_home] == k) + np.sum(season.result[away] == 2 - k) for k in (2, 1, 0)
        )
        scored = season.home_goals[at_home].sum() + season.away_goals[away].sum()
        conceded = season.away_goals[at_home].sum() + season.home_goals[away].sum()
        assert (won, drawn, lost, scored, conceded) == expected
