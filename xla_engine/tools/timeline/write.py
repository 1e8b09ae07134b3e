"""Writing a timeline as a page, trace events or a figure; the file's ending says which.

Trace events are what chrome://tracing and ui.perfetto.dev open. The format is Google's "Trace Event Format" in its
JSON object form: complete events ("X"), counters ("C") and metadata ("M"); times in microseconds.
"""

import json
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.observability.phases import PHASES
from xla_engine.tools.drawing import drawn
from xla_engine.tools.timeline.model import KINDS, WITH_DRAFTS, Timeline

PROCESS = 1  # numbers of processes and threads begin at 1: 0 is the idle one where such traces come from
NOMINAL_STEP = 1e-3  # seconds a step is drawn with where the record has no times
PICTURES = (".png", ".svg", ".pdf")

# The colours of a figure (extra `plot`).
COLOURS = {
    "prefill": "#e8833a",
    "decode": "#4c78c8",
    "held": "#e6c94f",
    "cached": "#55a868",
    "parked": "#a58bc4",
    "verify": "#7aa6d6",
}
DRAFTS = {"accepted": "#2f8f4e", "rejected": "#c25555"}  # drawn upon "verify"
MOST_DRAFTS = 16  # that fill the height of a lane
IDLE = "#f4f4f2"
LONG = ("decode", "parked", "verify")  # what takes many steps
NARROWEST = 0.001  # share of the figure's width that one step is drawn with at least
LOWEST = 0.1  # inches a lane needs for labels
ROOM = 0.011  # share of the figure's width that a letter of a label takes


def write_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write a page (.html), trace events (.json) or a figure (.png, .svg, .pdf). Raises ConfigError and OSError."""
    path = Path(path)
    if path.suffix in PICTURES:
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
    found = {each.name: getattr(timeline, each.name) for each in fields(timeline)}
    found |= {"lanes": timeline.lanes, "busy": timeline.busy, "kinds": KINDS, "phase_names": PHASES}
    found["segments"] = [
        (lane, first, last, KINDS.index(kind), request)
        for lane, first, last, kind, request in timeline.segments
    ]
    return found


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


def draw(timeline: Timeline, path: Path | str) -> None:
    """Draw slots by steps into `path`, whose ending chooses the form. Raises ConfigError without matplotlib."""
    lanes, steps = timeline.lanes, max(timeline.steps, 1)
    parked = lanes - timeline.slots
    squeeze = min(1.0, timeline.slots / parked) if parked else 1.0  # no more height than the slots
    deep = timeline.slots + parked * squeeze
    height = min(1.6 + 0.24 * deep, 24) + 1.2
    form: dict[str, Any] = {"figsize": (13, height), "height_ratios": (height - 2.2, 1), "sharex": True}
    with drawn(path, 2, dpi=130, otherwise=", or write a .html page", **form) as (_, (axes, below)):
        from matplotlib.collections import PolyCollection
        from matplotlib.patches import Rectangle

        boxes: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in KINDS}
        for lane, first, last, kind, index in timeline.segments:
            tall = squeeze if lane >= timeline.slots else 1.0
            middle = (
                lane
                if lane < timeline.slots
                else timeline.slots - 0.5 + (lane - timeline.slots + 0.5) * squeeze
            )
            end, half = max(last + 1, first + NARROWEST * steps), 0.42 * tall
            corners = (first, -half), (end, -half), (end, half), (first, half)
            boxes[kind].append([(x, middle + y) for x, y in corners])
            name = timeline.requests[index].name
            if (last + 1 - first) / steps > ROOM * len(name) and tall * height / deep > LOWEST:
                about = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
                axes.text((first + last + 1) / 2, middle, name, **about)
        for kind in sorted(KINDS, key=LONG.__contains__, reverse=True):  # short segments are drawn on top
            if boxes[kind]:
                edge = "white" if kind in LONG and len(boxes[kind]) < 4000 else "none"
                axes.add_collection(
                    PolyCollection(
                        boxes[kind], facecolor=COLOURS[kind], edgecolor=edge, linewidth=0.4, label=kind
                    )
                )
        for kind, bars in _drafts(timeline).items():
            if bars:
                axes.add_collection(
                    PolyCollection(bars, facecolor=DRAFTS[kind], edgecolor="none", label=kind)
                )
        axes.add_patch(
            Rectangle((0, -1), 0, 0, facecolor=IDLE, edgecolor="#bbbbb5", linewidth=0.5, label="idle")
        )
        axes.set(xlim=(0, steps), ylim=(deep - 0.5, -0.5), ylabel="slot")
        axes.set_yticks(range(0, timeline.slots, max(1, round(deep / 16))))
        if parked:
            axes.axhline(timeline.slots - 0.5, color="grey", linewidth=0.8)
            about = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 9}
            axes.text(-0.006 * steps, (timeline.slots + deep - 1) / 2, "parked", **about)
        axes.set_title(
            f"{timeline.title}\n{len(timeline.requests)} requests, {timeline.steps} steps", fontsize=9
        )
        axes.set_facecolor(IDLE)
        if timeline.segments:
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.01)}
            axes.legend(**place, ncols=len(KINDS) + 1, fontsize=8, frameon=False)
        below.fill_between(
            range(timeline.steps), timeline.busy, step="post", color="#4c78c8", alpha=0.35, linewidth=0
        )
        below.plot(
            range(timeline.steps), timeline.busy, drawstyle="steps-post", color="#4c78c8", label="busy slots"
        )
        below.plot(
            range(timeline.steps), timeline.waiting, drawstyle="steps-post", color="#b04a4a", label="waiting"
        )
        below.set(xlabel="step", ylim=(0, None))
        below.legend(fontsize=8, loc="upper right", ncols=2)


def _drafts(timeline: Timeline) -> dict[str, list[list[tuple[float, float]]]]:
    """Draw the accepted drafts of each step from the lower edge of a slot up, and the rejected ones above."""
    found: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in DRAFTS}
    for lane, step, *counts in timeline.drafts:
        edge = lane + 0.42
        for kind, count in zip(DRAFTS, counts, strict=True):
            top = edge - 0.84 * count / MOST_DRAFTS
            if count:
                found[kind].append([(step, edge), (step + 0.9, edge), (step + 0.9, top), (step, top)])
            edge = top
    return found
