"""The engine: its parts put together, one lock around them, and one method for each thing a caller may ask."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from xla_engine.config import EngineConfig
from xla_engine.engine.adapters import Adapters
from xla_engine.engine.continuations import Continuations
from xla_engine.engine.delivery import Delivery
from xla_engine.engine.driver import Driver
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.intake import Intake
from xla_engine.engine.locked import locked
from xla_engine.engine.loop import Loop
from xla_engine.engine.protocol import RequestOptions, drained
from xla_engine.engine.recovery import Recovery
from xla_engine.engine.reports import Reports
from xla_engine.engine.requests.output_collector import OutputCollector, Readable
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.seeds import noise_key
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.engine.scheduler_options import scheduler_config
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation.proposer import Proposer
from xla_engine.engine.speculation.speculator import Speculator, make_speculator
from xla_engine.engine.state import EngineState
from xla_engine.engine.turn import Turn
from xla_engine.engine.weight_updates import WeightUpdates
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.inventory import GraphReport
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.checkpoint import Checkpoint, load_weights
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.model_loader.pooling import PoolingForm
from xla_engine.observability.log import ProgressLog, engine_log
from xla_engine.observability.phases import PhaseTimer
from xla_engine.observability.prometheus import Family, text_of
from xla_engine.observability.stats import EngineStats
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.runner.devices import start_profile, stop_profile
from xla_engine.runner.drafting.make import device_proposer_of
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.runner.self_check.remembered import self_check
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Peek, Scheduler, Snapshot
from xla_engine.scheduler.continuation import forget_slots
from xla_engine.scheduler.pipeline import StepPipeline
from xla_engine.text.chat_template import Message, chosen_template, render_chat
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.startup import StartupProgress, StartupStep, silent


class XlaBatchEngine:
    """Continuous batching over one model.

    Several threads may call it, each with collectors of its own, as `LLM` has.

    state: what its parts share. lock: held while one of them works.
    observers: are told what happens.
    default_params: of requests that are submitted without parameters.

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
        pooler: PoolingForm | None = None,
        progress: StartupProgress = silent,
    ) -> None:
        """`progress` is called with each step of the start: weights, C++ operations, programs, self-check. draft: a
        draft model; None loads the one that `speculative_config` names. pooler: how prompts are pooled where
        `config.runner` says so; None takes the last token's vector."""
        config = config or EngineConfig()
        pooler = (pooler or PoolingForm()) if config.pools else None
        runner = Runner(
            checkpoint.config,
            checkpoint.weights,
            checkpoint.dtype,
            config,
            device_proposer=device_proposer_of(config, checkpoint, tokenizer, draft),
            pooling=None if pooler is None else pooler.pooling_type,
            progress=progress,
        )
        self.config = config = runner.config
        self.self_check: SelfCheck | None = None
        if config.self_check:
            progress(StartupStep("self-check"))
            self.self_check = self_check(runner, checkpoint.config.vocab_size, checkpoint.fingerprint)
        scheduler = Scheduler(scheduler_config(config, runner, self.self_check, checkpoint.fingerprint))
        table = RequestTable(tokenizer, config.keep_finished, pooler)
        self.state = state = EngineState(
            pipeline=StepPipeline(scheduler, lag=config.lag),
            runner=runner,
            table=table,
            speculator=make_speculator(config, runner, self.self_check, table),
            shadow=ShadowProbe(runner, config) if config.shadow_rate else None,
            timer=PhaseTimer() if config.phase_timers else None,
            step_timeout_s=config.step_timeout_s,
        )
        state.masks.on_made = state.ready.set
        self.lock, self.observers = state.lock, state.observers
        self.runner = runner
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.default_params = SamplingParams()
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
            never_fits=lambda prompt_tokens, max_tokens: state.scheduler.never_fits(
                prompt_tokens, max_tokens
            ),
        )
        self.adapters = Adapters(runner, checkpoint, state.adapter_slots)
        self._collector = OutputCollector()  # of requests that were submitted without one; `step` reads it
        delivery = Delivery(state)
        self._recovery = Recovery(state, delivery)
        self._intake = Intake(
            state, delivery, self._recovery, self.validator, self.adapters.of, seed=config.seed
        )
        self._loop = Loop(state, delivery, self._recovery, self._intake, parks=config.parks)
        self._driver = Driver(state, self._loop)
        self._continuations = Continuations(state, self._intake, self.validator, self.adapters)
        self._weights = WeightUpdates(state, runner, config, checkpoint, self.adapters, self._continuations)
        self._reports = Reports(state, runner, config, self._recovery.faults, self._weights)
        runner.count_padding(table.token_buffer.histograms.prefill_padding)
        self._log_progress()

    def _log_progress(self) -> None:
        """Log the limits now, and the progress from now on."""
        runner, progress = self.runner, ProgressLog(self.clock())
        self._loop.log_progress = lambda: engine_log.info("%s", progress.line(self.stats(), self.clock()))
        if engine_log.isEnabledFor(logging.INFO):
            told = ", ".join(f"{name} {value}" for name, value in self.limits().items() if value is not None)
            seconds = f"{runner.load_seconds:.1f} s load, {runner.compile_seconds:.1f} s compile"
            engine_log.info("ready: %s; %s", told, seconds)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | ModelFiles | None = None,
        config: EngineConfig | None = None,
        *,
        progress: StartupProgress = silent,
    ) -> XlaBatchEngine:
        """Load a Hugging Face directory, an id of its hub or a GGUF file (None: the embedded model) and compile;
        `open_model` says which names there are.

        Raises CheckpointError. `progress` is that of the constructor.
        """
        files = open_model(embedded_model_directory() if model is None else model)
        tokenizer = Tokenizer.of_model(files)
        described = describe(
            files, config or EngineConfig(), None if tokenizer is None else tokenizer.plain_ids
        )
        engine = cls(
            load_weights(described),
            tokenizer,
            described.options,
            chat_template=described.chat_template,
            pooler=described.pooling,
            progress=progress,
        )
        engine.default_params = SamplingParams.from_mapping(described.sampling_defaults)
        return engine

    def render_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """The prompt of a conversation by the checkpoint's chat template, or by `chat_template`; see `render_chat`.

        Submit it with `add_special_tokens=False`.
        """
        return render_chat(messages, chosen_template(self.chat_template, chat_template), **options)

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
        wanted = params or self.default_params
        self.check_open()
        if on_refused is None:
            self.validator.try_constraint(wanted)  # without the lock, so that other threads' turns go on
        reader = self._reader(collector)
        with self.lock:
            self._intake.check_open()
            return self._intake.submit(
                prompt, wanted, request_id, reader, on_refused, options, add_special_tokens=add_special_tokens
            )

    @locked
    def check_open(self) -> None:
        """Raise EngineClosedError where no request is taken."""
        self._intake.check_open()

    @locked
    def abort(self, request_id: str, cause: str | None = None) -> bool:
        """End a request now, keeping what it has; False when it is unknown or already over.

        cause: what its output says as `error`.
        """
        return self._intake.abort(request_id, cause)

    @locked
    def abort_all(self, cause: str | None = None) -> None:
        """End every live request now; `cause` as in `abort`."""
        self._intake.abort_all(cause)

    def stop_taking(self) -> None:
        """Refuse requests from now on; those that are here go on."""
        self.state.draining = True

    @locked
    def seed_of(self, request_id: str, params: SamplingParams) -> int:
        """Return a request's 64-bit noise key: its own seed, else one made from the engine's seed and its id."""
        return noise_key(self._intake.seed, request_id, params)

    @locked
    def extend(
        self,
        request_id: str,
        max_tokens: int,
        *,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Give a request that has ended up to `max_tokens` more tokens, in each of its sequences that may have more.

        The request goes on under its id, and what it returns is to the bit what it would have returned with a larger
        `max_tokens` from the start: tokens, log-probabilities, text, and where it stops. It decodes on at once where
        its slot and blocks still hold what it left and the engine does not speculate. Otherwise its tokens are
        prefilled again where that is exact, or else sampled again; none is delivered twice.

        Text that was shown at its end, since no token was to come, may be taken back: half a character, or the
        beginning of a stop string.

        collector: as in `submit`. options: those of `submit` but `cache_salt`; a priority that is left out stays as it
            was, and deadlines count from now.

        Raises InvalidRequestError for a request that is not kept: it is live or unknown, it ended with "stop" or
        "error", or others ended since and it was forgotten; TokenLimitError when the longer request does not fit,
        QueueFullError and EngineClosedError. Then nothing is changed.
        """
        self._continuations.extend(request_id, max_tokens, self._reader(collector), options)

    @locked
    def save(self, request_id: str, name: str | None = None) -> str:
        """Keep what a live request has so far, or one that has ended and is kept, under a name; returns the name.

        The request itself goes on as if nothing had been. What is saved are tokens and settings, on the host: of
        keys and values a `restore` takes what slots or blocks still hold, and computes the rest again.

        name: None makes one. As many as `keep_finished` are kept at a time, until they are freed.

        Raises InvalidRequestError for a request or a name that cannot be, or when so many are kept already.
        """
        return self._continuations.save(request_id, name, self._collector)

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of saved requests, the oldest first."""
        return tuple(self.state.saved)

    @locked
    def free(self, name: str) -> bool:
        """Let go of a saved request; False where none has this name."""
        return self._continuations.free(name)

    @locked
    def restore(
        self,
        name: str,
        max_tokens: int | None = None,
        *,
        request_id: str | None = None,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Let a saved request go on from where it was saved, as a request of its own; returns its id.

        It has the tokens that were saved, and what follows is to the bit what follows in the request that was saved:
        the noise is the same, whatever the id. It may be restored again and again.

        max_tokens: new tokens at most, on top of those saved; None: up to the `max_tokens` the request had.
        request_id, collector, options: as in `extend`; the id is made where it is None.

        Raises what `extend` does.
        """
        return self._continuations.restore(name, max_tokens, request_id, self._reader(collector), options)

    def fork(
        self,
        source: str,
        suffix: str | Sequence[int] = (),
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        index: int = 0,
        request_id: str | None = None,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Submit a request whose prompt is that of another, what this has generated so far, and `suffix`.

        It is such a request, and returns the very bits of one that was submitted so. What slots or blocks hold of
        the prompt is copied or shared and not computed again. All of the prompt counts as prompt: for penalties,
        `min_tokens`, bad words and structured outputs the output is what comes now.

        source: a live request, one that has ended and is kept, or the name of a saved one.
        suffix: text, tokenised by itself, or token ids.
        params: None are those of `source`, with its noise, which is a function of seed and position.
        seed: another seed than `params` have.
        index: which sequence of a `source` with n above 1.
        request_id, collector, options: as in `submit`, which says what is raised.
        """
        with self.lock:
            forked = self._continuations.forked(
                source, suffix, params, seed=seed, index=index, options=options
            )
        prompt, params, options = forked
        return self.submit(prompt, params, request_id=request_id, collector=collector, **options)

    @locked
    def forget_kept(self) -> None:
        """Let go of all requests that have ended, and of all that were saved."""
        self._continuations.forget_all()

    @locked
    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> bool:
        """Take a request's slot away: it goes on later, and its stream is the same; false where it holds no slot.

        how: "park" (its state waits on the host), "recompute" (prompt and tokens are prefilled again, where that gives
            the same bits), "replay" (it runs again from its beginning); None takes what is cheapest.
        to_back: it waits behind all others of its priority, else at the place it had.

        Raises InvalidRequestError for a way that this engine does not offer.
        """
        return self._loop.preempt(request_id, how=how, to_back=to_back)

    @property
    def ways_to_preempt(self) -> tuple[str, ...]:
        """The values of `how` that `preempt` takes on this engine."""
        return self._loop.ways_to_preempt

    def turn(self) -> Turn:
        """One turn, for a caller who waits for the device in a way of its own: `xla_engine.engine.turn` says how.

        Raises EngineClosedError, and RuntimeError while another turn runs.
        """
        return self._driver.turn()

    def advance(self) -> None:
        """One turn, whose news are left in the collectors, or as much of it as until a request runs out of time: then
        the step is under way, and the next call goes on waiting for it. Raises EngineClosedError.

        While another thread runs a turn, wait for its end instead: its news may be the caller's. With nothing else to
        do, wait for what is made in the background.
        """
        self._driver.advance()

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Run one turn; returns the cumulative output of every request with news and no collector of its own.

        `only_finished` leaves out the running requests, whose outputs cost a copy of all their tokens each turn; their
        tokens are then taken many at a time, unless stop strings or grammars need each.
        """
        self._collector.every_token = not only_finished
        if self.state.closed is None or not self._collector:
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
        state = self.state
        draining, state.draining = state.draining, True
        try:
            while self.has_unfinished:
                if self.has_work and self.clock() >= until:
                    self.abort_all(drained(timeout_s))
                if self.state.closed is None or not self._collector:
                    self.advance()
                ended += (request for request in self._collector.take() if request.finished)
        except BaseException:
            for request in ended:  # not delivered yet, so `step` or `drain` must find them again
                self._collector.put(request)
            raise
        finally:
            self._collector.every_token = True
            state.draining = draining
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
        self.finish_steps()
        self.reset_prefix_cache()
        forget_slots(self.scheduler)
        self.runner.blank()
        if self.state.shadow is not None:
            self.state.shadow.restart()

    def draft_with(self, proposer: Proposer) -> None:
        """Let another proposer guess, for a check or a measurement; the engine must be idle and speculate.

        Raises ConfigError where it does not.
        """
        if self.state.speculator is None:
            raise ConfigError("this engine does not speculate: give it a speculative_config")
        self.state.speculator.proposer = proposer

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

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; another one after a restart."""
        return self.state.pipeline.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self.state.pipeline.scheduler = scheduler

    @property
    def lag(self) -> int:
        """Started steps that may be left unread; may be changed between turns."""
        return self.state.pipeline.lag

    @lag.setter
    def lag(self, lag: int) -> None:
        self.state.pipeline.lag = lag

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, for deadlines and the times of tokens."""
        return self.state.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.state.clock = clock

    @property
    def step_timeout_s(self) -> float | None:
        """Seconds that the start of a step may take, and its answer, before the device is given up; None: no limit."""
        return self.state.step_timeout_s

    @step_timeout_s.setter
    def step_timeout_s(self, seconds: float | None) -> None:
        self.state.step_timeout_s = seconds

    @property
    def watches(self) -> bool:
        """Whether requests with deadlines may come from other threads while a step is under way."""
        return self.state.watches

    @watches.setter
    def watches(self, watches: bool) -> None:
        self.state.watches = watches

    @property
    def checkpoint(self) -> Checkpoint:
        """The weights as they are now."""
        return self._weights.checkpoint

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses; None where rows sample one token a step."""
        return self.state.speculator

    @property
    def phase_timer(self) -> PhaseTimer | None:
        """Measures the phases of turns; None without `EngineConfig.phase_timers`."""
        return self.state.timer

    @property
    def closed_because(self) -> str | None:
        """Why the engine takes nothing any more, None while it does."""
        return self.state.closed

    @property
    def last_fault(self) -> str | None:
        """The latest failed step, in words; None where none has failed."""
        return self._recovery.faults.last

    @property
    def num_running(self) -> int:
        """Sequences past the queue: in a slot, or with all their tokens planned and the last of them in flight."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self.state.num_waiting

    @property
    def max_num_seqs(self) -> int:
        """Slots."""
        return self.config.num_slots

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence at most, prompt and generated."""
        return self.runner.context_length

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do, or will have. Steps whose requests were all ended by a deadline do not
        count."""
        return self.state.has_work

    @locked
    def expire(self) -> None:
        """End the requests whose time is up, also while a turn waits."""
        self._loop.expire()

    @locked
    def fail(self, cause: str) -> None:
        """Close the engine for a cause: every request ends with reason `error`, and later submits fail at once."""
        self._recovery.fail(cause)

    @locked
    def finish_steps(self) -> None:
        """Read the steps that are under way though their requests have all ended, by a deadline."""
        self._driver.finish_steps()

    @locked
    def step_shadow(self) -> bool:
        """Let the shadow probe work while there is nothing else to do; false once it has nothing to do, either."""
        shadow, idle = self.state.shadow, self.state.closed is None and not self.state.has_work
        return shadow is not None and idle and shadow.step()

    @locked
    def finish_shadow(self) -> None:
        """Run again all requests that the shadow probe has drawn and not come to; the engine must be idle."""
        if self.state.shadow is not None:
            self.state.shadow.finish()

    @locked
    def snapshot(self) -> Snapshot:
        """Slots, queue, times, and the reason of each sequence's last scheduling decision."""
        return self._reports.snapshot()

    @locked
    def peek(self) -> Peek:
        """What the next turn would plan, and why the sequences that are not in that plan wait; changes nothing.

        It is what comes, unless a request comes or ends before. A restart after a failed step is not foreseen.
        """
        return self._reports.peek()

    @locked
    def stats(self) -> EngineStats:
        """Counters and distributions since start-up, and how many sequences are where now."""
        return self._reports.stats()

    @locked
    def metrics(self, model_name: str | None = None) -> list[Family]:
        """Everything that monitoring is told: counters, gauges and histograms, as docs/operators.md explains them.

        model_name: the label of each; None takes the name of the checkpoint.
        """
        return self._reports.metrics(model_name)

    def metrics_text(self) -> str:
        """The metrics in Prometheus' text format."""
        return text_of(self.metrics())

    def identity(self) -> EngineIdentity:
        """Everything the bits of a result may depend on besides the request."""
        return self._reports.identity()

    def limits(self) -> dict[str, Any]:
        """The limits in force, those among them that the options left to the engine."""
        return self._reports.limits()

    @locked
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request asks for it; False where it was loaded. Raises InvalidRequestError."""
        self._intake.check_open()
        return self._weights.add_lora(lora_request)

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Let go of an adapter; False where it is not loaded. Raises InvalidRequestError while requests have it."""
        return self.adapters.remove(lora_id)

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter, which then makes no room for others; False where it is not loaded."""
        return self.adapters.pin(lora_id)

    @locked
    def list_loras(self) -> set[int]:
        """Ids of the adapters that are loaded."""
        return self.adapters.ids

    @locked
    def adapter_named(self, name: str | None) -> LoRARequest | None:
        """The loaded adapter that a request means by its `model`; None: the model itself.

        Raises InvalidRequestError where adapters are loaded, and the name is neither theirs nor that of the model.
        """
        return self._weights.adapter_named(name)

    @locked
    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take new weights between two steps: names and shapes are those of the model's tensors in transformers.

        weights: numpy or jax arrays of floats, all of the model's tensors or some. Where several make up one
            weight (queries, keys and values; gates and ups), all of these. They are converted to the type of the
            engine and packed for this CPU. Old and new weights are in memory together for a moment.

        What follows has the bits of an engine that was started from the new checkpoint. Cached prefixes, kept and
        saved requests are forgotten; adapters stay. `identity` names the change, and not the checkpoint it equals.

        Raises InvalidRequestError while requests run or wait: a request has one set of weights, from its first token
        to its last. Let them end, or abort them. Raises CheckpointError for a name, shape or value that cannot be;
        then nothing is changed.
        """
        self._intake.check_open()
        self._driver.finish_steps()
        self._weights.update(weights)

    def _reader(self, collector: OutputCollector | None) -> OutputCollector:
        return self._collector if collector is None else collector

    @locked
    def close(self) -> None:
        """Abort what is live and free device memory. Outputs that were not read yet can still be read."""
        state = self.state
        if not state.waiter.is_at_home:
            return
        if state.closed is None:
            self.abort_all()
            self.finish_steps()
            state.closed = state.closed or "close() was called"
        state.pipeline.in_flight.clear()
        state.waiter.close()
        self._intake.compiler.close()
        state.masks.close()
        if not state.device_lost:  # a device that does not answer would not let go of its memory, either
            self.runner.close()

    def __enter__(self) -> XlaBatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
