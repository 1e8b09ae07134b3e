"""Shrink a record that breaks law 1 to a small one that still breaks it, and show it to people.

A schedule fails if any request's batched run differs from its run alone. Every run starts from a blank cache, so
failing is a property of the schedule alone, and shrinking is deterministic.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeVar

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.record import Record, Trace, trace
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import sampled
from xla_engine.equivalence.schedule import Action, Schedule, run_alone, run_schedule
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.tables import aligned

SHOWN_TURNS = 60  # rows of the printed table
SHOWN_TOKENS = 12  # of a prompt

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A subsequence of `items` that still fails and from which no single item can be removed.

    Delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002, figure 5), with
    the empty part tried first. `fails(tuple(items))` must be true.
    """
    rest = tuple(items)
    if not rest or fails(()):
        return ()
    pieces = 2
    while len(rest) > 1:
        edges = [len(rest) * index // pieces for index in range(pieces + 1)]
        parts = [rest[low:high] for low, high in pairwise(edges)]
        smaller = next((part for part in parts if fails(part)), None)
        if smaller is not None:
            rest, pieces = smaller, 2
            continue
        others = [rest[:low] + rest[high:] for low, high in pairwise(edges)]
        # With two parts, each is the other's complement, and both were already tried.
        smaller = next((other for other in others if fails(other)), None) if pieces > 2 else None
        if smaller is not None:
            rest, pieces = smaller, pieces - 1
        elif pieces == len(rest):
            break
        else:
            pieces = min(2 * pieces, len(rest))
    return rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkReport:
    """The result of shrinking a schedule.

    record: of the smallest schedule that fails; None when `before` does not fail.
    runs: number of batched runs. exhausted: whether the limit on runs was reached.
    """

    record: Record | None
    runs: int
    exhausted: bool
    before: Schedule

    def lines(self) -> list[str]:
        """The report as text."""
        if self.record is None:
            return ["does not fail here: every request is the same alone and batched, from a blank cache"]
        lines = [
            f"before: {_size(self.before)}",
            f"after:  {_size(self.record.schedule)}; {self.runs} runs",
            "",
            *describe(self.record),
        ]
        if self.exhausted:
            lines.append(f"stopped after {self.runs} runs; more --max-runs may find a smaller one")
        return lines


def shrink(
    engine: XlaBatchEngine,
    schedule: Schedule,
    *,
    max_runs: int = 1000,
    progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Reduce a failing schedule: fewer requests, actions, turns, shorter prompts, lower caps, plainer sampling.

    max_runs: limit on batched runs; runs alone do not count. The engine must be idle.
    """
    trials = Trials(engine, max_runs, progress)
    if not trials.fails(schedule):
        return ShrinkReport(record=None, runs=trials.runs, exhausted=False, before=schedule)
    smallest, exhausted = schedule, False
    try:
        while True:
            for reduce in (_requests, _aborts, _turns, _prompts, _caps, _sampling):
                trials.what = reduce.__name__.strip("_")
                reduce(trials)
            if trials.smallest == smallest:
                break
            smallest = trials.smallest
    except _OutOfRuns:
        exhausted = True
    record = trials.record(trials.smallest)
    return ShrinkReport(record=record, runs=trials.runs, exhausted=exhausted, before=schedule)


class _OutOfRuns(Exception):
    """The limit `max_runs` was reached."""


class Trials:
    """Runs candidate schedules on one engine, each once, and keeps the last that failed in `smallest`."""

    def __init__(
        self, engine: XlaBatchEngine, max_runs: int, progress: Callable[[str], None] | None = None
    ) -> None:
        self.smallest = Schedule(lag=0, cases=(), neighbours=(), actions=())
        self.runs = 0
        self.what = "whole"
        self._engine = engine
        self._max_runs = max_runs
        self._progress = progress
        self._seen: dict[Schedule, bool] = {}
        self._alone: dict[Case, Trace] = {}

    def fails(self, schedule: Schedule) -> bool:
        """Whether a request of the schedule differs from its alone-run. Raises _OutOfRuns."""
        if schedule not in self._seen:
            self._seen[schedule] = bool(schedule.cases) and self._run(schedule)
        if self._seen[schedule]:
            self.smallest = schedule
        return self._seen[schedule]

    def first_failing(self, candidates: Iterable[Schedule]) -> bool:
        """Keep the first candidate that fails. Returns false if none does."""
        return any(self.fails(candidate) for candidate in candidates)

    def alone(self, case: Case) -> Trace:
        """The case run by itself on a blank engine."""
        if case not in self._alone:
            self._engine.blank()
            self._alone[case] = trace(run_alone(self._engine, case))
        return self._alone[case]

    def record(self, schedule: Schedule) -> Record:
        alone = {case.request_id: self.alone(case) for case in schedule.cases}
        _, record = record_schedule(self._engine, schedule, blank=True)
        return replace(record, alone=alone)

    def _run(self, schedule: Schedule) -> bool:
        if self.runs >= self._max_runs:
            raise _OutOfRuns
        self.runs += 1
        if self._progress is not None:
            self._progress(f"{self.what}: {len(schedule.cases) + len(schedule.neighbours)} requests")
        self._engine.blank()
        results = run_schedule(self._engine, schedule)
        return any(
            self.alone(case).first_difference(trace(results[case.request_id])) is not None
            for case in schedule.cases
        )


# The reductions follow. Each one reduces `trials.smallest` as far as it can.


def _requests(trials: Trials) -> None:
    """Fewer requests, by delta debugging."""
    schedule = trials.smallest
    names = [case.request_id for case in schedule.requests]
    ddmin(names, lambda kept: trials.fails(_only(schedule, frozenset(kept))))


def _only(schedule: Schedule, kept: frozenset[str]) -> Schedule:
    return replace(
        schedule,
        cases=tuple(case for case in schedule.cases if case.request_id in kept),
        neighbours=tuple(case for case in schedule.neighbours if case.request_id in kept),
        actions=tuple(action for action in schedule.actions if action.request_id in kept),
    )


def _aborts(trials: Trials) -> None:
    """Fewer aborts, by delta debugging."""
    schedule = trials.smallest
    aborts = [action for action in schedule.actions if action.kind != "submit"]

    def with_aborts(kept: tuple[Action, ...]) -> Schedule:
        actions = (action for action in schedule.actions if action.kind == "submit" or action in kept)
        return replace(schedule, actions=tuple(actions))

    ddmin(aborts, lambda kept: trials.fails(with_aborts(kept)))


def _turns(trials: Trials) -> None:
    """A smaller lag, and all actions as early as possible."""
    trials.first_failing(replace(trials.smallest, lag=lag) for lag in range(trials.smallest.lag))
    actions = trials.smallest.actions
    trials.first_failing([_all_at_once(trials.smallest), _shifted(trials.smallest, 0, actions[0].turn)])
    for index in range(len(actions)):
        while trials.first_failing(_earlier(trials.smallest, index)):
            pass


def _all_at_once(schedule: Schedule) -> Schedule:
    return replace(schedule, actions=tuple(replace(action, turn=0) for action in schedule.actions))


def _earlier(schedule: Schedule, index: int) -> Iterator[Schedule]:
    """The schedule with the gap before an action closed, halved, or shortened by one."""
    actions = schedule.actions
    gap = actions[index].turn - (actions[index - 1].turn if index else 0)
    for shorter in _shorter(gap, 0):
        yield _shifted(schedule, index, gap - shorter)


def _shifted(schedule: Schedule, index: int, turns: int) -> Schedule:
    """Every action from `index` on, that many turns earlier."""
    moved = (replace(action, turn=action.turn - turns) for action in schedule.actions[index:])
    return replace(schedule, actions=(*schedule.actions[:index], *moved))


def _prompts(trials: Trials) -> None:
    """Shorter prompts: the head of each, or else its tail."""

    def shorter(case: Case) -> Iterator[Case]:
        prompt = case.prompt_token_ids
        for length in () if case.images else _shorter(len(prompt), 1):
            yield replace(case, prompt_token_ids=prompt[:length])
            yield replace(case, prompt_token_ids=prompt[-length:])

    _each_case(trials, shorter)


def _caps(trials: Trials) -> None:
    """Smaller max_tokens, and min_tokens no larger."""

    def shorter(case: Case) -> Iterator[Case]:
        params = case.params
        for cap in _shorter(params.token_limit, 1):
            least = min(params.min_tokens, cap)
            yield replace(case, params=replace(params, max_tokens=cap, min_tokens=least))

    _each_case(trials, shorter)


def _sampling(trials: Trials) -> None:
    """Greedy sampling without other fields; if that does not fail, each sampling field at its default."""
    plain = SamplingParams()
    others = [
        each.name for each in fields(plain) if each.name not in ("temperature", "max_tokens", "logprobs")
    ]

    def plainer(case: Case) -> Iterator[Case]:
        params = case.params
        greedy = replace(plain, temperature=0, max_tokens=params.max_tokens, logprobs=params.logprobs)
        options = [greedy, replace(greedy, ignore_eos=params.ignore_eos), replace(params, temperature=1.0)]
        if params.is_greedy:
            options = options[:2]
        for name in others:
            options.append(replace(params, **{name: getattr(plain, name)}))
        return (replace(case, params=option) for option in options if option != params)

    _each_case(trials, plainer)


def _each_case(trials: Trials, smaller: Callable[[Case], Iterator[Case]]) -> None:
    """Reduce each request as long as the schedule still fails with the smaller form."""
    schedule = trials.smallest
    for name in [case.request_id for case in schedule.requests]:
        while True:
            schedule = trials.smallest
            cases = schedule.requests
            case = next(case for case in cases if case.request_id == name)
            if not trials.first_failing(_with(schedule, form) for form in smaller(case)):
                break


def _with(schedule: Schedule, form: Case) -> Schedule:
    def put(cases: tuple[Case, ...]) -> tuple[Case, ...]:
        return tuple(form if case.request_id == form.request_id else case for case in cases)

    return replace(schedule, cases=put(schedule.cases), neighbours=put(schedule.neighbours))


def _shorter(length: int, least: int) -> list[int]:
    """Smaller lengths worth trying, ascending."""
    options = {least, length // 4, length // 2, 3 * length // 4, length - 1}
    return sorted(option for option in options if least <= option < length)


def _size(schedule: Schedule) -> str:
    cases = schedule.requests
    last = max((action.turn for action in schedule.actions), default=0)
    prompts = sum(len(case.prompt_token_ids) for case in cases)
    caps = sum(case.params.token_limit for case in cases)
    return f"{len(cases)} requests, last action in turn {last}, {prompts} prompt tokens, {caps} new at most"


# A record as text.


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
    words = f"{name}[{position}]={sample.token_id}"
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
