"""Steps are widened if that promises more tokens a second; rows do not speculate if it never does."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_engine.engine.speculation.proposer import CERTAIN
from xla_engine.engine.speculation.speculator import PATIENCE, PROBE, Acceptance, WidthChooser
from xla_engine.runner.step_costs import StepCosts

COSTS = StepCosts(decode={1: 1.0, 8: 1.4}, verify={(1, 8): 1.3, (8, 2): 1.7, (8, 4): 2.4})


def test_costs_between_what_was_measured_lie_on_a_line() -> None:
    assert COSTS.decode_of(1) == 1.0 and COSTS.decode_of(8) == 1.4
    assert COSTS.decode_of(4) == pytest.approx(1.0 + 0.4 * 3 / 7)
    assert COSTS.decode_of(20) == 1.4


def test_a_sure_guess_widens_the_step() -> None:
    chooser = WidthChooser(COSTS)
    assert chooser.looks
    assert chooser.choose(1, [(7, 1 << 20)]) == 8
    assert chooser.choose(8, [(7, 1 << 20)] * 8) == 4


def test_one_guess_among_many_rows_does_not() -> None:
    chooser = WidthChooser(COSTS)
    assert chooser.looks and chooser.choose(8, [(7, 1 << 20)]) == 0
    assert chooser.choose(8, []) == 0


def _looks(chooser: WidthChooser, steps: int) -> list[int]:
    """The steps in which a chooser searches for drafts although there are none."""
    found = []
    for step in range(steps):
        if chooser.looks:
            found.append(step)
            assert chooser.choose(1, []) == 0
    return found


def test_looks_are_ever_rarer_while_they_promise_nothing() -> None:
    chooser = WidthChooser(COSTS)
    found = _looks(chooser, 192)
    assert found[:5] == [0, 2, 5, 10, 19]
    assert {after - before for before, after in pairwise(found[5:])} == {PROBE}
    assert len(found) == 15


def test_a_gain_makes_them_frequent_again() -> None:
    chooser = WidthChooser(COSTS)
    _looks(chooser, 192)
    assert chooser.choose(1, [(7, 20)]) == 8
    assert [chooser.choose(1, []) for _ in range(PATIENCE)][-1] == 0
    assert _looks(chooser, 12) == [1, 4, 9]


def test_a_wider_step_is_never_taken_for_a_cheaper_one() -> None:
    costs = StepCosts.of({1: 0.78, 8: 1.24, (1, 8): 0.61, (8, 4): 1.3})
    assert costs == StepCosts({1: 0.78, 8: 1.24}, {(1, 8): 0.78, (8, 4): 1.3})


def test_rows_stop_speculating_after_a_while_without_gain() -> None:
    chooser = WidthChooser(COSTS)
    assert chooser.looks and chooser.choose(1, [(7, 20)]) == 8
    assert [chooser.choose(1, []) for _ in range(PATIENCE)] == [1] * (PATIENCE - 1) + [0]


def test_wrong_guesses_end_speculation() -> None:
    chooser = WidthChooser(COSTS)
    while chooser.choose(1, [(7, 20)]) == 8:
        chooser.acceptance.observe(20, 7, 0)
    assert chooser.acceptance.of(20) < 0.5


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.floats(0, 1)), max_size=60))
def test_acceptance_stays_a_chance(steps: list[tuple[int, int, float]]) -> None:
    acceptance = Acceptance()
    for match, drafted, share in steps:
        acceptance.observe(match, drafted, int(drafted * share))
        assert 0 <= acceptance.of(match) <= 1


def test_acceptance_follows_what_is_seen() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(20, 7, 7)
        acceptance.observe(3, 7, 0)
    assert acceptance.of(20) > 0.95 and acceptance.of(3) < 0.05
    assert acceptance.of(CERTAIN) == 0.99 and acceptance.of(0) == 0.4  # others learn nothing by it


# A draft model of 0.4 times the model's time: one draft of one row, or of eight.
DEVICE = StepCosts(
    decode={1: 1.0, 8: 1.4}, verify={(1, 2): 1.43, (1, 8): 4.0, (8, 2): 2.8, (8, 4): 6.0}
).with_fewer_drafts()


def _drafting(chooser: WidthChooser, chance: float, steps: int) -> tuple[float, set[int]]:
    """Time without speculation through time with it, if every draft is right with `chance`, and the widths."""
    tokens = seconds = 0.0
    widths = set()
    draw = random.Random(1)
    for _ in range(steps):
        width = chooser.choose(1, [(7, 0)]) if chooser.looks else 0
        widths.add(width)
        right = 0
        while right < width - 1 and draw.random() < chance:
            right += 1
        tokens += 1 + right
        seconds += DEVICE.verify[1, width] if width > 1 else 1
        if width > 1:
            chooser.acceptance.observe(0, width - 1, right)
    return tokens / seconds, widths


def test_costs_of_fewer_drafts_lie_between() -> None:
    assert DEVICE.verify[1, 5] == pytest.approx((1.43 + 4.0) / 2) and DEVICE.verify[8, 3] == pytest.approx(
        4.4
    )


def test_drafts_of_a_model_are_as_many_as_their_acceptance_pays() -> None:
    gain, widths = _drafting(WidthChooser(DEVICE, tries=True), 0.97, 400)
    assert gain > 1.6 and max(widths) >= 6
    gain, widths = _drafting(WidthChooser(DEVICE, tries=True), 0.75, 400)
    assert gain > 1.1 and max(widths) <= 5


def test_drafts_of_a_model_that_is_wrong_end_and_are_tried_ever_more_rarely() -> None:
    for chance in (0.0, 0.3, 0.5):
        gain, _ = _drafting(WidthChooser(DEVICE, tries=True), chance, 2000)
        assert gain > 0.98, chance


def test_drafts_of_a_model_are_not_even_tried_where_the_best_would_lose() -> None:
    chooser = WidthChooser(DEVICE, tries=True)
    assert all(chooser.choose(8, [(7, 0)] * 8) == 0 for _ in range(100) if chooser.looks)
    chooser = WidthChooser(DEVICE, tries=True)
    for _ in range(100):
        chooser.choose(8, [(7, 0)] * 8)
    while not chooser.looks:
        pass
    assert chooser.choose(1, [(7, 0)]) > 1  # one row gains at once


def test_more_rows_end_no_trial() -> None:
    chooser = WidthChooser(DEVICE, tries=True)
    _drafting(chooser, 0.95, 100)
    for _ in range(40):
        assert not chooser.looks or chooser.choose(8, [(7, 0)] * 8) in (0, 1)
    gain, _ = _drafting(chooser, 0.95, 100)
    assert gain > 1.4
