"""Totals of a run, and the summary printed at its end."""

from collections import Counter
from dataclasses import dataclass, field

from xla_engine.observability.stats import EngineStats
from xla_engine.openai.requests import LineError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import DEFAULT_MAX_TOKENS
from xla_engine.utils.quantiles import Quantiles


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Counts and times of a run so far.

    ok: lines with a result.
    failed: lines without a result, by error code.
    first_errors: the first few errors, in the order of the input.
    finish_reasons: counts over the sequences of the lines with a result.
    cut_by_default: sequences that ended at the default `max_tokens`.
    sampled_by_default: sequences with the default temperature.
    prompt_tokens, generated_tokens: of the lines with a result.
    ttft: seconds to the first token, of the lines with a result.
    inter_token: seconds between tokens, of the lines with a result.
    first_token_at: seconds on the run's clock; None before the first token.
    failed_before: lines for which an earlier run wrote an error, and which this run skips.
    resumed: lines skipped because an earlier run had finished them.
    interrupted: whether the user stopped the run.
    failure: why the run ended early: the engine failed, the input became unreadable, or the output was another run's.
    written: output lines, including errors.
    unwritten: after an interrupt, the lines that were read but have no output.
    """

    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_errors: list[LineError] = field(default_factory=list)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    cut_by_default: int = 0
    sampled_by_default: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: Quantiles = field(default_factory=Quantiles)
    inter_token: Quantiles = field(default_factory=Quantiles)
    first_token_at: float | None = None
    resumed: int = 0
    failed_before: int = 0
    interrupted: bool = False
    failure: Exception | None = None
    written: int = 0
    unwritten: int = 0

    @property
    def done(self) -> int:
        """Lines that ended in this run."""
        return self.ok + self.failed.total()

    @property
    def only_pooled(self) -> bool:
        """Whether texts became vectors, classes or scores, and none was generated."""
        return bool(self.ok) and not self.generated_tokens

    def count(
        self, output: RequestOutput, *, default_limit: bool = False, default_sampling: bool = False
    ) -> None:
        """Add the tokens and times of a finished request; `default_limit`, `default_sampling` as in `LineRequest`."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.generated_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self.finish_reasons.update(str(completion.finish_reason) for completion in output.outputs)
        if default_limit:
            self.cut_by_default += sum(each.finish_reason == "length" for each in output.outputs)
        if default_sampling:
            self.sampled_by_default += len(output.outputs)
        if (metrics := output.metrics) is None:
            return
        at = metrics.first_token_time
        if at is not None and (self.first_token_at is None or at < self.first_token_at):
            self.first_token_at = at
        if metrics.ttft is not None:
            self.ttft.add(metrics.ttft)
        for seconds in metrics.inter_token_latencies:
            self.inter_token.add(seconds)


def summary_lines(
    totals: RunTotals, stats: EngineStats, *, wall: float, cold_start: float | None, parts: str = ""
) -> list[str]:
    """The lines printed at the end of a run.

    wall: seconds from the first line read to the last one written. cold_start: seconds from process start to the
    first token; None without one. parts: a breakdown of that time.
    """
    codes = _counts(totals.failed)
    failed_before = f", {totals.failed_before} of them failed" if totals.failed_before else ""
    before = f"; {totals.resumed} done before{failed_before}" if totals.resumed else ""
    rows = [
        (
            "requests",
            f"{totals.done}: {totals.ok} ok, {totals.failed.total()} failed"
            + (codes and f" ({codes})")
            + before,
        ),
        *(_pooling_lines if totals.only_pooled else _generation_lines)(totals, stats, max(wall, 1e-9)),
        ("start-up", parts or f"{stats.load_seconds:.2f} s load, {stats.compile_seconds:.2f} s compile"),
        (
            "cold start",
            "no token" if cold_start is None else f"{cold_start:.2f} s from process start to first token",
        ),
        ("compiles", f"{stats.compiles_warmup} before, {stats.compiles_after_warmup} after warm-up"),
    ]
    return [f"{name:<20} {text}" for name, text in rows]


def _generation_lines(totals: RunTotals, stats: EngineStats, wall: float) -> list[tuple[str, str]]:
    rate = totals.generated_tokens / wall
    return [
        ("finish reasons", _counts(totals.finish_reasons) or "none"),
        *_cut_lines(totals),
        *_sampling_lines(totals),
        ("wall time", f"{wall:.2f} s"),
        ("tokens", f"{totals.prompt_tokens} prompt, {totals.generated_tokens} generated, {rate:.1f} tok/s"),
        *_memory_lines(stats),
        ("time to first token", _quantiles(totals.ttft)),
        ("inter-token latency", _quantiles(totals.inter_token)),
        ("slot occupancy", f"{stats.occupancy:.1%}"),
        *_mask_lines(stats, wall),
    ]


def _pooling_lines(totals: RunTotals, stats: EngineStats, wall: float) -> list[tuple[str, str]]:
    return [
        ("wall time", f"{wall:.2f} s"),
        ("texts", f"{totals.ok / wall:.1f} a second"),
        ("tokens", f"{totals.prompt_tokens} prompt, {totals.prompt_tokens / wall:.1f} tok/s"),
        *_memory_lines(stats),
    ]


def _cut_lines(totals: RunTotals) -> list[tuple[str, str]]:
    if not totals.cut_by_default:
        return []
    why = (
        f"without max_tokens ended at the default of {DEFAULT_MAX_TOKENS} tokens; use --max-tokens N for more"
    )
    return [("cut short", f"{totals.cut_by_default} texts {why}")]


def _sampling_lines(totals: RunTotals) -> list[tuple[str, str]]:
    if not totals.sampled_by_default:
        return []
    why = "were sampled at 1, as the model recommends no temperature; use --temperature T for another"
    return [("sampling", f"{totals.sampled_by_default} texts without a temperature {why}")]


def _memory_lines(stats: EngineStats) -> list[tuple[str, str]]:
    """Prefix cache hits, blocks in files, and preemptions; no line for a count of zero."""
    lines = []
    if stats.cached_tokens:
        lines.append(("prefix cache", f"{stats.cached_tokens} tokens found, {stats.prompt_tokens} computed"))
    if stats.loaded_blocks or stats.stored_blocks or stats.failed_blocks:
        text = f"{stats.loaded_blocks} blocks read, {stats.stored_blocks} written"
        lines.append(("prefix files", text + (f", {stats.failed_blocks} failed" * bool(stats.failed_blocks))))
    if stats.preemptions:
        lines.append(("preemptions", f"{stats.preemptions}"))
    return lines


def _mask_lines(stats: EngineStats, wall: float) -> list[tuple[str, str]]:
    """What token masks took; no line without constraints."""
    if not stats.mask_seconds:
        return []
    share = stats.mask_seconds / wall
    return [("constraints", f"token masks took {stats.mask_seconds:.2f} s, {share:.1%} of the wall time")]


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _quantiles(seconds: Quantiles) -> str:
    if not seconds.count:
        return "none"
    return f"p50 {seconds.at(0.5) * 1e3:.1f} ms, p99 {seconds.at(0.99) * 1e3:.1f} ms"
