"""The live requests of an engine: what each has so far, what the device is told about it, and who reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from xla_engine.engine.protocol import RequestOptions
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.seeds import sequence_ids, sequence_seed
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.requests.sequence_group import SequenceGroup
from xla_engine.engine.requests.token_buffer import TokenBuffer
from xla_engine.errors import InvalidRequestError
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from xla_engine.scheduler import FinishReason, Request
from xla_engine.text.token_mask import TokenMask
from xla_engine.text.tokenizer import Tokenizer


class RequestTable:
    """Sequences by id, which is the request's own id where n is 1. Each is opened once and ended once.

    settings: by sequence, for the runner. token_buffer: where sequences take their tokens from.
    submitted: requests since the start. finished: sequences since the start, by reason.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.settings: dict[str, RowSettings] = {}
        self.token_buffer: TokenBuffer[LiveSequence] = TokenBuffer()
        self.submitted = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self._tokenizer = tokenizer
        self._live: dict[str, LiveSequence] = {}
        self._groups: dict[str, SequenceGroup] = {}  # the requests that are more than one sequence

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        """The ids of the live sequences, oldest first; sequences may come and go meanwhile."""
        return iter(list(self._live))

    def __getitem__(self, name: str) -> LiveSequence:
        return self._live[name]

    def get(self, name: str) -> LiveSequence | None:
        """A live sequence; None when there is none of this id."""
        return self._live.get(name)

    def sequences(self, request_id: str) -> list[str]:
        """The ids of a request's sequences, some of which may be over."""
        group = self._groups.get(request_id)
        return [request_id] if group is None else [part.request_id for part in group.parts]

    def free_id(self, n: int) -> str:
        """An id that a request of n sequences can have: its number, with a suffix where a caller has given that."""
        name, count = str(self.submitted), 0
        while self._taken(name, n):
            count += 1
            name = f"{self.submitted}.{count}"
        return name

    def _taken(self, request_id: str, n: int) -> list[str]:
        """Those names of a request that are in use."""
        names = (request_id, *sequence_ids(request_id, n))
        return [name for name in names if name in self._live or name in self._groups]

    def check_free(self, request_id: str, n: int) -> None:
        """Raise InvalidRequestError unless a request of n sequences can have this id."""
        if taken := self._taken(request_id, n):
            raise InvalidRequestError(
                f"request id {min(taken)!r} is in use by a live request; choose another"
            )

    def open(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        mask: TokenMask | None,
        stop_ids: tuple[int, ...],
        eos_ids: tuple[int, ...],
        seed: int,
        collector: OutputCollector,
        now: float,
        options: RequestOptions,
    ) -> list[Request]:
        """Take a request of `params.n` sequences, each with its copy of the mask; returns them for the scheduler.

        The id must be free.
        """
        names = sequence_ids(request_id, params.n)
        parts = []
        masks = [mask, *(None if mask is None else mask.copy() for _ in names[1:])]
        for index, (name, own) in enumerate(zip(names, masks, strict=True)):
            part = replace(params, n=1, prompt_logprobs=params.prompt_logprobs if index == 0 else None)
            self.settings[name] = RowSettings(
                max_tokens=params.token_limit,
                stop_token_ids=stop_ids[:MAX_STOP_TOKEN_IDS],
                params=part,
                seed=sequence_seed(seed, index),
                mask=own,
                prompt_token_ids=token_ids,
            )
            self._live[name] = LiveSequence(
                name,
                prompt,
                token_ids,
                part,
                self._tokenizer,
                own,
                stop_ids=frozenset(stop_ids),
                host_stop_ids=frozenset(stop_ids[MAX_STOP_TOKEN_IDS:]),
                eos_ids=frozenset(eos_ids),
                token_buffer=self.token_buffer,
                collector=collector,
                now=now,
            )
            parts.append(self._live[name])
        if params.n > 1:
            self._groups[request_id] = SequenceGroup(request_id, tuple(parts))
        self.submitted += 1
        deadline, queue_timeout = options.get("deadline_s"), options.get("queue_timeout_s")
        return [
            Request(
                request_id=part.request_id,
                prompt_token_ids=token_ids,
                max_tokens=params.token_limit,
                stop_token_ids=frozenset(stop_ids[:MAX_STOP_TOKEN_IDS]),
                host_gated=part.host_gated,
                cache_salt=options.get("cache_salt", ""),
                reads_prefix_cache=self.settings[part.request_id].params.prompt_logprobs is None,
                priority=options.get("priority", 0),
                deadline=None if deadline is None else now + deadline,
                queue_deadline=None if queue_timeout is None else now + queue_timeout,
            )
            for part in parts
        ]

    def take_back(self, request_id: str) -> None:
        """Undo `open`, without a word to the request's reader."""
        for name in self.sequences(request_id):
            del self._live[name], self.settings[name]
        self._groups.pop(request_id, None)
        self.submitted -= 1

    def end(self, name: str, reason: FinishReason, now: float, error: str | None = None) -> FinishReason:
        """Give a sequence its terminal result and tell its reader; the id is free then.

        Returns the reason that stands: "error" where its text cannot be made.
        """
        request = self._live.pop(name)
        del self.settings[name]
        reason = request.finish(reason, now, error)
        request.collector.put(request.reader)
        self.finished[reason] += 1
        if isinstance(request.reader, SequenceGroup) and request.reader.finished:
            del self._groups[request.reader.request_id]
        return reason
