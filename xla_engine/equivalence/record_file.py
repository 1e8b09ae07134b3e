"""Read and write records as small JSON files: one line per request and per step.

A file that is not a record of this version is rejected with a RecordError that says where and why.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.engine.identity import EngineIdentity
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.record import Record, RecordError, Step, Trace
from xla_engine.equivalence.schedule import Action, Schedule
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.observability.step_log import delta
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.speculative_config import SpeculativeConfig

FORMAT, VERSION = "xla-engine record", 1


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
    cases = (*schedule.cases, *schedule.neighbours)
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
        **({"made_on": dict(record.identity.made_on)} if record.identity.made_on else {}),
        "fresh": record.fresh,
        "lag": schedule.lag,
        **(
            {}
            if record.speculative_config is None
            else {"speculative_config": dict(record.speculative_config)}
        ),
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
    parts = [f"{_dump(name)}: {_dump(value)}" for name, value in head.items()]
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
    """The tiles' bytes are compressed, in base64."""
    tiles = np.ascontiguousarray(image.tiles)
    packed = b64encode(zlib.compress(tiles.tobytes())).decode()
    return {"digest": image.digest, "spans": image.spans, "shape": tiles.shape, "tiles": packed}


def _image(row: Any) -> PromptImage:
    try:
        raw = zlib.decompress(b64decode(_kind(row["tiles"], str, "tiles"), validate=True))
    except zlib.error as error:
        raise ValueError(f"tiles: {error}") from error
    spans = tuple((start, length) for start, length in map(_numbers, row["spans"]))
    tiles = np.frombuffer(raw, np.uint8).reshape(_numbers(row["shape"]))
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
