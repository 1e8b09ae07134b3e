"""Loops of few slots with paging and a prefix cache, and requests for them."""

from __future__ import annotations

from tests.support.fake_loop import Loop
from xla_engine.scheduler import Request, SchedulerConfig

BASE = {"chunk_size": 4, "max_num_batched_tokens": 64, "block_size": 4, "priority_aging": 4}

LAYOUTS = [None, 12]  # slots of their own, or blocks


def loop(slots: int, **options: object) -> Loop:
    fields = BASE | {"enable_prefix_caching": True, "preemption": True} | options
    return Loop(SchedulerConfig(max_num_seqs=slots, **fields))  # type: ignore[arg-type]


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6, **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def holders(driven: Loop) -> set[str]:
    return {slot.request.request_id for slot in driven.scheduler.snapshot().slots if slot.request is not None}
