"""The limits a scheduler works within."""

from collections.abc import Sequence
from dataclasses import dataclass

from xla_engine.scheduler.policy import PREEMPTIVE
from xla_engine.scheduler.request import Immutable, Request
from xla_engine.scheduler.user_policy import find_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Immutable):
    """Limits of a scheduler. Raises ValueError, naming the field, if a limit is below 1.

    max_num_seqs: number of slots, B_max: the width of the decode program.
    chunk_size: prompt tokens of one prefill lane.
    max_num_batched_tokens: tokens of one step; a decode row counts 1, a chunk its padded width `chunk_size`. Every
        live row decodes and at least one chunk runs even if that exceeds this limit.
    max_chunks: chunks of one step; None: limited only by tokens. Chunks beyond the lanes of a prefill call need
        another call.
    max_waiting: the most requests that may wait, beyond those that fit into free slots; None: unbounded.
    scheduling_policy: the order of the queue, one of `scheduler.policy.POLICIES` or the import path of another
        (`scheduler.user_policy`).
    priority_aging: one level of priority counts as many arrivals, see `scheduler.policy.place`. Under policies that do
        not bound waiting times: how many requests may pass the one that waits longest.
    quantum: steps that a request decodes under "round_robin" before it gives up its slot to one that waits.
    enable_prefix_caching: reuse the KV of earlier requests with the same prefix; see `scheduler.kv.prefix_cache`.
    block_size: tokens of a KV block.
    mamba_block_size: states of recurrent layers are saved after each multiple of this number of tokens, which is a
        multiple of chunk size and block size. None: there are none to save.
    mamba_cache_states: the most states that are saved at once.
    num_blocks: size of the block pool that slots borrow from, see `scheduler.kv.block_manager`; None: every slot has
        its own memory. When blocks run out, requests are preempted whatever `preemption` says.
    cache_key: names the model; part of the keys of cached blocks.
    prefill_equals_decode: prefill gives the same bits as decode on this device, so generated tokens can be reused and
        recomputed.
    cut_invariant: the last token of a prompt has the same bits in a chunk of its own, so only that token runs again if
        the whole prompt is cached.
    preemption: a request may take the slot of one that is behind it in line; see `Scheduler.preempt`.
    swap_tokens: tokens of parked requests that fit into host memory.
    recompute_tokens: requests of up to this many tokens are recomputed instead of parked, if that is exact.
    feature_places: of the feature buffer; 0: requests have no pictures. feature_place_tokens: prompt tokens whose
        features fit into a place; those of a tile take as many places as they need.
    whole_tiles: a tile's positions see each other, so they are prefilled in one call, and no prefix ends among them.
    encode_stages: of the vision tower, for one tile: a number, or (tokens, number) for tiles of at most so many
        tokens, ascending. encode_slice: how many run in a step in which rows decode.
    stores_blocks: plans say which blocks to copy out of the pool: those that a second request shares.
    keeps_finished: finished requests can be extended, see `scheduler.continuation`.
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
    mamba_block_size: int | None = None
    mamba_cache_states: int = 1
    num_blocks: int | None = None
    cache_key: str = ""
    prefill_equals_decode: bool = False
    cut_invariant: bool = False
    preemption: bool = False
    swap_tokens: int = 1 << 20
    recompute_tokens: int = 0
    keeps_finished: bool = False
    stores_blocks: bool = False
    feature_places: int = 0
    whole_tiles: bool = False
    feature_place_tokens: int = 1 << 30
    encode_stages: int | Sequence[tuple[int, int]] = 1
    encode_slice: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "chunk_size",
            "max_num_batched_tokens",
            "max_chunks",
            "max_waiting",
            "priority_aging",
            "block_size",
            "mamba_block_size",
            "mamba_cache_states",
            "num_blocks",
            "quantum",
            "feature_place_tokens",
            "encode_slice",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        stages = self.encode_stages
        if (stages if isinstance(stages, int) else min((number for _, number in stages), default=0)) < 1:
            raise ValueError(f"encode_stages is {stages}; give at least 1")
        size = self.mamba_block_size
        if size is not None and (size % self.chunk_size or size % self.block_size):
            raise ValueError(
                f"mamba_block_size is {size}; give a multiple of chunk_size {self.chunk_size} and block_size "
                f"{self.block_size}"
            )
        find_policy(self.scheduling_policy)
        if self.preemption and self.scheduling_policy not in PREEMPTIVE:
            raise ValueError(
                f"preemption under {self.scheduling_policy!r} would let new requests preempt others again and "
                f"again; use it with fcfs or priority"
            )

    @property
    def keeps_tokens(self) -> bool:
        """Whether the scheduler needs the generated tokens of requests."""
        loses_slots = self.preemption or self.num_blocks is not None or self.keeps_finished
        return self.prefill_equals_decode and (self.enable_prefix_caching or loses_slots)

    def stages(self, tokens: int) -> int:
        """`encode_stages` of a tile with this number of tokens."""
        if isinstance(self.encode_stages, int):
            return self.encode_stages
        return next(stages for most, stages in self.encode_stages if tokens <= most)

    def groups(self, request: Request) -> tuple[tuple[int, int], ...]:
        """The positions of a request that are prefilled in one call, see `policy.Groups`."""
        return request.spans if self.whole_tiles else ()
