"""The engine: builds its parts and offers their operations as methods, all under one lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from xla_engine.config import AUTO, EngineConfig
from xla_engine.engine.adapters import Adapters
from xla_engine.engine.client import drain_engine, step_engine
from xla_engine.engine.continuations import Continuations
from xla_engine.engine.delivery import Delivery
from xla_engine.engine.driver import Driver
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.intake import Intake
from xla_engine.engine.locked import locked
from xla_engine.engine.loop import Loop
from xla_engine.engine.preempter import Preempter
from xla_engine.engine.protocol import RequestOptions, SubmitOptions
from xla_engine.engine.recovery import Recovery
from xla_engine.engine.reports import Reports
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import KeptRequests, RequestTable
from xla_engine.engine.requests.sequence import noise_key
from xla_engine.engine.requests.validation import NO_PICTURES, ImageForm, RequestValidator
from xla_engine.engine.scheduler_options import scheduler_config
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation.proposer import Proposer
from xla_engine.engine.speculation.speculator import Speculator, make_speculator
from xla_engine.engine.state import EngineState
from xla_engine.engine.stored_prefixes import stored_prefixes
from xla_engine.engine.turn import Turn
from xla_engine.engine.weight_updates import WeightUpdates
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError, NotPackableError
from xla_engine.graphs.inventory import GraphReport
from xla_engine.images.tower import load_reader, load_tower
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.checkpoint import Checkpoint, load_weights
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.model_loader.pooling import PoolingForm
from xla_engine.observability.log import ProgressLog, engine_log
from xla_engine.observability.metrics import MetricFamily, text_of
from xla_engine.observability.phases import PhaseTimer
from xla_engine.observability.stats import EngineStats
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.runner.devices import start_profile, stop_profile
from xla_engine.runner.drafting.proposers import device_proposer_of
from xla_engine.runner.encoder_runner import EncoderRunner
from xla_engine.runner.features import FeatureBuffer
from xla_engine.runner.hosts import Hosts
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.jax_settings import check_platform, with_own_settings
from xla_engine.runner.kept_leaves import leaves_on_disk
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.runner.self_check.remembered import self_check, self_check_config
from xla_engine.runner.vision_tower import VisionTower
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Peek, Scheduler, Snapshot
from xla_engine.scheduler.continuation import forget_slots
from xla_engine.scheduler.pipeline import StepPipeline
from xla_engine.text.chat_template import Message, chosen_template, render_chat
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.resident import release_free_memory, release_library_pages
from xla_engine.utils.startup import StartupProgress, StartupStep, silent

if TYPE_CHECKING:
    from xla_engine.images.pictures import PictureReader


def _image_form(tower: VisionTower, features: FeatureBuffer | None) -> ImageForm:
    assert features is not None
    return ImageForm(tower.tokens, tower.config.grid, features.place_tokens, features.places)


class XlaBatchEngine:
    """Continuous batching over one model.

    Thread-safe. Each thread should submit with its own `OutputCollector`, as `LLM` does.

    state: the state that all parts share. lock: held while a part reads or changes it.
    observers: notified of plans, tokens and ends.
    default_params: used for requests that are submitted without parameters.

    Runnable example::

        engine = XlaBatchEngine.from_pretrained()          # the embedded model
        engine.submit("def add(a, b):", SamplingParams(temperature=0, max_tokens=32))
        for output in engine.drain():
            print(output.outputs[0].text)
        engine.close()
    """

    @with_own_settings
    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        chat_template: ChatTemplate | None = None,
        draft: Checkpoint | None = None,
        pooler: PoolingForm | None = None,
        tower: VisionTower | str = NO_PICTURES,
        pictures: PictureReader | None = None,
        hosts: Hosts | None = None,
        progress: StartupProgress = silent,
    ) -> None:
        """Load the weights onto the device and compile all programs.

        draft: the draft model; None loads the one that `speculative_config` names.
        pooler: how prompts are pooled if `config.runner` is "pooling"; None takes the last token's vector.
        tower: encodes pictures; or why there is none, which requests with pictures are told.
        pictures: reads the pictures that requests name; None takes decoded ones only. Closed with the engine.
        hosts: that share the model's devices, see `Hosts`; None: only this one.
        progress: called at each step of the start: weights, C++ kernels, programs, self-check.
        """
        config = config or EngineConfig()
        pooler = (pooler or PoolingForm()) if config.pools else None
        device_proposer = device_proposer_of(config, checkpoint, tokenizer, draft)
        if hosts is not None:
            if checkpoint.config.encodes:
                raise ConfigError("an encoder runs on one host: leave num_hosts out")
            hosts.check_same("model (give the same --model)", checkpoint.fingerprint)

        def start(config: EngineConfig, shares: Runner | None = None) -> Runner | EncoderRunner:
            if checkpoint.config.encodes:
                model, weights = checkpoint.config, checkpoint.weights
                return EncoderRunner(model, weights, checkpoint.dtype, config, progress=progress)
            return Runner(
                checkpoint.config,
                checkpoint.weights,
                checkpoint.dtype,
                config,
                device_proposer=device_proposer if shares is None else None,
                pooling=None if pooler is None else pooler.pooling_type,
                tower=None if isinstance(tower, str) else tower,
                leaves=None if shares is None else shares.weights.leaves,
                hosts=hosts,
                progress=progress,
            )

        try:
            runner = start(config)
        except NotPackableError as error:
            if config.quantization != AUTO:
                raise
            runner = start(replace(config, quantization=None))
            runner.form_note = f"weights are dequantised to {checkpoint.dtype}: {error}"
        self.config = config = runner.config
        self.self_check: SelfCheck | None = None
        if config.self_check and isinstance(runner, Runner):
            progress(StartupStep("self-check"))
            vocab_size, checked = checkpoint.config.vocab_size, runner

            def with_pool(blocks: int) -> Runner:
                other = start(self_check_config(config, blocks), checked)
                assert isinstance(other, Runner)
                return other

            always = hosts is not None
            self.self_check = self_check(runner, vocab_size, checkpoint.fingerprint, with_pool, always=always)
        scheduler = Scheduler(scheduler_config(config, runner, self.self_check, checkpoint.fingerprint))
        pipeline: StepPipeline[InFlight] = StepPipeline(scheduler, lag=config.lag)
        kept = KeptRequests(config.keep_finished, lambda name: pipeline.scheduler.ended.pop(name, None))
        table = RequestTable(tokenizer, kept, pooler)
        self.state = state = EngineState(
            pipeline=pipeline,
            runner=runner,
            table=table,
            shadow=ShadowProbe(runner, config) if config.shadow_rate and isinstance(runner, Runner) else None,
            timer=PhaseTimer() if config.phase_timers else None,
            step_timeout_s=config.step_timeout_s,
            hosts=hosts,
        )
        if hosts is not None and isinstance(runner, Runner):
            state.watches, hosts.on_lost = True, state.waiter.wake.set
            runner.lead()
        state.masks.on_made = state.ready.set
        if isinstance(runner, Runner):  # an encoder has none of these
            state.speculator = make_speculator(config, runner, self.self_check, table)
            state.prefixes = stored_prefixes(config, runner, checkpoint.fingerprint, state.ready.set)
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
            pictures=pictures,
            images=tower if isinstance(tower, str) else _image_form(tower, runner.features),
            never_fits=lambda prompt_tokens, max_tokens: state.scheduler.never_fits(
                prompt_tokens, max_tokens
            ),
        )
        self.adapters = Adapters(runner, checkpoint, state.adapter_slots)
        self._collector = OutputCollector()  # for requests submitted without one; `step` reads it
        delivery = Delivery(state)
        self._recovery = Recovery(state, delivery)
        self._intake = Intake(
            state, delivery, self._recovery, self.validator, self.adapters.of, seed=config.seed
        )
        self._loop = Loop(state, delivery, self._recovery, self._intake)
        self._preempter = Preempter(state, self._recovery, parks=config.parks)
        self._driver = Driver(state, self._loop)
        self._continuations = Continuations(state, self._intake, self.validator, self.adapters)
        self._weights = WeightUpdates(state, config, checkpoint)
        self._reports = Reports(state, config, self._recovery.faults, self.adapters, self._weights)
        runner.count_padding(table.histograms.prefill_padding)
        release_free_memory()
        release_library_pages()
        self._log_progress()

    def _log_progress(self) -> None:
        """Log the form of the weights and the limits once, and the progress from now on."""
        runner, progress = self.runner, ProgressLog(self.clock())
        if runner.form_note is not None:
            engine_log.info("%s", runner.form_note)
        self._loop.log_progress = lambda: engine_log.info("%s", progress.line(self.stats(), self.clock()))
        if engine_log.isEnabledFor(logging.INFO):
            limits = ", ".join(
                f"{name} {value}" for name, value in self.limits().items() if value is not None
            )
            seconds = f"{runner.load_seconds:.1f} s load, {runner.compile_seconds:.1f} s compile"
            engine_log.info("ready: %s; %s", limits, seconds)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | ModelFiles | None = None,
        config: EngineConfig | None = None,
        *,
        hosts: Hosts | None = None,
        progress: StartupProgress = silent,
    ) -> XlaBatchEngine:
        """Load a model and compile it.

        model: a Hugging Face directory, a Hub id or a GGUF file; None is the embedded model. See `open_model`.
        hosts, progress: as in the constructor.

        Raises CheckpointError.
        """
        check_platform()
        config = config or EngineConfig()
        files = open_model(embedded_model_directory() if model is None else model)
        tokenizer = Tokenizer.of_model(files)
        described = describe(files, config, None if tokenizer is None else tokenizer.plain_ids)
        with leaves_on_disk(enabled=config.compile_cache):
            engine = cls(
                load_weights(described),
                tokenizer,
                described.options,
                chat_template=described.chat_template,
                pooler=described.pooling,
                tower=load_tower(described),
                pictures=load_reader(described),
                hosts=hosts,
                progress=progress,
            )
        engine.default_params = SamplingParams.from_mapping(described.sampling_defaults)
        if config.generation_config == "model" and described.recommends_no_sampling:
            engine_log.info(
                "the model recommends no sampling: requests without a temperature are sampled at 1"
            )
        return engine

    def render_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """Render a conversation with `chat_template`, by default the checkpoint's. Options as in `render_chat`.

        Submit the result with `add_special_tokens=False`.
        """
        return render_chat(messages, chosen_template(self.chat_template, chat_template), **options)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> str:
        """Queue a prompt (text, token ids or a dict around either); returns the request's id.

        options: its id and its reader, priority, deadlines, cache salt, adapter; see `SubmitOptions`.

        Raises InvalidRequestError (TokenLimitError if prompt and max_tokens do not fit), QueueFullError if the queue
        is bounded and full, and EngineClosedError if the engine is closed or draining. An error changes nothing.
        """
        wanted = params or self.default_params
        add_special_tokens = options.pop("add_special_tokens", True)
        request_id, on_refused = options.pop("request_id", None), options.pop("on_refused", None)
        reader = self._reader(options.pop("collector", None))
        self.check_open()
        if on_refused is None:
            self.validator.try_constraint(wanted)  # without the lock, so that other threads can run turns
        prompt = self.read_pictures(prompt, add_special_tokens=add_special_tokens)
        with self.lock:
            self._intake.check_open()
            return self._intake.submit(
                prompt, wanted, request_id, reader, on_refused, options, add_special_tokens=add_special_tokens
            )

    def read_pictures(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Prompt:
        """Read and decode the pictures of a prompt, as `submit` does unless it is given the result of this.

        It may wait for hosts. A prompt without pictures is returned as it is. Thread-safe. Raises InvalidRequestError,
        whose subclasses for pictures name the picture.
        """
        return self.validator.decoded(prompt, add_special_tokens=add_special_tokens)

    @locked
    def check_open(self) -> None:
        """Raise EngineClosedError if the engine accepts no requests."""
        self._intake.check_open()

    @locked
    def abort(self, request_id: str, cause: str | None = None) -> bool:
        """End a request now, with the tokens it has; False if it is unknown or has already ended.

        cause: becomes the `error` of its output.
        """
        return self._intake.abort(request_id, cause)

    @locked
    def abort_all(self, cause: str | None = None) -> None:
        """End every live request now; `cause` as in `abort`."""
        self._intake.abort_all(cause)

    def stop_taking(self) -> None:
        """Refuse new requests from now on; accepted ones run to their end."""
        self.state.draining = True

    @locked
    def seed_of(self, request_id: str, params: SamplingParams) -> int:
        """A request's 64-bit noise key: its own seed, or one derived from the engine's seed and the request id."""
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
        """Continue a finished request with up to `max_tokens` more tokens for each of its sequences.

        The request keeps its id. Its tokens, log-probabilities, text and stop are bit for bit what a larger
        `max_tokens` would have given from the start. If its slot or blocks still hold its KV entries and the engine
        does not speculate, it continues to decode at once. Otherwise its tokens are prefilled again if that is exact,
        or else sampled again. No token is delivered twice.

        The end of the text may change: when a request ends, it shows half a character or the beginning of a
        stop string that it had held back.

        collector: as in `submit`. options: those of `submit`, without `cache_salt` and `lora_request`. The priority
            stays as it was by default; deadlines count from now.

        Raises InvalidRequestError if the request is not kept: it is live or unknown, it ended with "stop" or "error",
        or it was evicted by later ones. Raises TokenLimitError if the longer request does not fit, QueueFullError and
        EngineClosedError. An error changes nothing.
        """
        self._continuations.extend(request_id, max_tokens, self._reader(collector), options)

    @locked
    def save(self, request_id: str, name: str | None = None) -> str:
        """Save the current state of a request, live or kept, under a name; returns the name.

        The request itself continues unaffected. Tokens and settings are saved on the host, but no KV entries:
        `restore` reuses those that slots or blocks still hold and computes the others again.

        name: None makes one. At most `keep_finished` requests can be saved at a time; `free` deletes one.

        Raises InvalidRequestError if the request is unknown, the name is taken, or the maximum is reached.
        """
        return self._continuations.save(request_id, name, self._collector)

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of saved requests, oldest first."""
        return tuple(self.state.table.kept.saved)

    @locked
    def free(self, name: str) -> bool:
        """Delete a saved request; False if none has this name."""
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
        """Continue a saved request from where it was saved, as a new request; returns its id.

        It starts with the saved tokens, and continues bit for bit as the original does: its noise is the same,
        whatever its id. The same save can be restored many times.

        max_tokens: new tokens at most, in addition to the saved ones; None: up to the original `max_tokens`.
        request_id: None takes the next free number.
        collector, options: as in `extend`.

        Raises what `extend` raises.
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
        """Submit a request whose prompt is `source`'s prompt, followed by its generated tokens and `suffix`.

        The result is bit for bit that of `submit` with this prompt. KV entries that slots or blocks still hold are
        copied or shared. The whole prompt counts as prompt: penalties, `min_tokens`, bad words and structured outputs
        see only the new tokens as output.

        source: the id of a live or kept request, or the name of a saved one.
        suffix: text, tokenised on its own, or token ids.
        params: None takes those of `source`, including its seed; noise is a function of seed and position.
        seed: replaces the seed of `params`.
        index: which sequence of a `source` with n above 1.
        request_id, collector, options: as in `submit`.

        Raises what `submit` raises.
        """
        with self.lock:
            prompt, params, options = self._continuations.forked(
                source, suffix, params, seed=seed, index=index, options=options
            )
        return self.submit(prompt, params, request_id=request_id, collector=collector, **options)

    @locked
    def forget_kept(self) -> None:
        """Forget all kept and all saved requests."""
        self.state.table.kept.clear()

    @locked
    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> bool:
        """Preempt a request: it gives up its slot and continues later, with the same tokens; False if it has no slot.

        how: "park" moves its state to host memory, "recompute" prefills its prompt and tokens again (offered only if
            that is exact), "replay" runs it again from its beginning. None takes the cheapest.
        to_back: queue it behind all others of its priority; by default it keeps its place.

        Raises InvalidRequestError if this engine does not offer `how`.
        """
        return self._preempter.preempt(request_id, how=how, to_back=to_back)

    @property
    def ways_to_preempt(self) -> tuple[str, ...]:
        """The values of `how` that `preempt` accepts on this engine."""
        return self._preempter.ways

    def turn(self) -> Turn:
        """One turn, for callers that wait for the device in their own way; see `xla_engine.engine.turn`.

        Raises EngineClosedError, and RuntimeError while another turn runs.
        """
        return self._driver.turn()

    def advance(self) -> None:
        """Run one turn; outputs go to the collectors. Raises EngineClosedError.

        If a request reaches its deadline first, the call returns early, and the next call continues to wait for the
        same step. If another thread runs a turn, the call waits for the end of that turn instead. If there is nothing
        to run, it waits for background work (constraints, masks).
        """
        self._driver.advance()

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Run one turn; returns the cumulative outputs of requests that have news and no collector of their own.

        only_finished: leave out running requests. This is faster: no tokens are copied each turn, and tokens are
            processed many at a time, except for requests with stop strings or grammars.
        """
        self._collector.every_token = not only_finished
        return step_engine(self, self._collector, only_finished=only_finished)

    def drain(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """Run until all requests have ended; returns their outputs in order of completion. Meanwhile `submit` raises.

        timeout_s: seconds after which requests that still run or wait end with reason "abort"; None: no limit.
        """
        self._collector.every_token = False
        try:
            return drain_engine(self, self._collector, self.state, timeout_s)
        finally:
            self._collector.every_token = True

    def stream(self) -> Iterator[RequestOutput]:
        """Run until all requests have ended, yielding cumulative outputs as tokens arrive."""
        while self.has_unfinished:
            yield from self.step()

    @property
    def has_unfinished(self) -> bool:
        """Whether there is work for a turn, or an output that was not read."""
        return self.has_work or bool(self._collector)

    @locked
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.reset_prefix_cache()

    def blank(self) -> None:
        """Reset KV cache, row state, prefixes and features to their state at start-up. The engine must be idle."""
        self.finish_steps()
        self.reset_prefix_cache()
        self.scheduler.forget_features()
        forget_slots(self.scheduler)
        self.runner.blank()
        if self.state.shadow is not None:
            self.state.shadow.restart()

    def draft_with(self, proposer: Proposer) -> None:
        """Replace the proposer, for a check or a measurement. The engine must be idle.

        Raises ConfigError if the engine does not speculate.
        """
        if self.state.speculator is None:
            raise ConfigError("this engine does not speculate: start it with a speculative_config")
        self.state.speculator.proposer = proposer

    def start_profile(self, directory: str | Path) -> None:
        """Profile XLA and the host until `stop_profile`, which writes the profile below `directory`.

        TensorBoard and Perfetto can show it. One engine per process can be profiled at a time.
        """
        start_profile(directory)

    def stop_profile(self) -> None:
        """End the profile and write it."""
        stop_profile()

    def inventory_report(self) -> list[GraphReport]:
        """One report per executable."""
        return self.runner.reports

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; a restart replaces it."""
        return self.state.pipeline.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self.state.pipeline.scheduler = scheduler

    @property
    def lag(self) -> int:
        """How many started steps may be unread; may be changed between turns."""
        return self.state.pipeline.lag

    @lag.setter
    def lag(self, lag: int) -> None:
        self.state.pipeline.lag = lag

    @property
    def clock(self) -> Callable[[], float]:
        """The clock for deadlines and token times, in seconds."""
        return self.state.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.state.clock = clock

    @property
    def step_timeout_s(self) -> float | None:
        """Seconds that the start of a step, and then its result, may take before the engine closes; None: no limit."""
        return self.state.step_timeout_s

    @step_timeout_s.setter
    def step_timeout_s(self, seconds: float | None) -> None:
        self.state.step_timeout_s = seconds

    @property
    def watches(self) -> bool:
        """Whether other threads may submit requests with deadlines while a turn waits for a step."""
        return self.state.watches

    @watches.setter
    def watches(self, watches: bool) -> None:
        self.state.watches = watches

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the current weights."""
        return self._weights.checkpoint

    @property
    def speculator(self) -> Speculator | None:
        """The speculator; None without speculation."""
        return self.state.speculator

    @property
    def phase_timer(self) -> PhaseTimer | None:
        """Measures the phases of turns; None without `EngineConfig.phase_timers`."""
        return self.state.timer

    @property
    def closed_because(self) -> str | None:
        """Why the engine was closed; None while it is open."""
        return self.state.closed

    @property
    def last_fault(self) -> str | None:
        """The error of the latest failed step; None if none has failed."""
        return self._recovery.faults.last

    @property
    def num_running(self) -> int:
        """Sequences in a slot, or with all tokens planned and the last one in flight."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self.state.num_waiting

    @property
    def max_num_seqs(self) -> int:
        """The number of slots."""
        return self.config.num_slots

    @property
    def max_model_len(self) -> int:
        """The maximum tokens of a sequence, prompt and generated."""
        return self.runner.context_length

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or steps to read. Steps whose requests have all passed their deadlines do not
        count."""
        return self.state.has_work

    @locked
    def expire(self) -> None:
        """End the requests whose deadline has passed, even while a turn waits."""
        self._loop.expire()

    @locked
    def fail(self, cause: str) -> None:
        """Close the engine: every request ends with reason "error" and this cause, and `submit` raises from now on."""
        self._recovery.fail(cause)

    @locked
    def finish_steps(self) -> None:
        """Read the steps in flight whose requests have all passed their deadlines."""
        self._driver.finish_steps()

    @locked
    def step_shadow(self) -> bool:
        """Run one step of the shadow probe if the engine is idle; False if the probe has nothing to do."""
        shadow, idle = self.state.shadow, self.state.closed is None and not self.state.has_work
        return shadow is not None and idle and shadow.step()

    @locked
    def finish_shadow(self) -> None:
        """Run the requests that the shadow probe has drawn and not yet run again. The engine must be idle."""
        if self.state.shadow is not None:
            self.state.shadow.finish()

    @locked
    def snapshot(self) -> Snapshot:
        """Slots, queue, times, and what each sequence does now or waits for."""
        return self._reports.snapshot()

    @locked
    def peek(self) -> Peek:
        """What the next turn would plan, and why the other sequences wait; changes nothing.

        The prediction holds unless a request arrives or ends before, or a failed step causes a restart.
        """
        return self._reports.peek()

    @locked
    def stats(self) -> EngineStats:
        """Counters and distributions since start-up, and the current numbers of running and waiting sequences."""
        return self._reports.stats()

    @locked
    def metrics(self, model_name: str | None = None) -> list[MetricFamily]:
        """All metrics: counters, gauges and histograms, as docs/operators.md explains them.

        model_name: the value of their label; None takes the name of the checkpoint.
        """
        return self._reports.metrics(model_name)

    def metrics_text(self) -> str:
        """The metrics in the text format of Prometheus."""
        return text_of(self.metrics())

    def identity(self) -> EngineIdentity:
        """Everything, apart from the request, that the bits of a result may depend on."""
        return self._reports.identity()

    def limits(self) -> dict[str, Any]:
        """The limits in force, including those that the engine chose itself."""
        return self._reports.limits()

    @locked
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request needs it; False if it is loaded already. Raises InvalidRequestError."""
        self._intake.check_open()
        return self.adapters.add(lora_request)

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; False if it is not loaded. Raises InvalidRequestError while requests use it."""
        return self.adapters.remove(lora_id)

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Protect an adapter from eviction; False if it is not loaded."""
        return self.adapters.pin(lora_id)

    @locked
    def list_loras(self) -> set[int]:
        """The ids of the loaded adapters."""
        return self.adapters.ids

    @locked
    def adapter_named(self, name: str | None) -> LoRARequest | None:
        """The loaded adapter that a request's `model` names; None: the model itself.

        Raises InvalidRequestError if adapters are loaded and the name is neither an adapter's nor the model's.
        """
        return self.adapters.named(name)

    @locked
    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replace weights between two steps. Names and shapes are those of the model's tensors in transformers.

        weights: numpy or jax float arrays, for all of the model's tensors or some. Tensors that the engine fuses
            (query, key and value; gate and up) must come together. They are converted to the engine's dtype and packed
            for this CPU. For a moment, old and new weights are both in memory.

        Later results have the bits of an engine started from the new checkpoint. Cached prefixes, kept and saved
        requests are forgotten; adapters stay. `identity` changes, but differs from that of an equal checkpoint.

        Raises InvalidRequestError while requests run or wait, because a request uses one set of weights from its first
        token to its last: drain or abort them first. Raises CheckpointError for an unknown name, a wrong shape or a
        bad value; then nothing is changed.
        """
        self._finish_to_update()
        self._weights.update(weights)

    @locked
    def update_leaves(self, leaves: Mapping[str, Any]) -> None:
        """As `update_weights`, with leaves by the names, shapes and dtypes of `checkpoint.weights`."""
        self._finish_to_update()
        self._weights.update_leaves(leaves)

    def _finish_to_update(self) -> None:
        self._intake.check_open()
        self._driver.finish_steps()
        self._driver.finish_idle_steps()

    def _reader(self, collector: OutputCollector | None) -> OutputCollector:
        return self._collector if collector is None else collector

    @locked
    def close(self) -> None:
        """Abort all live requests and free device memory. Unread outputs can still be read."""
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
        if self.validator.pictures is not None:
            self.validator.pictures.close()
        state.masks.close()
        if state.prefixes is not None:
            state.prefixes.storage.close()
        if state.hosts is not None:
            state.hosts.close()
        if not state.device_lost:  # freeing the memory of a device that does not answer would hang, too
            self.runner.close()

    def __enter__(self) -> XlaBatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
