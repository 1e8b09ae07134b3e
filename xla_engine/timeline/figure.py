"""Timelines as a matplotlib figure (extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from xla_engine.errors import ConfigError
from xla_engine.timeline.model import KINDS, Timeline

COLOURS = {
    "prefill": "#e8833a",
    "decode": "#4c78c8",
    "held": "#e6c94f",
    "cached": "#55a868",
    "parked": "#a58bc4",
}
ROOM = 0.011  # share of the figure's width that a letter of a label takes


def draw(timeline: Timeline, path: Path | str) -> None:
    """Draw slots by steps into `path`, whose ending chooses the form. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'xla-engine[plot]', or write a .html page"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.collections import PolyCollection

    lanes, steps = max(timeline.lanes, 1), max(timeline.steps, 1)
    height = min(1.6 + 0.24 * lanes, 24) + 1.2
    figure, (axes, below) = pyplot.subplots(
        2, figsize=(13, height), height_ratios=(height - 2.2, 1), sharex=True, layout="constrained"
    )
    for kind in KINDS:
        boxes = [
            [(first, lane - 0.42), (last + 1, lane - 0.42), (last + 1, lane + 0.42), (first, lane + 0.42)]
            for lane, first, last, what, _ in timeline.segments
            if what == kind
        ]
        if boxes:
            edge = "white" if len(boxes) < 4000 else "none"
            axes.add_collection(
                PolyCollection(boxes, facecolor=COLOURS[kind], edgecolor=edge, linewidth=0.4, label=kind)
            )
    for lane, first, last, _, index in timeline.segments:
        name = timeline.requests[index].name
        if (last + 1 - first) / steps > ROOM * len(name):
            axes.text((first + last + 1) / 2, lane, name, ha="center", va="center", fontsize=7, color="white")
    axes.set(xlim=(0, steps), ylim=(lanes - 0.5, -0.5), ylabel="slot")
    if lanes > timeline.slots:
        axes.axhline(timeline.slots - 0.5, color="grey", linewidth=0.8)
    axes.set_yticks(range(0, lanes, max(1, lanes // 16)))
    axes.set_title(f"{timeline.title}\n{len(timeline.requests)} requests, {timeline.steps} steps", fontsize=9)
    axes.set_facecolor("#f4f4f2")
    if timeline.segments:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=len(KINDS), fontsize=8, frameon=False
        )
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
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
