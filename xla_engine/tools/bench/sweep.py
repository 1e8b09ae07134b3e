"""Tokens per second and latency against the number of slots: from where more slots gain nothing or slow down."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.bench.figures import Spread, figures, spread_of
from xla_engine.tools.bench.workloads import Sizes, Workload, make_workload
from xla_engine.tools.drawing import import_pyplot
from xla_engine.utils.tables import aligned

NOTICEABLE = 0.05  # share of the rate that counts as a difference
UNEVEN = 0.3  # of a width's slowest round, by which the fastest may differ
STEEP = 1.25  # how much longer a step may take than its additional rows explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured at one width, over the rounds.

    slots: the width.
    cache: bytes of KV cache.
    decode_tok_s, tok_s: tokens per second of decode, and of the whole job.
    itl_p50_ms, itl_p99_ms: milliseconds between tokens.
    ttft_p99_ms: milliseconds to the first token.
    refusal: why there is no engine of this width, None if there is one; the figures are None then.
    """

    slots: int
    cache: int = 0
    decode_tok_s: Spread | None = None
    tok_s: Spread | None = None
    itl_p50_ms: Spread | None = None
    itl_p99_ms: Spread | None = None
    ttft_p99_ms: Spread | None = None
    refusal: str | None = None

    def record(self) -> dict[str, Any]:
        """As JSON values: a figure is [median, least, most]."""
        found = {name: getattr(self, name) for name in FIGURES}
        figures = {name: None if spread is None else spread.record for name, spread in found.items()}
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
            sizes = Sizes(
                batch=width,
                vocab_size=engine.checkpoint.config.vocab_size,
                positions=engine.max_model_len,
                prompt=prompt_tokens,
                new=new_tokens,
            )
            workload = make_workload("uniform", sizes)
            run(engine, workload.head(width, min(new_tokens, 8)))
            found = spread_of([figures(workload, run(engine, workload)) for _ in range(rounds)])
            kept: dict[str, Any] = {name: found[name] for name in FIGURES if name in found}
            yield Point(slots=width, cache=engine.runner.cache_bytes, **kept)


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
    measured = [point for point in points if point.decode_tok_s is not None]
    found = [f"{point.slots} slots: {point.refusal}" for point in points if point.refusal is not None]
    for point in measured:
        values = point.decode_tok_s.values if point.decode_tok_s is not None else ()
        if (apart := max(values) / min(values) - 1) > UNEVEN:
            found.append(
                f"{point.slots} slots: rounds differ by {100 * apart:.0f} %; measure on an idle machine"
            )
    for before, after in pairwise(measured):
        rate, step = _ratio(before, after, "decode_tok_s"), _ratio(before, after, "itl_p50_ms")
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
        times = [(point.slots, point.itl_p50_ms.median) for point in measured if point.itl_p50_ms is not None]
        bound = (1 + NOTICEABLE) * min(time for _, time in times)
        calm = [slots for slots, time in times if time <= bound][-1]
        found.append(
            f"a request has its tokens within {100 * NOTICEABLE:.0f} % of the shortest time at up to {calm} slots"
        )
        best = max(point.decode_tok_s.median for point in measured if point.decode_tok_s is not None)
        enough = next(
            point
            for point in measured
            if point.decode_tok_s is not None and point.decode_tok_s.median >= (1 - NOTICEABLE) * best
        )
        more = "" if enough is not measured[-1] else "; more slots were not measured and may be faster"
        found.append(
            f"{enough.slots} slots decode within {100 * NOTICEABLE:.0f} % of the most measured{more}"
        )
    return found


def _ratio(before: Point, after: Point, name: str) -> float:
    first, second = getattr(before, name), getattr(after, name)
    return second.median / first.median if first is not None and second is not None else 1.0


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
        rate = point.decode_tok_s
        each = "" if rate is None else f"{rate.median / point.slots:.1f}"
        cells = [_cell(rate, "{:.0f}"), each, _cell(point.tok_s, "{:.0f}")]
        between = f"{_cell(point.itl_p50_ms, '{:.2f}')} / {_cell(point.itl_p99_ms, '{:.2f}')}"
        cache = f"{point.cache / 1e6:.0f} MB"
        rows.append((str(point.slots), cache, *cells, between, _cell(point.ttft_p99_ms, "{:.1f}")))
    return aligned(rows, right=range(len(head)))


def _cell(spread: Spread | None, form: str) -> str:
    return "" if spread is None else form.format(spread.median)


def plot(points: Sequence[Point], path: Path | str, title: str) -> None:
    """Draw decode rate and time between tokens against the width. Raises ConfigError without matplotlib."""
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    labels = (("decode_tok_s", "decode tok/s"), ("itl_p50_ms", "ms between tokens, p50"))
    for axes, (name, label) in zip(panels, labels, strict=True):
        drawn = [(point.slots, getattr(point, name)) for point in points if getattr(point, name) is not None]
        slots = [width for width, _ in drawn]
        axes.plot(slots, [spread.median for _, spread in drawn], "o-", color="#4c78c8")
        low, high = ([side(spread.values) for _, spread in drawn] for side in (min, max))
        axes.fill_between(slots, low, high, alpha=0.25, color="#4c78c8", linewidth=0)
        axes.set(xlabel="slots", ylabel=label, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(slots, [str(width) for width in slots])
        axes.set_xticks([], minor=True)
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
