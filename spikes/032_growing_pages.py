# Frozen: runs at commit a8802fc.
"""Pages taken as rows grow, or reserved at admission, or slots of their own: how many steps does a job take?

python -m spikes.032_growing_pages

Deterministic: the scheduler plans, a stand-in samples, steps are counted. The last table is the only one with times.
"""

# %%
from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from spikes.support.timing import describe_machine, markdown_table
from tests.support.fake_runner import decoded_of
from xla_engine.scheduler import Decoded, Plan, Request, Sample, Scheduler, SchedulerConfig, StepResult
from xla_engine.scheduler.kv.block_manager import BlockManager, _positions
from xla_engine.scheduler.request_state import RequestState

STOP = 0
LONGEST = 1024  # positions of a slot
PAGE = 64
BASE = SchedulerConfig(
    max_num_seqs=32,
    chunk_size=32,
    max_num_batched_tokens=32 + 256,
    max_chunks=8,
    block_size=PAGE,
    enable_prefix_caching=True,
    preemption=True,
)


def requests(count: int = 400) -> dict[str, tuple[Request, int]]:
    """By id a request and how many tokens it samples before it stops; all ask for 512."""
    draw = random.Random(0)
    drawn = {}
    for index in range(count):
        own = min(int(draw.lognormvariate(4, 0.8)), 400)
        prompt = tuple(draw.randrange(1, 1000) for _ in range(1 + own))
        tokens = min(1 + int(draw.lognormvariate(3.7, 1.0)), 512)
        drawn[str(index)] = (
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                max_tokens=512,
                stop_token_ids=frozenset({STOP}),
            ),
            tokens,
        )
    return drawn


@dataclass
class Outcome:
    steps: int
    rows: float  # that decode in a step
    preemptions: int
    computed: int  # prompt tokens, again ones among them
    wait: float  # median steps to the first token


def drain(config: SchedulerConfig, drawn: dict[str, tuple[Request, int]], lag: int = 1) -> Outcome:
    scheduler = Scheduler(config)
    for request, _ in drawn.values():
        scheduler.submit(request)
    sampled = dict.fromkeys(drawn, 0)
    first: dict[str, int] = {}
    in_flight: deque[tuple[Plan, StepResult]] = deque()
    rows: list[int] = []
    computed = 0

    def take(request_id: str) -> Sample:
        sampled[request_id] += 1
        return Sample(STOP if sampled[request_id] >= drawn[request_id][1] else 1, None)

    while scheduler.has_unfinished:
        plan = scheduler.plan()
        for request_id in plan.replays:
            sampled[request_id] = 0
        if not plan.is_empty:
            heads = [take(chunk.request_id) for chunk in plan.first_rows]
            # A row that has stopped samples nothing more.
            live = [sampled[row.request_id] < drawn[row.request_id][1] for row in plan.decode]
            samples = [
                take(row.request_id) if alive else None for row, alive in zip(plan.decode, live, strict=True)
            ]
            in_flight.append((plan, StepResult(first=heads, decode=decoded_of(plan.decode, samples))))
            rows.append(sum(live))
            computed += sum(len(chunk.tokens) for chunk in plan.chunks)
        while len(in_flight) > (0 if plan.is_empty else lag):
            read, result = in_flight.popleft()
            for event in scheduler.commit(read, result):
                first.setdefault(event.request_id, read.step)
    counters = scheduler.counters()
    return Outcome(
        steps=counters.steps_planned,
        rows=statistics.mean(rows),
        preemptions=counters.preemptions,
        computed=computed,
        wait=statistics.median(first.values()),
    )


@contextmanager
def reserving() -> Iterator[None]:
    """RequestValidator takes all that a request may ever write."""
    grown = BlockManager._first_blocks

    def whole(self: BlockManager, state: RequestState) -> int:
        return self.pool.blocks_for(_positions(state))

    BlockManager._first_blocks = whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockManager._first_blocks = grown  # type: ignore[method-assign]


def layouts(pages: int) -> Iterator[tuple[str, Outcome]]:
    """The same job in the memory of so many pages."""
    job = requests()
    slots = pages * PAGE // LONGEST
    yield f"{slots} slots of {LONGEST}", drain(replace(BASE, max_num_seqs=slots), job)
    paged = replace(BASE, num_blocks=pages)
    with reserving():
        yield "32 slots, pages reserved", drain(paged, job)
    yield "32 slots, pages as they grow", drain(paged, job)
    yield "the same, no room on the host", drain(replace(paged, swap_tokens=0), job)


def step_time(config: SchedulerConfig, steps: int = 1200) -> float:
    """Median seconds of plan and commit while all rows decode."""
    scheduler = Scheduler(config)
    for index in range(config.max_num_seqs):
        prompt = (index % 200, index // 200, 3, 4) * (1 + index % 16)
        scheduler.submit(Request(request_id=str(index), prompt_token_ids=prompt, max_tokens=steps + 400))
    one, decoded = Sample(5, -0.1), Decoded(tokens=[5] * config.max_num_seqs)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter() - began
        result = StepResult(first=[one] * len(plan.first_rows), decode=decoded)
        began = time.perf_counter()
        scheduler.commit(plan, result)
        times.append(planned + time.perf_counter() - began)
    return statistics.median(times[300:])


# %%
if __name__ == "__main__":
    table = []
    for pages in (48, 64, 96, 128, 256):
        for name, found in layouts(pages):
            values = found.steps, found.rows, found.preemptions, found.computed / 1000, found.wait
            table.append([str(pages * PAGE), name, *(f"{value:.0f}" for value in values)])
    head = ["positions", "layout", "steps", "rows", "slots lost", "k tokens computed", "steps to first token"]
    print(markdown_table(head, table))
    print(describe_machine())
    wide = replace(BASE, max_num_seqs=256, max_num_batched_tokens=512)
    slots, paged = [], []
    for _ in range(5):
        slots.append(step_time(wide))
        paged.append(step_time(replace(wide, num_blocks=256 * 32)))
    print(
        markdown_table(
            ["plan and commit, 256 rows", "microseconds a step"],
            [
                ["slots of their own", f"{1e6 * min(slots):.0f}"],
                ["pages as they grow", f"{1e6 * min(paged):.0f}"],
            ],
        )
    )
