"""Merge the counters and snapshots of several engines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from xla_engine.data_parallel.wire import Message, snapshot_of
from xla_engine.observability.distributions import Distributions
from xla_engine.observability.histogram import Distribution
from xla_engine.observability.phases import PhaseTimes
from xla_engine.observability.stats import EngineStats
from xla_engine.scheduler import FinishReason, Snapshot
from xla_engine.scheduler.snapshot import Counters

# The maximum over the engines is reported, because they run in parallel.
LONGEST = ("load_seconds", "compile_seconds", "last_step_age_s")
NOW = ("waiting", "running", "slots_used", "slots")  # only of current processes
OWN = ("finished", "recoveries", "submitted")  # counted in the parent


def stats(
    told: Sequence[Message],
    lost: Sequence[Message],
    *,
    finished: Mapping[str, int],
    recoveries: int,
    submitted: int,
) -> EngineStats:
    """Merge counters. told: of each engine. lost: of processes that have ended. The rest is counted in the parent;
    the engines' own recoveries are added."""
    now = [one for one in told if one]
    every = [*now, *lost]
    found: dict[str, Any] = {}
    for name in (each.name for each in fields(EngineStats)):
        if name in LONGEST:
            found[name] = max((one[name] for one in every), default=0.0)
        elif name == "kv_usage":
            found[name] = sum(one[name] for one in now) / len(now) if now else 0.0
        elif name == "distributions":
            found[name] = _distributions([one[name] for one in every])
        elif name == "phases":
            phases = [one[name] for one in every if one[name] is not None]
            found[name] = PhaseTimes(**dict(sum(map(Counter, phases), Counter()))) if phases else None
        elif name not in OWN:
            found[name] = sum(one[name] for one in (now if name in NOW else every))
    recoveries += sum(one["recoveries"] for one in every)
    return EngineStats(finished=dict(finished), recoveries=recoveries, submitted=submitted, **found)


def _distributions(told: Sequence[Message]) -> Distributions:
    names = [each.name for each in fields(Distributions)]
    return Distributions(**{name: _distribution([one[name] for one in told]) for name in names if told})


def _distribution(told: Sequence[Message]) -> Distribution:
    return Distribution(
        bounds=tuple(told[0]["bounds"]),
        counts=tuple(map(sum, zip(*(one["counts"] for one in told), strict=True))),
        total=sum(one["total"] for one in told),
    )


def snapshot(told: Sequence[Message], *, blocks: int) -> Snapshot:
    """Merge snapshots. Slots and blocks are numbered consecutively. blocks: number of blocks of each engine."""
    parts = [snapshot_of(each) for each in told]
    slots = [
        replace(view, blocks=tuple(block + engine * blocks for block in view.blocks))
        for engine, part in enumerate(parts)
        for view in part.slots
    ]
    finished: Counter[FinishReason] = Counter()
    for part in parts:
        finished.update(part.counters.finished)
    names = [each.name for each in fields(Counters) if each.name != "finished"]
    sums = {name: sum(getattr(part.counters, name) for part in parts) for name in names}
    return Snapshot(
        slots=tuple(replace(view, slot=replace(view.slot, index=index)) for index, view in enumerate(slots)),
        waiting=tuple(view for part in parts for view in part.waiting),
        draining=tuple(view for part in parts for view in part.draining),
        counters=Counters(finished=dict(finished), **sums),
    )
