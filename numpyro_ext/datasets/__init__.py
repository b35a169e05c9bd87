"""Small embedded data, and the way to larger data that the user downloads."""

from .coal_mining import EventCounts, bin_events, load_coal_mining, load_coal_mining_counts
from .event_logs import EventLog, load_brightkite, load_lastfm_1k, load_movielens_events, load_wikipedia_edits
from .external import data_path
from .football import Season, load_premier_league
from .preferences import PairsOfItems, Rankings, load_best_worst_pairs, load_sushi, simulate_preferences

__all__ = [
    "EventCounts",
    "EventLog",
    "PairsOfItems",
    "Rankings",
    "Season",
    "bin_events",
    "data_path",
    "load_best_worst_pairs",
    "load_brightkite",
    "load_coal_mining",
    "load_coal_mining_counts",
    "load_lastfm_1k",
    "load_movielens_events",
    "load_premier_league",
    "load_sushi",
    "load_wikipedia_edits",
    "simulate_preferences",
]
