"""Records: one schedule as it ran on one engine, in a small JSON file that another run can be held against.

A record has the requests, the caller's actions turn by turn, what every step was planned to do, a hash of what was
read from it, and tokens and logprob bits of each request, batched and, where known, alone. Steps and slot epochs
count from the start of the schedule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from scheduler import Chunk, Plan, Row, Slot, TokenEvent
from xla_engine.config import embedded_model_directory
from xla_engine.engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError, XlaEngineError
from xla_engine.fingerprint import EngineIdentity, logprob_bits
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.schedule import Action, Case, Schedule, run_schedule

FORMAT, VERSION = "xla-engine record", 1


class RecordError(XlaEngineError, ValueError):
    """A file is not a record this version can read; the message says where and why."""

    code = "invalid_record"


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

    turn: the turn that started it. admitted: (request, slot, epoch). chunks: (request, slot, start, length), lanes in
    order. decode: slot indices in the plan's order. read: the turn that read it. hash: of the credited samples.
    """

    turn: int
    admitted: tuple[tuple[str, int, int], ...] = ()
    chunks: tuple[tuple[str, int, int, int], ...] = ()
    decode: tuple[int, ...] = ()
    read: int | None = None
    hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A schedule, the engine it ran on, and all that came of it.

    fresh: whether the engine's cache and row state were blank at the start. Replays start so; where the law is
    broken, a run that did not need not repeat. model_path: None for the embedded model.
    batched, alone: by request id. Requests not run alone are not in `alone`.
    """

    identity: EngineIdentity
    model_path: str | None
    fresh: bool
    schedule: Schedule
    steps: tuple[Step, ...]
    batched: Mapping[str, Trace]
    alone: Mapping[str, Trace]

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


# -- recording --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One token credited by a step. `end` is set on a request's last one."""

    request_id: str
    token_id: int
    bits: int | None
    end: str | None


class Recorder:
    """Watches an idle engine while it runs one schedule; `planned` and `was_read` are for those who check."""

    def __init__(self, engine: XlaBatchEngine, schedule: Schedule) -> None:
        snapshot = engine.snapshot()
        self._engine = engine
        self._schedule = schedule
        self._first_step = snapshot.counters.steps_planned
        self._epochs = [view.slot.epoch for view in snapshot.slots]
        self._wants_bits = {
            case.request_id: case.params.logprobs is not None
            for case in (*schedule.cases, *schedule.neighbours)
        }
        self.turn = 0
        self.steps: list[Step] = []

    def run(
        self,
        *,
        on_action: Callable[[Action, bool], None] | None = None,
        on_turn: Callable[[], None] | None = None,
    ) -> dict[str, CompletionOutput]:
        """Run the schedule to its end, or until `on_turn` raises; then the engine may have live requests."""

        def next_turn(_: int, __: list[RequestOutput]) -> None:
            self.turn += 1
            if on_turn is not None:
                on_turn()

        self._engine.on_step = self._on_step
        try:
            return run_schedule(self._engine, self._schedule, on_action=on_action, on_turn=next_turn)
        finally:
            self._engine.on_step = None

    def planned(self, number: int, step: Step) -> None:
        """A step was started."""

    def was_read(self, number: int, step: Step, credits: tuple[Credit, ...]) -> None:
        """A step was read and its tokens credited."""

    def _on_step(self, plan: Plan, events: list[TokenEvent] | None) -> None:
        number = plan.step - self._first_step
        if events is None:
            self.steps.append(self._step(plan))
            self.planned(number, self.steps[number])
            return
        credits = tuple(self._credit(event) for event in events)
        self.steps[number] = replace(self.steps[number], read=self.turn, hash=_hash(credits))
        self.was_read(number, self.steps[number], credits)

    def _step(self, plan: Plan) -> Step:
        holders: dict[str, Slot] = {}
        parts: tuple[Chunk | Row, ...] = (*plan.chunks, *plan.decode)
        for part in parts:
            holders[part.request_id] = part.slot
        if not holders.keys() >= set(plan.admitted):  # out of token budget: the first chunk comes later
            for view in self._engine.snapshot().slots:
                if view.request is not None:
                    holders[view.request.request_id] = view.slot
        slots = [(name, holders[name]) for name in plan.admitted]
        return Step(
            turn=self.turn,
            admitted=tuple((name, slot.index, slot.epoch - self._epochs[slot.index]) for name, slot in slots),
            chunks=tuple(
                (chunk.request_id, chunk.slot.index, chunk.start, len(chunk.tokens)) for chunk in plan.chunks
            ),
            decode=tuple(row.slot.index for row in plan.decode),
        )

    def _credit(self, event: TokenEvent) -> Credit:
        token_id, logprob, _ = event.sample
        known = logprob is not None and self._wants_bits[event.request_id]
        return Credit(
            request_id=event.request_id,
            token_id=token_id,
            bits=logprob_bits(logprob) if logprob is not None and known else None,
            end=None if event.finish_reason is None else str(event.finish_reason),
        )


