"""An engine without a model: it keeps the promises of `xla_engine.engine.protocol.Engine` and makes up its tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Unpack

from xla_engine.config import EngineConfig
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.protocol import RequestOptions, SubmitOptions
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.observability.metrics import engine_metrics, text_of
from xla_engine.observability.stats import EngineStats
from xla_engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import (
    Decision,
    FinishReason,
    Peek,
    Plan,
    RequestView,
    Row,
    Slot,
    SlotView,
    Snapshot,
    Status,
    Times,
)
from xla_engine.scheduler.snapshot import Counters

LONGEST = 100  # prompt and new tokens of a request


class FakeRequest:
    """One request. Its tokens are two, whatever the prompt, and two more each time it goes on; its text is the prompt
    in angle brackets."""

    def __init__(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, collector: OutputCollector
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.collector = collector
        self.has_run = False
        self.lives = 1
        self.reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.reason is not None

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=None,
            prompt_token_ids=(0,) * len(self.prompt),
            outputs=(
                CompletionOutput(
                    index=0,
                    text=f"<{self.prompt}>" * (self.lives - (not self.has_run)),
                    token_ids=(1, 2) * (self.lives - (not self.has_run)),
                    finish_reason=None if self.reason is None else str(self.reason),
                ),
            ),
            finished=self.finished,
            metrics=RequestMetrics(arrival_time=0.0, first_token_time=0.5, token_times=(0.5, 0.75)),
        )


KEPT = 64  # requests that may go on after their end, the latest


class FakeEngine:
    """Ends requests in random order after random numbers of steps; a result depends on its request alone.

    on_step: called with the number of each step before anything happens; what it raises, the step raises. A prompt
    that holds "!" is refused.
    submitted, aborted: ids, in order. params: of the submitted. peak: live requests at most. made_as: its identity.
    """

    def __init__(
        self, *, max_num_seqs: int = 3, seed: int = 0, on_step: Callable[[int], object] | None = None
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.tokenizer = None
        self.chat_template: Any = ChatTemplate(sources={"default": "that of render_chat"}, special_tokens={})
        self.validator = SimpleNamespace(
            labels=(), pictures=None, no_pictures="this engine reads no pictures"
        )  # no classifier, and no tower
        self.live: dict[str, FakeRequest] = {}
        self.max_model_len = LONGEST
        self.submitted: list[str] = []
        self.params: list[SamplingParams] = []  # of the same
        self.as_they_are: list[bool] = []  # of the same: whether special tokens were added
        self.aborted: list[str] = []
        self.peak = 0
        self.steps = 0
        self.collector = OutputCollector()
        self.finished: Counter[FinishReason] = Counter()
        self.closed = False
        self.ended: dict[str, FakeRequest] = {}
        self.made_as = EngineIdentity(model="fake", dtype="none", config={}, platform={})
        self._random = random.Random(seed)
        self.on_step = on_step

    @property
    def num_running(self) -> int:
        return min(len(self.live), self.max_num_seqs)

    @property
    def num_waiting(self) -> int:
        return len(self.live) - self.num_running

    @property
    def has_unfinished(self) -> bool:
        return bool(self.live or self.collector)

    def adapter_named(self, name: str | None) -> None:
        """It has none."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str:
        if any("content" not in message for message in messages):
            raise InvalidRequestError("a message has no content")
        return "|".join(message["content"] for message in messages)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> str:
        self._check_open()
        params = SamplingParams() if params is None else params
        if (request_id := options.get("request_id")) is None:
            request_id = str(len(self.submitted))
        if request_id in self.live:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        if not isinstance(options.get("priority", 0), int):
            raise InvalidRequestError("priority must be an integer")
        if "!" in prompt:
            raise InvalidRequestError("not this one")
        if len(prompt) + (params.max_tokens or 1) > LONGEST:
            raise TokenLimitError(f"{len(prompt)} + {params.max_tokens} > {LONGEST}")
        self.submitted.append(request_id)
        self.params.append(params)
        self.as_they_are.append(options.get("add_special_tokens", True))
        if (collector := options.get("collector")) is None:
            collector = self.collector
        self.live[request_id] = FakeRequest(request_id, prompt, params, collector)
        self.peak = max(self.peak, len(self.live))
        return request_id

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        if (request := self.live.get(request_id)) is None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def extend(
        self,
        request_id: str,
        max_tokens: int,
        *,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        self._check_open()
        old = self.ended.get(request_id)
        if old is None or request_id in self.live:
            raise InvalidRequestError(f"request {request_id!r} cannot be continued")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {max_tokens!r}")
        if len(old.prompt) + 2 * old.lives + max_tokens > LONGEST:
            raise TokenLimitError(f"{max_tokens} more are too many")
        collector = self.collector if collector is None else collector
        new = FakeRequest(request_id, old.prompt, old.params, collector)
        new.lives = old.lives + old.has_run
        del self.ended[request_id]
        self.live[request_id] = new

    def advance(self) -> None:
        self._check_open()
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self.steps)
        for request in list(self.live.values())[: self.max_num_seqs]:
            request.has_run = True
            if self._random.random() < 0.4:
                self._end(request, FinishReason.LENGTH)
            elif request.collector.every_token:
                request.collector.put(request)

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        self.collector.every_token = not only_finished
        if not (self.closed and self.collector):
            self.advance()
        return [each.output() for each in self.collector.take() if each.finished or not only_finished]

    def drain(self, timeout_s: float | None = None) -> list[RequestOutput]:
        ended = []
        while self.has_unfinished:
            if timeout_s is not None:  # time passes at once here
                for request_id in list(self.live):
                    self.abort(request_id)
            ended += self.step(only_finished=True)
        return ended

    def snapshot(self) -> Snapshot:
        views = [self._view(place, request) for place, request in enumerate(self.live.values())]
        running = dict(enumerate(views[: self.max_num_seqs]))
        return Snapshot(
            slots=tuple(
                SlotView(slot=Slot(index=index, epoch=0), position=0, request=running.get(index))
                for index in range(self.max_num_seqs)
            ),
            waiting=tuple(views[self.max_num_seqs :]),
            draining=(),
            counters=Counters(
                steps_planned=self.steps,
                steps_committed=self.steps,
                submitted=len(self.submitted),
                finished=dict(self.finished),
                tokens_credited=2 * sum(self.finished.values()),
                tokens_dropped=0,
            ),
        )

    def stats(self) -> EngineStats:
        finished = {str(reason): self.finished[reason] for reason in FinishReason}
        return EngineStats(
            steps=self.steps,
            generation_tokens=self.steps,
            finished=finished,
            submitted=len(self.submitted),
            running=self.num_running,
            waiting=self.num_waiting,
            slots_used=self.num_running,
            slots=self.max_num_seqs,
        )

    def peek(self) -> Peek:
        views = [self._view(place, request) for place, request in enumerate(self.live.values())]
        rows = tuple(
            Row(slot=Slot(index=index, epoch=0), request_id=view.request_id)
            for index, view in enumerate(views[: self.max_num_seqs])
        )
        fresh = tuple(row.request_id for row in rows if not self.live[row.request_id].has_run)
        plan = Plan(step=self.steps, admitted=fresh, chunks=(), decode=rows, decisions=())
        return Peek(plan=plan, then=self.snapshot())

    def metrics_text(self) -> str:
        return text_of(engine_metrics(self.stats(), EngineConfig(), "fake", max_model_len=1))

    def limits(self) -> dict[str, Any]:
        return {"model": "fake"}

    def identity(self) -> EngineIdentity:
        return self.made_as

    def close(self) -> None:
        for request_id in list(self.live):
            self.abort(request_id)
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("close() was called")

    def _end(self, request: FakeRequest, reason: FinishReason) -> None:
        del self.live[request.request_id]
        request.reason = reason
        self.ended[request.request_id] = request
        if len(self.ended) > KEPT:
            del self.ended[next(iter(self.ended))]
        self.finished[reason] += 1
        request.collector.put(request)

    def _view(self, place: int, request: FakeRequest) -> RequestView:
        return RequestView(
            request_id=request.request_id,
            status=Status.RUNNING if place < self.max_num_seqs else Status.WAITING,
            priority=0,
            arrival=place,
            prompt_tokens=len(request.prompt),
            max_tokens=request.params.max_tokens,
            prefilled=0,
            planned=0,
            credited=0,
            decision=None
            if place < self.max_num_seqs
            else Decision(request_id=request.request_id, action="wait", reason="no free slot"),
            times=Times(age=0.0, queued=0.0, first_token=None),
        )
