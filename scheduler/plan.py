"""The records between host and device: a plan going down, a step's samples coming up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xla_engine.scheduler.immutable import Immutable
from xla_engine.scheduler.request import FinishReason


class ResultMismatchError(ValueError):
    """A step's result does not fit its plan. The runner is at fault; the step's tokens cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Immutable):
    """One occupancy of a slot: device row `index` in its `epoch`-th occupancy. No two occupancies are equal."""

    index: int
    epoch: int


class Chunk(NamedTuple):
    """A piece of a prompt for one prefill lane; `tokens` go to positions `start`, `start + 1`, ...

    Starts are multiples of the chunk size and only the last chunk may be shorter: the cut depends on the
    prompt alone. (Where the device is known not to mind, the last token of a prompt that is cached otherwise is a
    chunk of its own.) The program that runs the last chunk also samples the request's next token.

    is_first: no earlier chunk of this occupancy ran; what lies before `start` comes from the prefix cache.
    generated: how many of the tokens up to the prompt's end the request itself had sampled before it was preempted.
    """

    slot: Slot
    request_id: str
    start: int
    tokens: Sequence[int]
    is_last: bool
    is_first: bool = False
    generated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Immutable):
    """One row of the decode step."""

    slot: Slot
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """One row of a verify step, which samples `width` tokens at most."""

    slot: Slot
    request_id: str
    width: int


