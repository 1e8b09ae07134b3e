"""Drafts are continuations that were seen in the same group, and memory is bounded."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from xla_engine.engine.speculation.proposer import Proposer
from xla_engine.engine.speculation.suffix import LONGEST, RUN, SuffixProposer

TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=40)


def told(proposer: Proposer, name: str, tokens: list[int], group: str = "") -> None:
    proposer.begin(name, tokens, group)


def test_what_followed_the_longest_match_comes() -> None:
    proposer = SuffixProposer()
    told(proposer, "a", [1, 2, 3, 4, 50, 51, 9, 2, 3, 4, 60, 61, 1, 2, 3, 4])
    assert proposer.propose("a", 2) == ([50, 51], 4)


def test_among_equals_the_latest_place_comes() -> None:
    proposer = SuffixProposer()
    told(proposer, "a", [7, 2, 3, 4, 50, 8, 2, 3, 4, 60, 9, 2, 3, 4])
    assert proposer.propose("a", 1) == ([60], 3)


def test_text_that_repeats_itself_goes_round() -> None:
    proposer = SuffixProposer()
    told(proposer, "a", [1, 2] * 6)
    tokens, match = proposer.propose("a", 7)
    assert list(tokens) == [1, 2, 1, 2, 1, 2, 1] and match == 10


def test_a_short_match_earns_a_short_guess() -> None:
    proposer = SuffixProposer()
    told(proposer, "a", [1, 2, 3, *range(10, 40), 5, 1, 2, 3])
    tokens, match = proposer.propose("a", 30)
    assert match == RUN and len(tokens) == 2 * RUN


def test_finished_sequences_are_quoted_in_their_group_only() -> None:
    """Otherwise the time a guess saves would tell one caller what another has asked."""
    proposer = SuffixProposer()
    told(proposer, "a", [1, 2, 3, 4, 5, 6], "mine")
    proposer.end("a")
    for group, expected in (("mine", [4, 5, 6]), ("yours", []), ("", [])):
        told(proposer, "b", [1, 2, 3], group)
        assert list(proposer.propose("b", 3).tokens) == expected


def test_without_sharing_nothing_is_kept() -> None:
    proposer = SuffixProposer(shares=False)
    told(proposer, "a", [1, 2, 3, 4, 5, 6])
    proposer.end("a")
    assert proposer.num_tokens == 0
    told(proposer, "b", [1, 2, 3])
    assert not proposer.propose("b", 3).tokens


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), own=TEXTS, most=st.integers(0, 12))
def test_a_guess_was_seen_behind_the_longest_match(texts: list[list[int]], own: list[int], most: int) -> None:
    """Compared with an exhaustive search, as long as no position is dropped."""
    proposer = SuffixProposer()
    for number, text in enumerate(texts[:6]):
        told(proposer, str(number), text)
        proposer.end(str(number))
    told(proposer, "own", own[: len(own) // 2])
    for token in own[len(own) // 2 :]:
        proposer.extend("own", [token])
    tokens, match = proposer.propose("own", most)
    assert len(tokens) <= most
    if not tokens:
        return
    seen = [*texts[:6], own + list(tokens)]
    assert any(
        text[at : at + match] == own[len(own) - match :]
        and text[at + match : at + match + len(tokens)] == list(tokens)[: len(text) - at - match]
        for text in seen
        for at in range(len(text) - match)
        if not (text is seen[-1] and at + match >= len(own))
    )
    assert RUN <= match <= LONGEST


@given(texts=st.lists(TEXTS, max_size=20), bound=st.integers(1, 60))
def test_memory_is_bounded(texts: list[list[int]], bound: int) -> None:
    proposer = SuffixProposer(max_tokens=bound)
    for number, text in enumerate(texts):
        told(proposer, str(number), text, str(number % 3))
        proposer.end(str(number))
        assert proposer.num_tokens <= bound
    kept = sum(len(group.latest) for group in proposer._groups.values())
    assert kept <= bound


def test_a_step_of_eight_rows_costs_little() -> None:
    """The budget is 0.15 ms a step; a slow machine gets ten times as much here."""
    proposer = SuffixProposer()
    for row in range(8):
        told(proposer, str(row), [token * (row + 1) % 97 for token in range(2000)])
        proposer.propose(str(row), 16)
    rounds = []  # of ten steps; the fastest counts, because others share the core
    for _ in range(5):
        began = time.thread_time()
        for step in range(10):
            for row in range(8):
                proposer.extend(str(row), [step % 97])
                proposer.propose(str(row), 16)
        rounds.append((time.thread_time() - began) / 10)
    assert min(rounds) < 1.5e-3
