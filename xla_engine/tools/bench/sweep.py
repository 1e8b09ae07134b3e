"""Tokens per second and latency against the number of slots: from where more slots gain nothing or slow down."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.bench.figures import Spread, figures, spread_of
from xla_engine.tools.bench.workloads import Workload, WorkloadSizes, make_workload
from xla_engine.tools.drawing import drawn, label_x
from xla_engine.utils.tables import aligned

NOTICEABLE = 0.05  # share of the rate that counts as a difference
UNEVEN = 0.3  # of a width's slowest round, by which the fastest may differ
STEEP = 1.25  # how much longer a step may take than its additional rows explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured at one width, over the rounds.

    slots: the width.
    cache: bytes of KV cache.
    figures: those of `FIGURES` that there are, see `figures`.
    refusal: why there is no engine of this width, None if there is one.
    """

    slots: int
    cache: int = 0
    figures: Mapping[str, Spread] = field(default_factory=dict)
    refusal: str | None = None

    def record(self) -> dict[str, Any]:
        """As JSON values: a figure is [median, least, most], None if there is none."""
        figures = dict.fromkeys(FIGURES) | {name: spread.record for name, spread in self.figures.items()}
        return {"slots": self.slots, "cache_bytes": self.cache, "refusal": self.refusal, **figures}


FIGURES = ("decode_tok_s", "tok_s", "itl_p50_ms", "itl_p99_ms", "ttft_p99_ms")


def sweep(
    make: Callable[[EngineConfig], XlaBatchEngine],
    config: EngineConfig,
    widths: Sequence[int],
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
) -> Iterator[Point]:
    """Measure each width in turn, on an engine of its own from `make` that is closed before the next is made.

    As many requests as slots, all alike and all at once, `rounds` times after a warm-up. A width that the device has
    no memory for is a point with the reason.
    """
    for width in widths:
        try:
            # The same prompts come in every round, and are to be computed again.
            engine = make(replace(config, max_num_seqs=width, enable_prefix_caching=False))
        except ConfigError as error:
            yield Point(slots=width, refusal=str(error))
            continue
        with engine:
            sizes = WorkloadSizes(
                batch=width,
                vocab_size=engine.checkpoint.config.vocab_size,
                positions=engine.max_model_len,
                prompt=prompt_tokens,
                new=new_tokens,
            )
            workload = make_workload("uniform", sizes)
            run(engine, workload.head(width, min(new_tokens, 8)))
            found = spread_of([figures(workload, run(engine, workload)) for _ in range(rounds)])
            kept = {name: found[name] for name in FIGURES if name in found}
            yield Point(slots=width, cache=engine.runner.cache_bytes, figures=kept)


def run(engine: XlaBatchEngine, workload: Workload) -> dict[str, Any]:
    """Run a workload that comes all at once: its seconds, and the times of each request's tokens."""
    began = time.monotonic()
    for prompt, count in zip(workload.prompts, workload.max_tokens, strict=True):
        engine.submit(
            prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        )
    outputs = engine.drain()
    seconds = time.monotonic() - began
    times = [[at - began for at in each.metrics.token_times] for each in outputs if each.metrics is not None]
    return {"seconds": seconds, "times": times}


def warnings(points: Sequence[Point]) -> list[str]:
    """Lines about what stands out.

    Widths that were refused or measured unevenly; cliffs between neighbours; up to which width no request waits
    noticeably longer for its tokens; from which width on more slots give no noticeable gain.
    """
    measured = [point for point in points if "decode_tok_s" in point.figures]
    rates = {point.slots: point.figures["decode_tok_s"] for point in measured}
    found = [f"{point.slots} slots: {point.refusal}" for point in points if point.refusal is not None]
    for slots, measurements in rates.items():
        if (apart := max(measurements.values) / min(measurements.values) - 1) > UNEVEN:
            found.append(f"{slots} slots: rounds differ by {100 * apart:.0f} %; measure on an idle machine")
    for before, after in pairwise(measured):
        rate, step = (
            after.figures[name].median / before.figures[name].median
            for name in ("decode_tok_s", "itl_p50_ms")
        )
        rows = after.slots / before.slots
        if rate < 1 - NOTICEABLE:
            found.append(
                f"cliff: {after.slots} slots decode {100 * (1 - rate):.0f} % fewer tokens per second than "
                f"{before.slots}"
            )
        elif step > STEEP * rows:
            found.append(
                f"cliff: from {before.slots} to {after.slots} slots a step takes {step:.1f} times as long for "
                f"{rows:.1f} times the rows"
            )
    if measured:
        times = [(each.slots, each.figures["itl_p50_ms"].median) for each in measured]
        bound = (1 + NOTICEABLE) * min(time for _, time in times)
        calm = [slots for slots, time in times if time <= bound][-1]
        found.append(
            f"a request has its tokens within {100 * NOTICEABLE:.0f} % of the shortest time at up to {calm} slots"
        )
        best = max(each.median for each in rates.values())
        enough = next(slots for slots, each in rates.items() if each.median >= (1 - NOTICEABLE) * best)
        more = "" if enough != measured[-1].slots else "; more slots were not measured and may be faster"
        found.append(f"{enough} slots decode within {100 * NOTICEABLE:.0f} % of the most measured{more}")
    return found


def table(points: Sequence[Point]) -> list[str]:
    head = (
        "slots",
        "cache",
        "decode tok/s",
        "of each",
        "whole job tok/s",
        "between tokens, ms p50 / p99",
        "first token, ms p99",
    )
    rows: list[tuple[str, ...]] = [head]
    for point in points:
        if point.refusal is not None:
            rows.append((str(point.slots), "does not fit", "", "", "", "", ""))
            continue
        rate = point.figures.get("decode_tok_s")
        each = "" if rate is None else f"{rate.median / point.slots:.1f}"
        decode, job, usual, slow, first = (
            form.format(point.figures[name].median) if name in point.figures else ""
            for name, form in zip(FIGURES, ("{:.0f}", "{:.0f}", "{:.2f}", "{:.2f}", "{:.1f}"), strict=True)
        )
        cache = f"{point.cache / 1e6:.0f} MB"
        rows.append((str(point.slots), cache, decode, each, job, f"{usual} / {slow}", first))
    return aligned(rows, right=range(len(head)))


def plot(points: Sequence[Point], path: Path | str, title: str) -> None:
    """Draw decode rate and time between tokens against the width. Raises ConfigError without matplotlib."""
    labels = (("decode_tok_s", "decode tok/s"), ("itl_p50_ms", "ms between tokens, p50"))
    with drawn(path, 1, 2, figsize=(10, 4)) as (figure, panels):
        for axes, (name, label) in zip(panels, labels, strict=True):
            found = {point.slots: point.figures[name] for point in points if name in point.figures}
            axes.plot([*found], [spread.median for spread in found.values()], "o-", color="#4c78c8")
            low, high = ([side(spread.values) for spread in found.values()] for side in (min, max))
            axes.fill_between([*found], low, high, alpha=0.25, color="#4c78c8", linewidth=0)
            axes.set(xlabel="slots", ylabel=label, ylim=(0, None))
            axes.set_xscale("log", base=2)
            label_x(axes, [*found])
        figure.suptitle(title, fontsize=10)
