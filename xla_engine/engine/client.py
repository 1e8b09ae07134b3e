"""The interface of an engine, whether it runs in this process or as several in processes of their own; and what both
have in common.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Condition
from typing import Any, Protocol, Self, Unpack

from xla_engine.config import EngineConfig
from xla_engine.engine.protocol import Engine, RequestOptions, drained
from xla_engine.engine.requests.output_collector import OutputCollector, Readable
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.engine.speculation.proposer import Proposer
from xla_engine.engine.turn import Turn
from xla_engine.graphs.inventory import GraphReport
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.observability.metrics import Family
from xla_engine.observability.observer import Observers
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.tokenizer import Tokenizer


class EngineClient(Engine, Protocol):
    """An engine as `LLM`, `AsyncLLM` and servers use it; `XlaBatchEngine` documents the methods.

    `DataParallelEngine` implements it, too. It runs several engines in processes of their own and raises
    `OneEngineError` for what it cannot do.
    """

    watches: bool

    @property
    def config(self) -> EngineConfig: ...
    @property
    def default_params(self) -> SamplingParams: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def validator(self) -> RequestValidator: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def lock(self) -> Condition: ...
    @property
    def observers(self) -> Observers: ...
    @property
    def closed_because(self) -> str | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def saved(self) -> tuple[str, ...]: ...

    def turn(self) -> Turn: ...
    def fail(self, cause: str) -> None: ...

    def stream(self) -> Iterator[RequestOutput]: ...
    def abort_all(self, cause: str | None = None) -> None: ...
    def stop_taking(self) -> None: ...
    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> bool: ...
    def seed_of(self, request_id: str, params: SamplingParams) -> int: ...

    def save(self, request_id: str, name: str | None = None) -> str: ...
    def free(self, name: str) -> bool: ...
    def restore(
        self,
        name: str,
        max_tokens: int | None = None,
        *,
        request_id: str | None = None,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> str: ...
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
    ) -> str: ...

    def add_lora(self, lora_request: LoRARequest) -> bool: ...
    def remove_lora(self, lora_id: int) -> bool: ...
    def pin_lora(self, lora_id: int) -> bool: ...
    def list_loras(self) -> set[int]: ...
    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None: ...

    def metrics(self, model_name: str | None = None) -> list[Family]: ...
    def limits(self) -> dict[str, Any]: ...
    def inventory_report(self) -> list[GraphReport]: ...
    def reset_prefix_cache(self) -> None: ...
    def blank(self) -> None: ...
    def finish_shadow(self) -> None: ...
    def step_shadow(self) -> bool: ...
    def draft_with(self, proposer: Proposer) -> None: ...
    def start_profile(self, directory: str | Path) -> None: ...
    def stop_profile(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class _Accepting(Protocol):
    draining: bool


def step_engine(
    engine: EngineClient, collector: OutputCollector, *, only_finished: bool
) -> list[RequestOutput]:
    """Run one turn; returns the outputs of the requests in `collector`, which the engine fills."""
    _turn(engine, collector)
    with engine.lock:
        return [request.output() for request in collector.take() if request.finished or not only_finished]


def drain_engine(
    engine: EngineClient, collector: OutputCollector, accepting: _Accepting, timeout_s: float | None
) -> list[RequestOutput]:
    """As `XlaBatchEngine.drain`, for the requests in `collector`. accepting: the state that refuses new ones."""
    ended: list[Readable] = []
    until = math.inf if timeout_s is None else engine.clock() + timeout_s
    draining, accepting.draining = accepting.draining, True
    try:
        while engine.has_unfinished:
            if engine.has_work and engine.clock() >= until:
                engine.abort_all(drained(timeout_s))
            _turn(engine, collector)
            with engine.lock:
                ended += (request for request in collector.take() if request.finished)
    except BaseException:
        with engine.lock:
            for request in ended:  # not delivered yet: the next `step` or `drain` must return them
                collector.put(request)
        raise
    finally:
        accepting.draining = draining
    with engine.lock:
        return [request.output() for request in ended]


def _turn(engine: EngineClient, collector: OutputCollector) -> None:
    """Run a turn. A closed engine runs none while outputs can still be read."""
    if engine.closed_because is None or not collector:
        engine.advance()
