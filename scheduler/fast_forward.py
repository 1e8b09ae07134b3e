"""Many steps of a scheduler at the cost of one, where each is like the one before: for the simulator.

Functions of a `Scheduler`: the engine never skips a step.
"""

from __future__ import annotations

from xla_engine.scheduler.plan import Row
from xla_engine.scheduler.scheduler import Scheduler


def next_deadline(scheduler: Scheduler) -> float:
    """Before this time, on the clock of the deadlines, `Scheduler.expire` ends no request; infinity for never."""
    return scheduler._deadlines.next_time


def steady_steps(scheduler: Scheduler, rows: tuple[Row, ...]) -> int:
    """How many of the next plans only decode `rows`, if no request comes or ends meanwhile.

    rows: those of an earlier plan, the very tuple; zero where they are not the same any more.
    """
    waiting, kv, config = scheduler._waiting, scheduler._kv, scheduler.config
    if (
        rows is not scheduler._decoding.rows
        or scheduler._prefilling
        or scheduler._host_gated
        or scheduler._speculating
        or scheduler._preemption
        or (waiting and (kv.slots.num_free or config.preemption))
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


def skip(scheduler: Scheduler, steps: int) -> None:
    """Count `steps` more steps as planned and as many as committed, each row a token richer by every one.

    The same as so many turns of `plan` and `commit`. At most `steady_steps`, while every plan in flight has the rows
    of the next one and nothing else, and no row samples a stop token; the plans in flight then stand for steps that
    are `steps` later.
    """
    scheduler._next_step += steps
    scheduler._committer.steps += steps
    scheduler._committer.credited += steps * len(scheduler._decoding)
