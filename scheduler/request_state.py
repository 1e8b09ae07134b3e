"""One request's progress, from submit to its end."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from xla_engine.scheduler.moves import Slot
from xla_engine.scheduler.plan import Decision
from xla_engine.scheduler.request import FinishReason, Request, Status


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """The state of one request; a later request under the same id has another.

    arrival: how many requests were submitted before it.
    turn: its number in the queue; equal to `arrival` unless it was sent to the back.
    status: see `Status`.
    occupancy: the slot to which the request was admitted. It stays after the slot is handed over, because tokens in
        flight are credited by it.
    holds_slot: whether the slot of `occupancy` is still this request's.
    prefilled: tokens of its context planned by prefill, or taken from the prefix cache.
    last_step: the plan that plans this request's last token; known once it decodes. None for constrained and
        speculating requests.
    widths: for a speculating request, the most tokens that each step in flight may give it, oldest first.
    first_step: the first plan in which it decodes, if `last_step` is known.
    planned_before: new tokens planned, for constrained and preempted requests. For speculating ones, the credited
        tokens plus one for each step in flight; may exceed `max_tokens`.
    credited: tokens received by commits, up to the last call of `settle`.
    generated: these tokens, if the scheduler `keeps_tokens`.
    base: how many of `generated` belong to the context because they are prefilled again.
    block_hashes: keys of the blocks of the context, computed when first needed.
    turn_ends: the step from which others may take its slot, under "round_robin" and while it runs.
    parked: how many of its KV entries are in host memory.
    blocks: its KV blocks while it holds a slot, with a block pool.
    settled: how many of the first `blocks` are full and will not change.
    ready: tokens of its context that `blocks` held when it got them.
    place: of the saved state after `ready` tokens, which it holds until it begins; -1: it holds none.
    left: after it gave up its blocks, (index, block, times taken) of those that are not settled.
    reached: positions it had written when it lost its slot.
    awaits_blocks: it waits for its `stored_blocks` when it is next in line.
    goes_on: it has finished in `occupancy` and is extended, and nothing is known to have overwritten its KV there.
    finish_reason: set when it ends.
    decision: the latest about it, None before the first.
    """

    request: Request
    arrival: int
    turn: int
    status: Status = Status.WAITING
    occupancy: Slot | None = None
    holds_slot: bool = False
    prefilled: int = 0
    last_step: int | None = None
    first_step: int = 0
    planned_before: int = 0
    credited: int = 0
    generated: list[int] = field(default_factory=list)
    base: int = 0
    widths: list[int] = field(default_factory=list)
    block_hashes: tuple[bytes, ...] | None = None
    turn_ends: int = 0
    parked: int = 0
    blocks: tuple[int, ...] = ()
    settled: int = 0
    ready: int = 0
    place: int = -1
    reached: int = 0
    left: tuple[tuple[int, int, int], ...] = ()
    awaits_blocks: bool = False
    goes_on: bool = False
    finish_reason: FinishReason | None = None
    decision: Decision | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> RequestState:
        """Copies the lists; all other fields are immutable."""
        twin = copy.copy(self)
        for part in fields(self):
            if isinstance(value := getattr(self, part.name), list):
                setattr(twin, part.name, value.copy())
        return twin

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def context(self) -> Sequence[int]:
        """The tokens to prefill: the prompt, and those that it had sampled before it was recomputed."""
        prompt = self.request.prompt_token_ids
        return (*prompt, *self.generated[: self.base]) if self.base else prompt

    @property
    def content(self) -> Sequence[int]:
        """`context` as caches compare it, see `Request.content`."""
        if not self.request.images:
            return self.context
        return (*self.request.content, *self.generated[: self.base])

    @property
    def context_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.base

    @property
    def slot(self) -> Slot:
        """The occupancy; the request must have been admitted."""
        assert self.occupancy is not None, f"request {self.request_id!r} was never admitted"
        return self.occupancy

    @property
    def awaits_mask(self) -> bool:
        """Whether it needs its mask as soon as it gets a slot, because its prefill samples the next token."""
        return self.request.constrained and self.status is Status.WAITING and self.credited > 0

    def planned(self, next_step: int) -> int:
        """New tokens planned by the plans before `next_step`, in flight or credited.

        From the plan of its last chunk on, each plan adds one token. (That plan adds two, the first and a decoded one,
        if other rows decode in it.) So the number follows from `last_step`, and steps need not count.
        """
        if self.last_step is None:
            return min(self.planned_before, self.request.max_tokens)
        return self.request.max_tokens - max(self.last_step + 1 - next_step, 0)

    def settle(self, committed: int) -> None:
        """Bring `credited` up to date with the steps before `committed`.

        A row gets one token from each step in which it decodes, so this is computed and not counted in each step.
        """
        if self.last_step is not None and committed > self.first_step:
            self.credited = self.planned(committed)

    def position(self, next_step: int) -> int:
        """KV entries written by the plans before `next_step`, and so the row's next write index.

        An upper bound while steps are in flight that may give it several tokens.
        """
        planned = self.planned(next_step)
        if self.widths and self.last_step is None:
            planned = min(planned + sum(self.widths) - len(self.widths), self.request.max_tokens)
        return self.prefilled + max(planned - self.base - 1, 0)

    def begin_prefill(self) -> None:
        """Prepare to prefill in a slot: the context is the prompt and the credited tokens."""
        self.prefilled = 0
        if self.base != self.credited:
            self.base, self.block_hashes = self.credited, None

    def start_over(self) -> None:
        """Forget its tokens, because it will sample them again; those in flight will be dropped."""
        self.occupancy, self.block_hashes = None, None
        self.planned_before = self.credited = self.base = 0
        self.generated.clear()
        self.widths.clear()

    def decide(self, action: str, reason: str) -> Decision:
        """Record a decision about this request, and return it."""
        self.decision = Decision(request_id=self.request_id, action=action, reason=reason)
        return self.decision
