import itertools

import numpy as np
import pytest

from numpyro_ext.linalg.padding import cheapest_levels, padded_groups, places_within, rounded_up


@pytest.mark.parametrize("digits", [1, 3, 4])
def test_rounded_up_is_the_next_number_of_few_digits(digits):
    for number in range(300):
        found = rounded_up(number, digits)
        few = (n for n in range(number, 2 * number + 1) if len(bin(n)[2:].rstrip("0")) <= digits)
        assert found == next(few), number


@pytest.mark.parametrize("size", [0, 1, 17])
def test_groups_are_those_of_a_loop(size):
    rng = np.random.default_rng(size)
    label, members = rng.integers(5, size=size), rng.permutation(size)
    of_groups = [[], [], [], [], []]
    for position, (group, member) in enumerate(zip(label, members, strict=True)):
        assert places_within(label, 5)[position] == len(of_groups[group])
        of_groups[group].append(member)
    widest = max(map(len, of_groups))
    for width in (None, widest, widest + 2):
        found = padded_groups(label, 5, -7, members=members, width=width)
        assert found.shape == (5, widest if width is None else width)
        for row, group in zip(found, of_groups, strict=True):
            np.testing.assert_array_equal(row, group + [-7] * (len(row) - len(group)))
    np.testing.assert_array_equal(padded_groups(label, 5, size), padded_groups(label, 5, size, members=np.arange(size)))


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_levels_cost_as_little_as_the_best_of_all_cuts(most):
    rng = np.random.default_rng(most)
    for size in (1, 2, 5, *[8] * 20):
        cost = rng.normal(size=(size, size))  # any, also such that fewer runs than allowed are best

        def total(cuts, cost=cost, size=size):
            ends = [*cuts, size]
            return sum(cost[first, last - 1] for first, last in zip([0, *cuts], ends, strict=True))

        all_cuts = [c for k in range(min(most, size)) for c in itertools.combinations(range(1, size), k)]
        level = cheapest_levels(cost, most)
        found = tuple(np.flatnonzero(np.diff(level)) + 1)
        assert level[0] == 0 and set(np.diff(level)) <= {0, 1} and level[-1] < most
        np.testing.assert_allclose(total(found), min(map(total, all_cuts)), rtol=0, atol=1e-12)
    assert cheapest_levels(np.zeros((0, 0)), most).size == 0
