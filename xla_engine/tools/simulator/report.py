"""Results of simulations: figures, a table, a picture."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from xla_engine.scheduler import SchedulerConfig
from xla_engine.tools.drawing import drawn, label_x
from xla_engine.tools.simulator.cost import CostModel, Machine
from xla_engine.utils.quantiles import Quantiles
from xla_engine.utils.tables import aligned, figure

SHARES = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)  # of a picture: from a hundredth to the longest of a thousand
MOST_TICKS = 6  # labels below a picture of this width that do not overlap
DOUBTFUL = 0.3  # a cost model's residual as a share of a step: more is said
REFUSED = "refused"  # among the ends of requests: it needs more blocks than there are


@dataclass(slots=True, kw_only=True)
class SimulationReport:
    """The results of a simulation. Times are in seconds.

    config: of the scheduler.
    wall: from the first arrival to the last token.
    steps: all of them. skipped: those simulated in bulk.
    decode_steps: steps in which a row decoded. row_steps: rows of all these.
    requests, prompt_tokens, new_tokens: how many there were.
    finished: requests by the reason of their end.
    most_waiting: the longest queue.
    preemptions: how often a request was preempted.
    longest: positions of the longest request. beyond: requests longer than those the cost model was fitted to.
    queued: from arrival to a slot.
    first_token: from arrival to the first token.
    inter_token: between two tokens of a request.
    whole: from arrival to the last token.
    """

    config: SchedulerConfig
    wall: float = 0.0
    steps: int = 0
    skipped: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    most_waiting: int = 0
    preemptions: int = 0
    longest: int = 0
    beyond: int = 0
    queued: Quantiles = field(default_factory=Quantiles)
    first_token: Quantiles = field(default_factory=Quantiles)
    inter_token: Quantiles = field(default_factory=Quantiles)
    whole: Quantiles = field(default_factory=Quantiles)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.wall if self.wall else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the rows of all decode steps that decoded."""
        slots = self.decode_steps * self.config.max_num_seqs
        return self.row_steps / slots if slots else 0.0


def together(reports: Iterable[SimulationReport]) -> SimulationReport:
    """The figures of several machines as of one with all their slots."""
    first, *rest = reports
    for other in rest:
        for name in (part.name for part in fields(SimulationReport)[1:]):
            mine, theirs = getattr(first, name), getattr(other, name)
            if isinstance(mine, Quantiles):
                mine.merge(theirs)
            else:
                is_peak = name in ("wall", "most_waiting", "longest")
                setattr(first, name, max(mine, theirs) if is_peak else mine + theirs)
    return first


def table(reports: Mapping[str, SimulationReport]) -> list[str]:
    """The reports as a table, one line each; times at the 50th and 99th percentile."""
    head = (
        "",
        "tok/s",
        "wall",
        "slots busy",
        "queue",
        "lost slots",
        "first token, s",
        "between, ms",
        "whole, s",
    )
    rows = [head, ("", "", "s", "%", "most", "times", "p50 / p99 / max", "p50 / p99", "p50 / p99")]
    for name, report in reports.items():
        first, between, whole = report.first_token, report.inter_token, report.whole
        rows.append(
            (
                name,
                f"{report.tokens_per_second:.0f}",
                f"{report.wall:.1f}",
                f"{100 * report.occupancy:.0f}",
                str(report.most_waiting),
                str(report.preemptions),
                " / ".join(map(figure, (first.at(0.5), first.at(0.99), first.largest))),
                f"{figure(1e3 * between.at(0.5))} / {figure(1e3 * between.at(0.99))}",
                f"{figure(whole.at(0.5))} / {figure(whole.at(0.99))}",
            )
        )
    lines = aligned(rows, right=range(len(head)))
    for name, report in reports.items():
        if refused := report.finished.get(REFUSED):
            lines.append(f"{name}: {refused} of {report.requests} requests can never fit into the blocks")
    return lines


def extrapolations(reports: Mapping[str, SimulationReport], cost: CostModel, machine: Machine) -> list[str]:
    """Warnings about extrapolation: which figures exceed what was measured, and by how much. machine: the cost
    model's."""
    lines = []
    if cost.residual > DOUBTFUL:
        lines.append(
            f"the cost model misses the time of a step by {100 * cost.residual:.0f} % of the mean step: record a "
            "longer run on a quiet machine"
        )
    for name, report in reports.items():
        if report.beyond:
            times = report.longest / machine.length
            lines.append(
                f"{name}: {report.beyond} of {report.requests} requests are longer than the {machine.length} "
                f"positions of the recorded engine, the longest {times:.1f} times: their times are extrapolated"
            )
        if (slots := report.config.max_num_seqs) > machine.rows:
            lines.append(
                f"{name}: {slots} slots, {slots / machine.rows:.1f} times the recorded ones: times of steps with more "
                "rows are extrapolated"
            )
    return lines


def to_json(report: SimulationReport) -> dict[str, Any]:
    """A simulation's figures; times in seconds."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    plain = (
        "wall",
        "steps",
        "requests",
        "prompt_tokens",
        "new_tokens",
        "finished",
        "most_waiting",
        "preemptions",
    )
    found: dict[str, Any] = {name: getattr(report, name) for name in (*plain, "longest", "beyond")}
    found |= {"tokens_per_second": report.tokens_per_second, "occupancy": report.occupancy}
    for name in ("queued", "first_token", "inter_token", "whole"):
        values = getattr(report, name)
        found[name] = {label: values.at(share) for label, share in shares.items()}
        found[name] |= {"mean": values.mean, "max": values.largest}
    return found


def time_ticks(low: float, high: float) -> list[float]:
    """At most six places for labels between two times: 1, 2 and 5 of each decade, or 1 of every few of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ones = [10.0**decade for decade in decades]
    for places in ([step * one for one in ones for step in (1, 2, 5)], ones):
        inside = [place for place in places if low <= place <= high]
        if len(inside) <= MOST_TICKS:
            return inside or [low, high]
    return inside[:: -(-len(inside) // MOST_TICKS)]


def plot(reports: Mapping[str, SimulationReport], path: Path | str, title: str) -> None:
    """Draw the distributions of the times. Raises ConfigError without matplotlib."""
    about = (
        ("first_token", "time to first token"),
        ("inter_token", "between tokens"),
        ("whole", "whole request"),
    )
    with drawn(path, 1, 3, figsize=(13, 4.2), sharey=True) as (figure, panels):
        for axes, (name, label) in zip(panels, about, strict=True):
            for which, report in reports.items():
                values = getattr(report, name)
                points = [(value, below / values.count) for value, below in values.steps() if value > 0]
                shares = [min(share, SHARES[-1]) for _, share in points]
                axes.plot([value for value, _ in points], shares, label=which, drawstyle="steps-post")
            axes.set(xscale="log", xlabel=f"{label}, s", yscale="logit", ylim=(SHARES[0], SHARES[-1]))
            label_x(axes, time_ticks(*axes.get_xlim()), "{:.3g}")
            axes.set_yticks(SHARES, [f"{100 * share:g} %" for share in SHARES])
            axes.set_yticks([], minor=True)
        panels[0].set_ylabel("share that took no longer")
        panels[0].legend(fontsize=8, loc="lower right")
        figure.suptitle(title, fontsize=10)
