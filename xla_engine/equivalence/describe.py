"""A record as text for people."""

from collections.abc import Iterator
from dataclasses import fields

from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.record import Record
from xla_engine.equivalence.replay import sampled
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.tables import aligned

SHOWN_TURNS = 60  # rows of the printed table
SHOWN_TOKENS = 12  # of a prompt


def describe(record: Record) -> list[str]:
    """The requests of a record, its turns, and where batched and alone differ."""
    schedule = record.schedule
    model = "embedded model" if record.model_path is None else record.model_path
    platform = {**record.identity.platform, **record.identity.made_on}
    slots = record.identity.config.get("max_num_seqs")
    rows = [("request", "prompt", "max_tokens", "sampling")]
    for case in schedule.requests:
        note = "" if case in schedule.cases else " (not compared)"
        cap = str(case.params.max_tokens)
        rows.append((case.request_id + note, _prompt(case), cap, _sampling_words(case.params)))
    lines = [
        f"{model}, {record.identity.dtype}, {slots} slots, lag {schedule.lag}; {platform.get('backend')}, "
        f"jax {platform.get('jax')}",
        "",
        *aligned(rows),
        "",
    ]
    turns = aligned([("turn", "before it", "step started", "step read: tokens"), *_turn_rows(record)])
    if len(turns) > SHOWN_TURNS:
        turns[SHOWN_TURNS:] = [f"... {len(turns) - SHOWN_TURNS} more rows"]
    lines += turns
    if record.first_difference is not None:
        name, position = record.first_difference
        slot = next(
            (slot for step in record.steps for request, slot, _ in step.admitted if request == name), None
        )
        lines += [
            "",
            f"first difference: request {name}, slot {slot}, generated token {position}",
            f"  alone    {sampled(record.alone[name].sample(position))}",
            f"  batched  {sampled(record.batched[name].sample(position))}",
        ]
    return lines


def _turn_rows(record: Record) -> Iterator[tuple[str, str, str, str]]:
    """(turn, actions, step started, steps read) for each turn that has one of them."""
    started: dict[int, str] = {}
    read: dict[int, list[str]] = {}
    acted: dict[int, list[str]] = {}
    for action in record.schedule.actions:
        acted.setdefault(action.turn, []).append(f"{action.kind} {action.request_id}")
    prompts = {case.request_id: len(case.prompt_token_ids) for case in record.schedule.requests}
    holder: dict[int, str] = {}
    position = dict.fromkeys(prompts, 0)
    for number, step in enumerate(record.steps):
        words = []
        sampling = []
        for name, slot, start, length in step.chunks:
            words.append(f"{name} in slot {slot}: prompt {start}..{start + length - 1}")
            holder[slot] = name
            if start + length == prompts[name]:
                sampling.append(name)
        rows = [holder[slot] for slot in step.decode if slot in holder]
        if rows:
            words.append(f"decode {', '.join(rows)}")
        started[step.turn] = f"{number}: {'; '.join(words)}"
        tokens = []
        for name in (*sampling, *rows):
            mark = _token_words(record, name, position[name])
            position[name] += 1
            if mark is not None:
                tokens.append(mark)
        if step.read is not None:
            read.setdefault(step.read, []).append(f"{number}: {', '.join(tokens) or '-'}")
    for turn in sorted({*started, *read, *acted}):
        yield str(turn), ", ".join(acted.get(turn, [])), started.get(turn, ""), "; ".join(read.get(turn, []))


def _token_words(record: Record, name: str, position: int) -> str | None:
    """One sampled token; None when it was dropped because the request had ended."""
    ended = record.batched.get(name)
    sample = None if ended is None else ended.sample(position)
    if sample is None:
        return None
    words = f"{name}[{position}]={sample[0]}"
    if name in record.alone and record.alone[name].first_difference(record.batched[name]) == position:
        words += " <- differs"
    return words


def _prompt(case: Case) -> str:
    tokens = case.prompt_token_ids
    shown = ", ".join(map(str, tokens[:SHOWN_TOKENS]))
    return f"[{shown}]" if len(tokens) <= SHOWN_TOKENS else f"[{shown}, ...] ({len(tokens)} tokens)"


def _sampling_words(params: SamplingParams) -> str:
    defaults = SamplingParams()
    words = ["greedy"] if params.is_greedy else [f"temperature {params.temperature:g}"]
    for name in (field.name for field in fields(SamplingParams)):
        value = getattr(params, name)
        if name not in ("temperature", "max_tokens", "logprobs") and value != getattr(defaults, name):
            words.append(f"{name} {list(value) if isinstance(value, tuple) else value}")
    return ", ".join(words)
