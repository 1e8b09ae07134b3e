"""The engine: the only place that holds both a Scheduler and a Runner.

One turn is `plan -> start -> wait(previous) -> commit -> deliver`. The lag between starting a step and reading it
is a value, the queue of steps in flight; there are no threads. An engine belongs to one thread.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphs.inventory import GraphReport
from scheduler import (
    NO_CHOICE,
    Chunk,
    FinishReason,
    Plan,
    QueueFullError,
    Request,
    Row,
    Scheduler,
    SchedulerConfig,
    Snapshot,
    StepResult,
    TokenEvent,
)
from xla_engine.admission import Admission
from xla_engine.chat import ChatTemplate, Message, render_chat
from xla_engine.checkpoint import Checkpoint, load_checkpoint
from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.fanout import Fanout, sequence_ids, sequence_seed
from xla_engine.generation_config import sampling_defaults
from xla_engine.inbox import Inbox
from xla_engine.live import LiveRequest
from xla_engine.metrics import EngineStats
from xla_engine.outputs import RequestOutput
from xla_engine.row_settings import RowSettings
from xla_engine.runner import InFlight, Runner
from xla_engine.sampling_params import SamplingParams
from xla_engine.self_check import SelfCheck, run_self_check
from xla_engine.tokenizer import Tokenizer

FAULTS_SURVIVED = 1  # failed steps after which a request is run again; one more ends it
FAULTS_IN_A_ROW = 4  # failed steps without a good one between them; then the device is given up


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
        load_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` is called with each compiled program's name, `load_progress` with the bytes of weights on the
        device so far and in total."""
        self.config = config or EngineConfig()
        self.lag = self.config.lag  # may be changed between turns
        # Sees each plan as it is started (events None) and each step as it is read. For records and tests.
        self.on_step: Callable[[Plan, list[TokenEvent] | None], None] | None = None
        # See each sequence as it is queued, and as it ends.
        self.on_submit: Callable[[Request], None] | None = None
        self.on_end: Callable[[str, FinishReason], None] | None = None
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.default_params = SamplingParams()  # of requests that bring none
        self.runner = Runner(
            checkpoint.config,
            checkpoint.weights,
            checkpoint.dtype,
            self.config,
            progress=progress,
            load_progress=load_progress,
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
                priority_aging=self.config.priority_aging,
            )
        )
        self.admission = Admission(
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_model_len=self.runner.context_length,
            tokenizer=tokenizer,
        )
        self._live: dict[str, LiveRequest] = {}  # by sequence, which is the request where n is 1
        self._settings: dict[str, RowSettings] = {}  # same keys
        self._fanouts: dict[str, Fanout] = {}  # the requests that are more than one sequence
        self._in_flight: deque[InFlight] = deque()
        self._inbox = Inbox()  # of requests that were submitted without one; `step` reads it
        self._turning = False  # inside a turn, perhaps while somebody else waits for its step
        self._unsettled = False  # a turn did not come to its end
        self._current: Plan | None = None  # what the device is asked for or about right now
        self._faults_in_a_row = 0
        self._recoveries = 0
        self.last_fault: str | None = None
        self._finished = dict.fromkeys(FinishReason, 0)
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
        load_progress: Callable[[int, int], None] | None = None,
    ) -> XlaBatchEngine:
        """Load a Hugging Face directory (None: the embedded model) and compile. Raises CheckpointError.

        The callbacks are those of the constructor.
        """
        config = config or EngineConfig()
        directory = embedded_model_directory() if model is None else Path(model)
        checkpoint = load_checkpoint(directory, dtype=config.dtype)
        tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").exists() else None
        chat_template = ChatTemplate.from_directory(directory)
        engine = cls(
            checkpoint,
            tokenizer,
            config,
            chat_template=chat_template,
            progress=progress,
            load_progress=load_progress,
        )
        if config.generation_config == "model":
            engine.default_params = SamplingParams.from_mapping(sampling_defaults(directory))
        return engine

    # -- requests ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
        inbox: Inbox | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        add_special_tokens: tokenise text with the begin token; false for the text of a chat template, which has it.
        priority: -10 (soonest) to 10, for a place in the queue; `scheduler.policy.place` states the rule and how long
            anybody can be kept waiting by it.
        deadline_s: after so many seconds the request ends with reason "deadline" and what it has.
        queue_timeout_s: if it has no slot after so many seconds it ends with reason "queue_timeout".
        inbox: who reads its outputs; without one `step` returns them. Times are looked at once a turn.

        Raises InvalidRequestError (TokenLimitError when prompt and max_tokens do not fit) and changes nothing then;
        QueueFullError when the queue is bounded and full; EngineClosedError when the engine is gone.
        """
        self._settle()
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        params = params or self.default_params
        request_id = str(self._submitted) if request_id is None else request_id
        names = sequence_ids(request_id, params.n)
        if taken := {request_id, *names} & (self._live.keys() | self._fanouts.keys()):
            raise InvalidRequestError(
                f"request id {min(taken)!r} is in use by a live request; choose another"
            )
        self.admission.check_patience(priority, deadline_s, queue_timeout_s)
        token_ids = self.admission.token_ids(prompt, params, add_special_tokens=add_special_tokens)
        stop_ids = self.admission.stop_token_ids(params)
        masks = [self.admission.token_mask(params, stop_ids) for _ in names]
        self._check_room(params.n)
        now = time.monotonic()
        seed = self.seed_of(request_id, params)
        parts = []
        for index, (name, mask) in enumerate(zip(names, masks, strict=True)):
            part = replace(params, n=1, prompt_logprobs=params.prompt_logprobs if index == 0 else None)
            self._settings[name] = RowSettings(
                max_tokens=params.max_tokens,
                stop_token_ids=stop_ids,
                params=part,
                seed=sequence_seed(seed, index),
                mask=mask,
                prompt_token_ids=token_ids,
            )
            self._live[name] = LiveRequest(
                name,
                prompt if isinstance(prompt, str) else None,
                token_ids,
                part,
                self.tokenizer,
                mask,
                stop_ids=frozenset(stop_ids),
                eos_ids=frozenset(self.admission.eos_token_ids),
                inbox=self._inbox if inbox is None else inbox,
                now=now,
            )
            parts.append(self._live[name])
            request = Request(
                request_id=name,
                prompt_token_ids=token_ids,
                max_tokens=params.max_tokens,
                stop_token_ids=frozenset(stop_ids),
                lockstep=mask is not None and mask.lockstep,
                priority=priority,
                deadline=None if deadline_s is None else now + deadline_s,
                queue_deadline=None if queue_timeout_s is None else now + queue_timeout_s,
            )
            try:
                self.scheduler.submit(request)
            except BaseException:
                for begun in names[:index]:
                    self.scheduler.abort(begun)
                    self._forget(begun)
                self._forget(name)
                raise
            if self.on_submit is not None:
                self.on_submit(request)
        if params.n > 1:
            self._fanouts[request_id] = Fanout(request_id, tuple(parts))
        self._submitted += 1
        return request_id

    def _check_room(self, n: int) -> None:
        """All sequences of a request are taken, or none."""
        limit = self.config.max_waiting
        if n > 1 and limit is not None and self.num_waiting + n > limit:
            raise QueueFullError(
                f"{n} sequences were not taken: {self.num_waiting} wait and max_waiting is {limit}; submit them again "
                "after a step, lower n, or raise the bound"
            )

    def render_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """The prompt of a conversation by the checkpoint's chat template, or by `chat_template`; see `render_chat`.

        Submit it with `add_special_tokens=False`.
        """
        return render_chat(messages, chat_template or self.chat_template, **options)

    def abort(self, request_id: str) -> bool:
        """End a request now, keeping what it has; False when it is unknown or already over."""
        self._settle()
        fanout = self._fanouts.get(request_id)
        names = [request_id] if fanout is None else [part.request_id for part in fanout.parts]
        ended = [name for name in names if self.scheduler.abort(name)]
        for name in ended:
            self._end(name, FinishReason.ABORT)
        return bool(ended)

    def abort_all(self) -> None:
        """End every live request now."""
        for request_id in list(self._live):
            self.abort(request_id)

    # -- the loop ---------------------------------------------------------------------------------------------

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """One turn. Returns the cumulative output of every request that has news, unless another inbox has them.

        `only_finished` leaves out the running ones, whose outputs cost a copy of all their tokens each turn.
        """
        if self._closed is None or not self._inbox:
            self.advance()
        return [request.output() for request in self._inbox.take() if request.finished or not only_finished]

    def drain(self) -> list[RequestOutput]:
        """Run until nothing is left; returns the finished requests in order of completion."""
        ended: list[LiveRequest | Fanout] = []
        try:
            while self.has_unfinished:
                if self._closed is None or not self._inbox:
                    self.advance()
                ended += (request for request in self._inbox.take() if request.finished)
        except BaseException:
            for request in ended:  # what was not delivered is still there
                self._inbox.put(request)
            raise
        return [request.output() for request in ended]

    def stream(self) -> Iterator[RequestOutput]:
        """Run until nothing is left, yielding cumulative outputs as tokens arrive."""
        while self.has_unfinished:
            yield from self.step()

    def advance(self) -> None:
        """One turn, whose news are left in the inboxes. Raises EngineClosedError."""
        turn = self.turn()
        resume: Callable[[Any], Callable[[], StepResult]] = turn.send
        answer: Any = None
        try:
            while True:
                fetch = resume(answer)
                try:
                    resume, answer = turn.send, fetch()
                except Exception as error:
                    resume, answer = turn.throw, error
        except StopIteration:
            pass
        finally:
            turn.close()

    def turn(self) -> Generator[Callable[[], StepResult], StepResult, None]:
        """One turn for a driver that has something else to do while the device works.

        Yields functions that block until a step is done; the driver calls them, in any thread, and sends back what
        they return or throws in what they raise. It may submit and abort meanwhile. Raises EngineClosedError.
        """
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        if self._turning:
            raise RuntimeError("two callers drive this engine at once; let one of them run it")
        self._settle()
        if self._closed is not None:
            return  # everybody has been told
        self._turning = self._unsettled = True
        try:
            yield from self._turn()
            self._unsettled = False
        except Exception as error:
            self._recover(f"{type(error).__name__}: {error}")
        finally:
            self._turning = False

    def _turn(self) -> Generator[Callable[[], StepResult], StepResult, None]:
        for request_id, reason in self.scheduler.expire(time.monotonic()):
            self._end(request_id, reason)
        started = self._start_next()
        while len(self._in_flight) > (self.lag if started else 0):
            step = self._in_flight.popleft()
            self._current = step.plan
            result = yield functools.partial(self.runner.wait, step)
            self._take_prompt_logprobs(step)
            events = self.scheduler.commit(step.plan, result)
            self._current, self._faults_in_a_row = None, 0
            if self.on_step is not None:
                self.on_step(step.plan, events)
            self._deliver(events)
            started = True  # with nothing to start, read one step and plan again

    def _start_next(self) -> bool:
        """Plan and dispatch one step; False when there is nothing to dispatch."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            if self._live and not self._in_flight:
                raise RuntimeError("requests are left, but there is nothing to do for them")
            return False
        self._current = plan
        self._in_flight.append(self.runner.start(plan, self._settings))
        self._current = None
        if self.on_step is not None:
            self.on_step(plan, None)
        now = time.monotonic()
        for request_id in plan.admitted:
            self._live[request_id].admit(now)
        self._steps += 1
        self._prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        if plan.decode:
            self._decode_steps += 1
            self._slot_steps_busy += len(plan.decode)
        return True

    def _take_prompt_logprobs(self, step: InFlight) -> None:
        for part in self.runner.prompt_scores(step):
            if self._settings.get(part.request_id) is part.settings:
                self._live[part.request_id].add_prompt_logprobs(part.start, part.scores)

    def _deliver(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            request = self._live.get(event.request_id)
            if request is None:  # an earlier token of this step completed a stop string
                continue
            if event.sample.token_id == NO_CHOICE:
                self._end(
                    event.request_id,
                    FinishReason.ERROR,
                    "no token could be chosen: the logits were not numbers",
                )
                continue
            is_new = not request.is_repeating
            reason, error = event.finish_reason, None
            try:
                if request.add(event.sample, now):
                    reason = FinishReason.STOP
            except Exception as failure:  # its text cannot be made; nobody else is concerned
                reason, error = FinishReason.ERROR, str(failure)
            if reason is not None:
                if event.finish_reason is None:
                    self.scheduler.finish(event.request_id, reason)
                self._end(event.request_id, reason, error)
            elif is_new:
                request.inbox.put(request.reader)
            self._generation_tokens += is_new

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """The terminal result of a request that the scheduler has ended."""
        request = self._live[request_id]
        request.finish(reason, time.monotonic(), error)
        request.inbox.put(request.reader)
        self._finished[reason] += 1
        self._forget(request_id)
        if self.on_end is not None:
            self.on_end(request_id, reason)

    def _forget(self, request_id: str) -> None:
        reader = self._live[request_id].reader
        del self._live[request_id], self._settings[request_id]
        if isinstance(reader, Fanout) and reader.finished:
            del self._fanouts[reader.request_id]

    # -- faults -----------------------------------------------------------------------------------------------

    def _recover(self, cause: str) -> None:
        """A turn failed. Requests in the step concerned run again, or end with `error` if they did so before."""
        plan, self._current = self._current, None
        self.last_fault = cause
        self._recoveries += 1
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= FAULTS_IN_A_ROW:
            self.fail(f"{FAULTS_IN_A_ROW} steps failed in a row, the last with {cause}")
            return
        self._restart()
        touched = list(self._live)
        if plan is not None:
            parts: tuple[Chunk | Row, ...] = (*plan.chunks, *plan.decode)
            concerned = {part.request_id for part in parts}
            touched = [request_id for request_id in touched if request_id in concerned]
        for request_id in touched:
            request = self._live[request_id]
            request.faults += 1
            if request.faults > FAULTS_SURVIVED:
                self.scheduler.finish(request_id, FinishReason.ERROR)
                self._end(
                    request_id, FinishReason.ERROR, f"a step failed again with this request in it: {cause}"
                )

    def _settle(self) -> None:
        """After an interrupt in the middle of a turn nobody knows what was done: begin again."""
        if self._unsettled and not self._turning and self._closed is None:
            self._restart()

    def _restart(self) -> None:
        """Run every live request again from its beginning, with state made anew on the device.

        Law 1 makes this exact: each gets the tokens it has, which are not delivered again, and goes on.
        """
        self._in_flight.clear()
        self._current = None
        self.scheduler = self.scheduler.restarted()
        for request in self._live.values():
            request.rewind()
        try:
            self.runner.rebuild()
        except Exception as error:
            self.fail(f"the device state was lost and cannot be made again: {type(error).__name__}: {error}")
        self._unsettled = False

    def fail(self, cause: str) -> None:
        """Nothing can run any more: every request ends with reason `error`, later submits fail at once."""
        self._closed = cause
        self._in_flight.clear()
        for request_id in list(self._live):
            self.scheduler.finish(request_id, FinishReason.ERROR)
            self._end(request_id, FinishReason.ERROR, cause)

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn still has something to do or to deliver."""
        return self.has_work or bool(self._inbox)

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do, whoever reads it."""
        return bool(self._live or self._in_flight)

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
            finished={str(reason): count for reason, count in self._finished.items()},
            recoveries=self._recoveries,
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
        """Abort what is live and free device memory.

        Terminal outputs that nobody has read yet can still be had, by `step`, `drain` or their inboxes.
        """
        if self._closed is None:
            self.abort_all()
            self._closed = "close() was called"
        self._in_flight.clear()
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