class Speculation(NamedTuple):
    """What a step may do: rows sample up to `width` tokens each, where they are `lanes` at most; else one."""

    width: int
    lanes: int

    @classmethod
    def again(cls, width: int) -> Speculation | None:
        """What makes a plan of this `Plan.width` once more."""
        if width == 0:
            return None
        return cls(width, 1 << 30 if width > 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The first `length` positions of a request's slot come from slot `source`; nothing moves if that is its own."""

    slot: Slot
    request_id: str
    source: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """The state of a request in `slot`, of which `length` positions are written, goes to the host or comes back.

    blocks: where slots borrow blocks, those of the positions, in order; -1 for the first ones, which a resume leaves
        as they are, since they are shared.
    """

    slot: Slot
    request_id: str
    length: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A request that had ended goes on in `slot`, which holds its state as it was left: `length` positions are
    written, and `remaining` tokens are still to come at most."""

    slot: Slot
    request_id: str
    length: int
    remaining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Block `target` becomes what block `source` is."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Blocks of an occupancy in order of position, the first of them its `start`-th; the others stay as they are."""

    slot: Slot
    request_id: str
    blocks: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the scheduler did with a request, and why in plain words.

    action: "admit" to a slot, "wait" for one, "prefill" chunks, "hold" (in a slot, no chunk in this step),
        "hand over" the slot; "park", "recompute" or "replay": it lost its slot, and how it will go on; "resume";
        "continue", in the slot in which it had ended.
    """

    request_id: str
    action: str
    reason: str


class Admitted(NamedTuple):
    """Requests that got a slot, by id, the states of them that come from the host, and those that are there still."""

    names: tuple[str, ...]
    resumes: tuple[Swap, ...]
    continues: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the device is asked to do in one step: the chunks in order, then one decode of the rows.

    step: counts non-empty plans from 0. Plans are started and committed in this order.
    admitted: ids of the requests that left the queue for a slot, first in line first.
    chunks: lanes in order, the oldest prompt first. Consecutive chunks of one prompt may stand in one plan:
        a lane may read the KV that an earlier lane writes.
    decode: the rows that decode, in the order they began to. A row whose last chunk is in this plan is one of
        them, unless no other decodes: then it begins in the next plan, so that its first token is read sooner. Those
        in constrained come last, and only when no token of theirs is in flight. Without them, the tuple is the same
        object from plan to plan until membership changes.
    decisions: in the order taken. Those about the queue concern its head only.
    parks: state that goes to the host. Parks, copies, resumes and reuses happen before all else in the step, in this
        order.
    resumes: state that comes back from the host.
    reuses: cached prefixes that requests begin with.
    continues: requests that had ended and go on in their slots; before all rows and chunks.
    replays: ids of requests that lost their slot and will sample all their tokens anew.
    tables: where slots borrow blocks, those that are new.
    copies: blocks that become what another one is.
    verify: the rows that may sample several tokens in a step, how many in this one each. Constrained ones are among
        them, and last, where one samples more than one token; then `decode` is empty.
    width: tokens that a row of a verify step may sample at most; 1 where the rows of `verify` decode with those of
        `decode`; 0 likewise, and requests that begin to decode in this plan do so in every step from there on.
    to_decode: rows that from this step on decode in every one, and might have sampled several tokens before.
    to_speculate: ids of the requests for which it is the other way round.
    held: ids of the constrained requests that sit out this step, as it is not known yet what their next token may be.
    is_late: a plan was empty since the last one that was not, while requests were held.
    """

    step: int
    admitted: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[Row, ...] = ()
    decisions: tuple[Decision, ...] = ()
    parks: tuple[Swap, ...] = ()
    resumes: tuple[Swap, ...] = ()
    reuses: tuple[Reuse, ...] = ()
    replays: tuple[str, ...] = ()
    tables: tuple[BlockTable, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    verify: tuple[VerifyRow, ...] = ()
    width: int = 0
    to_decode: tuple[Row, ...] = ()
    to_speculate: tuple[str, ...] = ()
    continues: tuple[Continuation, ...] = ()
    held: frozenset[str] = frozenset()
    is_late: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing to run: no request holds a slot, or all that do wait for the commit of a step that was started.

        Such a plan needs no start and no commit.
        """
        return not (self.chunks or self.decode or self.verify or self.parks or self.resumes)

    @property
    def decode_rows(self) -> tuple[Row | VerifyRow, ...]:
        """The rows that sample one token in this step; the same object from plan to plan as `decode` is."""
        if self.width > 1:
            return ()
        return (*self.decode, *self.verify) if self.verify else self.decode

    @property
    def joins(self) -> int:
        """The first step in which the rows of `first_rows` may decode: this one, if any row decodes in it."""
        return self.step + (not (self.decode or self.verify))

    @property
    def first_rows(self) -> tuple[Chunk, ...]:
        """The chunks that end a prompt, and so sample a first token, in lane order."""
        return tuple([chunk for chunk in self.chunks if chunk.is_last])


MASK = "its mask is being made"  # why a request is held

# In place of a token id:
NO_TOKEN = -1  # the row did not decode, or had stopped
NO_CHOICE = -2  # the device could not choose one, its logits were no numbers


class Sample(NamedTuple):
    """One sampled token, or NO_CHOICE, and its log-probability (natural; None where not asked for).

    extra: what else the device tells about it; passed through.
    """

    token_id: int
    logprob: float | None = None
    extra: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a decode step sampled, in columns by slot index. A row gets an object of its own when one is asked for.

    tokens: ids, NO_TOKEN or NO_CHOICE. logprobs: as in `Sample`, as many or none. extra: where there is any.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    extra: Mapping[int, object] = field(default_factory=dict)

    def sample(self, slot: int) -> Sample:
        """What the row of a slot sampled."""
        return Sample(self.tokens[slot], self.logprobs[slot] if self.logprobs else None, self.extra.get(slot))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step sampled: first, a sample for each of `plan.first_rows`; decode, the columns of `plan.decode`;
    verify, one sample or more for each of `plan.verify`, none where the device had stopped the row; drafted, how many
    drafts each of these had."""

    first: Sequence[Sample] = ()
    decode: Decoded = Decoded()
    verify: Sequence[Sequence[Sample]] = ()
    drafted: Sequence[int] = ()


class TokenEvent(NamedTuple):
    """One token credited to a request; `finish_reason` is set on the request's last one.

    Where that is ERROR, the sample is no token.
    """

    request_id: str
    sample: Sample
    finish_reason: FinishReason | None
