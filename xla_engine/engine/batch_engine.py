"""The engine: a model, its scheduler and its runner, driven by the loop in `xla_engine.engine.loop`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.drafting.drafter import Drafter
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.locked import locked
from xla_engine.engine.loop import Loop
from xla_engine.engine.protocol import RequestOptions, drained
from xla_engine.engine.requests.output_collector import OutputCollector, Readable
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.seeds import request_seed
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.engine.scheduler_options import scheduler_config
from xla_engine.engine.speculation import make_speculator
from xla_engine.engine.stats import EngineStats
from xla_engine.errors import ConfigError, EngineClosedError
from xla_engine.graphs.inventory import GraphReport
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.generation_config import sampling_defaults
from xla_engine.model_loader.model_files import open_model
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt, prompt_parts
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck, run_self_check
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Scheduler, Snapshot
from xla_engine.text.chat_template import Message, chosen_template, render_chat
from xla_engine.text.tokenizer import Tokenizer


class XlaBatchEngine(Loop):
    """Continuous batching over one model: the loop, and the requests, results and counters of its callers.

    Several threads may call it, each with collectors of its own, as `LLM` has.

    Runnable example::

        engine = XlaBatchEngine.from_pretrained()          # the embedded model
        engine.submit("def add(a, b):", SamplingParams(temperature=0, max_tokens=32))
        for output in engine.drain():
            print(output.outputs[0].text)
        engine.close()
    """

    runner: Runner

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
        self.step_timeout_s = config.step_timeout_s
        self._parks = config.parks
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.default_params = SamplingParams()  # of requests that are submitted without parameters
        self.validator = RequestValidator(
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_model_len=runner.context_length,
            tokenizer=tokenizer,
            max_waiting=config.max_waiting,
            max_num_seqs=config.num_slots,
            never_fits=lambda prompt_tokens, max_tokens: self.scheduler.never_fits(prompt_tokens, max_tokens),
        )
        self._speculator = make_speculator(config, runner, self.self_check, self._table)
        self._collector = OutputCollector()  # of requests that were submitted without one; `step` reads it

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

    @locked
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queue a prompt (text, token ids or a dict around either); returns the request's id.

        request_id: None counts up, past ids in use. It names the request in outputs and, without a seed of its own,
            keys its noise.
        add_special_tokens: tokenise text with the begin token; false for the text of a chat template, which has it.
        collector: takes the request's news; without one `step` returns them.
        options: when it runs and what it shares; see `RequestOptions`.

        Raises InvalidRequestError (TokenLimitError when prompt and max_tokens do not fit), QueueFullError when the
        queue is bounded and full, and EngineClosedError when the engine is gone; then nothing is changed.
        """
        self._waiter.check_process()
        self._settle()
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        if self._draining:
            raise EngineClosedError("the engine finishes what it has and takes no more requests")
        params = params or self.default_params
        request_id = self._table.free_id(params.n) if request_id is None else request_id
        self._table.check_free(request_id, params.n)
        content, text, salt = prompt_parts(prompt)
        if salt is not None:
            options["cache_salt"] = salt
        self.validator.check_options(**options)
        token_ids = self.validator.token_ids(content, params, add_special_tokens=add_special_tokens)
        params = self.validator.with_limit(params, len(token_ids))
        stop_ids = self.validator.stop_token_ids(params)
        self.validator.check_queue(params.n, self.num_waiting, self.scheduler.num_free)
        mask = self.validator.token_mask(params, stop_ids)
        sequences = self._table.open(
            request_id,
            text,
            token_ids,
            params,
            mask=mask,
            stop_ids=stop_ids,
            eos_ids=self.validator.eos_token_ids,
            seed=self.seed_of(request_id, params),
            collector=self._collector if collector is None else collector,
            now=self.clock(),
            options=options,
        )
        self.queue(request_id, sequences)
        return request_id

    def render_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """The prompt of a conversation by the checkpoint's chat template, or by `chat_template`; see `render_chat`.

        Submit it with `add_special_tokens=False`.
        """
        return render_chat(messages, chosen_template(self.chat_template, chat_template), **options)

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Run one turn; returns the cumulative output of every request with news and no collector of its own.

        `only_finished` leaves out the running requests, whose outputs cost a copy of all their tokens each turn; their
        tokens are then taken many at a time, unless stop strings or grammars need each.
        """
        self._collector.every_token = not only_finished
        if self._closed is None or not self._collector:
            self.advance()
        with self.lock:
            news = self._collector.take()
            return [request.output() for request in news if request.finished or not only_finished]

    def drain(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """Run until nothing is left; returns the finished requests in order of completion.

        timeout_s: what runs or waits after so many seconds ends with reason "abort"; None waits for all. Meanwhile
            no request is taken.
        """
        ended: list[Readable] = []
        self._collector.every_token = False
        until = math.inf if timeout_s is None else self.clock() + timeout_s
        draining, self._draining = self._draining, True
        try:
            while self.has_unfinished:
                if self._table and self.clock() >= until:
                    self.abort_all(drained(timeout_s))
                if self._closed is None or not self._collector:
                    self.advance()
                ended += (request for request in self._collector.take() if request.finished)
        except BaseException:
            for request in ended:  # not delivered yet, so `step` or `drain` must find them again
                self._collector.put(request)
            raise
        finally:
            self._collector.every_token = True
            self._draining = draining
        with self.lock:
            return [request.output() for request in ended]

    def stream(self) -> Iterator[RequestOutput]:
        """Run until nothing is left, yielding cumulative outputs as tokens arrive."""
        while self.has_unfinished:
            yield from self.step()

    @property
    def has_unfinished(self) -> bool:
        """Whether a turn still has something to do or to deliver."""
        return self.has_work or bool(self._collector)

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

    @locked
    def snapshot(self) -> Snapshot:
        """Slots, queue and the reason of each request's last scheduling decision; does not touch the device."""
        return self.scheduler.snapshot()

    @locked
    def stats(self) -> EngineStats:
        """Counters since start-up; does not touch the device."""
        counters, work = self.scheduler.counters(), self._work
        return EngineStats(
            steps=work.steps,
            prefill_calls=self.runner.prefill_calls,
            prompt_tokens=work.prompt_tokens,
            generation_tokens=self._table.token_buffer.num_tokens,
            finished={str(reason): count for reason, count in self._table.finished.items()},
            recoveries=self._faults.count,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
            slot_steps_busy=work.slot_steps_busy,
            slot_steps_total=work.decode_steps * self.config.num_slots,
            drafted_tokens=0 if self._speculator is None else self._speculator.drafted,
            accepted_tokens=0 if self._speculator is None else self._speculator.accepted,
            compiles_warmup=self.runner.compiles.before,
            compiles_after_warmup=self.runner.compiles.after,
            load_seconds=self.runner.load_seconds,
            compile_seconds=self.runner.compile_seconds,
            last_step_age_s=self.clock() - self._heard if self.has_work else 0.0,
        )

    def identity(self) -> EngineIdentity:
        """Everything the bits of a result may depend on beside the request."""
        return EngineIdentity(
            model=self.checkpoint.fingerprint,
            dtype=self.checkpoint.dtype,
            config=json.loads(json.dumps(self.config.bit_options())),
            platform=self.runner.platform,
        )

    @locked
    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes: a prompt is computed whole until its beginning has been seen again."""
        self.scheduler.reset_prefix_cache()

    def blank(self) -> None:
        """Put cache, row state and prefix cache back to their state at start-up, so that a run repeats to the bit.

        The engine must be idle.
        """
        self.reset_prefix_cache()
        self.runner.blank()

    def draft_with(self, drafter: Drafter) -> None:
        """Let another drafter guess, for a check or a measurement; the engine must be idle and speculate.

        Raises ConfigError where it does not.
        """
        if self._speculator is None:
            raise ConfigError("this engine does not speculate: give it a speculative_config")
        self._speculator.drafter = drafter

    def inventory_report(self) -> list[GraphReport]:
        """One report per executable."""
        return self.runner.reports

    @locked
    def close(self) -> None:
        """Abort what is live and free device memory. Outputs that were not read yet can still be read."""
        if not self._waiter.is_at_home:
            return
        if self._closed is None:
            self.abort_all()
            self._closed = "close() was called"
        self._in_flight.clear()
        self._waiter.close()
        if not self._gone:  # a device that does not answer would not let go of its memory, either
            self.runner.close()

    def __enter__(self) -> XlaBatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seed_of(self, request_id: str, params: SamplingParams) -> int:
        """Return a request's 64-bit noise key: its own seed, else one made from the engine's seed and its id."""
        return request_seed(self.config.seed, request_id) if params.seed is None else params.seed % 2**64
