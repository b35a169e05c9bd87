"""Small embedded data, and the way to larger data that the user downloads."""

from .coal_mining import EventCounts, bin_events, load_coal_mining, load_coal_mining_counts
from .external import data_path

__all__ = ["EventCounts", "bin_events", "data_path", "load_coal_mining", "load_coal_mining_counts"]
