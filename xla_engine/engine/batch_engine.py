"""The engine: a model, its scheduler and its runner, driven by the loop in `xla_engine.engine.loop`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.drafting.drafter import Drafter
from xla_engine.engine.locked import locked
from xla_engine.engine.protocol import drained
from xla_engine.engine.requests.output_collector import Readable
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.engine.scheduler_options import scheduler_config
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation import make_speculator
from xla_engine.engine.weights.adapters import Adapters
from xla_engine.engine.weights.changing import ChangingWeights
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.inventory import GraphReport
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.generation_config import sampling_defaults
from xla_engine.model_loader.model_files import open_model
from xla_engine.outputs import RequestOutput
from xla_engine.pooling.model import for_runner, load_pooler
from xla_engine.pooling.pooler import Pooler
from xla_engine.runner.devices import start_profile, stop_profile
from xla_engine.runner.drafting.make import guesser_of
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.runner.self_check.remembered import self_check
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Scheduler
from xla_engine.scheduler.continuation import forget_slots
from xla_engine.text.chat_template import Message, chosen_template, render_chat
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.startup import StartupProgress, StartupStep, silent


class XlaBatchEngine(ChangingWeights):
    """Continuous batching over one model: the loop, and the requests, results and counters of its callers.

    Several threads may call it, each with collectors of its own, as `LLM` has.

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
        draft: Checkpoint | None = None,
        pooler: Pooler | None = None,
        progress: StartupProgress = silent,
    ) -> None:
        """`progress` is called with each step of the start: weights, C++ operations, programs, self-check. draft: a
        draft model; None loads the one that `speculative_config` names. pooler: how prompts are pooled where
        `config.runner` says so; None takes the last token's vector."""
        config = config or EngineConfig()
        pooler = (pooler or Pooler()) if config.pools else None
        runner = Runner(
            checkpoint.config,
            checkpoint.weights,
            checkpoint.dtype,
            config,
            guesser=guesser_of(config, checkpoint, tokenizer, draft),
            pooling=None if pooler is None else pooler.pooling_type,
            progress=progress,
        )
        self.config = config = runner.config
        self.self_check: SelfCheck | None = None
        if config.self_check:
            progress(StartupStep("self-check"))
            self.self_check = self_check(runner, checkpoint.config.vocab_size, checkpoint.fingerprint)
        scheduler = Scheduler(scheduler_config(config, runner, self.self_check, checkpoint.fingerprint))
        super().__init__(
            scheduler, runner, RequestTable(tokenizer, config.keep_finished, pooler), lag=config.lag
        )
        self.step_timeout_s, self.seed = config.step_timeout_s, config.seed
        self._parks = config.parks
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.adapters = Adapters(runner, checkpoint, self.slots_of_adapters)
        self.validator = RequestValidator(
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            max_model_len=runner.context_length,
            tokenizer=tokenizer,
            max_waiting=config.max_waiting,
            max_num_seqs=config.num_slots,
            takes_turns=config.scheduling_policy == "round_robin",
            has_dry=config.enable_dry,
            pooler=pooler,
            hidden_size=checkpoint.config.hidden_size,
            never_fits=lambda prompt_tokens, max_tokens: self.scheduler.never_fits(prompt_tokens, max_tokens),
        )
        self._speculator = make_speculator(config, runner, self.self_check, self._table)
        self._shadow = ShadowProbe(runner, config) if config.shadow_rate else None
        self._begin_reports()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: StartupProgress = silent,
    ) -> XlaBatchEngine:
        """Load a Hugging Face directory, an id of its hub or a GGUF file (None: the embedded model) and compile.

        Raises CheckpointError. `progress` is that of the constructor.
        """
        config = config or EngineConfig()
        files = open_model(embedded_model_directory() if model is None else model)
        files, config = for_runner(files, config)
        tokenizer = Tokenizer.of_model(files)
        engine = cls(
            load_checkpoint(files, dtype=config.dtype),
            tokenizer,
            config,
            chat_template=files.chat_template(),
            pooler=load_pooler(files, tokenizer, config),
            progress=progress,
        )
        if config.generation_config == "model":
            engine.default_params = SamplingParams.from_mapping(sampling_defaults(files))
        return engine

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
                if self.has_work and self.clock() >= until:
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

    @locked
    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes: a prompt is computed whole until its beginning has been seen again."""
        self.scheduler.reset_prefix_cache()

    def blank(self) -> None:
        """Put cache, row state and prefix cache back to their state at start-up, so that a run repeats to the bit.

        The engine must be idle.
        """
        self.reset_prefix_cache()
        forget_slots(self.scheduler)
        self.runner.blank()
        if self._shadow is not None:
            self._shadow.restart()

    def draft_with(self, drafter: Drafter) -> None:
        """Let another drafter guess, for a check or a measurement; the engine must be idle and speculate.

        Raises ConfigError where it does not.
        """
        if self._speculator is None:
            raise ConfigError("this engine does not speculate: give it a speculative_config")
        self._speculator.drafter = drafter

    def start_profile(self, directory: str | Path) -> None:
        """Write down what XLA and the host do until `stop_profile`, which puts a profile below `directory`.

        TensorBoard and Perfetto show it. One engine of a process at a time is profiled.
        """
        start_profile(directory)

    def stop_profile(self) -> None:
        """Write the profile."""
        stop_profile()

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
        self._trier.close()
        self.masks.close()
        if not self._gone:  # a device that does not answer would not let go of its memory, either
            self.runner.close()

    def __enter__(self) -> XlaBatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
