"""Run a record again, step by step, up to the first difference in plans or results."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.record import Record, Step, Trace, trace
from xla_engine.equivalence.recorder import Credit, Recorder
from xla_engine.errors import EngineFaultError, RecordMismatchError
from xla_engine.outputs import CompletionOutput
from xla_engine.scheduler import Plan, Speculation
from xla_engine.utils.comparison import Difference, TokenSample, logprob_bits

_CHEAP_BYTES = 2 * 2**30  # of weights: the reference holds a second copy of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDifference:
    """The first difference between a record and its replay.

    what: the difference in words.
    step, turn: where in the schedule it is.
    slot, request_id: of the request concerned; None if it is not a single request.
    sampled: the generated token that differs, as recorded and in the replay; None if plans differ.
    gap: the two largest reference logits there, in words; None if not computed.
    """

    what: str
    step: int | None = None
    turn: int | None = None
    slot: int | None = None
    request_id: str | None = None
    sampled: Difference[TokenSample] | None = None
    gap: str | None = None

    def lines(self) -> list[str]:
        """The difference as text."""
        names = ("step", "turn", "slot", "request", "generated token")
        position = None if self.sampled is None else self.sampled.position
        values = (self.step, self.turn, self.slot, self.request_id, position)
        place = ", ".join(
            f"{name} {value}" for name, value in zip(names, values, strict=True) if value is not None
        )
        lines = [f"first difference: {place}" if place else "first difference", f"  {self.what}"]
        if self.sampled is not None:
            lines += [
                f"  recorded  {sampled(self.sampled.expected)}",
                f"  now       {sampled(self.sampled.found)}",
            ]
        if self.gap is not None:
            lines.append(f"  logits    {self.gap}")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay found.

    steps, tokens: replayed without a difference. difference: the first one. fresh: as in `Record`.
    """

    steps: int
    tokens: int
    difference: ReplayDifference | None
    fresh: bool

    @property
    def ok(self) -> bool:
        return self.difference is None

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"replayed: {self.steps} steps, {self.tokens} tokens"]
        if self.difference is None:
            return [*lines, "same plans, same tokens, same logprob bits"]
        lines += self.difference.lines()
        if not self.fresh:
            lines.append(
                "the record was made on an engine that had run before; a replay starts from a blank cache"
            )
        return [*lines, "NOT the same as recorded"]


def sampled(sample: TokenSample | None) -> str:
    """A token and its logprob in words, with the bits."""
    if sample is None:
        return "ended before"
    if sample.logprob is None:
        return str(sample)
    return f"token {sample.token_id}  logprob {sample.logprob:.9g}  bits {logprob_bits(sample.logprob):08x}"


def engine_config(record: Record, *, force: bool = False) -> EngineConfig:
    """The configuration to replay a record with.

    Raises RecordMismatchError if this version has other options than the record, unless `force` is given; then only
    options known to both are used. Raises ConfigError for invalid values.
    """
    known = {option.name for option in fields(EngineConfig)}
    recorded, expected = record.identity.config, EngineConfig().bit_options()
    wrong = [f"engine option {name}: not known to this version" for name in recorded if name not in known]
    wrong += [f"engine option {name}: not in the record" for name in expected if name not in recorded]
    if wrong and not force:
        raise RecordMismatchError(_refusal(sorted(wrong)))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in recorded.items()
        if name in known
    }
    try:
        return EngineConfig(**values, speculative_config=record.speculative_config)
    except TypeError as error:
        raise RecordMismatchError(f"the record's engine options are not valid: {error}") from error


def check_identity(engine: XlaBatchEngine, record: Record) -> None:
    """Raise RecordMismatchError unless the engine is the record's: model, configuration, versions, device."""
    differences = record.identity.differences(engine.identity())
    if differences:
        raise RecordMismatchError(_refusal(differences))


def _refusal(differences: Sequence[str]) -> str:
    return f"the record and this engine differ: {'; '.join(differences)}; --force replays anyway"


def replay(engine: XlaBatchEngine, record: Record, *, force: bool = False) -> ReplayReport:
    """Run a record's schedule on an idle engine with a blank cache and compare plan by plan, step by step.

    Raises RecordMismatchError if the engine is not the record's, unless `force` is given; ScheduleError if the
    engine rejects a request of the record; EngineFaultError if a step fails.
    """
    if not force:
        check_identity(engine, record)
    faults = engine.stats().recoveries
    engine.blank()
    check = _Check(engine, record)
    engine.state.masks.replay = check.held
    try:
        with _drafting_as_recorded(engine, record), contextlib.suppress(_Stop):
            results = check.run(on_turn=check.stop_at_difference)
            check.compare_ends(results)
    finally:
        engine.state.masks.replay = None
    if engine.stats().recoveries > faults:
        raise EngineFaultError(
            f"a step failed during the replay, so its result is meaningless: {engine.last_fault}"
        )
    difference = check.difference
    if difference is not None and difference.sampled is not None:
        difference = _with_gap(engine, record, difference)
    return ReplayReport(
        steps=check.same_steps, tokens=check.same_tokens, difference=difference, fresh=record.fresh
    )


