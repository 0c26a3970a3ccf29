"""Schedules: requests become possible merges per layer."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import InvalidOption
from vitrail.merging import Room, Schedule
from vitrail.merging.schedule import ramp

ROOM = Room(197, 1)


def solve(depth=12, room=ROOM, cost=None, **options):
    return Schedule.parse(depth, **options).solve(depth, room, cost)


def test_published_decreasing_schedule():
    solution = solve(r=16, schedule="decreasing")
    assert solution.per_layer == (32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0)
    assert 197 - sum(solution.per_layer) == 10


def test_increasing_mirrors_decreasing_up_to_rounding():
    up, down = ramp(16, 1, 12), ramp(16, -1, 12)
    assert all(abs(a - b) <= 1 for a, b in zip(up, reversed(down), strict=True))
    assert up[0] == 0
    assert up[-1] in (31, 32)


@given(r=st.integers(0, 60), inflection=st.floats(-1, 1), depth=st.integers(1, 40))
def test_ramps_are_straight_and_keep_the_mean(r, inflection, depth):
    values = ramp(r, inflection, depth)
    assert len(values) == depth
    assert min(values) >= 0
    assert abs(sum(values) - r * depth) <= depth
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert not steps or max(steps) - min(steps) <= 1


@given(
    wanted=st.lists(st.integers(0, 200), min_size=1, max_size=24),
    special=st.integers(0, 6),
    patches=st.integers(1, 300),
)
def test_caps_leave_half_of_the_unprotected_tokens(wanted, special, patches):
    per_layer = Room(special + patches, special).cap(wanted)
    left = patches
    for r, requested in zip(per_layer, wanted, strict=True):
        assert r == min(requested, left // 2)
        left -= r
    assert left >= 1


@given(
    keep=st.floats(0.001, 1),
    schedule=st.floats(-1, 1),
    special=st.integers(0, 5),
    patches=st.integers(1, 600),
    depth=st.integers(1, 40),
)
def test_keep_is_met_exactly_or_refused_when_impossible(keep, schedule, special, patches, depth):
    room = Room(special + patches, special)
    goal = max(1, round(keep * patches))
    most = patches - sum(room.cap([10**6] * depth))
    if keep * patches < 0.1 or goal < most:
        with pytest.raises(InvalidOption, match="less than one" if keep * patches < 0.1 else "cannot merge below"):
            solve(depth, room, keep=keep, schedule=schedule)
    else:
        solution = solve(depth, room, keep=keep, schedule=schedule)
        assert patches - sum(solution.per_layer) == goal
        assert room.cap(solution.per_layer) == solution.per_layer


def test_keep_spreads_merges_as_the_schedule_says():
    early, even, late = (solve(keep=0.5, schedule=s).per_layer for s in ("decreasing", "constant", "increasing"))
    assert max(even) - min(even) <= 1
    assert early[0] > early[5] > early[-1]
    assert late[0] < late[5] < late[-1]


def total_tokens(per_layer, start=197):
    """A cost that any merge lowers: tokens that leave all layers together."""
    left, total = start, 0
    for r in per_layer:
        left -= r
        total += left
    return total * 1e9


def test_budget_takes_the_gentlest_schedule_that_fits():
    solution = solve(gflops=1500, cost=total_tokens)
    assert solution.cost == total_tokens(solution.per_layer) <= 1500e9
    gentler = [*solution.per_layer]
    gentler[max(i for i, r in enumerate(gentler) if r)] -= 1
    assert total_tokens(gentler) - solution.cost <= 12e9


def test_budget_that_is_met_already_merges_nothing():
    assert solve(gflops=1e6, cost=total_tokens).per_layer == (0,) * 12


def test_unreachable_budget_names_what_is_reachable():
    with pytest.raises(InvalidOption, match=r"gflops=1 cannot be reached.*2\.36e\+03.*with the most merging"):
        solve(gflops=1, cost=total_tokens)


def test_shortage_is_counted():
    solution = solve(r=100)
    assert solution.per_layer == (98, 49, 24, 12, 6, 3, 2, 1, 0, 0, 0, 0)
    assert solution.missing == 1200 - 195


def test_masked_first_step_has_its_own_cap():
    assert Room(20, 8, first=2).cap([0, 5, 5]) == (0, 2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of r=, keep= or gflops=; got none"),
        ({"r": 3, "keep": 0.5}, "got r and keep"),
        ({"keep": 0.5, "gflops": 3}, "got keep and gflops"),
        ({"r": -1}, "0 or more, or a list with one for each layer; got -1"),
        ({"r": 2.5}, "a whole number of 0 or more.*got 2.5"),
        ({"r": "8"}, "got '8'"),
        ({"r": True}, "got True"),
        ({"r": [1, 2]}, "12 layers, the list 2"),
        ({"r": [1] * 11 + [-1]}, "got -1"),
        ({"r": [1] * 12, "schedule": "decreasing"}, "a list for r is the schedule itself"),
        ({"keep": 0}, "above 0 and at most 1; got 0"),
        ({"keep": 1.5}, "got 1.5"),
        ({"keep": math.nan}, "got nan"),
        ({"keep": "half"}, "got 'half'"),
        ({"gflops": 0}, "above 0"),
        ({"gflops": math.inf}, "above 0"),
        ({"r": 3, "schedule": "sideways"}, "constant, decreasing, increasing or a number"),
        ({"r": 3, "schedule": 1.5}, "got 1.5"),
    ],
)
def test_bad_options_say_what_is_expected(options, message):
    with pytest.raises(InvalidOption, match=message):
        Schedule.parse(12, **options)


def test_numpy_and_torch_integers_count():
    import numpy as np

    assert Schedule.parse(2, r=np.int64(3)).r == 3
    assert Schedule.parse(2, r=(1, np.int32(2))).r == (1, 2)


ROWS_OF_SEVEN = Room(197, 1, feasible=lambda r, tokens: r // 7 * 7)


def test_what_is_not_feasible_is_left_to_the_next_layers_that_merge():
    assert solve(r=5, room=ROWS_OF_SEVEN).per_layer == (0, 7, 7, 0, 7, 7, 7, 0, 7, 7, 0, 7)
    assert solve(depth=6, r=[5, 0, 3, 30, 0, 1], room=ROWS_OF_SEVEN).per_layer == (0, 0, 7, 28, 0, 0)
    assert solve(r=5, room=ROWS_OF_SEVEN).missing == 0, "60 were requested and 56 are whole rows"
    assert solve(depth=3, r=100, room=ROWS_OF_SEVEN).per_layer == (98, 49, 21)
    assert solve(depth=3, r=100, room=ROWS_OF_SEVEN).missing == 300 - 168, "no layer can merge more"


def test_restored_layers_owe_nothing():
    room = Room(197, 1, restored=True, feasible=lambda r, tokens: r // 7 * 7)
    assert solve(depth=3, r=13, room=room).per_layer == (7, 7, 7)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.77])
def test_keep_with_rows_removes_just_enough(keep):
    per_layer = solve(keep=keep, room=ROWS_OF_SEVEN).per_layer
    assert all(r % 7 == 0 for r in per_layer)
    left = 196 - sum(per_layer)
    assert left <= round(keep * 196) < left + 14


def test_layers_without_a_share_merge_nothing_where_the_method_decides():
    assert solve(depth=4, layers=[0, 0.5, 0, 0.5], required=False).per_layer == (0, 197, 0, 197)
    assert solve(depth=4, layers=[0, 0.5, 0, 0.5], r=3).per_layer == (0, 6, 0, 6)


def test_without_a_number_layers_without_a_share_merge_nothing():
    solution = solve(3, Room(17, 1), required=False, layers=(0.0, 0.5, 0.5))
    assert solution.per_layer == (0, 17, 17)
    assert solve(3, Room(17, 1), required=False).per_layer == (17, 17, 17)
