"""The embedded dates against published totals, and the counting of events."""

import numpy as np
import pytest

from numpyro_ext.datasets import bin_events, load_coal_mining, load_coal_mining_counts

# Disasters per year from 1851 to 1962, as published with the series.
PER_YEAR = [
    *(4, 5, 4, 1, 0, 4, 3, 4, 0, 6, 3, 3, 4, 0, 2, 6, 3, 3, 5, 4, 5, 3, 1, 4, 4, 1, 5, 5, 3, 4, 2, 5, 2, 2, 3, 4, 2, 1),
    *(3, 2, 2, 1, 1, 1, 1, 3, 0, 0, 1, 0, 1, 1, 0, 0, 3, 1, 0, 3, 2, 2, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 2, 1, 0),
    *(0, 0, 1, 1, 0, 2, 3, 3, 1, 1, 2, 1, 1, 1, 1, 2, 3, 3, 0, 0, 0, 1, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1),
    *(0, 1),
]


def test_dates_are_sorted_and_agree_with_the_published_counts_per_year():
    dates = load_coal_mining()
    assert dates.shape == (191,)
    assert np.all(np.diff(dates) >= 0)
    np.testing.assert_array_equal(bin_events(dates, np.arange(1851, 1964)).counts, PER_YEAR)


def test_default_bins():
    counts, centres = load_coal_mining_counts()
    assert centres.shape == counts.shape == (100,)
    assert np.issubdtype(counts.dtype, np.integer)
    np.testing.assert_allclose(centres[[0, -1]], [1851.56, 1962.44], rtol=1e-15)
    assert counts.sum() == 191


def test_an_event_on_an_edge_belongs_to_the_bin_on_its_right_except_at_the_end():
    counts, centres = bin_events([0.0, 1.0, 1.5, 3.0], [0.0, 1.0, 3.0])
    np.testing.assert_array_equal(centres, [0.5, 2.0])
    np.testing.assert_array_equal(counts, [1, 3])


def test_no_events_is_a_row_of_zeros():
    np.testing.assert_array_equal(bin_events([], [0.0, 1.0, 2.0]).counts, [0, 0])


@pytest.mark.parametrize("dates", [[-0.1, 0.5], [2.5], [np.nan]])
def test_events_outside_the_bins_are_refused(dates):
    with pytest.raises(ValueError, match=r"1 of \d events, for example .*, lie outside \[0.0, 2.0\]"):
        bin_events(dates, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("edges", [[1.0], [[0.0, 1.0]], [0.0, 2.0, 1.0], [0.0, 0.0, 1.0], [0.0, np.nan]])
def test_edges_must_increase(edges):
    with pytest.raises(ValueError, match="edges must be at least two increasing numbers"):
        bin_events([0.5], edges)
