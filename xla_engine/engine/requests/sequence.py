"""The host side of one sequence: its ids, noise key, tokens, text and times; and of the n sequences of one request."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from xla_engine.engine.requests.output_collector import AllSeen, OutputCollector, Readable, Seen
from xla_engine.engine.requests.pooling import PooledPrompt
from xla_engine.engine.requests.sampled_tokens import MadeWhenRead, SampledTokens, Score, Sink, by_id
from xla_engine.engine.requests.validation import CheckedRequest
from xla_engine.errors import ReplayError
from xla_engine.graphs.sampling.logprobs import TopLogprobs
from xla_engine.observability.distributions import Histograms
from xla_engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import FinishReason, Request, Sample, Times
from xla_engine.text.stop_strings import GeneratedText
from xla_engine.text.tokenizer import Tokenizer


class LiveSequence:
    """Accumulates the sampled tokens of one sequence until it ends.

    request: as the scheduler gets it. settings: as the device gets them. mask: of its next token; None if any token is
    allowed.
    collector: receives its output. reader: the object that is put there, the sequence itself or its group.
    pooling: collects its vector if the model pools. Such a request ends with one token, which is not shown.
    faults: failed steps it was in. passes: times it got past such a step while running apart from others.
    preemptions: times it lost its slot.
    sink: takes a token and its time; None if that is not enough: `immediate` sequences need `add`, and those that keep
    log-probabilities need `keep`.
    arrival_time, finished_time: on the engine's clock; the latter is None while it runs. error: why it failed.
    """

    def __init__(
        self,
        request: Request,
        settings: RowSettings,
        checked: CheckedRequest,
        tokenizer: Tokenizer | None,
        *,
        histograms: Histograms,
        collector: OutputCollector,
        now: float,
        pooling: PooledPrompt | None = None,
        images_sha256: tuple[str, ...] = (),
    ) -> None:
        self._continue_as(request, settings)
        self._images_sha256 = images_sha256
        self.pooling = pooling
        self.collector = collector
        self.reader: Readable = self
        self.faults = self.passes = self.preemptions = 0
        self._histograms = histograms
        self._num_cached_tokens = 0
        self._admitted_time: float | None = None
        self._prompt, self.prompt_token_ids = checked.text, checked.token_ids
        self._tokenizer = tokenizer if self._params.detokenize else None
        self._text = self._no_text()
        self._stop_ids = frozenset(checked.stop_ids)
        # Only the host checks these, because the device has room for `MAX_STOP_TOKEN_IDS`.
        self._host_stop_ids = self._stop_ids - request.stop_token_ids
        self._eos_ids = frozenset(checked.eos_ids)
        self.arrival_time = now
        self.finished_time: float | None = None
        self._inherited = 0  # tokens that the request had when it was extended
        self._to_repeat = 0  # tokens it has that it must sample again, since it runs again
        self._decoded = 0  # tokens that `_text` has
        self._num_drafted = self._num_accepted = 0
        self._tokens = SampledTokens(self._params, self._tokenizer)
        self._prompt_scores: list[Score | None] = [None] * max(self._params.logprobs_start, 1)
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []  # cache of `output`
        self._stop_string: str | None = None
        self.failure: Exception | None = None  # its text cannot be decoded; the engine's next turn ends it
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._looks = self._looks_at_each()
        self.sink: Sink | None = self._make_sink()

    def _looks_at_each(self) -> bool:
        stops = bool(self._host_stop_ids) or (self._text is not None and bool(self._params.stop))
        return stops or self.constrained

    def _make_sink(self) -> Sink | None:
        return None if self.immediate else self._tokens.sink

    def _continue_as(self, request: Request, settings: RowSettings) -> None:
        self.request, self.request_id = request, request.request_id
        self.settings, self._params, self.mask = settings, settings.params, settings.mask

    def successor(self, request: Request, settings: RowSettings, collector: OutputCollector) -> LiveSequence:
        """A live copy that continues where this sequence is; this one does not change."""
        other = copy.copy(self)
        other.collector, other.reader = collector, other
        other._continue_as(request, settings)
        other._inherited = len(self._tokens.ids)
        other.faults = other.passes = 0
        other.finish_reason = other.finished_time = other.error = None
        other._tokens = self._tokens.copy(settings.params)
        other._prompt_scores, other._prompt_logprobs = list(self._prompt_scores), list(self._prompt_logprobs)
        # Decode again: text that was flushed at the end may have to be held back now.
        other._text = text = other._no_text()
        if text is not None and settings.params.stop:
            for count, token_id in enumerate(self._tokens.ids, 1):
                text.push(token_id, may_stop=count >= settings.params.min_tokens)
            other._decoded = len(self._tokens.ids)
        else:
            other._decoded = 0
        other._looks = other._looks_at_each()
        other.sink = other._make_sink()
        return other

    def _no_text(self) -> GeneratedText | None:
        if self._tokenizer is None:
            return None
        return GeneratedText(
            self._tokenizer.incremental(self._params.skip_special_tokens),
            tuple(self._params.stop),
            include_stop=self._params.include_stop_str_in_output,
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def can_go_on(self) -> bool:
        """Whether a larger `max_tokens` gives more tokens: not after a stop or an error, nor if it ended before its
        constraint was compiled."""
        compiled = self.mask is not None or self._params.structured_outputs is None
        return compiled and self.finish_reason not in (FinishReason.STOP, FinishReason.ERROR)

    @property
    def received(self) -> Sequence[int]:
        """The tokens since it last started: all that it has, unless it runs again."""
        return self._tokens.ids[: len(self._tokens.ids) - self._to_repeat]

    @property
    def num_tokens(self) -> int:
        """Tokens it has."""
        return len(self._tokens.ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens it has sampled itself: not those of the request that it extends."""
        return len(self._tokens.ids) - self._inherited

    @property
    def last_token_time(self) -> float | None:
        """When the latest of its `num_tokens` tokens was read from the device; None without any."""
        return self._tokens.times[-1] if self._tokens.times else None

    @property
    def is_repeating(self) -> bool:
        """Whether it runs again, so that the next token is one it has already."""
        return self._to_repeat > 0

    @property
    def constrained(self) -> bool:
        """Whether the allowed next tokens depend on the tokens so far."""
        return self.mask is not None and self.mask.constrained

    @property
    def immediate(self) -> bool:
        """Whether each token must be looked at as it arrives, by `add`. Otherwise `keep` is enough, and its text is
        decoded when it is read."""
        return self._looks or self._to_repeat > 0

    def times(self, now: float) -> Times:
        """Its age, queueing time and time to first token."""
        came, admitted = self.arrival_time, self._admitted_time
        return Times(
            age=now - came,
            queued=(now if admitted is None else admitted) - came,
            first_token=self._tokens.times[0] - came if self._tokens.times else None,
        )

    def admit(self, now: float) -> None:
        """Note that it got a slot, for the first time or again."""
        if self._admitted_time is None:
            self._admitted_time = now
            self._histograms.queue_seconds.add(now - self.arrival_time)

    def reuse(self, tokens: int) -> None:
        """Note how many tokens the prefix cache had; not counted when it resumes after a preemption."""
        if not self._tokens.ids:
            self._num_cached_tokens = tokens

    def rewind(self) -> None:
        """Prepare to run again from the beginning; it keeps its tokens, and must sample the same ones again."""
        self._to_repeat = len(self._tokens.ids)
        self.sink = self._make_sink()
        if self.mask is not None:
            self.mask.reset()

    def keep(self, sample: Sample, now: float) -> None:
        """Take one sampled token without looking at it; for sequences that are not `immediate`."""
        self._tokens.append(sample, now)

    def extend(self, samples: Sequence[Sample], now: float) -> bool:
        """Take the tokens of one step; True if one ends the request.

        Tokens after that one are dropped. Raises what `add` raises.
        """
        return any(self.add(sample, now) for sample in samples)

    def decode_text(self) -> bool:
        """Decode the tokens whose text was not read yet; returns False. Raises the detokenizer's error, each time."""
        if self.failure is not None:
            raise self.failure
        tokens = self._tokens.ids[self._decoded :]
        if self._text is None or not tokens:
            return False
        self._decoded += len(tokens)
        # Only the last can be a stop token.
        hidden = tokens[-1] in self._stop_ids and not self._params.include_stop_str_in_output
        try:
            self._text.extend(tokens[:-1] if hidden else tokens)
        except Exception as failure:
            self.failure = failure
            raise
        return False

    @property
    def next_position(self) -> int:
        """The position of the first token that has not been read from the device."""
        return len(self.prompt_token_ids) + len(self._tokens.ids) - self._to_repeat

    @property
    def token_ids(self) -> Sequence[int]:
        """The generated tokens, as far as they were read from the device."""
        return self._tokens.ids

    def read_from(self, place: int) -> list[int]:
        """These tokens from index `place` on."""
        return self._tokens.ids[place:]

    def known_tokens(self, most: int) -> list[int]:
        """Up to `most` of the next tokens of a sequence that runs again."""
        place = len(self._tokens.ids) - self._to_repeat
        return self._tokens.ids[place : place + most]

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count the draft tokens of a step."""
        self._num_drafted += drafted
        self._num_accepted += accepted

    def add(self, sample: Sample, now: float) -> bool:
        """Take one sampled token; True if it completes a stop string or is in `host_stop_ids`.

        A stop token counts as a token but adds no text, unless the request sets `include_stop_str_in_output`. Raises
        ReplayError if the sequence runs again and the token differs from before.
        """
        if self.mask is not None and sample.token_id not in self._stop_ids:
            self.mask.take(sample.token_id)
        if self.is_repeating:
            self._repeat(sample)
            return False
        self.decode_text()
        if self._tokens.times:
            self._histograms.inter_token_seconds.add(now - self._tokens.times[-1])
        else:
            self._histograms.first_token_seconds.add(now - self.arrival_time)
        self._tokens.append(sample, now)
        stops = sample.token_id in self._host_stop_ids
        if self._text is None:
            return stops
        self._decoded += 1
        if sample.token_id not in self._stop_ids:
            may_stop = len(self._tokens.ids) >= self._params.min_tokens
            self._stop_string = self._text.push(sample.token_id, may_stop=may_stop)
        elif self._params.include_stop_str_in_output:
            self._text.push(sample.token_id, may_stop=False)
        return stops or self._stop_string is not None

    def _repeat(self, sample: Sample) -> None:
        place = len(self._tokens.ids) - self._to_repeat
        known = self._tokens.ids[place]
        if sample.token_id != known:
            raise ReplayError(
                f"run again after a fault, the request got token {sample.token_id} at position {place}, "
                f"not {known} as before; please report this with the output of `xla-engine verify`"
            )
        self._to_repeat -= 1
        self.sink = self._make_sink()

    def add_prompt_logprobs(self, start: int, scores: Sequence[tuple[float, TopLogprobs]]) -> None:
        """Take the log-probabilities of the prompt tokens from position `start` on, in order; ignores known ones."""
        for position, (logprob, top) in enumerate(scores, start):
            if position == len(self._prompt_scores):
                self._prompt_scores.append((self.prompt_token_ids[position], logprob, top))

    def finish(self, reason: FinishReason, now: float, error: str | None = None) -> FinishReason:
        """End the sequence with the tokens it has, and flush text that was held back.

        Returns the final reason: ERROR if its text or vector cannot be computed.
        """
        try:
            self.decode_text()
            if self._text is not None and self._stop_string is None:
                self._text.end()
            if self.pooling is not None:
                self.pooling.finish(len(self.prompt_token_ids), whole=reason is FinishReason.LENGTH)
        except Exception as failure:
            given = error if reason is FinishReason.ERROR else None
            reason, error = FinishReason.ERROR, given or str(failure)
        self.finish_reason, self.finished_time, self.error = reason, now, error
        self._histograms.count_end(now - self.arrival_time, self._tokens.times, self.preemptions, self.faults)
        return reason

    def output(self) -> RequestOutput:
        self._read_text()
        result = self.result((self._completion(0, Seen(), self._tokens.whole()),))
        if self._params.prompt_logprobs is not None:
            self._prompt_logprobs += map(
                self._by_id_or_none, self._prompt_scores[len(self._prompt_logprobs) :]
            )
            result = replace(result, prompt_logprobs=tuple(self._prompt_logprobs))
        metrics = RequestMetrics(
            arrival_time=self.arrival_time,
            admitted_time=self._admitted_time,
            first_token_time=self._tokens.times[0] if self._tokens.times else None,
            finished_time=self.finished_time,
            token_times=tuple(self._tokens.times),
        )
        return replace(result, metrics=metrics)

    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput:
        """See `Readable`."""
        part = self.new_part(0, seen[0], only_ended=only_ended)
        return self.result(() if part is None else (part,))

    def new_part(self, index: int, seen: Seen, *, only_ended: bool) -> CompletionOutput | None:
        """What `seen` lacks of this sequence, None if nothing; updates `seen`. index: that of the sequence."""
        if seen.ended or (only_ended and not self.finished):
            return None
        self._read_text()
        if len(self._tokens.ids) == seen.tokens and not self.finished:
            return None
        part = self._completion(index, seen, self._tokens.columns(seen.tokens))
        seen.tokens, seen.ended = len(self._tokens.ids), self.finished
        seen.characters += len(part.text)
        return part

    def result(self, outputs: tuple[CompletionOutput, ...]) -> RequestOutput:
        """The request's output with these sequences; of the times, only arrival and end."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=RequestMetrics(arrival_time=self.arrival_time, finished_time=self.finished_time),
            error=self.error,
            num_cached_tokens=self._num_cached_tokens,
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            prompt_logprobs=None
            if self._params.prompt_logprobs is None
            else MadeWhenRead(self._prompt_scores, self._by_id_or_none),
            pooled=None if self.pooling is None else self.pooling.numbers,
            images_sha256=self._images_sha256,
        )

    def _by_id_or_none(self, score: Score | None) -> dict[int, Logprob] | None:
        return None if score is None else by_id(*score, self._tokenizer)

    def _read_text(self) -> None:
        with suppress(Exception):  # kept in `failure` for the engine's turn, which ends the sequence
            self.decode_text()

    def _completion(self, index: int, since: Seen, columns: dict[str, Any]) -> CompletionOutput:
        """The output after the tokens and characters that were seen. columns: its fields about tokens."""
        if self.pooling is not None:
            columns["token_ids"] = ()
        last = self._tokens.ids[-1] if self._tokens.ids else None
        own_stop = self.finish_reason == FinishReason.STOP and last not in self._eos_ids
        return CompletionOutput(
            index=index,
            text="" if self._text is None else self._text.text[since.characters :],
            **columns,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self._stop_string or (last if own_stop else None),
        )


