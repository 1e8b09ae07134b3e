"""Records: one run of a schedule on one engine, for comparison with other runs; and their files.

A record has the requests, the caller's actions by turn, the plan of every step and a hash of its result, and the
tokens and logprob bits of each request, batched and, if known, alone. Steps and slot epochs count from the start of
the schedule. `xla_engine.equivalence.recorder` makes records.

Files are small JSON with one line per request and per step. A file that is not a record of this version is rejected
with a RecordError that says where and why.
"""

from __future__ import annotations

import json
import math
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.engine.identity import EngineIdentity
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.schedule import Action, Schedule
from xla_engine.errors import ConfigError, InvalidRequestError, RecordError
from xla_engine.observability.step_log import delta
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.speculative_config import SpeculativeConfig
from xla_engine.utils.comparison import TokenSample, first_difference, logprob_bits, logprob_of

FORMAT, VERSION = "xla-engine record", 1


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
        shared = min(len(mine), len(theirs))
        if "abort" in (self.end, other.end):
            mine, theirs = mine[:shared], theirs[:shared]
        elif self.end != other.end and mine == theirs:
            return shared
        difference = first_difference(mine, theirs)
        return None if difference is None else difference.position

    def sample(self, position: int) -> TokenSample | None:
        """The sample at a position; None past the end."""
        return self._samples()[position] if position < len(self.token_ids) else None

    def _samples(self) -> list[TokenSample]:
        if self.bits is None:
            return list(map(TokenSample, self.token_ids))
        pairs = zip(self.token_ids, self.bits, strict=True)
        return [TokenSample(token_id, logprob_of(bits)) for token_id, bits in pairs]


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
    """A record as text. Requests are referred to by number; defaults and empty lists are omitted."""
    schedule = record.schedule
    cases = schedule.requests
    number = {case.request_id: index for index, case in enumerate(cases)}
    requests = [
        {
            "id": case.request_id,
            "neighbour": index >= len(schedule.cases),
            "prompt": case.prompt_token_ids,
            **({"images": list(map(_image_to_json, case.images))} if case.images else {}),
            "params": case.params.to_mapping(),
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
        "made_on": dict(record.identity.made_on) or None,
        "fresh": record.fresh,
        "lag": schedule.lag,
        "speculative_config": None if record.speculative_config is None else dict(record.speculative_config),
        "actions": [[action.turn, action.kind, number[action.request_id]] for action in schedule.actions],
    }
    steps: list[dict[str, Any]] = []
    decode: tuple[int, ...] = ()
    for step in record.steps:
        leave, join = delta(decode, step.decode)
        decode = step.decode
        row = {
            "turn": step.turn,
            "admit": [(number[name], *rest) for name, *rest in step.admitted],
            "chunks": [(number[name], *rest) for name, *rest in step.chunks],
            "leave": leave,
            "join": join,
            "verify": [(number[name], *rest) for name, *rest in step.verify],
            "verified": list(step.verified),
            "width": step.width or [],
            "held": [number[name] for name in step.held],
            "late": step.is_late or [],
            "read": step.read,
            "hash": step.hash,
        }
        steps.append({name: value for name, value in row.items() if value != []})
    parts = [f"{_dump(name)}: {_dump(value)}" for name, value in head.items() if value is not None]
    for name, rows in (("requests", requests), ("steps", steps)):
        parts.append(f'"{name}": [\n' + ",\n".join(map(_dump, rows)) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def from_json(raw: bytes) -> Record:
    """Read a record from bytes. Raises RecordError."""
    try:
        data = json.loads(raw.decode("utf-8"))
    except json.JSONDecodeError as error:
        place = "the file is truncated" if error.pos >= len(error.doc.rstrip()) else error.msg
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
    platform, made_on = (
        {name: _kind(value, str, name) for name, value in _kind(found, dict, "").items()}
        for found in (data["platform"], data.get("made_on", {}))
    )
    cases: list[Case] = []
    neighbours: list[Case] = []
    batched: dict[str, Trace] = {}
    alone: dict[str, Trace] = {}
    for row in _kind(data["requests"], list, "requests"):
        name = _kind(row["id"], str, "id")
        if not name.isprintable():
            raise ValueError(f"request id {name!r} has characters that cannot be shown")
        case = Case(
            request_id=name,
            prompt_token_ids=_numbers(row["prompt"]),
            params=_params(row["params"]),
            images=tuple(map(_image, _kind(row.get("images", []), list, "images"))),
        )
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
            made_on=made_on,
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
        speculative_config=_speculation(data.get("speculative_config")),
    )


def _speculation(values: Any) -> dict[str, Any] | None:
    if values is None:
        return None
    try:
        return SpeculativeConfig.of(values).given()
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _actions(rows: Any, names: Sequence[str]) -> tuple[Action, ...]:
    actions = []
    submitted = set()
    for turn, kind, index in _kind(rows, list, "actions"):
        name = names[_number(index)]
        if kind not in ("submit", "abort", *WAYS_TO_PREEMPT):
            raise ValueError(f"an action is submit, abort, {', '.join(WAYS_TO_PREEMPT)}, not {kind!r}")
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
        admitted, chunks, verify = (_rows(row.get(name, []), names) for name in ("admit", "chunks", "verify"))
        steps.append(
            Step(
                turn=_number(row["turn"]),
                admitted=tuple((name, slot, epoch) for name, slot, epoch in admitted),
                chunks=tuple((name, slot, start, length) for name, slot, start, length in chunks),
                decode=decode,
                width=_number(row.get("width", 0)),
                verify=tuple((name, slot, width) for name, slot, width in verify),
                verified=tuple((tokens, drafts) for tokens, drafts in map(_numbers, row.get("verified", []))),
                held=tuple(names[index] for index in _numbers(row.get("held", []))),
                is_late=_kind(row.get("late", False), bool, "late"),
                read=None if row["read"] is None else _number(row["read"]),
                hash=None if row["hash"] is None else _kind(row["hash"], str, "hash"),
            )
        )
    return tuple(steps)


def _rows(rows: Any, names: Sequence[str]) -> list[tuple[Any, ...]]:
    numbers = [_numbers(row) for row in _kind(rows, list, "a step")]
    return [(names[index], *rest) for index, *rest in numbers]


def _image_to_json(image: PromptImage) -> dict[str, Any]:
    """The tiles' bytes are compressed, in base64. shape: of all together, or of each if they differ."""
    tiles = list(map(np.ascontiguousarray, image.tiles))
    shapes = [tile.shape for tile in tiles]
    packed = b64encode(zlib.compress(b"".join(tile.tobytes() for tile in tiles))).decode()
    shape = (len(tiles), *shapes[0]) if len(set(shapes)) == 1 else shapes
    return {"digest": image.digest, "spans": image.spans, "shape": shape, "tiles": packed}


def _image(row: Any) -> PromptImage:
    try:
        raw = zlib.decompress(b64decode(_kind(row["tiles"], str, "tiles"), validate=True))
    except zlib.error as error:
        raise ValueError(f"tiles: {error}") from error
    spans = tuple((start, length) for start, length in map(_numbers, row["spans"]))
    pixels, shape = np.frombuffer(raw, np.uint8), _kind(row["shape"], list, "shape")
    if all(isinstance(each, list) for each in shape):
        shapes = list(map(_numbers, shape))
        parts = np.split(pixels, np.cumsum(list(map(math.prod, shapes)))[:-1])
        tiles: Any = tuple(part.reshape(own) for part, own in zip(parts, shapes, strict=True))
    else:
        tiles = pixels.reshape(_numbers(shape))
    return PromptImage(digest=_kind(row["digest"], str, "digest"), tiles=tiles, spans=spans)


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
