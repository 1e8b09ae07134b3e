"""Extending finished requests, saving and restoring requests, and forking new requests from others."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from xla_engine.engine.adapters import Adapters
from xla_engine.engine.intake import Intake
from xla_engine.engine.protocol import RequestOptions, deadlines
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import KeptRequest
from xla_engine.engine.requests.sequence import LiveSequence, sequence_ids
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.engine.state import EngineState
from xla_engine.errors import InvalidRequestError
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Request
from xla_engine.scheduler.continuation import go_on


class Continuations:
    """Continues kept requests (finished ones, see `EngineConfig.keep_finished`) and saved requests."""

    def __init__(
        self, state: EngineState, intake: Intake, validator: RequestValidator, adapters: Adapters
    ) -> None:
        self._state, self._table = state, state.table
        self._intake = intake
        self._validator = validator
        self._adapters = adapters

    def extend(
        self, request_id: str, max_tokens: int, collector: OutputCollector, options: RequestOptions
    ) -> None:
        """As `XlaBatchEngine.extend`."""
        self._intake.check_open()
        kept = self._kept(request_id)
        self._check_options("extend", options)
        parts = [
            self._longer(part, part.request_id, max_tokens, collector, options) if part.can_go_on else part
            for part in kept
        ]
        self._queue_again(request_id, parts)
        self._table.kept.take(request_id)

    def save(self, request_id: str, name: str | None, collector: OutputCollector) -> str:
        """As `XlaBatchEngine.save`. collector: a placeholder for the saved copy; `restore` replaces it."""
        kept, saved = self._table.kept, self._table.kept.saved
        if name is None:
            name = next(free for at in count() if (free := f"{request_id}@{at}") not in saved)
        if not kept.most:
            raise InvalidRequestError("this engine does not keep finished requests: set keep_finished")
        if name in saved:
            raise InvalidRequestError(
                f"{name!r} is the name of another saved request; free it or choose another"
            )
        if len(saved) >= kept.most:
            raise InvalidRequestError(
                f"{kept.most} requests are saved, the maximum that keep_finished allows; free one"
            )
        saved[name] = tuple(
            part.successor(part.request, _with_own_mask(part.settings), collector) if part.can_go_on else part
            for part in self._known(request_id)
        )
        return name

    def free(self, name: str) -> bool:
        """As `XlaBatchEngine.free`."""
        return self._table.kept.saved.pop(name, None) is not None

    def restore(
        self,
        name: str,
        max_tokens: int | None,
        request_id: str | None,
        collector: OutputCollector,
        options: RequestOptions,
    ) -> str:
        """As `XlaBatchEngine.restore`."""
        self._intake.check_open()
        table = self._table
        if (saved := table.kept.saved.get(name)) is None:
            raise InvalidRequestError(f"no request is saved as {name!r}")
        self._check_options("restore", options)
        request_id = table.free_id(len(saved)) if request_id is None else request_id
        table.check_free(request_id, len(saved))
        if all(part.finished for part in saved):
            raise InvalidRequestError(
                f"the request saved as {name!r} ended with stop or error and cannot be continued"
            )
        parts: list[LiveSequence] = []
        for own, part in zip(sequence_ids(request_id, len(saved)), saved, strict=True):
            if part.finished:
                ended = copy.copy(part)
                ended.request_id = own
                parts.append(ended)
            else:
                most = part.settings.max_tokens - part.num_tokens if max_tokens is None else max_tokens
                parts.append(self._longer(part, own, most, collector, options, own_mask=True))
        self._queue_again(request_id, parts)
        return request_id

    def forked(
        self,
        source: str,
        suffix: str | Sequence[int],
        params: SamplingParams | None,
        *,
        seed: int | None,
        index: int,
        options: RequestOptions,
    ) -> tuple[list[int], SamplingParams, RequestOptions]:
        """The prompt, parameters and options with which to submit a fork."""
        parts = self._table.kept.saved.get(source) or self._known(source)
        if not isinstance(index, int) or not 0 <= index < len(parts):
            raise InvalidRequestError(f"index is {index!r}, and {source!r} has {len(parts)} sequences")
        part, row = parts[index], parts[index].settings
        if part.request.images:
            raise InvalidRequestError("requests with pictures cannot be forked; submit the longer prompt")
        if params is None:
            params = replace(row.params, seed=row.seed)
        if seed is not None:
            params = replace(params, seed=seed)
        if isinstance(suffix, str):
            if self._validator.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer.json; pass the suffix as token ids")
            suffix = self._validator.tokenizer.encode(suffix, add_special_tokens=False)
        options.setdefault("cache_salt", part.request.cache_salt)
        options.setdefault("lora_request", self._adapters.in_slot(row.adapter))
        prompt = [*part.prompt_token_ids, *part.token_ids, *suffix]
        return prompt, params, options

    def _known(self, request_id: str) -> KeptRequest:
        """The sequences of a live or kept request. Raises InvalidRequestError."""
        if not self._table.taken(request_id):
            return self._kept(request_id)
        return self._table.parts(request_id)

    def _kept(self, request_id: str) -> KeptRequest:
        """A kept request that can continue. Raises InvalidRequestError."""
        if not (kept := self._table.kept).most:
            raise InvalidRequestError("this engine does not keep finished requests: set keep_finished")
        if self._table.taken(request_id):
            raise InvalidRequestError(
                f"request {request_id!r} is still running; extend it when it has finished"
            )
        if (found := kept.get(request_id)) is None:
            raise InvalidRequestError(
                f"request {request_id!r} cannot be continued: no such request has ended, it ended with stop or "
                f"error, or it was dropped, because only the last {kept.most} are kept (keep_finished); submit it "
                f"again"
            )
        self._table.check_free(request_id, len(found))
        return found

    def _check_options(self, call: str, options: RequestOptions) -> None:
        self._validator.check_options(call, options)
        for name in ("cache_salt", "lora_request"):
            if name in options:
                raise InvalidRequestError(f"{name} cannot change when a request continues: leave it out")

    def _longer(
        self,
        part: LiveSequence,
        name: str,
        max_tokens: int,
        collector: OutputCollector,
        options: RequestOptions,
        *,
        own_mask: bool = False,
    ) -> LiveSequence:
        """The continuation of a sequence, with id `name`, and the new limits and options.

        own_mask: it gets a copy of the mask, because the sequence may be continued again.
        """
        max_tokens = self._validator.check_more(len(part.prompt_token_ids), part.num_tokens, max_tokens)
        cap, before = part.num_tokens + max_tokens, part.request
        row = _with_own_mask(part.settings) if own_mask else part.settings
        deadline, queue_deadline = deadlines(options, self._state.clock())
        request = replace(
            before,
            request_id=name,
            max_tokens=cap,
            priority=options.get("priority", before.priority),
            quantum=options.get("quantum", before.quantum),
            deadline=deadline,
            queue_deadline=queue_deadline,
        )
        row = replace(row, max_tokens=cap, params=replace(row.params, max_tokens=cap))
        return part.successor(request, row, collector)

    def _queue_again(self, request_id: str, parts: Sequence[LiveSequence]) -> None:
        self._state.ready.set()  # an engine that was idle has work now
        running, scheduler = sum(not part.finished for part in parts), self._state.scheduler
        self._validator.check_queue(running, scheduler.num_waiting, scheduler.num_free)
        self._intake.queue(request_id, self._table.enter(request_id, tuple(parts)), self._go_on)
        for part in parts:
            if part.constrained:
                self._state.masks.add(part)

    def _go_on(self, request: Request) -> None:
        part = self._table[request.request_id]
        if go_on(self._state.scheduler, request, part.received):
            part.rewind()


def _with_own_mask(row: RowSettings) -> RowSettings:
    return row if row.mask is None else replace(row, mask=row.mask.copy())
