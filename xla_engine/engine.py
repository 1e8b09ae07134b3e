"""The engine: the only place that holds both a Scheduler and a Runner.

One turn is `plan -> start -> wait(previous) -> commit -> deliver`. The lag between starting a step and reading it
is a value, the queue of steps in flight; there are no threads. An engine belongs to one thread.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graphs.inventory import GraphReport
from scheduler import FinishReason, Plan, Request, Scheduler, SchedulerConfig, Snapshot, TokenEvent
from xla_engine.admission import Admission
from xla_engine.chat import ChatTemplate, Message, render_chat
from xla_engine.checkpoint import Checkpoint, load_checkpoint
from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.live import LiveRequest
from xla_engine.metrics import EngineStats
from xla_engine.outputs import RequestOutput
from xla_engine.runner import InFlight, RowSettings, Runner
from xla_engine.sampling_params import SamplingParams
from xla_engine.self_check import SelfCheck, run_self_check
from xla_engine.tokenizer import Tokenizer


class XlaBatchEngine:
    """Continuous batching over one model.

    Runnable example::

        engine = XlaBatchEngine.from_pretrained()          # the embedded model
        engine.submit("def add(a, b):", SamplingParams(temperature=0, max_tokens=32))
        for output in engine.drain():
            print(output.outputs[0].text)
        engine.close()
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        chat_template: ChatTemplate | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.lag = self.config.lag  # may be changed between turns
        # Sees each plan as it is started (events None) and each step as it is read. For records and tests.
        self.on_step: Callable[[Plan, list[TokenEvent] | None], None] | None = None
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.runner = Runner(
            checkpoint.config, checkpoint.weights, checkpoint.dtype, self.config, progress=progress
        )
        self.self_check: SelfCheck | None = None
        if self.config.self_check:
            self.self_check = run_self_check(self.runner, checkpoint.config.vocab_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                chunk_size=self.config.chunk_size,
                max_num_batched_tokens=self.config.token_budget,
                max_waiting=self.config.max_waiting,
            )
        )
        self.admission = Admission(
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_model_len=self.runner.context_length,
            tokenizer=tokenizer,
        )
        self._live: dict[str, LiveRequest] = {}
        self._settings: dict[str, RowSettings] = {}
        self._in_flight: deque[InFlight] = deque()
        self._ended: list[LiveRequest] = []  # ended outside a commit, to be delivered by the next turn
        self._submitted = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._slot_steps_busy = 0
        self._decode_steps = 0
        self._closed: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> XlaBatchEngine:
        """Load a Hugging Face directory (None: the embedded model) and compile. Raises CheckpointError."""
        config = config or EngineConfig()
        directory = embedded_model_directory() if model is None else Path(model)
        checkpoint = load_checkpoint(directory, dtype=config.dtype)
        tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").exists() else None
        chat_template = ChatTemplate.from_directory(directory)
        return cls(checkpoint, tokenizer, config, chat_template=chat_template, progress=progress)

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        add_special_tokens: tokenise text with the begin token; false for the text of a chat template, which has it.

        Raises InvalidRequestError (TokenLimitError when prompt and max_tokens do not fit) and changes nothing then;
        QueueFullError when the queue is bounded and full; EngineClosedError when the engine is gone.
        """
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        params = params or SamplingParams()
        request_id = str(self._submitted) if request_id is None else request_id
        if request_id in self._live:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use by a live request; choose another"
            )
        token_ids = self.admission.token_ids(prompt, params, add_special_tokens=add_special_tokens)
        stop_ids = self.admission.stop_token_ids(params)
        self.scheduler.submit(
            Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                max_tokens=params.max_tokens,
                stop_token_ids=frozenset(stop_ids),
            )
        )
        self._submitted += 1
        self._settings[request_id] = RowSettings(
            max_tokens=params.max_tokens,
            stop_token_ids=stop_ids,
            params=params,
            seed=self.seed_of(request_id, params),
        )
        self._live[request_id] = LiveRequest(
            request_id,
            prompt if isinstance(prompt, str) else None,
            token_ids,
            params,
            None if self.tokenizer is None else self.tokenizer.incremental(params.skip_special_tokens),
            stop_ids=frozenset(stop_ids),
            eos_ids=frozenset(self.admission.eos_token_ids),
            now=time.monotonic(),
        )
        return request_id

    def render_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """The prompt of a conversation by the checkpoint's chat template, or by `chat_template`; see `render_chat`.

        Submit it with `add_special_tokens=False`.
        """
        return render_chat(messages, chat_template or self.chat_template, **options)

    def abort(self, request_id: str) -> bool:
        """End a request now, keeping what it has; False when it is unknown or already over."""
        if not self.scheduler.abort(request_id):
            return False
        self._end(request_id, FinishReason.ABORT)
        return True

    # -- the loop ---------------------------------------------------------------------------------------------

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """One turn. Returns the cumulative output of every request that got a token or ended in it.

        `only_finished` leaves out the running ones, whose outputs cost a copy of all their tokens each turn.
        """
        return [request.output() for request in self._turn() if request.finished or not only_finished]

    def drain(self) -> list[RequestOutput]:
        """Run until nothing is left; returns the finished requests in order of completion."""
        outputs: list[RequestOutput] = []
        while self.has_unfinished:
            outputs += self.step(only_finished=True)
        return outputs

    def stream(self) -> Iterator[RequestOutput]:
        """Run until nothing is left, yielding cumulative outputs as tokens arrive."""
        while self.has_unfinished:
            yield from self.step()

    def _turn(self) -> list[LiveRequest]:
        if self._closed is not None and not self._ended:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        touched: dict[str, LiveRequest] = {}
        try:
            if self._closed is None:
                started = self._start_next()
                while len(self._in_flight) > (self.lag if started else 0):
                    self._deliver(self._read_oldest(), touched)
                    started = True  # with nothing to start, read one step and plan again
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        ended, self._ended = self._ended, []
        # By identity: an id may have been aborted and submitted again within one turn.
        return [
            *touched.values(),
            *(request for request in ended if touched.get(request.request_id) is not request),
        ]

    def _start_next(self) -> bool:
        """Plan and dispatch one step; False when there is nothing to dispatch."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            return False
        self._in_flight.append(self.runner.start(plan, self._settings))
        if self.on_step is not None:
            self.on_step(plan, None)
        now = time.monotonic()
        for request_id in plan.admitted:
            self._live[request_id].admitted_time = now
        self._steps += 1
        self._prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        if plan.decode:
            self._decode_steps += 1
            self._slot_steps_busy += len(plan.decode)
        return True

    def _read_oldest(self) -> list[TokenEvent]:
        step = self._in_flight.popleft()
        events = self.scheduler.commit(step.plan, self.runner.wait(step))
        if self.on_step is not None:
            self.on_step(step.plan, events)
        return events

    def _deliver(self, events: list[TokenEvent], touched: dict[str, LiveRequest]) -> None:
        now = time.monotonic()
        for event in events:
            request = self._live.get(event.request_id)
            if request is None:  # an earlier token of this step completed a stop string
                continue
            touched[event.request_id] = request
            self._generation_tokens += 1
            reason, error = event.finish_reason, None
            try:
                if request.add(event.sample, now):
                    reason = FinishReason.STOP
            except Exception as failure:  # its text cannot be made; nobody else is concerned
                reason, error = FinishReason.ERROR, str(failure)
            if reason is not None:
                if event.finish_reason is None:
                    self.scheduler.finish(event.request_id, reason)
                request.finish(reason, now, error)
                self._forget(event.request_id)

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        request = self._live[request_id]
        request.finish(reason, time.monotonic(), error)
        self._ended.append(request)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._live[request_id], self._settings[request_id]

    def _fail(self, cause: str) -> None:
        """The device state is lost: every request ends with reason `error`, later submits fail at once."""
        self._closed = f"a step failed: {cause}"
        self._in_flight.clear()
        for request_id in list(self._live):
            self.scheduler.finish(request_id, FinishReason.ERROR)
            self._end(request_id, FinishReason.ERROR, self._closed)

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn still has something to do or to deliver."""
        return bool(self._live or self._ended or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def max_num_seqs(self) -> int:
        return self.config.max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self.runner.context_length

    def snapshot(self) -> Snapshot:
        """Slots, queue and the reason of each request's last scheduling decision; does not touch the device."""
        return self.scheduler.snapshot()

    def stats(self) -> EngineStats:
        """Counters since start-up; does not touch the device."""
        return EngineStats(
            steps=self._steps,
            prefill_calls=self.runner.prefill_calls,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            slot_steps_busy=self._slot_steps_busy,
            slot_steps_total=self._decode_steps * self.config.max_num_seqs,
            compiles_warmup=self.runner.compiles.before,
            compiles_after_warmup=self.runner.compiles.after,
            load_seconds=self.runner.load_seconds,
            compile_seconds=self.runner.compile_seconds,
        )

    def inventory_report(self) -> list[GraphReport]:
        """One line per executable."""
        return self.runner.reports

    def close(self) -> None:
        """Abort what is live and free device memory; the engine is unusable afterwards."""
        if self._closed is None:
            for request_id in list(self._live):
                self.abort(request_id)
            self._closed = "close() was called"
        self._in_flight.clear()
        self._ended.clear()
        self.runner.close()

    def __enter__(self) -> XlaBatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seed_of(self, request_id: str, params: SamplingParams) -> int:
        """A request's 64-bit noise key: its own seed, else one drawn from the engine's seed and the request's id."""
        if params.seed is not None:
            return params.seed % 2**64
        digest = hashlib.sha256(f"{self.config.seed}\0{request_id}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big")
