"""Skips many equal steps of a scheduler at the cost of one. For the simulator only: the engine never skips a step."""

from typing import NamedTuple

from xla_engine.scheduler import policy
from xla_engine.scheduler.plan import Row
from xla_engine.scheduler.scheduler import Scheduler


class Steady(NamedTuple):
    """Consecutive plans with the same rows and the same number of chunks of one prompt.

    They do not include the last chunk of the prompt. Rows may plan their last token only in the last plan.

    rows: the same tuple object as in the plans. steps: how many plans. chunks: per plan. start: position of the first
        chunk.
    """

    rows: tuple[Row, ...]
    steps: int
    chunks: int = 0
    start: int = 0


def steady_plans(scheduler: Scheduler) -> Steady | None:
    """The next plans, as long as they are equal, if no request arrives and none with a row ends meanwhile.

    None if not even the next one can be predicted.
    """
    if not (steps := _same_rows(scheduler)):
        return None
    rows, state = scheduler.running.decoding.rows, next(iter(scheduler.running.prefilling), None)
    if state is None:
        return Steady(rows, steps)
    kv, config = scheduler.kv, scheduler.config
    if not state.prefilled or kv.cache is not None or kv.blocks is not None:
        return None  # the prompt may need a lookup in the prefix cache, or blocks
    left = policy.num_chunks(state.context_tokens - state.prefilled, config.chunk_size)
    budget = config.max_num_batched_tokens - len(rows)
    joins = state.request.max_tokens - state.base > 1
    chunks = policy.grant(left, budget, config.chunk_size, joins_decode=joins, first=True)
    chunks = min(chunks, config.max_chunks or chunks)
    steps = min(steps, (left - 1) // chunks)
    return Steady(rows, steps, chunks, state.prefilled) if steps else None


def _same_rows(scheduler: Scheduler) -> int:
    """How many of the next plans decode the same rows, whatever chunks they run."""
    waiting, kv, config = scheduler.waiting, scheduler.kv, scheduler.config
    preemption = scheduler.preemption
    if (
        scheduler.running.constrained
        or scheduler.running.speculating
        or preemption
        or (
            waiting and (kv.slots.num_free or (config.preemption and not preemption.is_in_vain(waiting.head)))
        )
        or config.keeps_tokens
    ):
        return 0
    next_step = scheduler.next_step
    steps = scheduler.running.decoding.steady_steps(next_step)
    if kv.blocks is not None and (due := kv.blocks.next_due) is not None:
        steps = min(steps, due - next_step)
    turn_ends = scheduler.running.round_robin.next_end()
    if waiting and turn_ends is not None:
        steps = min(steps, turn_ends - next_step)
    return max(steps, 0)


def skip_plans(scheduler: Scheduler, steps: int, chunks: int) -> None:
    """Do the work of `steps` calls of `plan`, each with `chunks` chunks; at least 1 and at most those of
    `steady_plans`."""
    if chunks:
        next(iter(scheduler.running.prefilling)).prefilled += steps * chunks * scheduler.config.chunk_size
    scheduler.next_step += steps - 1
    for state in scheduler.running.decoding.due(scheduler.next_step):
        scheduler.hand_over(state)
    scheduler.next_step += 1


def skip_commits(scheduler: Scheduler, steps: int, rows: int) -> None:
    """Do the work of `steps` commits, each with one token for each of `rows` rows, none of which ends a request.

    The plans in flight then represent later steps, by `steps`.
    """
    scheduler.committer.steps += steps
    scheduler.committer.credited += steps * rows
