"""A scheduler of few slots, requests for it, and steps by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.support.fake_runner import decoded_of
from xla_engine.scheduler import (
    FinishReason,
    Plan,
    Request,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepResult,
    TokenEvent,
)

END = 99  # a stop token
STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


def make(slots: int = 2, *, chunk: int = 4, budget: int = 1000, max_waiting: int | None = None) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=slots, chunk_size=chunk, max_num_batched_tokens=budget, max_waiting=max_waiting
        )
    )


def ask(name: str, prompt: int = 3, tokens: int = 5, stops: Sequence[int] = (END,)) -> Request:
    """A request with a prompt of `prompt` tokens 0, 1, 2, ..."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(prompt)),
        max_tokens=tokens,
        stop_token_ids=frozenset(stops),
    )


def result(plan: Plan, token: int = 7) -> StepResult:
    """Every row samples `token`."""
    decoded = decoded_of(plan.decode, [Sample(token)] * len(plan.decode))
    return StepResult(first=[Sample(token)] * len(plan.first_rows), decode=decoded)


def step(engine: Scheduler, token: int = 7) -> list[TokenEvent]:
    plan = engine.plan()
    events = list(engine.commit(plan, result(plan, token)))
    engine.check()
    return events


def ends(events: Iterable[TokenEvent]) -> dict[str, FinishReason]:
    return {event.request_id: event.finish_reason for event in events if event.finish_reason is not None}


def names(parts: Sequence[object]) -> list[str]:
    return [part.request_id for part in parts]  # type: ignore[attr-defined]