class _Stop(Exception):
    """Ends a replay at its first difference."""


class _Check:
    """Compares each plan and each read with the record and keeps the first difference."""

    def __init__(self, engine: XlaBatchEngine, record: Record) -> None:
        self._recorder = Recorder(
            engine,
            record.schedule,
            on_planned=self._planned,
            on_restarted=self._restarted,
            on_read=self._read,
        )
        self.run = self._recorder.run
        self._record = record
        self._positions = dict.fromkeys(record.batched, 0)
        self.difference: ReplayDifference | None = None
        self.same_steps = 0
        self.same_tokens = 0

    def stop_at_difference(self) -> None:
        if self.difference is not None:
            raise _Stop

    def held(self) -> Collection[str]:
        """The requests that skip the next step, as recorded; all requests if no step was planned in this turn."""
        number, steps = len(self._recorder.steps), self._record.steps
        if number >= len(steps):
            return ()
        step = steps[number]
        return self._record.batched if step.is_late and self._recorder.turn < step.turn else step.held

    def _planned(self, number: int, step: Step) -> None:
        if self.difference is not None:
            return
        if number >= len(self._record.steps):
            what = f"plan: the record ends after {number} steps, the replay goes on"
            self.difference = ReplayDifference(what=what, step=number, turn=step.turn)
            return
        self.difference = _plan_difference(number, self._record.steps[number], step)

    def _restarted(self, request_id: str) -> None:
        self._positions[request_id] = 0

    def _read(self, number: int, step: Step, credits: tuple[Credit, ...]) -> None:
        if self.difference is not None:
            return
        recorded = self._record.steps[number]
        for credit in credits:
            self.difference = self._credit_difference(number, step, credit)
            if self.difference is not None:
                return
        if (recorded.read, recorded.hash) != (step.read, step.hash):
            what = (
                f"recorded read in turn {recorded.read}, hash {recorded.hash}; now {step.read}, {step.hash}"
            )
            self.difference = ReplayDifference(what=f"results: {what}", step=number, turn=step.read)
            return
        self.same_steps += 1
        self.same_tokens += len(credits)

    def compare_ends(self, results: Mapping[str, CompletionOutput]) -> None:
        """After the last turn, find results in the record that the replay lacks."""
        if self.difference is None and len(self._recorder.steps) < len(self._record.steps):
            what = f"plan: the replay ends after {len(self._recorder.steps)} steps, the record goes on"
            self.difference = ReplayDifference(what=what, step=len(self._recorder.steps))
        for name, found in ((name, trace(output)) for name, output in results.items()):
            recorded = self._record.batched.get(name)
            if self.difference is None and recorded != found:
                ends = f"{len(found.token_ids)} tokens, {found.end}"
                if recorded is not None:
                    ends = f"recorded {len(recorded.token_ids)} tokens, {recorded.end}; now {ends}"
                self.difference = ReplayDifference(what=f"results: {ends}", request_id=name)

    def _credit_difference(self, number: int, step: Step, credit: Credit) -> ReplayDifference | None:
        name = credit.request_id
        recorded = self._record.batched.get(name, Trace(token_ids=(), bits=None, end=None))
        position = self._positions[name] = self._positions.get(name, 0) + 1
        expected, found = recorded.sample(position - 1), credit.sample
        ends = recorded.end if position == len(recorded.token_ids) and recorded.end != "abort" else None
        if expected == found and ends == credit.end:
            return None
        if expected is None or expected.token_id != found.token_id:
            what = "results: another token"
        elif expected != found:
            what = "results: the same token with other logprob bits"
        else:
            what = f"results: recorded finish reason {ends}, now {credit.end}"
        return ReplayDifference(
            what=what,
            step=number,
            turn=step.read,
            slot=_slot_of(self._recorder.steps[: number + 1], name),
            request_id=name,
            sampled=Difference(position=position - 1, expected=expected, found=found),
        )


