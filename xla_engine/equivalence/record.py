"""Records: one schedule as it ran on one engine, to compare another run with.

A record has the requests, the caller's actions turn by turn, what every step was planned to do, a hash of what was
read from it, and tokens and logprob bits of each request, batched and, where known, alone. Steps and slot epochs
count from the start of the schedule. `xla_engine.equivalence.recorder` makes them,
`xla_engine.equivalence.record_file` is their file.
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

    bits: float32 bits of each logprob; None where they were not asked for. end: the finish reason.
    """

    token_ids: tuple[int, ...]
    bits: tuple[int, ...] | None
    end: str | None

    def first_difference(self, other: Trace) -> int | None:
        """The first generated position at which two runs of a request differ.

        An aborted run is compared as far as it went.
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
    """One step: what it was planned to do, and what came of it.

    turn: the turn that started it.
    admitted: (request, slot, epoch) of requests that got a slot.
    chunks: (request, slot, start, length), lanes in order.
    decode: slot indices in the plan's order.
    width: as in `Plan`.
    verify: (request, slot, width) of rows that might sample several tokens.
    verified: of each of these, how many it sampled and how many drafts it had.
    held: requests that sat out, as their masks were not there. is_late: as in `Plan`.
    read: the turn that read it, None if none did.
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
    fresh: whether the engine's cache and row state were blank at the start, as in replays; where the law is broken, a
        run that started otherwise may not repeat.
    schedule: requests and actions.
    steps: in the order in which they were started.
    batched: what the schedule generated, by request id.
    alone: what each request generated alone; requests that were not run alone are left out.
    speculative_config: how the engine speculated, None if it did not.
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
        """The first request, in the order of the cases, that differs from its alone-run, and its position."""
        for case in self.schedule.cases:
            name = case.request_id
            if name in self.alone and name in self.batched:
                position = self.alone[name].first_difference(self.batched[name])
                if position is not None:
                    return name, position
        return None


def trace(output: CompletionOutput) -> Trace:
    """The trace of a finished request."""
    bits = None if output.logprobs is None else tuple(logprob_bits(value) for value in output.logprobs)
    return Trace(token_ids=output.token_ids, bits=bits, end=output.finish_reason)
