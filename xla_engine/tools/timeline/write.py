"""Writing a timeline as a page, trace events or a figure; the file's ending says which."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.observability.phases import PHASES
from xla_engine.tools.timeline.model import KINDS, Timeline
from xla_engine.tools.timeline.trace_events import trace_events

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