def record_schedule(
    engine: XlaBatchEngine,
    schedule: Schedule,
    *,
    alone: Mapping[str, CompletionOutput] | None = None,
    blank: bool = False,
    on_action: Callable[[Action, bool], None] | None = None,
) -> tuple[dict[str, CompletionOutput], Record]:
    """`run_schedule`, and the record of it. `blank` clears cache and row state before."""
    if blank:
        engine.runner.blank()
    recorder = Recorder(engine, schedule)
    results = recorder.run(on_action=on_action)
    directory = engine.checkpoint.path
    record = Record(
        identity=EngineIdentity.of(engine),
        model_path=None if directory == embedded_model_directory() else str(directory),
        fresh=blank,
        schedule=schedule,
        steps=tuple(recorder.steps),
        batched={name: trace(output) for name, output in results.items()},
        alone={name: trace(output) for name, output in (alone or {}).items() if name in results},
    )
    return results, record


class RecordKeeper:
    """Records schedule after schedule and keeps the first one that differs from the alone-runs, else the last."""

    def __init__(self) -> None:
        self.record: Record | None = None

    def run(
        self,
        engine: XlaBatchEngine,
        schedule: Schedule,
        *,
        alone: Mapping[str, CompletionOutput],
        on_action: Callable[[Action, bool], None] | None = None,
    ) -> dict[str, CompletionOutput]:
        """`run_schedule`, recorded."""
        if self.record is not None and self.record.first_difference is not None:
            return run_schedule(engine, schedule, on_action=on_action)
        results, self.record = record_schedule(engine, schedule, alone=alone, on_action=on_action)
        return results


def _hash(credits: Sequence[Credit]) -> str:
    rows = [(credit.request_id, credit.token_id, credit.bits, credit.end) for credit in credits]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]


# -- files ------------------------------------------------------------------------------------------------------


def write_record(path: Path | str, record: Record) -> None:
    """Write a record as JSON, one line per request and step."""
    Path(path).write_text(to_json(record), encoding="utf-8")


