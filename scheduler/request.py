"""A request as the scheduler sees it: token ids and limits, without text or sampling parameters."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T", bound="Immutable")


class Immutable:
    """An immutable record: a deep copy of an object that holds it shares it."""

    __slots__ = ()

    def __deepcopy__(self: T, memo: dict[int, object]) -> T:
        return self


PRIORITIES = range(-10, 11)
_HEXADECIMAL = frozenset("0123456789abcdef")


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
class PromptImage(Immutable):
    """A picture in a prompt. Raises ValueError, naming the field, if a field is invalid.

    digest: sha256, in hexadecimal, of everything that its tiles depend on: the source's bytes and the processor's
        options. Features and cached prefixes are shared between pictures of the same digest.
    tiles: uint8 `[tiles, height, width, 3]`, or one `[height, width, 3]` for each if they differ in size; the
        scheduler does not read them.
    spans: (start, length) for each tile: the prompt's positions that its features replace, in ascending order.
    """

    digest: str
    tiles: Any = field(repr=False, compare=False)
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if len(self.digest) != 64 or not set(self.digest) <= _HEXADECIMAL:
            raise ValueError(
                f"a picture's digest is {self.digest!r}; give a sha256 in 64 lower-case hexadecimal digits"
            )
        if not self.spans or len(self.spans) != len(self.tiles):
            raise ValueError(
                f"a picture has {len(self.tiles)} tiles and {len(self.spans)} spans; give each tile one span"
            )
        if any(length < 1 for _, length in self.spans):
            raise ValueError(f"a picture has spans {self.spans}; each covers at least one position")


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
    images: its pictures, in the order of their spans, which do not overlap.
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
    images: tuple[PromptImage, ...] = ()

    @property
    def content(self) -> Sequence[int]:
        """The prompt as caches compare it: token ids, and at the positions of pictures numbers below 0.

        They are made of digest, tile and place in the tile, so equal content means equal tokens and pictures.
        """
        if not self.images:
            return self.prompt_token_ids
        content = list(self.prompt_token_ids)
        for image in self.images:
            picture = int(image.digest, 16)
            for tile, (start, length) in enumerate(image.spans):
                for at in range(length):
                    content[start + at] = -1 - (((picture << 32) + tile << 32) + at)
        return tuple(content)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, length) for each tile of its pictures."""
        return tuple(span for image in self.images for span in image.spans)

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
        if (why := misplaced(self.images, len(self.prompt_token_ids))) is not None:
            raise ValueError(f"request {self.request_id!r}: {why}")


def misplaced(images: Sequence[PromptImage], prompt_tokens: int) -> str | None:
    """Why the spans of a prompt's pictures cannot be its own; None if they can."""
    free = 0
    for start, length in (span for image in images for span in image.spans):
        if start < free or start + length > prompt_tokens:
            return (
                f"a picture's features go to positions {start} to {start + length - 1} of {prompt_tokens}; give spans "
                "in ascending order that lie in the prompt and do not overlap"
            )
        free = start + length
    return None
