"""The limits a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass

from xla_engine.scheduler.immutable import Immutable
from xla_engine.scheduler.policy import PREEMPTIVE
from xla_engine.scheduler.user_policy import find_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Immutable):
    """Limits of a scheduler. Raises ValueError, naming the field, for a limit that is below 1.

    max_num_seqs: number of slots.
    chunk_size: prompt tokens of one prefill lane.
    max_num_batched_tokens: tokens of one step, where a decode row counts one and a chunk its padded width
        `chunk_size`. Every live row decodes and at least one chunk runs, even where that exceeds it.
    max_chunks: chunks of one step, None for no bound but that of tokens. Chunks beyond the lanes of a prefill call
        take one more call.
    max_waiting: most requests that wait beyond the free slots, None for no bound.
    scheduling_policy: who goes first, one of `scheduler.policy.POLICIES` or the import path of another
        (`scheduler.user_policy`).
    priority_aging: later arrivals that one class of priority is worth, see `scheduler.policy.place`; under policies
        that bound no wait by themselves, how many requests may go before the one that waits longest.
    quantum: steps a request decodes under "round_robin" before it makes room for one that waits.
    enable_prefix_caching: slots keep what they hold for prompts that begin alike; see
        `scheduler.kv.slot_prefix_cache`.
    block_size: tokens of one block of the prefix cache.
    num_blocks: blocks of `block_size` tokens that slots borrow, see `scheduler.kv.block_manager`; None: every slot
        has memory of its own. Where blocks run out, requests lose their slots whatever `preemption` says.
    cache_key: names the model; the keys of blocks begin with it.
    prefill_equals_decode: prefill gives the bits of decode on this device, so that generated tokens may be reused and
        recomputed.
    cut_invariant: a prompt's last token has the same bits in a chunk of its own, so that nothing else of a prompt that
        is wholly cached runs again.
    preemption: a request that is before another in line takes its slot; see `Scheduler.preempt`.
    swap_tokens: tokens of parked requests that the host has room for.
    recompute_tokens: requests of up to so many tokens are recomputed and not parked, where that is exact.
    keeps_finished: requests that have ended may go on, see `scheduler.continuation`.
    """

    max_num_seqs: int
    chunk_size: int
    max_num_batched_tokens: int
    max_chunks: int | None = None
    max_waiting: int | None = None
    scheduling_policy: str = "priority"
    priority_aging: int = 64
    quantum: int = 64
    enable_prefix_caching: bool = False
    block_size: int = 64
    num_blocks: int | None = None
    cache_key: str = ""
    prefill_equals_decode: bool = False
    cut_invariant: bool = False
    preemption: bool = False
    swap_tokens: int = 1 << 20
    recompute_tokens: int = 0
    keeps_finished: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "chunk_size",
            "max_num_batched_tokens",
            "max_chunks",
            "max_waiting",
            "priority_aging",
            "block_size",
            "num_blocks",
            "quantum",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        find_policy(self.scheduling_policy)
        if self.preemption and self.scheduling_policy not in PREEMPTIVE:
            raise ValueError(
                f"preemption under {self.scheduling_policy!r} would let newcomers take a slot away again and "
                "again; use it with fcfs or priority"
            )

    @property
    def keeps_tokens(self) -> bool:
        """Whether generated tokens are of any use to the scheduler."""
        loses_slots = self.preemption or self.num_blocks is not None or self.keeps_finished
        return self.prefill_equals_decode and (self.enable_prefix_caching or loses_slots)
