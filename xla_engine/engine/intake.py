"""Accepts and aborts requests: validates them, queues them, and holds them back until their constraint is compiled."""

from collections.abc import Callable, Iterable
from functools import partial

from xla_engine.engine.adapters import LoadedAdapter
from xla_engine.engine.delivery import Delivery
from xla_engine.engine.protocol import RequestOptions, deadlines
from xla_engine.engine.recovery import Recovery
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import PendingRequest
from xla_engine.engine.requests.sequence import noise_key
from xla_engine.engine.requests.validation import RequestValidator, check_takes
from xla_engine.engine.state import EngineState
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Decision, FinishReason, QueueFullError, Request, RequestView, Status
from xla_engine.scheduler.user_policy import PolicyError
from xla_engine.utils.call_thread import CallThread

_COMPILING = "its constraint is being compiled"


class Intake:
    """Enters requests into the table and the scheduler's queue.

    seed: the engine's seed, from which requests without a seed derive theirs.
    compiler: the thread that compiles constraints.
    """

    def __init__(
        self,
        state: EngineState,
        delivery: Delivery,
        recovery: Recovery,
        validator: RequestValidator,
        adapter_of: Callable[[LoRARequest | None], LoadedAdapter],
        *,
        seed: int,
    ) -> None:
        self.seed = seed
        self.compiler = CallThread()
        self._state = state
        self._delivery = delivery
        self._recovery = recovery
        self._validator = validator
        self._adapter_of = adapter_of

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine accepts no requests."""
        self._state.waiter.check_process()
        self._recovery.restart_if_incomplete()
        check_takes(self._state.closed, draining=self._state.draining)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        collector: OutputCollector,
        on_refused: Callable[[Exception], object] | None,
        options: RequestOptions,
        *,
        add_special_tokens: bool,
    ) -> str:
        """As `XlaBatchEngine.submit`; the caller has called `check_open`."""
        state, table, validator = self._state, self._state.table, self._validator
        state.ready.set()
        request_id = table.free_id(params.n) if request_id is None else request_id
        table.check_free(request_id, params.n)
        checked = validator.checked(prompt, params, options, add_special_tokens=add_special_tokens)
        params = checked.params
        adapter = self._adapter_of(options.get("lora_request"))
        waits = on_refused is not None and not validator.knows_constraint(params)
        if params.n > 1 or waits or table.pending:  # otherwise the scheduler checks
            validator.check_queue(params.n, state.num_waiting, state.scheduler.num_free)
        now = state.clock()
        make_mask = partial(validator.token_mask, params, checked.stop_ids)
        take = partial(
            table.open,
            request_id,
            checked,
            adapter=adapter,
            seed=noise_key(self.seed, request_id, params),
            collector=collector,
            now=now,
            options=options,
        )
        if on_refused is None or not waits:
            self.queue(request_id, take(mask=make_mask()))
            return request_id
        times = zip(deadlines(options, now), (FinishReason.DEADLINE, FinishReason.QUEUE_TIMEOUT), strict=True)
        table.pending[request_id] = PendingRequest(
            view=RequestView(
                request_id=request_id,
                status=Status.WAITING,
                priority=options.get("priority", 0),
                arrival=state.scheduler.counters().submitted,
                prompt_tokens=len(checked.token_ids),
                max_tokens=params.token_limit,
                prefilled=0,
                planned=0,
                credited=0,
                decision=Decision(request_id=request_id, action="wait", reason=_COMPILING),
            ),
            sequences=params.n,
            mask=self.compiler.ask(make_mask, state.ready.set),
            open=take,
            on_refused=on_refused,
            adapter=adapter.slot,
            expires=sorted((time, reason) for time, reason in times if time is not None),
        )
        return request_id

    def queue(
        self, request_id: str, sequences: Iterable[Request], submit: Callable[[Request], None] | None = None
    ) -> None:
        """Queue all sequences of a request in the table; on an error queue none and remove the request from the table.

        submit: replaces `Scheduler.submit`, and raises the same errors.
        """
        state, queued = self._state, []
        try:
            for request in sequences:
                if state.prefixes is not None and submit is None:
                    request = state.prefixes.marked(request, state.scheduler)
                (submit or state.scheduler.submit)(request)
                state.observers.queued(request)
                queued.append(request.request_id)
                if request.deadline is not None or request.queue_deadline is not None:
                    state.waiter.wake.set()
                if state.speculator is not None:
                    state.speculator.begin(request)
        except BaseException as error:
            for name in queued:
                state.scheduler.abort(name)
                if state.speculator is not None:
                    state.speculator.end(name)
            state.table.take_back(request_id)
            if isinstance(error, PolicyError):
                raise InvalidRequestError(str(error)) from error
            raise

    def queue_compiled(self) -> None:
        """Queue the pending requests whose constraints have been compiled since the last turn."""
        state, pending = self._state, self._state.table.pending
        state.ready.clear()
        for name, one in list(pending.items()):
            if one.mask.done.is_set() and name in pending and state.closed is None:
                self._queue_compiled(name, one)

    def _queue_compiled(self, name: str, one: PendingRequest) -> None:
        pending, mask = self._state.table.pending, one.mask.result()
        del pending[name]
        if isinstance(mask, Exception):
            one.on_refused(mask)
            return
        try:
            self.queue(name, one.open(mask=mask))
        except QueueFullError:  # others have filled the queue: try again in the next turn
            pending[name] = one

    def abort(self, request_id: str, cause: str | None = None) -> bool:
        """As `XlaBatchEngine.abort`."""
        state = self._state
        if request_id in state.table.pending:
            self._delivery.end_pending(request_id, FinishReason.ABORT, cause)
            return True
        self._recovery.restart_if_incomplete()
        ended = False
        for name in state.table.sequences(request_id):
            if state.scheduler.abort(name):
                ended = True
                self._delivery.end(name, FinishReason.ABORT, cause)
        return ended

    def abort_all(self, cause: str | None = None) -> None:
        """As `XlaBatchEngine.abort_all`."""
        for name in (*self._state.table.pending, *self._state.table):
            self.abort(name, cause)
