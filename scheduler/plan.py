"""The records between host and device: the plan of a step, and its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xla_engine.scheduler.moves import NO_MOVES, Moves, Slot
from xla_engine.scheduler.pictures import Encode, FeatureSpan
from xla_engine.scheduler.request import Immutable
from xla_engine.scheduler.samples import NONE_DECODED, Decoded, Sample


class ResultMismatchError(ValueError):
    """A step's result does not match its plan. The runner is at fault, and the step's tokens cannot be trusted."""


class Chunk(NamedTuple):
    """A piece of a prompt for one prefill lane; `tokens` go to positions `start`, `start + 1`, ...

    Starts are multiples of the chunk size and only the last chunk may be shorter, so the cut depends on the prompt
    alone. There are two exceptions. With `SchedulerConfig.whole_tiles`, each tile begins a chunk, and multiples count
    from there. With `cut_invariant`, if all tokens but the last are cached, the last one is a chunk of its own.

    The program that runs the last chunk also samples the request's next token.

    generated: how many tokens at the end of the context the request itself had sampled before it was preempted.
    features: where pictures' features take the place of tokens.
    """

    slot: Slot
    request_id: str
    start: int
    tokens: Sequence[int]
    is_last: bool
    generated: int = 0
    features: tuple[FeatureSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Immutable):
    """One row of the decode step."""

    slot: Slot
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """One row of a verify step; it samples at most `width` tokens."""

    slot: Slot
    request_id: str
    width: int


class Speculation(NamedTuple):
    """Allows a verify step: if there are at most `lanes` rows, each may sample up to `width` tokens; otherwise one."""

    width: int
    lanes: int

    @classmethod
    def again(cls, width: int) -> Speculation | None:
        """The argument of `Scheduler.plan` that reproduces a plan of this `Plan.width`."""
        if width == 0:
            return None
        return cls(width, 1 << 30 if width > 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the scheduler did with a request, and why, in plain words.

    action: "admit" (gets a slot), "wait" (for a slot), "prefill" (runs chunks), "hold" (has a slot, runs no chunk),
        "hand over" (gives up its slot, wholly planned), "park", "recompute" or "replay" (preempted, and how it will
        continue), "resume" (after "park"), "continue" (extended in the slot in which it ended).
    """

    request_id: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the device does in one step: the chunks in order, then one decode of the rows.

    step: counts non-empty plans from 0. Plans are started and committed in this order.
    admitted: ids of the requests that left the queue for a slot, first in line first.
    chunks: lanes in order, oldest prompt first. A plan may have consecutive chunks of one prompt, because a lane can
        read the KV that an earlier lane writes.
    decode: the rows that decode, in the order in which they joined. A row whose last chunk is in this plan decodes in
        it, too, unless no other row does: then it joins in the next plan, so that its first token is read sooner.
        Constrained rows come last, and only if none of their tokens is in flight. Without them, the tuple is the same
        object from plan to plan until a row joins or leaves.
    moves: what happens to the KV memory, before the chunks and beside them.
    decisions: in the order in which they were made. Of the queue, only the head gets one.
    verify: the rows that may sample several tokens, each with its number for this step. If any samples more than one,
        the constrained rows are among them, and last; then `decode` is empty.
    width: the most tokens that a row of `verify` may sample. 1: the rows of `verify` decode together with those of
        `decode`. 0: the same, and requests that begin to decode in this plan join `decode`.
    to_decode: rows that move from `verify` to `decode` for this and the following steps.
    to_speculate: ids of the requests that move from `decode` to `verify`.
    blocked: ids of constrained requests that skip this step because their mask is not ready.
    encodes: work of the vision tower; it runs before the chunks.
    is_late: masks delayed this step: the plans since the last non-empty one were empty, and at least one of them had
        blocked requests.
    """

    step: int
    admitted: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[Row, ...] = ()
    moves: Moves = NO_MOVES
    decisions: tuple[Decision, ...] = ()
    verify: tuple[VerifyRow, ...] = ()
    width: int = 0
    to_decode: tuple[Row, ...] = ()
    to_speculate: tuple[str, ...] = ()
    blocked: frozenset[str] = frozenset()
    encodes: tuple[Encode, ...] = ()
    is_late: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run: no request holds a slot, or all that do wait for a commit. An empty plan is
        neither started nor committed."""
        return not (
            self.chunks
            or self.decode
            or self.verify
            or self.moves.parks
            or self.moves.resumes
            or self.encodes
        )

    @property
    def decode_rows(self) -> tuple[Row | VerifyRow, ...]:
        """The rows that sample one token in this step. Without `verify` rows, it is the tuple `decode` itself."""
        if self.width > 1:
            return ()
        return (*self.decode, *self.verify) if self.verify else self.decode

    @property
    def joins(self) -> int:
        """The first step in which the rows of `first_rows` may decode: this one if any row decodes, else the next."""
        return self.step + (not (self.decode or self.verify))

    @property
    def first_rows(self) -> tuple[Chunk, ...]:
        """The last chunks of prompts, which sample a first token, in lane order."""
        return tuple([chunk for chunk in self.chunks if chunk.is_last])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The samples of a step.

    first: one for each of `plan.first_rows`. decode: the columns for `plan.decode`.
    verify: for each of `plan.verify` one sample or more, or none if the device had stopped the row.
    drafted: how many draft tokens each of these rows had.
    """

    first: Sequence[Sample] = ()
    decode: Decoded = NONE_DECODED
    verify: Sequence[Sequence[Sample]] = ()
    drafted: Sequence[int] = ()
