"""Several engines as one: an `Engine` over processes that each run an engine.

A request's tokens and log-probabilities depend only on the request, so it can run on any engine, and more than once.
If a process ends, its requests run again on another engine; readers only get tokens that they have not had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Unpack

from xla_engine.config import EngineConfig
from xla_engine.data_parallel import totals
from xla_engine.data_parallel.adapters import key_reader
from xla_engine.data_parallel.fleet import Fleet
from xla_engine.data_parallel.request import RemoteRequest
from xla_engine.data_parallel.turns import FleetLoop
from xla_engine.engine.client import drain_engine, step_engine
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.locked import locked
from xla_engine.engine.protocol import SubmitOptions, deadlines
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.sequence import noise_key
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.engine.turn import Turn
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError, InvalidRequestError, OneEngineError
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.observability.metrics import MetricFamily, engine_metrics, text_of
from xla_engine.observability.observer import Observers
from xla_engine.observability.stats import EngineStats
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Scheduler, SchedulerConfig, Snapshot
from xla_engine.text.chat_template import Message as ChatMessage
from xla_engine.text.chat_template import chosen_template, render_chat
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.startup import StartupProgress, silent

MAX_ENGINES = 64


def one_engine_only(name: str, instead: str) -> Callable[..., NoReturn]:
    """A stub for a method of `XlaBatchEngine` that data parallelism does not support. Raises OneEngineError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OneEngineError(f"{name} needs a single engine (no data_parallel_size); with several, {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Raises OneEngineError: {instead}."
    return refuse


class DataParallelEngine:
    """Engines on one machine behind the interface of `XlaBatchEngine`.

    A request goes to the engine that last read its prefix, else to the one with the fewest requests. It waits here
    while every engine has twice as many requests as slots. An engine whose process ends is restarted, a limited
    number of times in a row, and its requests run on other engines meanwhile. A request with which three processes
    have ended, the third while it ran alone, ends with an error.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        engines: int = 2,
        progress: StartupProgress = silent,
    ) -> None:
        """model, config, progress: as in `XlaBatchEngine.from_pretrained`. Raises ConfigError and CheckpointError."""
        if isinstance(engines, bool) or not isinstance(engines, int) or not 1 <= engines <= MAX_ENGINES:
            raise ConfigError(f"data_parallel_size must be 1 to {MAX_ENGINES}, not {engines!r}")
        if config is not None and config.keep_finished:
            raise OneEngineError(
                "several engines keep no finished requests; leave out keep_finished, or data_parallel_size"
            )
        files = open_model(embedded_model_directory() if model is None else model)
        self.tokenizer = Tokenizer.of_model(files)
        encode = None if self.tokenizer is None else self.tokenizer.plain_ids
        described = describe(files, config or EngineConfig(), encode)
        if described.options.pools:
            raise OneEngineError("several engines do not pool; leave out data_parallel_size for this model")
        self._name = files.path.name
        self.chat_template = described.chat_template
        name = None if model is None else str(model)
        fleet = Fleet(name, config or EngineConfig(), engines, progress)
        self.fleet = fleet
        self.loop = turns = FleetLoop(fleet, key_reader(described, fleet.config))
        self._adapters = turns.adapters
        self.lock, self.clock = turns.lock, turns.clock
        self.observers = Observers()  # never called, because engines do not send their plans
        self.watches = False  # a turn only waits for messages, so deadlines of requests always hold
        self.config = fleet.config
        self.default_params = SamplingParams.from_mapping(described.sampling_defaults)
        self.max_model_len: int = self.fleet.facts["max_model_len"]
        room = Scheduler(SchedulerConfig(**self.fleet.facts["scheduler"]))  # only for its size checks
        self.validator = RequestValidator(
            vocab_size=described.config.vocab_size,
            eos_token_ids=described.special_tokens.eos_token_ids,
            max_model_len=self.max_model_len,
            tokenizer=self.tokenizer,
            max_waiting=self.config.max_waiting,
            max_num_seqs=self.max_num_seqs,
            takes_turns=self.config.scheduling_policy == "round_robin",
            has_dry=self.config.enable_dry,
            never_fits=room.never_fits,
            images="this engine reads no pictures: data_parallel_size above 1 does not support them; use one engine",
        )
        self._collector = OutputCollector()  # for requests that were submitted without one
        self._submitted = 0

    @property
    def max_num_seqs(self) -> int:
        """Total number of slots of all engines."""
        return self.config.num_slots * len(self.fleet.members)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return [member.pid for member in self.fleet.members if member.pid is not None]

    @property
    def num_running(self) -> int:
        return min(sum(member.running for member in self.fleet.members), len(self.loop.live))

    @property
    def num_waiting(self) -> int:
        return len(self.loop.live) - self.num_running

    @property
    def has_work(self) -> bool:
        return bool(self.loop.live)

    @property
    def has_unfinished(self) -> bool:
        return self.has_work or bool(self._collector)

    @property
    def closed_because(self) -> str | None:
        return self.loop.closed

    def render_chat(
        self, messages: Sequence[ChatMessage], *, chat_template: str | None = None, **options: Any
    ) -> str:
        return render_chat(messages, chosen_template(self.chat_template, chat_template), **options)

    def read_pictures(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Prompt:
        """As `XlaBatchEngine.read_pictures`; several engines take no pictures."""
        return self.validator.decoded(prompt, add_special_tokens=add_special_tokens)

    @locked
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> str:
        """As `XlaBatchEngine.submit`, with the same errors. A new constraint is tried here at once, and raises here
        if it is bad; on_refused is called if an engine still rejects it."""
        self.loop.check_open()
        self.loop.settle()
        params = params or self.default_params
        add_special_tokens = options.pop("add_special_tokens", True)
        collector, on_refused = options.pop("collector", None), options.pop("on_refused", None)
        if (request_id := options.pop("request_id", None)) is None:
            request_id = self._free_id()
        if request_id in self.loop.live:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use by a live request; choose another"
            )
        checked = self.validator.checked(prompt, params, options, add_special_tokens=add_special_tokens)
        params = checked.params
        if self.config.max_waiting is not None:
            live = sum(request.params.n for request in self.loop.live.values())
            self.validator.check_queue(params.n, waiting=live, free=self.max_num_seqs)
        lora_request = options.get("lora_request")
        adapter = None if lora_request is None else self._adapters.of(lora_request)
        self.validator.token_mask(params, checked.stop_ids)
        now = self.clock()
        deadline, queue_deadline = deadlines(options, now)
        request = RemoteRequest(
            request_id,
            self._submitted,
            checked.text,
            checked.token_ids,
            params,
            self._collector if collector is None else collector,
            arrival=now,
            priority=options.get("priority", 0),
            quantum=options.get("quantum"),
            salt=options.get("cache_salt", ""),
            adapter=adapter,
            deadline=math.inf if deadline is None else deadline,
            queue_deadline=math.inf if queue_deadline is None else queue_deadline,
            on_refused=on_refused,
        )
        self._submitted += 1
        self.loop.add(request)
        return request_id

    def abort(self, request_id: str, cause: str | None = None) -> bool:
        return self.loop.abort(request_id, cause)

    def abort_all(self, cause: str | None = None) -> None:
        self.loop.abort_all(cause)

    def stop_taking(self) -> None:
        """Reject new requests; live ones continue."""
        self.loop.draining = True

    def fail(self, cause: str) -> None:
        self.loop.fail(cause)

    def turn(self) -> Turn:
        """As `XlaBatchEngine.turn`; it waits for messages of engines."""
        return self.loop.turn()

    def advance(self) -> None:
        self.loop.advance()

    @locked
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter in every engine. Returns false if all had it.

        It is read here; engines load it before any request that is submitted later. Raises InvalidRequestError if
        it cannot be loaded, AdaptersBusyError if an engine has no room for it.
        """
        self.loop.check_open()
        return self._adapters.load(self._adapters.of(lora_request))

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter in every engine. Returns false if none has it. Raises InvalidRequestError while
        requests use it."""
        return self._adapters.remove(lora_id)

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Load an adapter in every engine and never evict it. Returns false if none has it.

        Raises AdaptersBusyError if an engine has no room for it, or if live requests would be left without room.
        """
        return self._adapters.pin(lora_id)

    @locked
    def list_loras(self) -> set[int]:
        """Ids of the adapters that an engine has or a request waits for."""
        self._adapters.tidy()
        return set(self._adapters.known)

    @locked
    def adapter_named(self, name: str | None) -> LoRARequest | None:
        return self._adapters.named(name, self._name)

    def identity(self) -> EngineIdentity:
        """The identity of a single engine of this configuration, because the choice of engine changes no bit."""
        found, pinned = self.fleet.identity(), self._adapters.pinned
        return replace(found, config={**found.config, "adapters": pinned}) if pinned else found

    extend = one_engine_only("extend", "submit prompt and tokens again")
    save = one_engine_only("save", "submit prompt and tokens again")
    restore = one_engine_only("restore", "submit prompt and tokens again")
    fork = one_engine_only("fork", "submit prompt and tokens as a new prompt")
    preempt = one_engine_only("preempt", "give requests priorities")
    peek = one_engine_only("peek", "look at snapshot")
    inventory_report = one_engine_only("inventory_report", "use a separate engine")
    blank = one_engine_only("blank", "use reset_prefix_cache to empty the cache")

    def step_shadow(self) -> bool:
        """Does nothing: each engine's process runs its own shadow probe while it is idle."""
        return False

    finish_shadow = one_engine_only("finish_shadow", "read the probe's counters in stats")
    draft_with = one_engine_only("draft_with", "name the method in speculative_config")
    update_weights = one_engine_only("update_weights", "save a checkpoint and start new engines from it")
    start_profile = one_engine_only("start_profile", "profile an engine of its own")
    stop_profile = one_engine_only("stop_profile", "profile an engine of its own")

    @property
    def saved(self) -> tuple[str, ...]:
        """Empty: requests cannot be saved."""
        return ()

    def free(self, name: str) -> bool:
        """Returns false: requests cannot be saved."""
        return False

    def limits(self) -> dict[str, Any]:
        """As `XlaBatchEngine.limits`, of each engine, but with the slots of all engines."""
        return {
            **self.fleet.facts["limits"],
            "max_num_seqs": self.max_num_seqs,
            "max_waiting": self.config.max_waiting,
            "data_parallel_size": len(self.fleet.members),
        }

    def _free_id(self) -> str:
        name, count = str(self._submitted), 0
        while name in self.loop.live:
            count += 1
            name = f"{self._submitted}.{count}"
        return name

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """As `XlaBatchEngine.step`; a turn delivers the messages of engines since the last one."""
        self._tell_every_token(not only_finished)
        return step_engine(self, self._collector, only_finished=only_finished)

    def drain(self, timeout_s: float | None = None) -> list[RequestOutput]:
        self._tell_every_token(False)
        return drain_engine(self, self._collector, self.loop, timeout_s)

    def stream(self) -> Iterator[RequestOutput]:
        """Run until all requests have ended, yielding cumulative outputs as tokens arrive."""
        while self.has_unfinished:
            yield from self.step()

    @locked
    def _tell_every_token(self, every_token: bool) -> None:
        if self._collector.every_token == every_token:
            return
        self._collector.every_token = every_token
        for member in self.fleet.members:
            numbers = [number for number, each in member.live.items() if each.collector is self._collector]
            if numbers:
                member.tell({"op": "stream", "numbers": numbers, "every_token": every_token})

    @locked
    def snapshot(self) -> Snapshot:
        """All slots and blocks, engine after engine, as last received. Also requests an update from each engine."""
        self.loop.listen()
        for member in self.fleet.members:
            member.tell({"op": "snapshot"})
        told = [member.snapshot for member in self.fleet.members]
        return totals.snapshot(told, blocks=self.config.num_blocks or 0)

    @locked
    def stats(self) -> EngineStats:
        """The summed counters of all engines as last received, including processes that have ended."""
        self.loop.listen()
        return totals.stats(
            [member.stats for member in self.fleet.members],
            [one for member in self.fleet.members for one in member.lost],
            finished=self.loop.finished,
            recoveries=self.loop.recoveries,
            submitted=self._submitted,
        )

    def metrics(self, model_name: str | None = None) -> list[MetricFamily]:
        """As `XlaBatchEngine.metrics`, over all engines."""
        return engine_metrics(
            self.stats(),
            self.config,
            self._name if model_name is None else model_name,
            max_model_len=self.max_model_len,
            engines=len(self.fleet.members),
        )

    def metrics_text(self) -> str:
        """The metrics in Prometheus' text format."""
        return text_of(self.metrics())

    @locked
    def reset_prefix_cache(self) -> None:
        """Clear the prefix caches of all engines."""
        for member in self.fleet.members:
            member.tell({"op": "reset"})
            self.loop.router.forget(member.index)

    def seed_of(self, request_id: str, params: SamplingParams) -> int:
        return noise_key(self.config.seed, request_id, params)

    def close(self) -> None:
        """Abort live requests and end the processes."""
        self.loop.close()

    def __enter__(self) -> DataParallelEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
