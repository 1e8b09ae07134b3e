"""The methods of an engine that batch runs and loops over turns need; and the options of requests."""

from collections.abc import Callable, Mapping, Sequence
from threading import Condition
from typing import Any, Protocol, TypedDict, Unpack

from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.shown import shown


class SharedOptions(TypedDict, total=False):
    """Options that apply to all prompts of a call; all are optional.

    deadline_s: seconds after which a request ends with reason "deadline" and the tokens it has.
    queue_timeout_s: seconds after which a request that has no slot yet ends with reason "queue_timeout".
    cache_salt: cached prefixes are shared only between requests with the same salt, so that no tenant learns from the
        time to first token what others have asked.

    A request ends at its deadline even while a step runs; its slot becomes free when that step has been read.
    """

    deadline_s: float | None
    queue_timeout_s: float | None
    cache_salt: str


class RequestOptions(SharedOptions, total=False):
    """Options of one request; all are optional.

    priority: -10 (first) to 10, by default 0; `scheduler.policy.place` states the rule and bounds the waiting time.
    quantum: steps that it runs before it gives up its slot under the policy "round_robin"; None: the value of
        `EngineConfig`.
    lora_request: its adapter, loaded if necessary; None: the model without an adapter.
    deadline_s, queue_timeout_s, cache_salt: as in `SharedOptions`.
    """

    priority: int
    quantum: int | None
    lora_request: LoRARequest | None


class SubmitOptions(RequestOptions, total=False):
    """Options of `XlaBatchEngine.submit`; all are optional.

    request_id: names the request in outputs and, unless its parameters have a seed, keys its noise. None takes the
        next free number.
    add_special_tokens: tokenise text with the begin token; false if a chat template has already added it.
    collector: receives the request's outputs; by default `step` returns them.
    on_refused: by default `submit` waits until a new constraint is compiled, which may take a second. With this
        callback it returns at once and compiles in a background thread; the request waits meanwhile. If the
        constraint is invalid, the request ends without an output, and a turn calls `on_refused` with the error that
        `submit` would have raised.

    The others are those of `RequestOptions`.
    """

    request_id: str | None
    add_special_tokens: bool
    collector: OutputCollector | None
    on_refused: Callable[[Exception], object] | None


def deadlines(options: RequestOptions, now: float) -> tuple[float | None, float | None]:
    """`deadline` and `queue_deadline` of a `Request` with these options from `now` on."""
    seconds, in_queue = options.get("deadline_s"), options.get("queue_timeout_s")
    return None if seconds is None else now + seconds, None if in_queue is None else now + in_queue


def check_options(call: str, options: Mapping[str, Any], *also: str) -> None:
    """Raise InvalidRequestError for an option that a call does not have; sampling fields get their own message.

    also: the call's options in addition to those of `RequestOptions`.
    """
    known = sorted((*RequestOptions.__annotations__, "add_special_tokens", *also))
    for name in options:
        if name in SamplingParams.__dataclass_fields__:
            raise InvalidRequestError(
                f"{call}() has no option {name!r}: it is a sampling parameter; write "
                f"{call}(..., SamplingParams({name}={shown(options[name])}))"
            )
        if name not in known:
            hint = did_you_mean(name, known)
            if not hint and (field := did_you_mean(name, SamplingParams.__dataclass_fields__)):
                hint = f"{field} That is a sampling parameter; write {call}(..., SamplingParams(...))"
            hint = hint or f"; its options are {', '.join(known)}"
            raise InvalidRequestError(f"{call}() has no option {name!r}{hint}")


def pop_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `RequestOptions` from a call's keyword arguments, and return them."""
    return {name: options.pop(name) for name in RequestOptions.__annotations__ if name in options}


SHADOW_S = 1e-3  # seconds between steps of the shadow probe while the engine is idle


def drained(timeout_s: float | None) -> str:
    """The `error` of a request that did not finish within the timeout of a drain."""
    return f"the engine was drained, and the request did not finish within {timeout_s} s"


class LineEngine(Protocol):
    """The methods that a batch run needs of an engine; `XlaBatchEngine` documents them."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def has_unfinished(self) -> bool: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str: ...
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> str: ...
    def read_pictures(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Prompt: ...
    def adapter_named(self, name: str | None) -> LoRARequest | None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self, *, only_finished: bool = False) -> list[RequestOutput]: ...


class Engine(LineEngine, Protocol):
    """The methods that run requests turn by turn; `XlaBatchEngine` documents them."""

    watches: bool

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def lock(self) -> Condition: ...
    @property
    def closed_because(self) -> str | None: ...
    @property
    def has_work(self) -> bool: ...

    def advance(self) -> None: ...
    def abort_all(self, cause: str | None = None) -> None: ...
    def fail(self, cause: str) -> None: ...
