"""Traces: arrival times, prompt lengths and numbers of new tokens.

Traces are read one line at a time. Files are CSV with a header, packed if named .gz, in one of these layouts:

- ours: `arrival` (seconds), `prompt_tokens`, `new_tokens`, and if wanted `max_tokens`, `priority`, `deadline` (seconds
  after the arrival);
- the Azure LLM inference traces (Patel et al., "Splitwise", 2024): `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`;
- BurstGPT (Wang et al., 2024): `Timestamp`, `Model`, `Request tokens`, `Response tokens`, `Total tokens`, `Log Type`.
"""

import csv
import gzip
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from xla_engine.errors import RecordError
from xla_engine.observability.step_log import Moment, StepLog

SPREAD = 1 << 24  # token ids of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A future request.

    name: its id.
    time: seconds since the first request.
    prompt_tokens: length of its prompt.
    new_tokens: how many tokens it gets.
    max_tokens: its limit, at least `new_tokens`.
    priority, constrained, max_cached_tokens: as in `Request`.
    moment: when it arrives, in steps of the loop, in place of the time; None if the trace does not say.
    gives_up: when it is aborted, or ended by its deadline or its text, and the reason; None if a token ends it.
    fails: whether the device cannot choose its last token.
    deadline: seconds after its arrival, None without one.
    prompt: token ids that stand for the real ones, where it is known what prompts have in common; else None.
    custom_id: the caller's name for it, None if unknown.
    """

    name: str
    time: float
    prompt_tokens: int
    new_tokens: int
    max_tokens: int
    priority: int = 0
    constrained: bool = False
    max_cached_tokens: int | None = None
    moment: Moment | None = None
    gives_up: tuple[Moment, str] | None = None
    fails: bool = False
    deadline: float | None = None
    prompt: Sequence[int] | None = None
    custom_id: str | None = None


def distinct(number: int, tokens: int) -> range:
    """A prompt that has no token in common with those of other numbers."""
    return range(number * SPREAD, number * SPREAD + tokens)


def of_step_log(log: StepLog, *, by_time: bool) -> Iterator[Arrival]:
    """The requests of a recorded run, at the times they came or, without `by_time`, before the same steps."""
    prompts: list[Sequence[int]] = []
    for number, each in enumerate(log.requests):
        prompt: Sequence[int] = distinct(number, each.prompt_tokens)
        if each.like is not None:
            other, same = each.like
            prompt = (*prompts[other][:same], *prompt[same:])
        prompts.append(prompt)
        gives_up = None
        if each.taken_back is not None and not by_time:
            gives_up = each.taken_back, str(each.end)
        stopped = each.end in ("stop", "error") and gives_up is None
        yield Arrival(
            name=each.name,
            time=each.submitted,
            prompt_tokens=each.prompt_tokens,
            new_tokens=each.tokens if stopped else each.max_tokens,
            max_tokens=each.max_tokens,
            priority=each.priority,
            constrained=each.constrained,
            max_cached_tokens=each.max_cached_tokens,
            moment=None if by_time else each.came,
            gives_up=gives_up,
            fails=each.end == "error" and gives_up is None,
            prompt=prompt,
            custom_id=each.custom_id,
        )


def read_csv(path: Path | str) -> Iterator[Arrival]:
    """The requests of a CSV file, as read. Rows without a prompt or without an answer are left out.

    Raises RecordError, naming the line, for what is not a trace or not in order of time, and OSError.
    """
    with gzip.open(path, "rt", newline="") if str(path).endswith(".gz") else open(path, newline="") as file:
        rows = csv.DictReader(file)
        names = {name.strip() for name in rows.fieldnames or ()}
        layout = next((read for needed, read in LAYOUTS if needed <= names), None)
        if layout is None:
            wanted = "; ".join(", ".join(sorted(needed)) for needed, _ in LAYOUTS)
            raise RecordError(
                f"{path}: a trace has one of these sets of columns: {wanted}; this file has {sorted(names)}"
            )
        first: float | None = None
        last = -math.inf
        for row in rows:
            try:
                time, prompt, new, more = layout(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RecordError(f"{path}, line {rows.line_num}: {error}") from error
            if prompt < 1 or new < 1:
                continue
            first = time if first is None else first
            if time < last:
                raise RecordError(
                    f"{path}, line {rows.line_num}: it is earlier than the line above; sort by time"
                )
            last = time
            yield Arrival(
                name=str(rows.line_num),
                time=time - first,
                prompt_tokens=prompt,
                new_tokens=new,
                max_tokens=max(new, int(more.get("max_tokens") or 0)),
                priority=int(more.get("priority") or 0),
                deadline=float(more["deadline"]) if more.get("deadline") else None,
            )


Row = Mapping[str, str]
Found = tuple[float, int, int, Row]
_Length = Callable[[random.Random], int]


def _ours(row: Row) -> Found:
    return float(row["arrival"]), int(row["prompt_tokens"]), int(row["new_tokens"]), row


def _azure(row: Row) -> Found:
    moment = datetime.fromisoformat(row["TIMESTAMP"].strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), {}


def _burst_gpt(row: Row) -> Found:
    return float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]), {}


LAYOUTS: tuple[tuple[frozenset[str], Callable[[Row], Found]], ...] = (
    (frozenset({"arrival", "prompt_tokens", "new_tokens"}), _ours),
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    (frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burst_gpt),
)


def _poisson(
    name: str, requests: int, rate: float, seed: int, prompt: _Length, new: _Length
) -> Iterator[Arrival]:
    """Poisson arrivals, `rate` a second, whose lengths `prompt` and `new` draw."""
    draw = random.Random(f"{name}/{seed}")
    time = 0.0
    for index in range(requests):
        prompt_tokens, new_tokens = prompt(draw), new(draw)
        yield Arrival(
            name=str(index),
            time=time,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            max_tokens=new_tokens,
        )
        time += draw.expovariate(rate)


def _log_normal(median: int, deviation: float, least: int, most: int) -> _Length:
    """deviation: in the logarithm. least, most: where lengths are cut off."""
    return lambda draw: min(max(round(draw.lognormvariate(math.log(median), deviation)), least), most)


def heavy_tailed(requests: int, rate: float, seed: int) -> Iterator[Arrival]:
    """Log-normal lengths as in the benchmark's `ragged` workload: medians 64 in and 48 out."""
    prompt, new = _log_normal(64, 1.0, 4, 512), _log_normal(48, 1.0, 4, 384)
    return _poisson("heavy-tailed", requests, rate, seed, prompt, new)


def uniform(requests: int, rate: float, seed: int) -> Iterator[Arrival]:
    """All of 128 tokens in and 128 out."""
    return _poisson("uniform", requests, rate, seed, lambda _: 128, lambda _: 128)


def azure_like(requests: int, rate: float, seed: int) -> Iterator[Arrival]:
    """Log-normal lengths with the medians and means of the public Azure conversation trace: 1020 and 1155 tokens in,
    129 and 211 out (Patel et al., "Splitwise", 2024, section 3)."""
    prompt, new = _log_normal(1020, 0.5, 1, 14_050), _log_normal(129, 1.0, 1, 1000)
    return _poisson("azure-like", requests, rate, seed, prompt, new)


SYNTHETIC: dict[str, Callable[[int, float, int], Iterator[Arrival]]] = {
    "heavy-tailed": heavy_tailed,
    "uniform": uniform,
    "azure-like": azure_like,
}