class SequenceGroup:
    """The sequences of a request with n above 1, in order: the scheduler runs them as separate requests.

    Their collector receives the group in their place.
    """

    def __init__(self, request_id: str, parts: tuple[LiveSequence, ...]) -> None:
        self.request_id = request_id
        self.parts = parts
        for part in parts:
            part.reader = self

    @property
    def finished(self) -> bool:
        return all(part.finished for part in self.parts)

    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput:
        """See `Readable`."""
        parts = [
            part.new_part(index, seen[index], only_ended=only_ended) for index, part in enumerate(self.parts)
        ]
        ends = [part.finished_time or 0.0 for part in self.parts]
        return replace(
            self.parts[0].result(tuple(part for part in parts if part is not None)),
            request_id=self.request_id,
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self.parts[0].arrival_time, finished_time=max(ends) if self.finished else None
            ),
            error=next((part.error for part in self.parts if part.error is not None), None),
        )

    def output(self) -> RequestOutput:
        """The cumulative output of all sequences.

        Times: the first admission, the first token, the end of the last sequence; token times are those of all.
        """
        outputs = [part.output() for part in self.parts]
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        admitted = [each.admitted_time for each in metrics if each.admitted_time is not None]
        token_times = sorted(time for each in metrics for time in each.token_times)
        return replace(
            outputs[0],
            request_id=self.request_id,
            outputs=tuple(replace(output.outputs[0], index=index) for index, output in enumerate(outputs)),
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=metrics[0].arrival_time,
                admitted_time=min(admitted, default=None),
                first_token_time=token_times[0] if token_times else None,
                finished_time=max(each.finished_time or 0.0 for each in metrics) if self.finished else None,
                token_times=tuple(token_times),
                sequence_token_times=tuple(each.token_times for each in metrics),
            ),
            error=next((output.error for output in outputs if output.error is not None), None),
        )


def sequence_ids(request_id: str, n: int) -> list[str]:
    """The ids under which the scheduler knows the sequences of a request."""
    return [request_id] if n == 1 else [f"{request_id}[{index}]" for index in range(n)]


def noise_key(engine_seed: int, request_id: str, params: SamplingParams) -> int:
    """A request's noise key, 64-bit unsigned: its own seed, or one derived from the engine's seed and its id."""
    if params.seed is not None:
        return params.seed % 2**64
    digest = hashlib.sha256(f"{engine_seed}\0{request_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def sequence_seed(seed: int, index: int) -> int:
    """The noise key of a request's sequence, 64-bit unsigned; the first sequence has the request's key."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}\0{index}".encode()).digest()[:8], "big")
