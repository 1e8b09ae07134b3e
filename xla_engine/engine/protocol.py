"""The engine as its callers see it: what the command line, batch runs, streams and servers ask of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.observability.stats import EngineStats
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Peek, Snapshot
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.shown import shown


class SharedOptions(TypedDict, total=False):
    """Options that are the same for all prompts of a call; each may be left out.

    deadline_s: after so many seconds a request ends with reason "deadline" and the tokens it has.
    queue_timeout_s: without a slot after so many seconds a request ends with reason "queue_timeout".
    cache_salt: cached prefixes are shared among requests of one salt only, so that the time to a first token does not
        tell a tenant what others have asked.

    A request whose time is up ends at once, also while a step runs; its slot is free when the step has been read.
    """

    deadline_s: float | None
    queue_timeout_s: float | None
    cache_salt: str


class RequestOptions(SharedOptions, total=False):
    """Options of one request; each may be left out.

    priority: -10 (soonest) to 10, and 0 if left out; `scheduler.policy.place` states the rule, and how long a request
        can be kept waiting by it.
    quantum: steps of its turns under the policy "round_robin"; None: as `EngineConfig` says.
    lora_request: its adapter, loaded where it is not there yet; None: the model as it is.
    deadline_s, queue_timeout_s, cache_salt: as in `SharedOptions`.
    """

    priority: int
    quantum: int | None
    lora_request: LoRARequest | None


def check_options(call: str, options: Mapping[str, Any], *also: str) -> None:
    """Raise InvalidRequestError for an option that a call does not have; a sampling field is told where it belongs.

    also: the call's options other than those of `RequestOptions`.
    """
    known = sorted((*RequestOptions.__annotations__, "add_special_tokens", *also))
    for name in options:
        if name in SamplingParams.__dataclass_fields__:
            raise InvalidRequestError(
                f"{call}() has no option {name!r}: it is a sampling parameter; write "
                f"{call}(..., SamplingParams({name}={shown(options[name])}))"
            )
        if name not in known:
            hint = did_you_mean(name, known) or f"; its options are {', '.join(known)}"
            raise InvalidRequestError(f"{call}() has no option {name!r}{hint}")


def pop_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take those of `RequestOptions` out of the keyword arguments of a call that has others, too."""
    return {name: options.pop(name) for name in RequestOptions.__annotations__ if name in options}


SHADOW_S = 1e-3  # between looks at what the shadow probe of an idle engine does


def drained(timeout_s: float | None) -> str:
    """Why a request ends when an engine was drained for as long as it may be."""
    return f"the engine was told to end, and the request was not finished {timeout_s} s later"


class LineEngine(Protocol):
    """What a run of lines asks of an engine; `XlaBatchEngine` documents the methods."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def has_unfinished(self) -> bool: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str: ...
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
    ) -> str: ...
    def adapter_named(self, name: str | None) -> LoRARequest | None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self, *, only_finished: bool = False) -> list[RequestOutput]: ...


class Engine(LineEngine, Protocol):
    """Runs requests turn by turn, as `XlaBatchEngine` does, whose methods document these."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...

    def extend(
        self,
        request_id: str,
        max_tokens: int,
        *,
        collector: OutputCollector | None = None,
        **options: Unpack[RequestOptions],
    ) -> None: ...

    def advance(self) -> None: ...
    def drain(self, timeout_s: float | None = None) -> list[RequestOutput]: ...

    def snapshot(self) -> Snapshot: ...
    def peek(self) -> Peek: ...
    def stats(self) -> EngineStats: ...
    def metrics_text(self) -> str: ...
    def identity(self) -> EngineIdentity: ...
    def close(self) -> None: ...
