"""A request as the scheduler sees it: token ids and limits, without text or sampling parameters."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from xla_engine.scheduler.immutable import Immutable

PRIORITIES = range(-10, 11)


class FinishReason(enum.StrEnum):
    """Why a request ended. A request ends once, with one of these."""

    STOP = "stop"  # a stop token was sampled, or the engine saw a stop string
    LENGTH = "length"  # max_tokens were sampled
    ABORT = "abort"  # the caller aborted it
    DEADLINE = "deadline"  # its deadline passed
    QUEUE_TIMEOUT = "queue_timeout"  # it got no slot in time
    ERROR = "error"  # it failed


class Status(enum.StrEnum):
    """The state of a request. It moves down this list, except that preemption puts it back into the queue."""

    WAITING = "waiting"  # in the queue, no slot
    PARKED = "parked"  # in the queue, no slot, its state in host memory
    PREFILLING = "prefilling"  # in a slot, prompt tokens left to plan
    RUNNING = "running"  # whole prompt planned, new tokens left to plan or in flight
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Immutable):
    """One prompt to continue. Raises ValueError, naming the field, if a field is invalid.

    request_id: unique among live requests; free again once the request has ended.
    prompt_token_ids: at least one token; never changed.
    max_tokens: the most new tokens, at least 1; a stop token counts as one.
    stop_token_ids: sampling one of these ends the request.
    constrained: each token is planned only after the previous one was committed.
    cache_salt: requests share cached prefixes only with those of the same salt.
    adapter: key of its LoRA adapter, "" without; prefixes are shared only between requests of the same adapter.
    max_cached_tokens: how many prompt tokens may come from the prefix cache; None: all, 0: none.
    priority: from -10 to 10, lower goes first; see `scheduler.policy.place`.
    deadline: time on the caller's clock at which `expire` ends the request, whatever its status.
    queue_deadline: time at which `expire` ends it if it still waits for its first slot.
    quantum: steps before it gives up its slot under "round_robin"; None: the value of `SchedulerConfig`.
    stored_blocks: how many full blocks at the beginning of the prompt can be loaded from outside of the pool. Next in
        line, the request waits for `Scheduler.load`, unless the pool has them by then.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    constrained: bool = False
    cache_salt: str = ""
    max_cached_tokens: int | None = None
    priority: int = 0
    deadline: float | None = None
    queue_deadline: float | None = None
    quantum: int | None = None
    adapter: str = ""
    stored_blocks: int = 0

    @property
    def group(self) -> str:
        """Names the requests whose text may be used to draft for each other: same salt and adapter."""
        return f"{self.cache_salt}\0{self.adapter}" if self.adapter else self.cache_salt

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt; give at least one token id")
        if self.max_tokens < 1:
            raise ValueError(
                f"request {self.request_id!r} has max_tokens {self.max_tokens}; ask for at least 1 new token"
            )
        if self.quantum is not None and self.quantum < 1:
            raise ValueError(f"request {self.request_id!r} has quantum {self.quantum}; give at least 1 step")
        if self.priority not in PRIORITIES:
            raise ValueError(
                f"request {self.request_id!r} has priority {self.priority}; give one from {PRIORITIES[0]} (soonest) "
                f"to {PRIORITIES[-1]}"
            )
