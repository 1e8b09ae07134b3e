"""Bugs that prefix caches have shipped, from the projects of `test_known_bugs_of_schedulers`."""

from __future__ import annotations

import pytest

from tests.support.small_loops import LAYOUTS, loop, request
from xla_engine.scheduler.kv.prefix_cache import SlotPrefixCache


@pytest.mark.parametrize("num_blocks", LAYOUTS)
def test_a_shared_prefix_keeps_all_its_owners(num_blocks: int | None) -> None:
    """The bug: sharing set the reference count to one, so the other owners lost their blocks."""
    driven = loop(3, num_blocks=num_blocks)
    stem = tuple(range(1, 13))
    for index in range(3):
        driven.submit(request(f"r{index}", prompt=(*stem, index), max_tokens=12))
    driven.turn()
    driven.turn()
    driven.finish("r0")
    for index in range(3, 8):
        driven.submit(request(f"r{index}", prompt=(index, 7, 7, 7, index), max_tokens=2))
    driven.drain()


@pytest.mark.parametrize("num_blocks", LAYOUTS)
def test_padding_is_not_token_zero_and_the_place_of_a_page_counts(num_blocks: int | None) -> None:
    """The bug: only a block's tokens were hashed, so zero padding looked like token 0, and a block matched at
    any position."""
    driven = loop(2, num_blocks=num_blocks)
    driven.submit(request("a", prompt=(5, 6, 7, 8, 1, 0), max_tokens=1))
    driven.drain()
    reused: list[int] = []
    for name, prompt in (
        ("shorter", (5, 6, 7)),
        ("padded", (5, 6, 7, 8, 1, 0, 0, 0, 3)),
        ("shifted", (1, 0, 5, 6, 7, 8, 1)),
    ):
        driven.submit(request(name, prompt=prompt, max_tokens=1))
        reused += [reuse.length for reuse in driven.turn().moves.reuses]
        driven.drain()
    assert reused == [4], "only the block at the beginning, under the prompt that begins with it"


@pytest.mark.parametrize("num_blocks", LAYOUTS)
@pytest.mark.parametrize("cut_invariant", [False, True])
def test_a_prompt_that_is_wholly_cached_still_computes_a_token(
    cut_invariant: bool, num_blocks: int | None
) -> None:
    """The bug: nothing was left to compute, so there were no logits to sample from."""
    driven = loop(2, cut_invariant=cut_invariant, num_blocks=num_blocks)
    for name in ("a", "b"):
        driven.submit(request(name, prompt=(1, 2, 3, 4, 5, 6, 7, 8), max_tokens=3))
        driven.drain()
    (reuse,) = [reuse for plan in driven.plans for reuse in plan.moves.reuses]
    assert reuse.length == (7 if cut_invariant else 4)


# From here on, bugs of R.


def test_a_slot_reused_by_another_suffix_forgets_the_longer_prefix() -> None:
    """The bug: reuse did not change the slot's version, so the old, longer prefix still matched and returned
    overwritten keys."""
    stem = tuple(range(1, 9))
    driven = loop(1)
    for name, tail in (("long", (1, 2, 3, 4, 5)), ("short", (9,)), ("again", (1, 2, 3, 4, 5))):
        driven.submit(request(name, prompt=(*stem, *tail), max_tokens=1))
        driven.drain()  # `FakeRunner` compares what is reused with the prompt
    assert [reuse.length for plan in driven.plans for reuse in plan.moves.reuses] == [8, 8]


def test_what_was_evicted_is_found_nowhere() -> None:
    """The bug: evicted nodes stayed linked from their parent, and the next lookup raised KeyError."""
    driven = loop(2)
    for index in range(12):
        driven.submit(request(f"r{index}", prompt=(index % 5, *range(1, 12)), max_tokens=1))
        driven.drain()
        driven.scheduler.check()


def test_an_insert_with_everything_in_use_returns() -> None:
    """The bug: with all nodes pinned, eviction looped forever. Here every slot is in use, so nothing can be
    evicted."""
    driven = loop(2)
    stem = tuple(range(1, 13))
    driven.submit(request("a", prompt=(*stem, 1), max_tokens=50))
    driven.submit(request("b", prompt=(*stem, 2), max_tokens=50))
    driven.turn()
    driven.turn()
    driven.submit(request("c", prompt=(*stem, 3), max_tokens=5))
    plan = driven.turn()
    assert not plan.admitted and len(plan.decode) == 2
    driven.drain()


def test_the_cache_finds_every_prompt_that_still_lies_in_a_slot() -> None:
    """The bug: capacity was counted in token nodes; one of five prompts was found, and the lookup crashed for four."""
    driven = loop(5)
    prompts = [tuple((7 * index + at) % 13 for at in range(40)) for index in range(5)]
    for name, prompt in enumerate(prompts):
        driven.submit(request(f"r{name}", prompt=prompt, max_tokens=1))
        driven.drain()
    for name, prompt in enumerate(prompts):
        driven.submit(request(f"again{name}", prompt=prompt, max_tokens=1))
        (reuse,) = driven.turn().moves.reuses
        assert reuse.length == 36 and reuse.source == reuse.slot.index
        driven.drain()


def test_the_inner_pages_of_a_live_prefix_stay() -> None:
    """The bug: only leaves were counted, and inner nodes of a live prefix were evicted. Here the index has
    every block of a slot."""
    cache_checked: list[int] = []
    driven = loop(2)
    driven.submit(request("live", prompt=tuple(range(1, 13)) * 2, max_tokens=30))
    for index in range(6):
        driven.turn()
        driven.submit(request(f"r{index}", prompt=(*range(1, 1 + 4 * (index % 4)), 0), max_tokens=1))
        driven.scheduler.check()
        cache_checked.append(index)
    driven.drain()
    assert isinstance(driven.scheduler.kv.cache, SlotPrefixCache) and len(cache_checked) == 6


def test_prompts_of_which_unequal_parts_are_cached_share_a_step() -> None:
    """The bug: prefill was grouped by cached length, one group at a time."""
    driven = loop(4)
    stem = tuple(range(1, 9))
    driven.submit(request("first", prompt=(*stem, 9), max_tokens=30))
    driven.turn()
    driven.turn()
    driven.turn()
    for name, prompt in (("none", (9, 9, 9)), ("some", (*stem[:4], 7, 7)), ("most", (*stem, 5, 5))):
        driven.submit(request(name, prompt=prompt, max_tokens=3))
    plan = driven.turn()
    assert [(chunk.request_id, chunk.start) for chunk in plan.chunks] == [
        ("none", 0),
        ("some", 4),
        ("most", 8),
    ]
    driven.drain()
