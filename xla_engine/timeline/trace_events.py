"""Timelines as trace events, which chrome://tracing and ui.perfetto.dev open.

The format is Google's "Trace Event Format" in its JSON object form: complete events ("X"), counters ("C") and
metadata ("M"); times in microseconds.
"""

from __future__ import annotations

from typing import Any

from xla_engine.timeline.model import Timeline

NOMINAL_STEP = 1e-3  # seconds a step is drawn with where the record has no times


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace: a track per slot, one for the steps, counters of busy slots and waiting requests."""
    times = timeline.times or [(NOMINAL_STEP * at, NOMINAL_STEP * (at + 1)) for at in range(timeline.steps)]
    events: list[dict[str, Any]] = [_name("process_name", 0, 0, timeline.title or "xla-engine")]
    lanes, busy = timeline.lanes, timeline.busy
    events.append(_name("thread_name", 0, lanes, "steps"))
    for lane in range(lanes):
        events.append(_name("thread_name", 0, lane, f"slot {lane}" if lane < timeline.slots else "parked"))
    for lane, first, last, kind, index in timeline.segments:
        request = timeline.requests[index]
        args = {"kind": kind, "first step": first, "last step": last, "prompt tokens": request.prompt_tokens}
        if request.tokens is not None:
            args["new tokens"] = request.tokens
        if request.end is not None:
            args["end"] = request.end
        events.append(_span(request.name, kind, lane, times[first][0], times[last][1], args))
    for step, (begin, end) in enumerate(times):
        events.append(_span(f"step {step}", "step", lanes, begin, end, {"busy slots": busy[step]}))
        counters = {"busy slots": busy[step], "waiting": timeline.waiting[step]}
        for name, value in counters.items():
            events.append({"name": name, "ph": "C", "pid": 0, "ts": _us(begin), "args": {name: value}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(name: str, kind: str, lane: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = round(_us(end) - _us(begin), 3)
    span = {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": lane, "ts": _us(begin), "dur": duration}
    return {**span, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
