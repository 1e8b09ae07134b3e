"""Prompts of models with recurrent layers begin after a prefix only where a state was saved, in slots and in blocks.

`tests.support.fake_runner` refuses a plan that restores another state than the one after the reused prefix.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.adversary import adversary
from tests.support.fake_loop import Loop
from tests.support.small_loops import LAYOUTS, loop, request
from xla_engine.scheduler import FinishReason, SchedulerConfig
from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.kv.prefix_cache import BlockHashes, state_after
from xla_engine.scheduler.kv.prefix_states import PrefixStates
from xla_engine.scheduler.request_state import RequestState

STEM = tuple(range(1, 13)) * 2


def recurrent(slots: int = 3, **options: object) -> Loop:
    return loop(slots, **{"mamba_block_size": 8, "mamba_cache_states": 4} | options)


def reused(driven: Loop, *prompts: tuple[int, ...], **fields: object) -> list[int]:
    """How many tokens each of these prompts reuses when they run one after the other."""
    found = []
    for at, prompt in enumerate(prompts):
        before = driven.scheduler.counters().cached_tokens
        driven.submit(request(f"p{len(driven.plans)}-{at}", prompt=prompt, max_tokens=2, **fields))
        driven.drain()
        driven.scheduler.check()
        found.append(driven.scheduler.counters().cached_tokens - before)
    return found


in_slots_and_blocks = pytest.mark.parametrize("blocks", LAYOUTS)


@in_slots_and_blocks
def test_a_prompt_begins_after_the_last_saved_state_of_its_prefix(blocks: int | None) -> None:
    """Keys and values of more tokens are cached, and the last token of a prompt is always computed."""
    driven = recurrent(num_blocks=blocks)
    assert reused(driven, STEM, STEM[:23], STEM[:16], (*STEM[:15], 0, 0), (*STEM[:7], 0, 0)) == [
        0,
        16,
        8,
        8,
        0,
    ]


def test_keys_and_values_without_a_state_are_not_reused_nor_a_state_without_them() -> None:
    driven = recurrent(slots=1, mamba_cache_states=1)
    assert reused(driven, STEM, STEM[:16]) == [0, 0], "the state after 24 tokens has overwritten those before"
    driven = recurrent(slots=1)
    other = tuple(range(5, 12))
    assert reused(driven, STEM, other, STEM) == [0, 0, 0], "the slot has been overwritten"


@in_slots_and_blocks
def test_the_least_recently_used_state_is_overwritten(blocks: int | None) -> None:
    driven = recurrent(mamba_cache_states=2, num_blocks=blocks)
    a, b, c = (tuple(x for _ in range(9)) for x in (1, 2, 3))
    assert reused(driven, a, b, a, c, a, b) == [0, 0, 8, 0, 8, 0]


@in_slots_and_blocks
def test_of_one_prefix_the_longest_state_is_overwritten_first(blocks: int | None) -> None:
    driven = recurrent(mamba_cache_states=3, num_blocks=blocks)
    assert reused(driven, STEM, (0,) * 9, STEM) == [0, 0, 16]


@pytest.mark.parametrize("blocks", [None, 24])
def test_a_prompt_waits_for_the_one_that_computes_its_prefix(blocks: int | None) -> None:
    driven = recurrent(num_blocks=blocks)
    for index in range(3):
        driven.submit(request(f"r{index}", prompt=(*STEM[:17], index), max_tokens=2))
    driven.drain()
    assert driven.scheduler.counters().cached_tokens == 2 * 16


@in_slots_and_blocks
def test_salts_and_limits_are_kept(blocks: int | None) -> None:
    driven = recurrent(num_blocks=blocks)
    assert reused(driven, STEM, cache_salt="a") + reused(driven, STEM, cache_salt="b") == [0, 0]
    assert reused(driven, STEM, cache_salt="a", max_cached_tokens=15) == [8]
    assert reused(driven, STEM, cache_salt="a", max_cached_tokens=0) == [0]


@in_slots_and_blocks
def test_states_of_a_failed_request_and_of_other_weights_are_forgotten(blocks: int | None) -> None:
    driven = recurrent(num_blocks=blocks)
    driven.submit(request("bad", prompt=STEM, max_tokens=6))
    driven.turn()
    driven.finish("bad", FinishReason.ERROR)
    driven.drain()
    assert reused(driven, STEM, STEM) == [0, 16]
    driven.scheduler.reset_prefix_cache()
    assert reused(driven, STEM) == [0]


@in_slots_and_blocks
def test_a_lookup_ahead_is_what_will_be_reused(blocks: int | None) -> None:
    driven = recurrent(num_blocks=blocks)
    reused(driven, STEM)
    state = RequestState(request=request("x", prompt=STEM[:20]), arrival=0, turn=0)
    assert driven.scheduler.kv.cached_tokens(state) == 16


def test_a_request_with_blocks_holds_its_state_until_it_begins() -> None:
    """The two that enter meanwhile pass as many states as there are places, and begin before it."""
    driven = recurrent(slots=4, mamba_cache_states=1, num_blocks=40, max_num_batched_tokens=4)
    reused(driven, STEM[:9])
    for at, prompt in enumerate(((3,) * 20, (5,) * 20, STEM[:12])):
        driven.submit(request(f"r{at}", prompt=prompt, max_tokens=2))
    driven.turn()
    states = driven.scheduler.kv.states
    assert states is not None and states.pool.num_free == 0, "the third holds the only place"
    driven.drain()
    driven.scheduler.check()
    assert driven.scheduler.counters().cached_tokens == 8 and states.pool.num_free == 1


def test_a_request_that_ends_before_it_begins_lets_go_of_its_state() -> None:
    driven = recurrent(num_blocks=40, max_num_batched_tokens=4)
    reused(driven, STEM[:9])
    driven.submit(request("long", prompt=(3,) * 20, max_tokens=2))
    driven.submit(request("short", prompt=STEM[:12], max_tokens=2))
    driven.turn()
    states = driven.scheduler.kv.states
    assert states is not None and states.pool.num_used == 1
    driven.finish("short")
    driven.scheduler.check()
    assert states.pool.num_used == 0


def stored() -> Loop:
    """A loop that has stored the first two states of `STEM` and the blocks before them, and has lost all."""
    driven = recurrent(num_blocks=24, stores_blocks=True)
    assert reused(driven, STEM[:21], STEM[:17], (*STEM[:8], 0)) == [0, 16, 8]
    driven.scheduler.reset_prefix_cache()
    assert len(driven.runner.states_outside) == 2 and len(driven.runner.outside) == 2 + 4
    driven.draw.random = lambda: 0.0  # type: ignore[method-assign]
    return driven


def test_a_state_is_stored_when_a_second_prompt_begins_with_it_and_comes_back() -> None:
    driven = stored()
    before = driven.runner.prefilled
    assert reused(driven, STEM) == [16] and driven.loaded == 1 + 4
    assert driven.runner.prefilled == before + 8
    assert reused(driven, (*STEM[:11], 0)) == [8] and driven.loaded == 1 + 4 + 1, "only the state was missing"


def test_blocks_without_a_state_are_not_loaded() -> None:
    driven = stored()
    driven.runner.outside = {
        key: tokens for key, tokens in driven.runner.outside.items() if tokens or key == b"none"
    }
    assert reused(driven, STEM) == [0] and driven.loaded == 0


def test_a_state_that_cannot_be_read_costs_no_bit() -> None:
    driven = stored()
    driven.draw.random = lambda: 0.95  # type: ignore[method-assign]
    assert reused(driven, STEM) == [0] and driven.loaded == 0


def test_an_interval_off_the_grid_is_refused() -> None:
    for size in (6, 2):
        with pytest.raises(ValueError, match="mamba_block_size"):
            recurrent(mamba_block_size=size)


def storms() -> tuple[int, int]:
    """Adversarial sequences; returns the tokens reused, and the states loaded from outside."""
    total = loaded = 0
    for seed in range(60):
        draw = random.Random(seed)
        size = draw.choice((2, 4))
        config = SchedulerConfig(
            max_num_seqs=draw.randint(1, 4),
            chunk_size=2,
            num_blocks=draw.choice((None, 44 // size, 90 // size)),
            max_num_batched_tokens=draw.choice((2, 8, 30)),
            max_chunks=draw.choice((None, 2)),
            enable_prefix_caching=True,
            block_size=size,
            mamba_block_size=4,
            mamba_cache_states=draw.randint(1, 5),
            stores_blocks=draw.random() < 0.5,
            prefill_equals_decode=draw.random() < 0.6,
            preemption=draw.random() < 0.6,
            swap_tokens=draw.choice((0, 1 << 20)),
            recompute_tokens=draw.choice((0, 100)),
        )
        driven = adversary(draw, turns=20, config=config)
        driven.drain(lag=seed % 2)
        total += driven.scheduler.counters().cached_tokens
        loaded += sum(each.is_state for plan in driven.plans for each in plan.moves.loads)
    return total, loaded


def test_adversarial_sequences_restore_no_wrong_state() -> None:
    reused, loaded = storms()
    assert reused > 1000 and loaded > 5, "something was reused, also from outside"


def an_overwritten_state_keeps_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    save = PrefixStates.save

    def careless(self, state, begun):  # type: ignore[no-untyped-def]
        known = self.pool._by_key
        before = dict(known)
        yield from save(self, state, begun)
        known.update({key: place for key, place in before.items() if key not in known})

    monkeypatch.setattr(PrefixStates, "save", careless)


def a_state_is_saved_one_chunk_early(monkeypatch: pytest.MonkeyPatch) -> None:
    key = PrefixStates._key
    monkeypatch.setattr(
        PrefixStates, "_key", lambda self, state, length: key(self, state, min(length + 4, 8))
    )


def a_state_is_found_in_the_step_that_saves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = PrefixStates.keys

    def eager(self, state, begun):  # type: ignore[no-untyped-def]
        for _ in self.save(state, begun):
            pass
        return keys(self, state, begun)

    monkeypatch.setattr(PrefixStates, "keys", eager)


def salts_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockHashes, "_root", lambda self, request: b"")


def keys_and_values_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = PrefixStates.usable

    def careless(self, state, cached, coming=()):  # type: ignore[no-untyped-def]
        return usable(self, state, state.context_tokens, coming)

    monkeypatch.setattr(PrefixStates, "usable", careless)


def a_waiting_state_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixStates, "hold", lambda self, state, length: None)


def blocks_are_shared_beyond_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = BlockManager._usable

    def careless(self, state):  # type: ignore[no-untyped-def]
        states, self._states = self._states, None
        try:
            return usable(self, state)
        finally:
            self._states = states

    monkeypatch.setattr(BlockManager, "_usable", careless)


def a_state_is_loaded_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_load_state", _load_into_the_first)


def _load_into_the_first(self, states, block, keys):  # type: ignore[no-untyped-def]
    state = state_after(block)
    if state.key in keys and states.make_place(block) is not None:
        self._loads.append(replace(state, block=0))


def a_state_is_stored_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    place = PrefixStates.place

    def altered(self, states, state, length):  # type: ignore[no-untyped-def]
        stored = state_after(self._hashes.of_context(state)[length // self._block_size - 1])
        self._stores.append(replace(stored, block=place(states, state, length) ^ 1))

    monkeypatch.setattr(BlockManager, "_store_state", altered)


FAULTS = [
    a_state_is_loaded_elsewhere,
    a_state_is_stored_from_elsewhere,
    a_waiting_state_is_not_held,
    blocks_are_shared_beyond_the_last_state,
    an_overwritten_state_keeps_its_key,
    a_state_is_saved_one_chunk_early,
    a_state_is_found_in_the_step_that_saves_it,
    salts_are_ignored,
    keys_and_values_are_not_looked_at,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, LookupError)):
        storms()
