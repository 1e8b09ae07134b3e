"""Records of the tiny engine, and edits that make them lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import Record, from_json, to_json
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.schedule import draw_schedule, run_alone, run_schedule
from xla_engine.observability.observer import Observer
from xla_engine.scheduler import Events, Plan

Alter = Callable[[dict[str, Any]], None]


def recorded(engine: XlaBatchEngine, *, lag: int) -> Record:
    cases = draw_cases(engine, 40, seed=11)
    alone = {case.request_id: run_alone(engine, case) for case in cases}
    _, record = record_schedule(engine, draw_schedule(cases, 11, lag=lag), alone=alone, blank=True)
    return record


def altered(record: Record, alter: Alter) -> Record:
    data = json.loads(to_json(record))
    alter(data)
    return from_json(json.dumps(data).encode())


def step_of(engine: XlaBatchEngine, record: Record, request_id: str, position: int) -> int:
    """The step that credits a token, from a run of its own."""
    first = engine.snapshot().counters.steps_planned
    seen: list[tuple[str, int]] = []

    def watch(plan: Plan, events: Events) -> None:
        seen.extend((event.request_id, plan.step - first) for event in events)

    with engine.observers.having(Observer(read=watch)):
        run_schedule(engine, record.schedule)
    return [step for name, step in seen if name == request_id][position]


def longest(record: Record) -> int:
    """Index of the case with the most tokens."""
    return max(range(40), key=lambda index: len(record.batched[f"case-{index}"].token_ids))


def find_step(data: dict[str, Any], field: str) -> int:
    """A step well into the record that has the field."""
    return next(index for index, step in enumerate(data["steps"]) if index >= 10 and step.get(field))


def other_slot(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["admit"][0][1] ^= 1


def other_epoch(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["admit"][0][2] += 1


def other_chunk(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["chunks"][0][2] += 16


def fewer_chunks(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["chunks"].pop()


def other_row(data: dict[str, Any], step: int) -> None:
    """A row of the plan is missing in its record and in all later ones."""
    slot = data["steps"][step]["join"].pop()
    for later in data["steps"][step + 1 :]:
        if slot in later.get("leave", []):
            later["leave"].remove(slot)
            return


def other_turn(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["turn"] += 1


def other_hash(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["hash"] = "0" * 12


def other_read(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["read"] += 1


def put(*path: str, value: Any) -> Alter:
    def alter(data: dict[str, Any]) -> None:
        place = data
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return alter
