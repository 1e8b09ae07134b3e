"""Many steps of a scheduler at the cost of one, where each is like the one before: for the simulator.

Functions of a `Scheduler`: the engine never skips a step.
"""

from __future__ import annotations

from typing import NamedTuple

from xla_engine.scheduler import policy
from xla_engine.scheduler.plan import Row
from xla_engine.scheduler.scheduler import Scheduler


def next_deadline(scheduler: Scheduler) -> float:
    """Before this time, on the clock of the deadlines, `Scheduler.expire` ends no request; infinity for never."""
    return scheduler._deadlines.next_time


class Steady(NamedTuple):
    """Plans that decode the same rows and run as many chunks of one prompt each, the last chunk in none of them.

    Rows may plan their last token in the last of the plans.

    rows: the very tuple. steps: how many plans. chunks: of each. start: position of the first.
    """

    rows: tuple[Row, ...]
    steps: int
    chunks: int = 0
    start: int = 0


def steady_plans(scheduler: Scheduler) -> Steady | None:
    """Those of the next plans that are alike, if no request comes and none that has a row ends meanwhile; None where
    not even the next is known."""
    if not (steps := _same_rows(scheduler)):
        return None
    rows, state = scheduler._decoding.rows, next(iter(scheduler._prefilling), None)
    if state is None:
        return Steady(rows, steps)
    kv, config = scheduler._kv, scheduler.config
    if not state.prefilled or kv.cache is not None or kv.blocks is not None:
        return None  # something may be looked up for the prompt
    left = policy.num_chunks(state.context_tokens - state.prefilled, config.chunk_size)
    budget = policy.prompt_budget(config.max_num_batched_tokens, len(rows))
    joins = state.request.max_tokens - state.base > 1
    chunks = policy.grant(left, budget, config.chunk_size, joins_decode=joins, first=True)
    chunks = min(chunks, config.max_chunks or chunks)
    steps = min(steps, (left - 1) // chunks)
    return Steady(rows, steps, chunks, state.prefilled) if steps else None


def _same_rows(scheduler: Scheduler) -> int:
    """How many of the next plans decode the same rows, whatever prompts they run beside."""
    waiting, kv, config = scheduler._waiting, scheduler._kv, scheduler.config
    preemption = scheduler._preemption
    if (
        scheduler._constrained
        or scheduler._speculating
        or preemption
        or (
            waiting and (kv.slots.num_free or (config.preemption and not preemption.is_in_vain(waiting.head)))
        )
        or config.keeps_tokens
    ):
        return 0
    next_step = scheduler._next_step
    steps = scheduler._decoding.steady_steps(next_step)
    if kv.blocks is not None and (due := kv.blocks.next_due) is not None:
        steps = min(steps, due - next_step)
    turn_ends = scheduler._round_robin.next_end()
    if waiting and turn_ends is not None:
        steps = min(steps, turn_ends - next_step)
    return max(steps, 0)


def skip_plans(scheduler: Scheduler, steps: int, chunks: int) -> None:
    """Count `steps` more steps as planned: the same as so many calls of `plan`, at least one and at most those of
    `steady_plans`, each with so many chunks."""
    if chunks:
        next(iter(scheduler._prefilling)).prefilled += steps * chunks * scheduler.config.chunk_size
    scheduler._next_step += steps - 1
    for state in scheduler._decoding.due(scheduler._next_step):
        scheduler._hand_over(state)
    scheduler._next_step += 1


def skip_commits(scheduler: Scheduler, steps: int, rows: int) -> None:
    """Count `steps` more steps as committed, each with a token for each of `rows` that ends no request.

    The plans in flight then stand for steps that are `steps` later.
    """
    scheduler._committer.steps += steps
    scheduler._committer.credited += steps * rows
