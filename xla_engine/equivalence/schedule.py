"""Schedules: the caller's actions before each turn. A schedule is data, and running it is deterministic."""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case
from xla_engine.errors import InvalidRequestError, ScheduleError, XlaEngineError
from xla_engine.outputs import CompletionOutput
from xla_engine.scheduler import QueueFullError
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the caller does before a turn: "submit" or "abort" `request_id`, or one of `WAYS_TO_PREEMPT`."""

    turn: int
    kind: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions in the order of their turns. `neighbours` are requests that only disturb others, and may be aborted."""

    lag: int
    cases: tuple[Case, ...]
    neighbours: tuple[Case, ...]
    actions: tuple[Action, ...]

    @property
    def requests(self) -> tuple[Case, ...]:
        """All of them: cases, then neighbours."""
        return (*self.cases, *self.neighbours)


def draw_schedule(
    cases: Sequence[Case], seed: int | str, *, lag: int, preempts: Sequence[str] = ()
) -> Schedule:
    """Draw a schedule: cases arrive in random order at random turns, with neighbours, most of which are aborted.

    preempts: ways to preempt requests at random turns, about one request in three.
    """
    draw = random.Random(seed)
    pace = draw.choice((0.3, 1.0, 4.0))  # arrivals per turn
    actions: list[Action] = []
    neighbours: list[Case] = []
    turn = 0.0
    for case in draw.sample(list(cases), len(cases)):
        turn += draw.expovariate(pace)
        actions.append(Action(turn=int(turn), kind="submit", request_id=case.request_id))
        if draw.random() < 0.15:
            name = f"neighbour-{len(neighbours)}"
            reversed_ids = case.prompt_token_ids[::-1]
            neighbours.append(replace(case, request_id=name, prompt_token_ids=reversed_ids, images=()))
            actions.append(Action(turn=int(turn), kind="submit", request_id=name))
            if draw.random() < 0.8:
                end = int(turn) + draw.randrange(12)
                actions.append(Action(turn=end, kind="abort", request_id=name))
    if preempts:
        again = random.Random(f"{seed}/preempt")
        actions += [
            Action(
                turn=came.turn + again.randrange(1, 24),
                kind=again.choice(preempts),
                request_id=came.request_id,
            )
            for came in actions
            if came.kind == "submit" and again.random() < 0.5
        ]
    actions.sort(key=lambda action: action.turn)
    return Schedule(lag=lag, cases=tuple(cases), neighbours=tuple(neighbours), actions=tuple(actions))


def run_alone(engine: XlaBatchEngine, case: Case) -> CompletionOutput:
    """Run a request alone through the same executables, after clearing the prefix cache."""
    engine.reset_prefix_cache()
    engine.submit(case.prompt, case.params, request_id=case.request_id)
    (output,) = engine.drain()
    return output.outputs[0]


def run_schedule(
    engine: XlaBatchEngine,
    schedule: Schedule,
    *,
    on_action: Callable[[Action, bool], None] | None = None,
    on_turn: Callable[[int], None] | None = None,
) -> dict[str, CompletionOutput]:
    """Run a schedule to its end; returns the final output of every request, neighbours included.

    on_action: called with each action and whether it took effect (an abort may come too late).
    on_turn: called with each turn's number; of the idle turns before an arrival, only the last counts.

    The engine must be idle, and is idle again afterwards in any case. Raises ScheduleError if it rejects a request.
    """
    requests: Mapping[str, Case] = {case.request_id: case for case in schedule.requests}
    results: dict[str, CompletionOutput] = {}
    pending = list(reversed(schedule.actions))
    normal_lag, engine.lag = engine.lag, schedule.lag
    turn = 0
    try:
        while pending or engine.has_unfinished:
            if not engine.has_unfinished and pending[-1].turn > turn:
                turn = pending[-1].turn
                if on_turn is not None:
                    on_turn(turn - 1)
            while pending and pending[-1].turn <= turn:
                took_effect = _act(engine, pending[-1], requests)
                if on_action is not None:
                    on_action(pending[-1], took_effect)
                pending.pop()
            results.update((each.request_id, each.outputs[0]) for each in engine.step() if each.finished)
            if on_turn is not None:
                on_turn(turn)
            turn += 1
    finally:
        for name in requests:
            engine.abort(name)
        with contextlib.suppress(XlaEngineError):  # a dead engine has nothing to drain
            engine.drain()
        engine.lag = normal_lag
    return results


def _act(engine: XlaBatchEngine, action: Action, requests: Mapping[str, Case]) -> bool:
    """Whether the action took effect. Raises ScheduleError."""
    if action.kind == "abort":
        return engine.abort(action.request_id)
    if action.kind in WAYS_TO_PREEMPT:
        if action.kind not in engine.ways_to_preempt:
            raise ScheduleError(f"this engine cannot {action.kind} {action.request_id} in turn {action.turn}")
        return engine.preempt(action.request_id, how=action.kind)
    case = requests[action.request_id]
    try:
        engine.submit(case.prompt, case.params, request_id=case.request_id)
    except (InvalidRequestError, QueueFullError) as error:
        raise ScheduleError(
            f"this engine refuses request {case.request_id} in turn {action.turn}: {error}"
        ) from error
    return True
