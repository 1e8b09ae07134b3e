"""The limits a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a scheduler. Raises ValueError, naming the field, for one that is below 1.

    max_num_seqs: number of slots.
    chunk_size: prompt tokens of one prefill lane.
    max_num_batched_tokens: tokens of one step, where a decode row counts one and a chunk its padded width
        `chunk_size`. Every live row decodes and at least one chunk runs, even where that exceeds it.
    max_waiting: longest waiting queue, None for no bound.
    priority_aging: later arrivals that one class of priority is worth; see `scheduler.policy.place`.
    """

    max_num_seqs: int
    chunk_size: int
    max_num_batched_tokens: int
    max_waiting: int | None = None
    priority_aging: int = 64

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "chunk_size", "max_num_batched_tokens", "max_waiting", "priority_aging"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
