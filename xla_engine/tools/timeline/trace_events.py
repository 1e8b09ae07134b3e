"""Timelines as trace events, which chrome://tracing and ui.perfetto.dev open.

The format is Google's "Trace Event Format" in its JSON object form: complete events ("X"), counters ("C") and
metadata ("M"); times in microseconds.
"""

from typing import Any

from xla_engine.observability.phases import PHASES
from xla_engine.tools.timeline.model import WITH_DRAFTS, Timeline

PROCESS = 1  # numbers of processes and threads begin at 1: 0 is the idle one where such traces come from
NOMINAL_STEP = 1e-3  # seconds a step is drawn with where the record has no times


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace: a track per slot, one for the steps, counters of busy slots and waiting requests."""
    times = timeline.times or [(NOMINAL_STEP * at, NOMINAL_STEP * (at + 1)) for at in range(timeline.steps)]
    lanes, busy = timeline.lanes, timeline.busy
    events = [_about("process_name", lanes, name=timeline.title or "xla-engine")]
    for lane in range(lanes + 1):
        name = f"slot {lane}" if lane < timeline.slots else "parked" if lane < lanes else "steps"
        events += [_about("thread_name", lane, name=name), _about("thread_sort_index", lane, sort_index=lane)]
    for lane, first, last, kind, index in timeline.segments:
        request = timeline.requests[index]
        args = {"kind": kind, "first step": first, "last step": last, "prompt tokens": request.prompt_tokens}
        if request.tokens is not None:
            args["new tokens"] = request.tokens
        if request.end is not None:
            args["end"] = request.end
        if kind in WITH_DRAFTS:
            inside = [part for part in timeline.drafts if part.lane == lane and first <= part.step <= last]
            args["accepted drafts"] = sum(part.accepted for part in inside)
            args["rejected drafts"] = sum(part.rejected for part in inside)
        events.append(_span(request.name, kind, lane, times[first][0], times[last][1], args))
    for step, (begin, end) in enumerate(times):
        events.append(
            _span(f"step {step}", "step", lanes, begin, end, _about_step(timeline, step, busy[step]))
        )
        counters = {"busy slots": busy[step], "waiting": timeline.waiting[step]}
        for name, value in counters.items():
            events.append({"name": name, "ph": "C", "pid": PROCESS, "ts": _us(begin), "args": {name: value}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _about_step(timeline: Timeline, step: int, busy: int) -> dict[str, Any]:
    """The counters of a step: busy slots, and microseconds of the host's time if measured."""
    spent = timeline.phases[step] if timeline.phases else None
    return {"busy slots": busy} | {
        f"{name}, us": each / 1000 for name, each in zip(PHASES, spent or (), strict=False)
    }


def _span(name: str, kind: str, lane: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = round(_us(end) - _us(begin), 3)
    span = {"name": name, "cat": kind, "ph": "X", "ts": _us(begin), "dur": duration, "args": args}
    return span | _track(lane)


def _about(what: str, lane: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "args": args} | _track(lane)


def _track(lane: int) -> dict[str, int]:
    return {"pid": PROCESS, "tid": lane + 1}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
