"""Taking requests: their checks, and those that wait until their constraint was tried, beside the loop."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from xla_engine.engine.locked import locked
from xla_engine.engine.loop import Loop
from xla_engine.engine.protocol import RequestOptions
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.seeds import noise_key
from xla_engine.engine.requests.validation import RequestValidator, check_takes
from xla_engine.engine.waiter import Pending, StepRunner, Waiter
from xla_engine.engine.weights.adapters import Adapters
from xla_engine.prompts import Prompt
from xla_engine.runner.in_flight import InFlight
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import (
    Decision,
    FinishReason,
    QueueFullError,
    Request,
    RequestView,
    Scheduler,
    Status,
)
from xla_engine.scheduler.fast_forward import next_deadline
from xla_engine.text.token_mask import TokenMask

_TRYING = "its constraint is being tried"


@dataclass(slots=True, kw_only=True, eq=False)
class Untried:
    """A request that waits for its mask, which is made when its constraint was tried.

    open: takes it into the table with its mask. on_refused: told why it has none.
    adapter: as in `RowSettings`. expires: (time, reason) of its deadlines.
    """

    view: RequestView
    sequences: int
    mask: Pending[TokenMask | None]
    open: Callable[..., list[Request]]
    on_refused: Callable[[Exception], object]
    adapter: int
    expires: list[tuple[float, FinishReason]]


class Intake(Loop):
    """The loop and the requests that come to it.

    validator: the limits of model and engine. seed: of requests without one of their own.
    adapters: those that are loaded.
    default_params: of requests that are submitted without parameters.
    on_ready: called in another thread when a constraint was tried or a mask was made, which the next turn takes up.
    """

    validator: RequestValidator
    adapters: Adapters
    seed: int

    def __init__(self, scheduler: Scheduler, runner: StepRunner, table: RequestTable, *, lag: int) -> None:
        super().__init__(scheduler, runner, table, lag=lag)
        self.default_params = SamplingParams()
        self._collector = OutputCollector()  # of requests that were submitted without one; `step` reads it
        self.on_ready: Callable[[], object] | None = None
        self._ready = threading.Event()  # something was made beside the loop since the last turn began
        self._idle = False  # the last turn had nothing to do
        self._untried: dict[str, Untried] = {}
        self._trier = Waiter()
        self.masks.on_made = self._tell_ready

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        collector: OutputCollector | None = None,
        on_refused: Callable[[Exception], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queue a prompt (text, token ids or a dict around either); returns the request's id.

        request_id: None counts up, past ids in use. It names the request in outputs and, without a seed of its own,
            keys its noise.
        add_special_tokens: tokenise text with the begin token; false for the text of a chat template, which has it.
        collector: takes the request's news; without one `step` returns them.
        on_refused: do not wait here while a constraint is tried that was not seen before, for a second at most. Other
            requests go on, and this one waits in the queue. Where the constraint is none, the request is gone without
            a result, and this is called in a turn with the error that `submit` would have raised.
        options: when it runs and what it shares; see `RequestOptions`.

        Raises InvalidRequestError (TokenLimitError when prompt and max_tokens do not fit), QueueFullError when the
        queue is bounded and full, and EngineClosedError when the engine is gone; then nothing is changed.
        """
        self.check_open()
        wanted = params or self.default_params
        if on_refused is None:
            self.validator.try_constraint(wanted)  # without the lock, so that other threads' turns go on
        with self.lock:
            self.check_open()
            reader = self._collector if collector is None else collector
            self._idle = False
            return self._submit(prompt, wanted, request_id, add_special_tokens, reader, on_refused, options)

    @locked
    def check_open(self) -> None:
        """Raise EngineClosedError where no request is taken."""
        self._waiter.check_process()
        self._settle()
        check_takes(self._closed, draining=self._draining)

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        add_special_tokens: bool,
        collector: OutputCollector,
        on_refused: Callable[[Exception], object] | None,
        options: RequestOptions,
    ) -> str:
        request_id = self._table.free_id(params.n) if request_id is None else request_id
        self._table.check_free(request_id, params.n)
        text, token_ids, params, stop_ids = self.validator.checked(
            prompt, params, options, add_special_tokens=add_special_tokens
        )
        adapter = self.adapters.of(options.get("lora_request"))
        waits = on_refused is not None and not self.validator.knows_constraint(params)
        if params.n > 1 or waits or self._untried:  # else the scheduler does
            self.validator.check_queue(params.n, self.num_waiting, self.scheduler.num_free)
        now = self.clock()
        make_mask = partial(self.validator.token_mask, params, stop_ids)
        take = partial(
            self._table.open,
            request_id,
            text,
            token_ids,
            params,
            dry_breakers=self.validator.dry_breakers(params),
            adapter=adapter,
            stop_ids=stop_ids,
            eos_ids=self.validator.eos_token_ids,
            seed=self.seed_of(request_id, params),
            collector=collector,
            now=now,
            options=options,
        )
        if on_refused is None or not waits:
            self.queue(request_id, take(mask=make_mask()))
            return request_id
        self._table.reserved[request_id] = params.n
        times = (
            (options.get("deadline_s"), FinishReason.DEADLINE),
            (options.get("queue_timeout_s"), FinishReason.QUEUE_TIMEOUT),
        )
        self._untried[request_id] = Untried(
            view=RequestView(
                request_id=request_id,
                status=Status.WAITING,
                priority=options.get("priority", 0),
                arrival=self.scheduler.counters().submitted,
                prompt_tokens=len(token_ids),
                max_tokens=params.token_limit,
                prefilled=0,
                planned=0,
                credited=0,
                decision=Decision(request_id=request_id, action="wait", reason=_TRYING),
            ),
            sequences=params.n,
            mask=self._trier.ask(make_mask, self._tell_ready),
            open=take,
            on_refused=on_refused,
            adapter=adapter.slot,
            expires=sorted((now + seconds, reason) for seconds, reason in times if seconds is not None),
        )
        return request_id

    def seed_of(self, request_id: str, params: SamplingParams) -> int:
        """Return a request's 64-bit noise key: its own seed, else one made from the engine's seed and its id."""
        return noise_key(self.seed, request_id, params)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self.scheduler.num_waiting + sum(one.sequences for one in self._untried.values())

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do, or will have."""
        return bool(self._table or self._in_flight or self._untried)

    @property
    def awaits_beside(self) -> bool:
        """Whether a turn would have nothing to do until something is ready that is made beside the loop."""
        return self._idle and bool(self._untried or self.masks.making) and not self._ready.is_set()

    def advance(self) -> None:
        """One turn, whose news are left in the collectors. Raises EngineClosedError.

        While another thread runs a turn, wait for its end instead: its news may be the caller's. With nothing else to
        do, wait for what is made beside the loop.
        """
        with self.lock:
            waits, left = self.awaits_beside, self.beside_time_left()
        if waits:
            self._ready.wait(left)
        super().advance()

    @locked
    def beside_time_left(self) -> float | None:
        """Seconds until a request runs out of time; None where none does."""
        times = [one.expires[0][0] for one in self._untried.values() if one.expires]
        first = min((*times, next_deadline(self.scheduler)))
        return None if first == math.inf else max(first - self.clock(), 1e-3)

    @locked
    def begin_turn(self) -> InFlight | None:
        """As in `Loop`, with the requests whose constraints were tried since the last turn."""
        self._ready.clear()
        for name, one in list(self._untried.items()):
            if one.mask.done.is_set() and name in self._untried and self._closed is None:
                self._take_tried(name, one)
        step = super().begin_turn()
        self._idle = step is None and not self._in_flight
        return step

    def _take_tried(self, name: str, one: Untried) -> None:
        mask = one.mask.result()
        self._forget(name)
        if isinstance(mask, Exception):
            one.on_refused(mask)
            return
        try:
            self.queue(name, one.open(mask=mask))
        except QueueFullError:  # others came first: it waits on
            self._table.reserved[name], self._untried[name] = one.sequences, one

    def _forget(self, name: str) -> None:
        del self._untried[name], self._table.reserved[name]

    @locked
    def expire(self) -> None:
        """End the requests whose time is up, also between the two halves of a turn."""
        super().expire()
        now = self.clock()
        for name, one in list(self._untried.items()):
            if one.expires and one.expires[0][0] <= now:
                self._end_untried(name, one.expires[0][1])

    @locked
    def abort(self, request_id: str, cause: str | None = None) -> bool:
        """End a request now, keeping what it has; False when it is unknown or already over.

        cause: what its output says as `error`.
        """
        if request_id in self._untried:
            self._end_untried(request_id, FinishReason.ABORT, cause)
            return True
        return super().abort(request_id, cause)

    @locked
    def abort_all(self, cause: str | None = None) -> None:
        """End every live request now; `cause` as in `abort`."""
        for name in list(self._untried):
            self.abort(name, cause)
        super().abort_all(cause)

    def fail(self, cause: str) -> None:
        """Close the engine for a cause: every request ends with reason `error`, and later submits fail at once."""
        super().fail(cause)
        for name in list(self._untried):
            self._end_untried(name, FinishReason.ERROR, cause)

    def _end_untried(self, name: str, reason: FinishReason, error: str | None = None) -> None:
        one = self._untried[name]
        self._forget(name)
        for request in one.open(mask=None):
            if self.on_submit is not None:
                self.on_submit(request)
            self._end(request.request_id, reason, error)

    def _tell_ready(self) -> None:
        self._ready.set()
        if self.on_ready is not None:
            self.on_ready()