def _plan_difference(number: int, recorded: Step, found: Step) -> ReplayDifference | None:
    """The first part of a plan that differs, if any."""
    if recorded.turn != found.turn:
        what = f"plan: recorded in turn {recorded.turn}, now in turn {found.turn}"
        return ReplayDifference(what=what, step=number, turn=found.turn)
    for name, then, now in (
        ("admitted (request, slot, epoch)", recorded.admitted, found.admitted),
        ("chunks (request, slot, start, length)", recorded.chunks, found.chunks),
        ("may sample several (request, slot, width)", recorded.verify, found.verify),
    ):
        pairs: Iterator[tuple[Any, Any]] = zip_longest(then, now)
        for old, new in pairs:
            if old == new:
                continue
            request_id, slot = (new or old)[:2]
            return ReplayDifference(
                what=f"plan: {name}: recorded {old}, now {new}",
                step=number,
                turn=found.turn,
                slot=slot,
                request_id=request_id,
            )
    if recorded.decode != found.decode:
        left, joined = (
            sorted(set(a) - set(b))
            for a, b in ((recorded.decode, found.decode), (found.decode, recorded.decode))
        )
        what = f"plan: decode slots recorded {list(recorded.decode)}, now {list(found.decode)}"
        return ReplayDifference(
            what=what, step=number, turn=found.turn, slot=next(iter(left or joined), None)
        )
    return None


def _slot_of(steps: Sequence[Step], request_id: str) -> int | None:
    for step in reversed(steps):
        for name, slot, _ in step.admitted:
            if name == request_id:
                return slot
    return None


def _with_gap(engine: XlaBatchEngine, record: Record, difference: ReplayDifference) -> ReplayDifference:
    name = difference.request_id
    assert name is not None and difference.sampled is not None
    case = next(case for case in record.schedule.requests if case.request_id == name)
    prefix = (*case.prompt_token_ids, *record.batched[name].token_ids[: difference.sampled.position])
    if engine.runner.weights.nbytes > _CHEAP_BYTES or case.images:  # the reference reads no pictures
        return difference
    from xla_engine.equivalence.forward_pass import ForwardPass, logit_gap

    gap = logit_gap(ForwardPass(engine.checkpoint), prefix)
    words = f"best token {gap.first} at {gap.first_logit:.6g}, then {gap.second}; gap {gap.size:.6g}"
    return replace(difference, gap=f"{words} (uncached reference)")


@contextlib.contextmanager
def _drafting_as_recorded(engine: XlaBatchEngine, record: Record) -> Iterator[None]:
    """Make an engine repeat the plans of a record, with drafts such that its rows sample as many tokens."""
    speculator = engine.speculator
    if speculator is None or record.speculative_config is None:
        yield
        return
    speculator.replay = _AsRecorded(record, engine.snapshot().counters.steps_planned)
    try:
        yield
    finally:
        speculator.replay = None


class _AsRecorded:
    """The `ReplayControl` of a record, which has each row's samples and its number of right drafts."""

    def __init__(self, record: Record, first_step: int) -> None:
        self._widths = [step.width for step in record.steps]
        self._first_step = first_step
        self._next = 0
        # for each step, the position of the drafts and the drafts, by request
        self._rows: list[dict[str, tuple[int, list[int]]]] = []
        cases = record.schedule.requests
        prompts = {case.request_id: len(case.prompt_token_ids) for case in cases}
        sampled: dict[str, int] = {}
        holder: dict[int, str] = {}
        for step in record.steps:
            holder.update((slot, name) for name, slot, _ in step.admitted)
            # The last chunk of a prompt samples a token, after those that were prefilled again with it.
            sampled.update(
                (name, max(start + length - prompts[name] + 1, 0)) for name, _, start, length in step.chunks
            )
            for slot in step.decode:
                sampled[holder[slot]] += 1
            rows = {}
            for (name, *_), (tokens, drafts) in zip(step.verify, step.verified, strict=False):
                known = record.batched[name].token_ids if name in record.batched else ()
                rows[name] = (
                    prompts[name] + sampled[name],
                    _drafts(known[sampled[name] :], tokens - 1, drafts),
                )
                sampled[name] += tokens
            self._rows.append(rows)

    def wanted(self) -> Speculation | None:
        return Speculation.again(self._widths[self._next]) if self._next < len(self._widths) else None

    def planned(self, plan: Plan) -> None:
        """Called after a plan was made."""
        self._next = plan.step - self._first_step + 1

    def drafts(self, plan: Plan, request_id: str) -> tuple[int, list[int]]:
        number = plan.step - self._first_step
        return self._rows[number].get(request_id, (0, [])) if number < len(self._rows) else (0, [])


def _drafts(ahead: Sequence[int], right: int, count: int) -> list[int]:
    """`count` drafts, of which the first `right` match the coming tokens, as far as these are known."""
    return [token if place < right else token ^ 1 for place, token in enumerate(ahead[:count])]
