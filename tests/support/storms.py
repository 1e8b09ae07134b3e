"""Random calls to the scheduler from a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.fake_loop import Loop
from tests.support.fake_runner import VOCABULARY
from xla_engine.scheduler import Request, SchedulerConfig


def within(request: Request, now: float, times: tuple[int | None, int | None]) -> Request:
    deadline, queue_deadline = (None if time is None else now + time for time in times)
    return replace(request, deadline=deadline, queue_deadline=queue_deadline)


def some_request(rng: random.Random, request_id: str) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))),
        max_tokens=rng.randint(1, 8),
        constrained=rng.random() < 0.3,
        stop_token_ids=frozenset({rng.randrange(VOCABULARY)}),
        priority=rng.choice([0, 0, 0, 1, -1]),
    )


def storm(rng: random.Random, turns: int = 40) -> Loop:
    """A loop after some turns of submits, aborts and resubmits at a lag of 0 to 3."""
    loop = Loop(
        SchedulerConfig(
            max_num_seqs=rng.randint(1, 3),
            chunk_size=3,
            max_num_batched_tokens=rng.choice([2, 8, 30]),
            priority_aging=2,
        )
    )
    lag = rng.randint(0, 3)
    for _ in range(turns):
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            request_id = f"r{rng.randrange(5)}"
            if rng.random() < 0.5:
                loop.finish(request_id)
            if request_id not in loop.live:
                times = rng.choice([(None, None), (None, None), (4, None), (30, 2)])
                loop.submit(within(some_request(rng, request_id), loop.now, times))
        loop.blocked = frozenset(name for name in loop.live if rng.random() < 0.2)
        loop.pass_time(1)
        if rng.random() < 0.03:
            loop.restart()
        loop.turn(lag)
        loop.scheduler.check()
    return loop