def read_record(path: Path | str) -> Record:
    """Read a record. Raises RecordError for anything that is not one, and OSError."""
    try:
        return from_json(Path(path).read_bytes())
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def to_json(record: Record) -> str:
    """A record as text. Requests are named by their number from then on; defaults and empty lists are left out."""
    schedule = record.schedule
    cases = (*schedule.cases, *schedule.neighbours)
    number = {case.request_id: index for index, case in enumerate(cases)}
    requests = [
        {
            "id": case.request_id,
            "neighbour": index >= len(schedule.cases),
            "prompt": case.prompt_token_ids,
            "params": _params_to_json(case.params),
            "batched": _trace_to_json(record.batched.get(case.request_id)),
            "alone": _alone_to_json(record, case.request_id),
        }
        for index, case in enumerate(cases)
    ]
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "fingerprint": record.identity.model,
            "dtype": record.identity.dtype,
            "path": record.model_path,
        },
        "engine": dict(record.identity.config),
        "platform": dict(record.identity.platform),
        "fresh": record.fresh,
        "lag": schedule.lag,
        "actions": [[action.turn, action.kind, number[action.request_id]] for action in schedule.actions],
    }
    steps: list[dict[str, Any]] = []
    decode: tuple[int, ...] = ()
    for step in record.steps:
        leave, join = _delta(decode, step.decode)
        decode = step.decode
        row = {
            "turn": step.turn,
            "admit": [(number[name], *rest) for name, *rest in step.admitted],
            "chunks": [(number[name], *rest) for name, *rest in step.chunks],
            "leave": leave,
            "join": join,
            "read": step.read,
            "hash": step.hash,
        }
        steps.append({name: value for name, value in row.items() if value != []})
    parts = [f"{_dump(name)}: {_dump(value)}" for name, value in head.items()]
    for name, rows in (("requests", requests), ("steps", steps)):
        parts.append(f'"{name}": [\n' + ",\n".join(map(_dump, rows)) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def from_json(raw: bytes) -> Record:
    """Read a record from bytes. Raises RecordError."""
    try:
        data = json.loads(raw.decode("utf-8"))
    except json.JSONDecodeError as error:
        place = "it ends too early" if error.pos >= len(error.doc.rstrip()) else error.msg
        raise RecordError(f"not JSON at line {error.lineno}: {place}") from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordError(f'not a record: no "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise RecordError(
            f"format version {data.get('version')!r}; this version of xla-engine reads {VERSION}"
        )
    try:
        return _record(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RecordError(f"damaged record: {why}") from error


def _record(data: dict[str, Any]) -> Record:
    model, config = _kind(data["model"], dict, "model"), _kind(data["engine"], dict, "engine")
    platform = {name: _kind(value, str, name) for name, value in _kind(data["platform"], dict, "").items()}
    cases: list[Case] = []
    neighbours: list[Case] = []
    batched: dict[str, Trace] = {}
    alone: dict[str, Trace] = {}
    for row in _kind(data["requests"], list, "requests"):
        name = _kind(row["id"], str, "id")
        if not name.isprintable():
            raise ValueError(f"request id {name!r} has characters that cannot be shown")
        case = Case(request_id=name, prompt_token_ids=_numbers(row["prompt"]), params=_params(row["params"]))
        (neighbours if _kind(row["neighbour"], bool, "neighbour") else cases).append(case)
        if row["batched"] is not None:
            batched[name] = _trace(row["batched"])
        if row["alone"] is not None:
            alone[name] = batched[name] if row["alone"] == "same" else _trace(row["alone"])
    names = [case.request_id for case in (*cases, *neighbours)]
    if len(set(names)) != len(names):
        raise RecordError("damaged record: two requests with one id")
    path = model["path"]
    return Record(
        identity=EngineIdentity(
            model=_kind(model["fingerprint"], str, "fingerprint"),
            dtype=_kind(model["dtype"], str, "dtype"),
            config=config,
            platform=platform,
        ),
        model_path=path if path is None else _kind(path, str, "path"),
        fresh=_kind(data["fresh"], bool, "fresh"),
        schedule=Schedule(
            lag=_number(data["lag"]),
            cases=tuple(cases),
            neighbours=tuple(neighbours),
            actions=_actions(data["actions"], names),
        ),
        steps=_steps(_kind(data["steps"], list, "steps"), names),
        batched=batched,
        alone=alone,
    )


def _actions(rows: Any, names: Sequence[str]) -> tuple[Action, ...]:
    actions = []
    submitted = set()
    for turn, kind, index in _kind(rows, list, "actions"):
        name = names[_number(index)]
        if kind not in ("submit", "abort"):
            raise ValueError(f"an action is submit or abort, not {kind!r}")
        if kind == "submit" and name in submitted:
            raise ValueError(f"{name} is submitted twice")
        if kind == "submit":
            submitted.add(name)
        actions.append(Action(turn=_number(turn), kind=kind, request_id=name))
    if missing := [name for name in names if name not in submitted]:
        raise ValueError(f"{missing[0]} is never submitted")
    if actions != sorted(actions, key=lambda action: action.turn):
        raise ValueError("actions are not in the order of their turns")
    return tuple(actions)


def _steps(rows: Sequence[Any], names: Sequence[str]) -> tuple[Step, ...]:
    steps: list[Step] = []
    decode: tuple[int, ...] = ()
    for index, row in enumerate(rows):
        leave, join = _numbers(row.get("leave", [])), _numbers(row.get("join", []))
        if not set(leave) <= set(decode) or set(join) & (set(decode) - set(leave)):
            raise ValueError(f"step {index}: slots {leave} leave and {join} join rows {decode}")
        decode = (*(slot for slot in decode if slot not in leave), *join)
        admitted, chunks = (_rows(row.get(name, []), names) for name in ("admit", "chunks"))
        steps.append(
            Step(
                turn=_number(row["turn"]),
                admitted=tuple((name, slot, epoch) for name, slot, epoch in admitted),
                chunks=tuple((name, slot, start, length) for name, slot, start, length in chunks),
                decode=decode,
                read=None if row["read"] is None else _number(row["read"]),
                hash=None if row["hash"] is None else _kind(row["hash"], str, "hash"),
            )
        )
    return tuple(steps)


def _rows(rows: Any, names: Sequence[str]) -> list[tuple[Any, ...]]:
    numbers = [_numbers(row) for row in _kind(rows, list, "a step")]
    return [(names[index], *rest) for index, *rest in numbers]


def _delta(before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
    """(leave, join): drop the slots of `leave` from `before` and append those of `join` to get `after`."""
    kept = 0
    leave = []
    for slot in before:
        if kept < len(after) and after[kept] == slot:
            kept += 1
        else:
            leave.append(slot)
    return leave, list(after[kept:])


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not the default."""
    defaults = SamplingParams()
    return {
        field.name: getattr(params, field.name)
        for field in fields(SamplingParams)
        if getattr(params, field.name) != getattr(defaults, field.name)
    }


def _params(values: Any) -> SamplingParams:
    try:
        return SamplingParams.from_mapping(_kind(values, dict, "params"))
    except InvalidRequestError as error:
        raise ValueError(str(error)) from error


def _alone_to_json(record: Record, name: str) -> Any:
    alone = record.alone.get(name)
    return "same" if alone is not None and alone == record.batched.get(name) else _trace_to_json(alone)


def _trace_to_json(trace: Trace | None) -> dict[str, Any] | None:
    if trace is None:
        return None
    bits = None if trace.bits is None else "".join(f"{value:08x}" for value in trace.bits)
    return {"tokens": trace.token_ids, "bits": bits, "end": trace.end}


def _trace(row: Any) -> Trace:
    token_ids, bits = _numbers(row["tokens"]), row["bits"]
    if bits is not None:
        digits = _kind(bits, str, "bits")
        if len(digits) != 8 * len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens with {len(digits)} hex digits of logprob bits")
        bits = tuple(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    end = row["end"]
    return Trace(token_ids=token_ids, bits=bits, end=end if end is None else _kind(end, str, "end"))


def _kind(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, not {value!r:.60}")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r:.60} must be a whole number")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in _kind(values, list, "a list of numbers"))


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
