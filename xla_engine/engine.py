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
from pathlib import Path
from typing import Any

from graphs.inventory import GraphReport
from scheduler import (
    NO_CHOICE,
    FinishReason,
    Plan,
    QueueFullError,
    Request,
    Scheduler,
    SchedulerConfig,
    Snapshot,
    StepResult,
    TokenEvent,
)
from scheduler.policy import PREEMPTIVE
from xla_engine.admission import Admission
from xla_engine.chat import ChatTemplate, Message, chosen_template, render_chat
from xla_engine.checkpoint import Checkpoint, load_checkpoint
from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.errors import EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.fanout import Fanout
from xla_engine.faults import FAULTS_IN_A_ROW, Faults
from xla_engine.generation_config import sampling_defaults
from xla_engine.in_flight import InFlight
from xla_engine.inbox import Inbox
from xla_engine.live import LiveRequest
from xla_engine.metrics import EngineStats
from xla_engine.model_path import model_path
from xla_engine.outputs import RequestOutput
from xla_engine.request_book import RequestBook
from xla_engine.runner import Runner
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
        self.config = self.runner.config
        self.self_check: SelfCheck | None = None
        if self.config.self_check and self.config.num_blocks is None:
            self.self_check = run_self_check(self.runner, checkpoint.config.vocab_size)
        self.scheduler = Scheduler(self._scheduler_config())
        self.admission = Admission(
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_model_len=self.runner.context_length,
            tokenizer=tokenizer,
        )
        self._book = RequestBook(tokenizer)
        self._faults = Faults()
        self._in_flight: deque[InFlight] = deque()
        self._inbox = Inbox()  # of requests that were submitted without one; `step` reads it
        self._turning = False  # inside a turn, perhaps while somebody else waits for its step
        self._unsettled = False  # a turn did not come to its end
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._slot_steps_busy = 0
        self._decode_steps = 0
        self._closed: str | None = None

    def _scheduler_config(self) -> SchedulerConfig:
        """What the scheduler may do, by the options and by what the self-check found to be exact."""
        config = self.config
        check = self.self_check if self.runner.has_one_row_code else None
        return SchedulerConfig(
            max_num_seqs=config.num_slots,
            chunk_size=config.chunk_size,
            max_num_batched_tokens=config.token_budget,
            max_chunks=config.max_chunks,
            max_waiting=config.max_waiting,
            scheduling_policy=config.scheduling_policy,
            priority_aging=config.priority_aging,
            quantum=config.quantum,
            enable_prefix_caching=config.reuses_slots and self.runner.keeps_every_position,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            cache_key=self.checkpoint.fingerprint,
            prefill_equals_decode=check is not None and check.prefill_equals_decode,
            cut_invariant=check is not None and check.cut_invariant,
            preemption=config.preemption and config.scheduling_policy in PREEMPTIVE,
            swap_tokens=self._swap_tokens(),
        )

    def _swap_tokens(self) -> int:
        """Tokens of parked requests that the host has room for."""
        room = int(self.config.swap_space * 2**30) if self.config.parks else 0
        return room // max(self.runner.kv_bytes_per_token, 1)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        load_progress: Callable[[int, int], None] | None = None,
    ) -> XlaBatchEngine:
        """Load a Hugging Face directory, an id of its hub or a GGUF file (None: the embedded model) and compile.

        Raises CheckpointError. The callbacks are those of the constructor.
        """
        config = config or EngineConfig()
        place = model_path(embedded_model_directory() if model is None else model)
        engine = cls(
            load_checkpoint(place, dtype=config.dtype),
            Tokenizer.of_model(place),
            config,
            chat_template=ChatTemplate.from_directory(place),
            progress=progress,
            load_progress=load_progress,
        )
        if config.generation_config == "model":
            engine.default_params = SamplingParams.from_mapping(sampling_defaults(place))
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
        cache_salt: str = "",
        inbox: Inbox | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id.

        add_special_tokens: tokenise text with the begin token; false for the text of a chat template, which has it.
        priority: -10 (soonest) to 10, for a place in the queue; `scheduler.policy.place` states the rule and how long
            anybody can be kept waiting by it.
        deadline_s: after so many seconds the request ends with reason "deadline" and what it has.
        queue_timeout_s: if it has no slot after so many seconds it ends with reason "queue_timeout".
        cache_salt: its prefix is shared with requests of the same salt only, so that nobody can tell by the time of a
            first token what others have asked.
        inbox: who reads its outputs; without one `step` returns them. Times are looked at once a turn.

        Raises InvalidRequestError (TokenLimitError when prompt and max_tokens do not fit) and changes nothing then;
        QueueFullError when the queue is bounded and full; EngineClosedError when the engine is gone.
        """
        self._settle()
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        params = params or self.default_params
        request_id = str(self._book.submitted) if request_id is None else request_id
        self._book.check_free(request_id, params.n)
        self.admission.check_options(priority, deadline_s, queue_timeout_s, cache_salt)
        token_ids = self.admission.token_ids(prompt, params, add_special_tokens=add_special_tokens)
        if (why := self.scheduler.never_fits(len(token_ids), params.max_tokens)) is not None:
            raise TokenLimitError(
                f"prompt and max_tokens never fit: {why}; ask for less or give more num_blocks"
            )
        stop_ids = self.admission.stop_token_ids(params)
        masks = [self.admission.token_mask(params, stop_ids) for _ in range(params.n)]
        self._check_room(params.n)
        now = time.monotonic()
        sequences = self._book.open(
            request_id,
            prompt,
            token_ids,
            params,
            masks=masks,
            stop_ids=stop_ids,
            eos_ids=self.admission.eos_token_ids,
            seed=self.seed_of(request_id, params),
            inbox=self._inbox if inbox is None else inbox,
            now=now,
        )
        queued: list[str] = []
        try:
            for name in sequences:
                request = Request(
                    request_id=name,
                    prompt_token_ids=token_ids,
                    max_tokens=params.max_tokens,
                    stop_token_ids=frozenset(stop_ids),
                    lockstep=masks[0] is not None and masks[0].lockstep,
                    cache_salt=cache_salt,
                    reads_prefix_cache=self._book.settings[name].params.prompt_logprobs is None,
                    priority=priority,
                    deadline=None if deadline_s is None else now + deadline_s,
                    queue_deadline=None if queue_timeout_s is None else now + queue_timeout_s,
                )
                self.scheduler.submit(request)
                if self.on_submit is not None:
                    self.on_submit(request)
                queued.append(name)
        except BaseException:
            for name in queued:
                self.scheduler.abort(name)
            self._book.take_back(request_id)
            raise
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
        return render_chat(messages, chosen_template(self.chat_template, chat_template), **options)

    def abort(self, request_id: str) -> bool:
        """End a request now, keeping what it has; False when it is unknown or already over."""
        self._settle()
        ended = [name for name in self._book.sequences(request_id) if self.scheduler.abort(name)]
        for name in ended:
            self._end(name, FinishReason.ABORT)
        return bool(ended)

    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> bool:
        """Take a request's slot away: it goes on later, and its stream is the same; False where it holds no slot.

        how: "park" (its state waits on the host), "recompute" (prompt and tokens are prefilled again, where that gives
            the same bits), "replay" (it runs again from its beginning); None takes what is cheapest.
        to_back: in line behind everybody of its priority, else at the place it had.

        Raises InvalidRequestError for a way that this engine has not got.
        """
        self._settle()
        if how not in (None, *self.ways_to_preempt):
            raise InvalidRequestError(
                f"this engine preempts by {', '.join(self.ways_to_preempt)}, not {how!r}"
            )
        names = self._book.sequences(request_id)
        return any([self.scheduler.preempt(name, how=how, to_back=to_back) is not None for name in names])

    @property
    def ways_to_preempt(self) -> tuple[str, ...]:
        """What `preempt` can do here."""
        parks = ("park",) if self.config.parks else ()
        return (*parks, *(("recompute",) if self.scheduler.config.keeps_tokens else ()), "replay")

    def abort_all(self) -> None:
        """End every live request now."""
        for name in self._book:
            self.abort(name)

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
            self._faults.plan = step.plan
            result = yield functools.partial(self.runner.wait, step)
            self._take_prompt_logprobs(step)
            events = self.scheduler.commit(step.plan, result)
            self._faults.step_was_good()
            if self.on_step is not None:
                self.on_step(step.plan, events)
            self._deliver(events)
            started = True  # with nothing to start, read one step and plan again

    def _start_next(self) -> bool:
        """Plan and dispatch one step; False when there is nothing to dispatch."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            if self._book and not self._in_flight:
                raise RuntimeError("requests are left, but there is nothing to do for them")
            return False
        self._faults.plan = plan
        self._in_flight.append(self.runner.start(plan, self._book.settings))
        self._faults.plan = None
        if self.on_step is not None:
            self.on_step(plan, None)
        for request_id in plan.replays:
            self._book[request_id].rewind()
        for reuse in plan.reuses:
            self._book[reuse.request_id].reuse(reuse.length)
        now = time.monotonic()
        for request_id in plan.admitted:
            self._book[request_id].admit(now)
        self._steps += 1
        self._prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        if plan.decode:
            self._decode_steps += 1
            self._slot_steps_busy += len(plan.decode)
        return True

    def _take_prompt_logprobs(self, step: InFlight) -> None:
        for part in self.runner.prompt_scores(step):
            if self._book.settings.get(part.request_id) is part.settings:
                self._book[part.request_id].add_prompt_logprobs(part.start, part.scores)

    def _deliver(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            request = self._book.get(event.request_id)
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
        self._book.end(request_id, reason, time.monotonic(), error)
        self.runner.discard(request_id)
        if self.on_end is not None:
            self.on_end(request_id, reason)

    # -- faults -----------------------------------------------------------------------------------------------

    def _recover(self, cause: str) -> None:
        """A turn failed. Requests in the step concerned run again, or end with `error` if they did so before."""
        if not self._faults.strike(cause):
            self.fail(f"{FAULTS_IN_A_ROW} steps failed in a row, the last with {cause}")
            return
        self._restart()
        for request in self._faults.condemned(self._book[name] for name in self._book):
            self.scheduler.finish(request.request_id, FinishReason.ERROR)
            message = f"a step failed again with this request in it: {cause}"
            self._end(request.request_id, FinishReason.ERROR, message)

    def _settle(self) -> None:
        """After an interrupt in the middle of a turn nobody knows what was done: begin again."""
        if self._unsettled and not self._turning and self._closed is None:
            self._faults.plan = None
            self._restart()

    def _restart(self) -> None:
        """Run every live request again from its beginning, with state made anew on the device.

        Law 1 makes this exact: each gets the tokens it has, which are not delivered again, and goes on.
        """
        self._in_flight.clear()
        self.scheduler = self.scheduler.restarted()
        for name in self._book:
            self._book[name].rewind()
        try:
            self.runner.rebuild()
        except Exception as error:
            self.fail(f"the device state was lost and cannot be made again: {type(error).__name__}: {error}")
        self._unsettled = False

    def fail(self, cause: str) -> None:
        """Nothing can run any more: every request ends with reason `error`, later submits fail at once."""
        self._closed = cause
        self._in_flight.clear()
        for name in self._book:
            self.scheduler.finish(name, FinishReason.ERROR)
            self._end(name, FinishReason.ERROR, cause)

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn still has something to do or to deliver."""
        return self.has_work or bool(self._inbox)

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do, whoever reads it."""
        return bool(self._book or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def max_num_seqs(self) -> int:
        return self.config.num_slots

    @property
    def max_model_len(self) -> int:
        return self.runner.context_length

    def snapshot(self) -> Snapshot:
        """Slots, queue and the reason of each request's last scheduling decision; does not touch the device."""
        return self.scheduler.snapshot()

    def stats(self) -> EngineStats:
        """Counters since start-up; does not touch the device."""
        counters = self.scheduler.counters()
        return EngineStats(
            steps=self._steps,
            prefill_calls=self.runner.prefill_calls,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished={str(reason): count for reason, count in self._book.finished.items()},
            recoveries=self._faults.count,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
            slot_steps_busy=self._slot_steps_busy,
            slot_steps_total=self._decode_steps * self.config.num_slots,
            compiles_warmup=self.runner.compiles.before,
            compiles_after_warmup=self.runner.compiles.after,
            load_seconds=self.runner.load_seconds,
            compile_seconds=self.runner.compile_seconds,
        )

    @property
    def last_fault(self) -> str | None:
        """The latest step that failed, in words."""
        return self._faults.last

    def reset_prefix_cache(self) -> None:
        """Forget what the slots hold: prompts are computed whole again until they have been seen anew."""
        self.scheduler.reset_prefix_cache()

    def blank(self) -> None:
        """Cache, row state and all that is known of them as at start-up: what runs next repeats to the bit.

        The engine must be idle.
        """
        self.reset_prefix_cache()
        self.runner.blank()

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
