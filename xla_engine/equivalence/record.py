"""Records: one run of a schedule on one engine, for comparison with other runs.

A record has the requests, the caller's actions by turn, the plan of every step and a hash of its result, and the
tokens and logprob bits of each request, batched and, if known, alone. Steps and slot epochs count from the start of
the schedule. `xla_engine.equivalence.recorder` makes records, `xla_engine.equivalence.record_file` reads and writes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_engine.engine.identity import EngineIdentity, logprob_bits
from xla_engine.equivalence.schedule import Schedule
from xla_engine.errors import RecordError as RecordError
from xla_engine.outputs import CompletionOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run generated for a request.

    bits: float32 bits of each logprob; None if logprobs were not requested. end: the finish reason.
    """

    token_ids: tuple[int, ...]
    bits: tuple[int, ...] | None
    end: str | None

    def first_difference(self, other: Trace) -> int | None:
        """The first generated position at which two runs of a request differ.

        An aborted run is compared up to its end.
        """
        mine, theirs = self._samples(), other._samples()
        for position, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                return position
        if "abort" in (self.end, other.end):
            return None
        return None if (len(mine), self.end) == (len(theirs), other.end) else min(len(mine), len(theirs))

    def sample(self, position: int) -> tuple[int, int | None] | None:
        """(token id, logprob bits) at a position; None past the end."""
        return self._samples()[position] if position < len(self.token_ids) else None

    def _samples(self) -> list[tuple[int, int | None]]:
        bits: Sequence[int | None] = [None] * len(self.token_ids) if self.bits is None else self.bits
        return list(zip(self.token_ids, bits, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: its plan and its result.

    turn: the turn that started it.
    admitted: (request, slot, epoch) of requests that got a slot.
    chunks: (request, slot, start, length), lanes in order.
    decode: slot indices in the plan's order.
    width: as in `Plan`.
    verify: (request, slot, width) of rows that might sample several tokens.
    verified: for each of these, the number of sampled tokens and of drafts.
    held: requests that skipped the step because their masks were not ready. is_late: as in `Plan`.
    read: the turn that read it; None if none did.
    hash: of the credited samples.
    """

    turn: int
    admitted: tuple[tuple[str, int, int], ...] = ()
    chunks: tuple[tuple[str, int, int, int], ...] = ()
    decode: tuple[int, ...] = ()
    width: int = 0
    verify: tuple[tuple[str, int, int], ...] = ()
    verified: tuple[tuple[int, int], ...] = ()
    held: tuple[str, ...] = ()
    is_late: bool = False
    read: int | None = None
    hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A schedule, the engine it ran on, its steps and results.

    identity: model, options, versions and device of the engine.
    model_path: None for the embedded model.
    fresh: whether the engine's cache and row state were blank at the start, as in replays. If not, a run that breaks
        the law may not be reproducible.
    schedule: requests and actions.
    steps: in the order in which they were started.
    batched: what the schedule generated, by request id.
    alone: what each request generated alone, for those that were run alone.
    speculative_config: the engine's; None without speculation.
    """

    identity: EngineIdentity
    model_path: str | None
    fresh: bool
    schedule: Schedule
    steps: tuple[Step, ...]
    batched: Mapping[str, Trace]
    alone: Mapping[str, Trace]
    speculative_config: Mapping[str, Any] | None = None

    @property
    def first_difference(self) -> tuple[str, int] | None:
        """The first request, in the order of the cases, that differs from its run alone, and the position."""
        for case in self.schedule.cases:
            name = case.request_id
            if name in self.alone and name in self.batched:
                position = self.alone[name].first_difference(self.batched[name])
                if position is not None:
                    return name, position
        return None


def trace(output: CompletionOutput) -> Trace:
    bits = None if output.logprobs is None else tuple(logprob_bits(value) for value in output.logprobs)
    return Trace(token_ids=output.token_ids, bits=bits, end=output.finish_reason)
