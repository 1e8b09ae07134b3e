"""Requests that go on after their end, or from where they were saved, and requests that begin as others went."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Unpack

from xla_engine.engine.intake import Intake
from xla_engine.engine.locked import locked
from xla_engine.engine.protocol import RequestOptions
from xla_engine.engine.requests.kept import FINAL, KeptRequest
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.seeds import sequence_ids
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.errors import InvalidRequestError
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Request
from xla_engine.scheduler.continuation import go_on, request_of
from xla_engine.text.token_mask import TokenMask


class SavedSequence(NamedTuple):
    """A sequence as it was saved, what the device was told about it, and what the scheduler was."""

    part: LiveSequence
    row: RowSettings
    request: Request | None


class Continuing(Intake):
    """A loop whose requests may go on after their end, while they are kept (`EngineConfig.keep_finished`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._saved: dict[str, tuple[SavedSequence, ...]] = {}

    @locked
    def extend(
        self,
        request_id: str,
        max_tokens: int,
        *,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Give a request that has ended up to `max_tokens` more tokens, in each of its sequences that may have more.

        The request goes on under its id, and what it returns is to the bit what it would have returned with a larger
        `max_tokens` from the start: tokens, log-probabilities, text, and where it stops. It decodes on at once where
        its slot and blocks still hold what it left and the engine does not speculate. Otherwise its tokens are
        prefilled again where that is exact, or else sampled again; none is delivered twice.

        Text that was shown at its end, since no token was to come, may be taken back: half a character, or the
        beginning of a stop string.

        collector: as in `submit`. options: those of `submit` but `cache_salt`; a priority that is left out stays as it
            was, and deadlines count from now.

        Raises InvalidRequestError for a request that is not kept: it is live or unknown, it ended with "stop" or
        "error", or others ended since and it was forgotten; TokenLimitError when the longer request does not fit,
        QueueFullError and EngineClosedError. Then nothing is changed.
        """
        self.check_open()
        kept = self._kept(request_id)
        self._check_options(options)
        collector = self._collector if collector is None else collector
        parts: list[tuple[LiveSequence, RowSettings]] = []
        requests: list[Request] = []
        for part, row in kept.parts:
            if part.finish_reason not in FINAL:
                part, row = self._longer(part, row, max_tokens, collector, part.request_id)
                before = request_of(self.scheduler, part.request_id)
                assert before is not None
                requests.append(self._asked_again(before, row, options))
            parts.append((part, row))
        self._queue_again(request_id, parts, requests)
        assert self._table.kept is not None
        self._table.kept.take(request_id)

    @locked
    def save(self, request_id: str, name: str | None = None) -> str:
        """Keep what a live request has so far, or one that has ended and is kept, under a name; returns the name.

        The request itself goes on as if nothing had been. What is saved are tokens and settings, on the host: of
        keys and values a `restore` takes what slots or blocks still hold, and computes the rest again.

        name: None makes one. As many as `keep_finished` are kept at a time, until they are freed.

        Raises InvalidRequestError for a request or a name that cannot be, or when so many are kept already.
        """
        if name is None:
            name = next(free for at in count() if (free := f"{request_id}@{at}") not in self._saved)
        if self._table.kept is None:
            raise InvalidRequestError("this engine keeps no requests: set keep_finished")
        if name in self._saved:
            raise InvalidRequestError(
                f"{name!r} is the name of another saved request; free it or choose another"
            )
        if len(self._saved) >= (most := self._table.kept.most):
            raise InvalidRequestError(f"{most} requests are saved, as many as keep_finished allows; free one")
        saved: list[SavedSequence] = []
        for part, row in self._known(request_id):
            request = request_of(self.scheduler, part.request_id)
            if part.finish_reason not in FINAL:
                row = replace(row, mask=_copied(row.mask))
                part.tokens_from(0)  # takes what was read of its tokens
                part = part.successor(part.request_id, row.params, row.mask, self._collector)
            saved.append(SavedSequence(part, row, request))
        self._saved[name] = tuple(saved)
        return name

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of saved requests, the oldest first."""
        return tuple(self._saved)

    @locked
    def free(self, name: str) -> bool:
        """Let go of a saved request; False where none has this name."""
        return self._saved.pop(name, None) is not None

    def slots_of_adapters(self) -> set[int]:
        """Those that sequences have which run, wait, or may go on."""
        saved = [each.row for parts in self._saved.values() for each in parts]
        kept = [] if self._table.kept is None else self._table.kept.every_setting()
        rows = (*self._table.settings.values(), *saved, *kept)
        return {row.adapter for row in rows} | {one.adapter for one in self._untried.values()}

    def forget_kept(self) -> None:
        """Let go of all requests that have ended, and of all that were saved."""
        self._saved.clear()
        if self._table.kept is not None:
            self._table.kept.clear()

    @locked
    def restore(
        self,
        name: str,
        max_tokens: int | None = None,
        *,
        request_id: str | None = None,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Let a saved request go on from where it was saved, as a request of its own; returns its id.

        It has the tokens that were saved, and what follows is to the bit what follows in the request that was saved:
        the noise is the same, whatever the id. It may be restored again and again.

        max_tokens: new tokens at most beside those saved; None: up to the `max_tokens` the request had.
        request_id, collector, options: as in `extend`; the id is made where it is None.

        Raises what `extend` does.
        """
        self.check_open()
        if (saved := self._saved.get(name)) is None:
            raise InvalidRequestError(f"no request is saved as {name!r}")
        self._check_options(options)
        request_id = self._table.free_id(len(saved)) if request_id is None else request_id
        self._table.check_free(request_id, len(saved))
        collector = self._collector if collector is None else collector
        parts: list[tuple[LiveSequence, RowSettings]] = []
        requests: list[Request] = []
        for own, (part, row, request) in zip(sequence_ids(request_id, len(saved)), saved, strict=True):
            if part.finished or request is None:
                ended = copy.copy(part)
                ended.request_id = own
                parts.append((ended, row))
                continue
            more = row.max_tokens - part.num_tokens if max_tokens is None else max_tokens
            row = replace(row, mask=_copied(row.mask))
            longer, row = self._longer(part, row, more, collector, own)
            parts.append((longer, row))
            requests.append(self._asked_again(replace(request, request_id=own), row, options))
        if not requests:
            raise InvalidRequestError(
                f"what is saved as {name!r} ended with stop or error: it has no more tokens"
            )
        self._queue_again(request_id, parts, requests)
        return request_id

    @locked
    def fork(
        self,
        source: str,
        suffix: str | Sequence[int] = (),
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        index: int = 0,
        request_id: str | None = None,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Submit a request whose prompt is that of another, what this has generated so far, and `suffix`.

        It is such a request, and returns the very bits of one that was submitted so. What slots or blocks hold of
        the prompt is copied or shared and not computed again. All of the prompt counts as prompt: for penalties,
        `min_tokens`, bad words and structured outputs the output is what comes now.

        source: a live request, one that has ended and is kept, or the name of a saved one.
        suffix: text, tokenised by itself, or token ids.
        params: None are those of `source`, with its noise, which is a function of seed and position.
        seed: another seed than `params` have.
        index: which sequence of a `source` with n above 1.
        request_id, collector, options: as in `submit`, which says what is raised.
        """
        found = self._saved.get(source)
        parts = self._known(source) if found is None else [(part, row) for part, row, _ in found]
        if not isinstance(index, int) or not 0 <= index < len(parts):
            raise InvalidRequestError(f"index is {index!r}, and {source!r} has {len(parts)} sequences")
        part, row = parts[index]
        request = request_of(self.scheduler, part.request_id) if found is None else found[index].request
        if params is None:
            params = replace(row.params, seed=row.seed)
        if seed is not None:
            params = replace(params, seed=seed)
        if isinstance(suffix, str):
            if self.validator.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer.json; pass the suffix as token ids")
            suffix = self.validator.tokenizer.encode(suffix, add_special_tokens=False)
        if request is not None:
            options.setdefault("cache_salt", request.cache_salt)
        options.setdefault("lora_request", self.adapters.in_slot(row.adapter))
        prompt = [*part.prompt_token_ids, *part.tokens_from(0), *suffix]
        return self.submit(prompt, params, request_id=request_id, collector=collector, **options)

    def _known(self, request_id: str) -> list[tuple[LiveSequence, RowSettings]]:
        """The sequences of a request that is live, or has ended and is kept. Raises InvalidRequestError."""
        if not self._table.taken(request_id):
            return list(self._kept(request_id).parts)
        return self._table.parts(request_id)

    def _kept(self, request_id: str) -> KeptRequest:
        """A request that may go on. Raises InvalidRequestError."""
        if (kept := self._table.kept) is None:
            raise InvalidRequestError("this engine keeps no requests that have ended: set keep_finished")
        if self._table.taken(request_id):
            raise InvalidRequestError(f"request {request_id!r} is live; it can go on when it has ended")
        if (found := kept.get(request_id)) is None:
            raise InvalidRequestError(
                f"request {request_id!r} cannot go on: no such request has ended, it ended with stop or error, or it "
                f"was forgotten, as the latest {kept.most} are kept (keep_finished); submit it anew"
            )
        self._table.check_free(request_id, len(found.parts))
        return found

    def _check_options(self, options: RequestOptions) -> None:
        self.validator.check_options(**options)
        for name in ("cache_salt", "lora_request"):
            if name in options:
                raise InvalidRequestError(f"{name} cannot change when a request goes on: leave it out")

    def _longer(
        self, part: LiveSequence, row: RowSettings, max_tokens: int, collector: OutputCollector, name: str
    ) -> tuple[LiveSequence, RowSettings]:
        """A sequence as it goes on, under a name, with what the device is told."""
        self.validator.check_more(len(part.prompt_token_ids), part.num_tokens, max_tokens)
        cap = part.num_tokens + max_tokens
        row = replace(row, max_tokens=cap, params=replace(row.params, max_tokens=cap))
        return part.successor(name, row.params, row.mask, collector), row

    def _asked_again(self, request: Request, row: RowSettings, options: RequestOptions) -> Request:
        """A request that goes on, for the scheduler."""
        now = self.clock()
        deadline, queue_timeout = options.get("deadline_s"), options.get("queue_timeout_s")
        return replace(
            request,
            max_tokens=row.max_tokens,
            priority=options.get("priority", request.priority),
            quantum=options.get("quantum", request.quantum),
            deadline=None if deadline is None else now + deadline,
            queue_deadline=None if queue_timeout is None else now + queue_timeout,
        )

    def _queue_again(
        self, request_id: str, parts: Sequence[tuple[LiveSequence, RowSettings]], requests: Sequence[Request]
    ) -> None:
        self.validator.check_queue(len(requests), self.scheduler.num_waiting, self.scheduler.num_free)
        self._table.open_again(request_id, parts)
        self.queue(request_id, requests, self._go_on)
        for part, _ in parts:
            if part.host_gated:
                self.masks.add(part)
        if (kept := self._table.kept) is not None:
            kept.settings.update((part.request_id, row) for part, row in parts if part.finished)

    def _go_on(self, request: Request) -> None:
        part = self._table[request.request_id]
        if go_on(self.scheduler, request, part.received):
            part.rewind()


def _copied(mask: TokenMask | None) -> TokenMask | None:
    return None if mask is None else mask.copy()
