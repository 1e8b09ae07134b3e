"""One request's progress, from submit to its end."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from xla_engine.scheduler.plan import Decision, Slot
from xla_engine.scheduler.request import FinishReason, Request, Status


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One life of a request id; a later request under the same id has another state.

    arrival: how many requests were submitted before it.
    turn: its number in line, the arrival unless it was sent back.
    status: where it stands.
    occupancy: the slot the request was admitted to. It stays when the slot is handed over, because tokens
        still in flight are credited by it.
    holds_slot: whether the slot of `occupancy` is still this request's.
    prefilled: tokens of its context planned by prefill, or taken from the prefix cache.
    last_step: the plan that plans this request's last token; known while it decodes, and after. None if constrained,
        and of a request that speculates.
    widths: tokens that steps in flight may bring at most, oldest first, of those in which it speculates.
    first_step: the first plan in which it decodes, where `last_step` is known.
    planned_before: new tokens planned, of a constrained request or one that was preempted; of one that speculates the
        credited ones and one for each step in flight, perhaps beyond its cap.
    credited: tokens received by commits, up to the last call of `settle`.
    generated: these tokens, where the scheduler has a use for them.
    base: how many of `generated` belong to the context, as they are prefilled again.
    block_hashes: keys of the blocks of the context, made when first needed.
    turn_ends: the step from which others may have its slot, under "round_robin" and while it runs.
    parked: KV entries of it that are on the host.
    blocks: its blocks while it holds a slot, where slots borrow blocks.
    settled: how many of the first of `blocks` are full and will not change.
    ready: tokens of its context that `blocks` held when it got them.
    left: (index, block, times it was taken) of those that are not settled, once it gave them up.
    reached: positions it had written when it lost its slot.
    goes_on: it had ended in `occupancy`, and nothing was seen to overwrite what it left there.
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
    reached: int = 0
    left: tuple[tuple[int, int, int], ...] = ()
    goes_on: bool = False
    finish_reason: FinishReason | None = None
    decision: Decision | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> RequestState:
        """A state with lists of its own; all else in it never changes."""
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
        """What is prefilled: the prompt, and what the request had sampled when it was preempted and not parked."""
        prompt = self.request.prompt_token_ids
        return (*prompt, *self.generated[: self.base]) if self.base else prompt

    @property
    def context_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.base

    @property
    def slot(self) -> Slot:
        """The occupancy of a request that was admitted."""
        assert self.occupancy is not None, f"request {self.request_id!r} was never admitted"
        return self.occupancy

    @property
    def awaits_mask(self) -> bool:
        """Whether it needs to know what its next token may be when it gets a slot, and not only when it decodes."""
        return self.request.constrained and self.status is Status.WAITING and self.credited > 0

    def planned(self, next_step: int) -> int:
        """New tokens planned by the plans before `next_step`, in flight or credited.

        From the plan of the last chunk on, each plan adds one token (that one two, the first and a decoded one, if
        other rows decode in it), so the number follows from `last_step` and no step has to count.
        """
        if self.last_step is None:
            return min(self.planned_before, self.request.max_tokens)
        return self.request.max_tokens - max(self.last_step + 1 - next_step, 0)

    def settle(self, committed: int) -> None:
        """Let `credited` say what the steps before `committed` brought.

        A row gets a token from each step in which it decodes, so it is not counted step by step.
        """
        if self.last_step is not None and committed > self.first_step:
            self.credited = self.planned(committed)

    def position(self, next_step: int) -> int:
        """KV entries written by the plans before `next_step`, which is the row's next write index; that many at most
        while steps are in flight that may bring it several tokens."""
        planned = self.planned(next_step)
        if self.widths and self.last_step is None:
            planned = min(planned + sum(self.widths) - len(self.widths), self.request.max_tokens)
        return self.prefilled + max(planned - self.base - 1, 0)

    def begin_prefill(self) -> None:
        """Begin in a slot: the context is prompt and credited tokens."""
        self.prefilled = 0
        if self.base != self.credited:
            self.base, self.block_hashes = self.credited, None

    def start_over(self) -> None:
        """Forget the request's tokens, which it will sample again; those in flight will be dropped."""
        self.occupancy, self.block_hashes = None, None
        self.planned_before = self.credited = self.base = 0
        self.generated.clear()
        self.widths.clear()

    def decide(self, action: str, reason: str) -> Decision:
        """Record a decision about this request, and return it."""
        self.decision = Decision(request_id=self.request_id, action=action, reason=reason)
        return self.decision
