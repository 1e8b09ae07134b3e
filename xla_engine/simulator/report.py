"""Simulations side by side: a table for people, a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.simulator.simulate import Report


def table(reports: Mapping[str, Report]) -> list[str]:
    """A line per simulation. Times to the first token, between tokens and of whole requests at p50 and p99."""
    head = ("", "tok/s", "wall", "slots busy", "queue", "first token, s", "between, ms", "whole, s")
    rows = [head, ("", "", "s", "%", "most", "p50 / p99 / max", "p50 / p99", "p50 / p99")]
    for name, report in reports.items():
        first, between, whole = report.first_token, report.inter_token, report.whole
        rows.append(
            (
                name,
                f"{report.tokens_per_second:.0f}",
                f"{report.wall:.1f}",
                f"{100 * report.occupancy:.0f}",
                str(report.most_waiting),
                f"{first.at(0.5):.3g} / {first.at(0.99):.3g} / {first.largest:.3g}",
                f"{1e3 * between.at(0.5):.3g} / {1e3 * between.at(0.99):.3g}",
                f"{whole.at(0.5):.3g} / {whole.at(0.99):.3g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def to_json(report: Report) -> dict[str, Any]:
    """A simulation's figures; times in seconds."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found: dict[str, Any] = {
        name: getattr(report, name)
        for name in ("wall", "steps", "requests", "prompt_tokens", "new_tokens", "finished", "most_waiting")
    }
    found |= {"tokens_per_second": report.tokens_per_second, "occupancy": report.occupancy}
    for name in ("queued", "first_token", "inter_token", "whole"):
        values = getattr(report, name)
        found[name] = {label: values.at(share) for label, share in shares.items()}
        found[name] |= {"mean": values.mean, "max": values.largest}
    return found


def plot(reports: Mapping[str, Report], path: Path | str, title: str) -> None:
    """Draw which share of requests and of token intervals took no longer than so long. Raises ConfigError."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'xla-engine[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.2), sharey=True, layout="constrained")
    about = (
        ("first_token", "time to first token"),
        ("inter_token", "between tokens"),
        ("whole", "whole request"),
    )
    for axes, (name, label) in zip(panels, about, strict=True):
        for which, report in reports.items():
            values = getattr(report, name)
            points: Sequence[tuple[float, int]] = [
                (max(value, 1e-6), below) for value, below in values.steps()
            ]
            shares = [below / values.count for _, below in points]
            axes.plot([value for value, _ in points], shares, label=which, drawstyle="steps-post")
        axes.set(xscale="log", xlabel=f"{label}, s", ylim=(0, 1.01))
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("share that took no longer")
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
