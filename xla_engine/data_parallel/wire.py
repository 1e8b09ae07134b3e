"""The protocol between an engine and its parent: one JSON object a line; outputs are sent as increments."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.requests.output_collector import AllSeen, Seen
from xla_engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from xla_engine.scheduler import FinishReason, Snapshot
from xla_engine.scheduler.moves import Slot
from xla_engine.scheduler.plan import Decision
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.snapshot import Counters, RequestView, SlotView, Times

Message = dict[str, Any]


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode one line. Floats keep all bits; NaN and infinities are written as in Python's json."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    found: Message = json.loads(line)
    return found


def config_of(values: Message) -> EngineConfig:
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return EngineConfig(**{**values, **tuples})


def snapshot_of(values: Message) -> Snapshot:
    """The inverse of `asdict` and JSON for a `Snapshot`."""
    counters = {**values["counters"]}
    counters["finished"] = {FinishReason(name): count for name, count in counters["finished"].items()}
    return Snapshot(
        slots=tuple(
            SlotView(
                slot=Slot(**each["slot"]),
                position=each["position"],
                request=None if each["request"] is None else _view(each["request"]),
                blocks=tuple(each["blocks"]),
            )
            for each in values["slots"]
        ),
        waiting=tuple(map(_view, values["waiting"])),
        draining=tuple(map(_view, values["draining"])),
        counters=Counters(**counters),
    )


def _view(values: Message) -> RequestView:
    decision, times = values["decision"], values["times"]
    return RequestView(
        **{
            **values,
            "status": Status(values["status"]),
            "decision": None if decision is None else Decision(**decision),
            "times": None if times is None else Times(**times),
        }
    )


@dataclass(slots=True)
class SentOutput:
    """How much of a request was sent: of each sequence, and how many times and prompt logprobs."""

    seen: AllSeen = field(default_factory=lambda: AllSeen(Seen))
    times: int = 0
    prompt: int = 0


def news_of(output: RequestOutput, sent: SentOutput) -> Message:
    """The part of `output` that was not sent yet; updates `sent`."""
    parts = []
    for completion in output.outputs:
        seen = sent.seen[completion.index]
        start = seen.tokens
        parts.append(
            {
                "index": completion.index,
                "columns": {name: _to_json(each[start:]) for name, each in completion.columns().items()},
                "text": completion.text[seen.characters :],
                "sum": completion.cumulative_logprob,
                "finish": completion.finish_reason,
                "stop": completion.stop_reason,
            }
        )
        seen.tokens, seen.characters = len(completion.token_ids), len(completion.text)
    news: Message = {"finished": output.finished, "outputs": parts}
    if output.error is not None:
        news["error"] = output.error
    if (scores := output.prompt_logprobs) is not None:
        news["prompt"] = _to_json(scores[sent.prompt :])
        sent.prompt = len(scores)
    if (metrics := output.metrics) is not None:
        times = metrics.token_times[sent.times :]
        news["times"] = [metrics.admitted_time, metrics.first_token_time, metrics.finished_time, times]
        sent.times = len(metrics.token_times)
    news["counts"] = [output.num_cached_tokens, output.num_drafted_tokens, output.num_accepted_tokens]
    return news


def _to_json(values: Sequence[Any]) -> list[Any]:
    """The values of tokens: numbers as they are, the likeliest tokens of each as a list of lists."""
    return [
        [[token, *entry] for token, entry in each.items()] if isinstance(each, Mapping) else each
        for each in values
    ]


def _of_json(values: list[Any]) -> list[Any]:
    """The inverse of `_to_json`."""
    return [
        {token: Logprob(*entry) for token, *entry in each} if isinstance(each, list) else each
        for each in values
    ]


@dataclass(slots=True)
class _Sequence:
    """What was received of a sequence. columns: as in `CompletionOutput.columns`."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {"token_ids": []})
    text: str = ""
    total: float | None = None
    finish: str | None = None
    stop: int | str | None = None

    def add(self, part: Message) -> None:
        for name, values in part["columns"].items():
            self.columns.setdefault(name, []).extend(_of_json(values))
        self.text += part["text"]
        self.total, self.finish, self.stop = part["sum"], part["finish"], part["stop"]

    @property
    def tokens(self) -> list[int]:
        return self.columns["token_ids"]

    def completion(self, index: int, since: Seen) -> CompletionOutput:
        columns: dict[str, Any] = {
            name: tuple(values[since.tokens :]) for name, values in self.columns.items()
        }
        return CompletionOutput(
            index=index,
            text=self.text[since.characters :],
            cumulative_logprob=self.total,
            finish_reason=self.finish,
            stop_reason=self.stop,
            **columns,
        )


@dataclass(slots=True)
class Received:
    """All output received for a request in one of its runs."""

    sequences: defaultdict[int, _Sequence] = field(default_factory=lambda: defaultdict(_Sequence))
    prompt: list[Any] | None = None
    finished: bool = False
    error: str | None = None
    admitted: float | None = None
    first: float | None = None
    ended: float | None = None
    times: list[float] = field(default_factory=list)
    counts: tuple[int, int, int] = (0, 0, 0)

    def add(self, news: Message) -> None:
        for part in news["outputs"]:
            self.sequences[part["index"]].add(part)
        self.finished, self.error = news["finished"], news.get("error")
        if "prompt" in news:
            self.prompt = (self.prompt or []) + _of_json(news["prompt"])
        if "times" in news:
            self.admitted, self.first, self.ended, times = news["times"]
            self.times += times
        self.counts = tuple(news["counts"])

    def is_behind(self, other: Received) -> bool:
        """Whether `other`, an earlier run of the same request, has output that has not come here yet."""
        return not self.finished and (
            len(self.prompt or ()) < len(other.prompt or ())
            or any(
                index not in self.sequences or len(self.sequences[index].tokens) < len(sequence.tokens)
                for index, sequence in other.sequences.items()
            )
        )

    def continues(self, other: Received) -> bool:
        """Whether the tokens of `other` are a prefix of the tokens here."""
        return all(
            index in self.sequences
            and self.sequences[index].tokens[: len(sequence.tokens)] == sequence.tokens
            for index, sequence in other.sequences.items()
        )

    def new_parts(self, seen: AllSeen, *, only_ended: bool) -> tuple[CompletionOutput, ...]:
        """See `Readable.news`."""
        parts = []
        for index, each in sorted(self.sequences.items()):
            known = seen[index]
            is_new = each.finish is not None or (len(each.tokens) > known.tokens and not only_ended)
            if is_new and not known.ended:
                part = each.completion(index, known)
                parts.append(replace(part, cumulative_logprob=None))
                known.tokens, known.ended = len(each.tokens), each.finish is not None
                known.characters += len(part.text)
        return tuple(parts)

    def output(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        arrival: float,
        parts: tuple[CompletionOutput, ...] | None = None,
    ) -> RequestOutput:
        """parts: the parts of sequences to include; None includes everything."""
        if parts is None:
            parts = tuple(each.completion(index, Seen()) for index, each in sorted(self.sequences.items()))
            times = tuple(self.times)
        else:
            times = ()
        cached, drafted, accepted = self.counts
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=parts,
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=arrival,
                admitted_time=self.admitted,
                first_token_time=self.first,
                finished_time=self.ended,
                token_times=times,
            ),
            error=self.error,
            prompt_logprobs=None if self.prompt is None else tuple(self.prompt),
            num_cached_tokens=cached,
            num_drafted_tokens=drafted,
            num_accepted_tokens=accepted,
        )
