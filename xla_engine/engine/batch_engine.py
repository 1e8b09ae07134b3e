"""The engine: a model, its scheduler and its runner, driven by the loop in `xla_engine.engine.loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.engine.loop import Loop
from xla_engine.engine.output_collector import OutputCollector
from xla_engine.engine.request_table import RequestTable
from xla_engine.engine.scheduler_options import scheduler_config
from xla_engine.engine.seeds import request_seed
from xla_engine.engine.sequence import LiveSequence
from xla_engine.engine.sequence_group import SequenceGroup
from xla_engine.engine.stats import EngineStats
from xla_engine.engine.validation import RequestValidator
from xla_engine.errors import EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.graphs.inventory import GraphReport
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.generation_config import sampling_defaults
from xla_engine.model_loader.model_files import open_model
from xla_engine.outputs import RequestOutput
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check import SelfCheck, run_self_check
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import QueueFullError, Request, Scheduler, Snapshot
from xla_engine.text.chat_template import Message, chosen_template, render_chat
from xla_engine.text.tokenizer import Tokenizer


class XlaBatchEngine(Loop):
    """Continuous batching over one model: the loop, and what people ask of it.

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
        config = config or EngineConfig()
        runner = Runner(
            checkpoint.config,
            checkpoint.weights,
            checkpoint.dtype,
            config,
            progress=progress,
            load_progress=load_progress,
        )
        self.config = config = runner.config
        self.self_check: SelfCheck | None = None
        if config.self_check:
            self.self_check = run_self_check(runner, checkpoint.config.vocab_size)
        scheduler = Scheduler(scheduler_config(config, runner, self.self_check, checkpoint.fingerprint))
        super().__init__(scheduler, runner, RequestTable(tokenizer), lag=config.lag)
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.default_params = SamplingParams()  # of requests that bring none
        self.admission = RequestValidator(
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_model_len=runner.context_length,
            tokenizer=tokenizer,
        )
        self._inbox = OutputCollector()  # of requests that were submitted without one; `step` reads it

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
        files = open_model(embedded_model_directory() if model is None else model)
        engine = cls(
            load_checkpoint(files, dtype=config.dtype),
            Tokenizer.of_model(files),
            config,
            chat_template=files.chat_template(),
            progress=progress,
            load_progress=load_progress,
        )
        if config.generation_config == "model":
            engine.default_params = SamplingParams.from_mapping(sampling_defaults(files))
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
        inbox: OutputCollector | None = None,
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
        now = self.clock()
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
        self.queue(
            request_id,
            (
                Request(
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
                for name in sequences
            ),
        )
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
        return any([self._take_away(name, how=how, to_back=to_back) for name in names])

    @property
    def ways_to_preempt(self) -> tuple[str, ...]:
        """What `preempt` can do here."""
        parks = ("park",) if self.config.parks else ()
        return (*parks, *(("recompute",) if self.scheduler.config.keeps_tokens else ()), "replay")

    # -- results ----------------------------------------------------------------------------------------------

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """One turn. Returns the cumulative output of every request that has news, unless another inbox has them.

        `only_finished` leaves out the running ones, whose outputs cost a copy of all their tokens each turn; nobody
        looks at their tokens one by one then, unless stop strings or grammars ask for it.
        """
        self._inbox.every_token = not only_finished
        if self._closed is None or not self._inbox:
            self.advance()
        return [request.output() for request in self._inbox.take() if request.finished or not only_finished]

    def drain(self) -> list[RequestOutput]:
        """Run until nothing is left; returns the finished requests in order of completion."""
        ended: list[LiveSequence | SequenceGroup] = []
        self._inbox.every_token = False
        try:
            while self.has_unfinished:
                if self._closed is None or not self._inbox:
                    self.advance()
                ended += (request for request in self._inbox.take() if request.finished)
        except BaseException:
            for request in ended:  # what was not delivered is still there
                self._inbox.put(request)
            raise
        finally:
            self._inbox.every_token = True
        return [request.output() for request in ended]

    def stream(self) -> Iterator[RequestOutput]:
        """Run until nothing is left, yielding cumulative outputs as tokens arrive."""
        while self.has_unfinished:
            yield from self.step()

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn still has something to do or to deliver."""
        return self.has_work or bool(self._inbox)

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
        counters, work = self.scheduler.counters(), self._work
        return EngineStats(
            steps=work.steps,
            prefill_calls=self.runner.prefill_calls,
            prompt_tokens=work.prompt_tokens,
            generation_tokens=self._book.ledger.num_tokens,
            finished={str(reason): count for reason, count in self._book.finished.items()},
            recoveries=self._faults.count,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
            slot_steps_busy=work.slot_steps_busy,
            slot_steps_total=work.decode_steps * self.config.num_slots,
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
        return request_seed(self.config.seed, request_id) if params.seed is None else params.seed % 2**64
