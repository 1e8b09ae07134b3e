"""Writing a timeline as a page, trace events or a figure; the file's ending says which.

Trace events are what chrome://tracing and ui.perfetto.dev open. The format is Google's "Trace Event Format" in its
JSON object form: complete events ("X"), counters ("C") and metadata ("M"); times in microseconds.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.observability.phases import PHASES
from xla_engine.tools.timeline.model import KINDS, WITH_DRAFTS, Timeline

PROCESS = 1  # numbers of processes and threads begin at 1: 0 is the idle one where such traces come from
NOMINAL_STEP = 1e-3  # seconds a step is drawn with where the record has no times
PICTURES = (".png", ".svg", ".pdf")


def write_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write a page (.html), trace events (.json) or a figure (.png, .svg, .pdf). Raises ConfigError and OSError."""
    path = Path(path)
    if path.suffix in PICTURES:
        from xla_engine.tools.timeline.figure import draw

        draw(timeline, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(trace_events(timeline), separators=(",", ":")) + "\n", encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(page(timeline), encoding="utf-8")
    else:
        raise ConfigError(f"{path}: name it .html, .json (trace events) or {', '.join(PICTURES)}")


def page(timeline: Timeline) -> str:
    """The timeline as one HTML page that loads nothing from anywhere."""
    data = json.dumps(page_data(timeline), separators=(",", ":")).replace("<", "\\u003c")
    template = files("xla_engine.tools.timeline").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/null", data)


def page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws. Segments are rows of (lane, first step, last step, kind's index, request)."""
    return {
        "title": timeline.title,
        "slots": timeline.slots,
        "lanes": timeline.lanes,
        "steps": timeline.steps,
        "kinds": KINDS,
        "requests": timeline.requests,
        "segments": [
            (lane, first, last, KINDS.index(kind), request)
            for lane, first, last, kind, request in timeline.segments
        ],
        "times": timeline.times,
        "busy": timeline.busy,
        "waiting": timeline.waiting,
        "phase_names": PHASES,
        "phases": timeline.phases,
        "drafts": timeline.drafts,
    }


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
