"""Requests and schedules drawn at random, and running them: what verification, records and replays share.

A schedule is data: which actions happen before which turn of the engine. Running it is deterministic.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError, XlaEngineError
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import QueueFullError
from xla_engine.structured_outputs import StructuredOutputsParams


class ScheduleError(XlaEngineError, ValueError):
    """The engine cannot run a schedule that was not drawn for it; the message names request and limit."""

    code = "invalid_schedule"


PREEMPTS = ("park", "recompute", "replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One drawn request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the caller does before a turn: "submit" or "abort" `request_id`, or take its slot away (`PREEMPTS`)."""

    turn: int
    kind: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions in order of their turns, over requests by id. `neighbours` are there to disturb and may be aborted."""

    lag: int
    cases: tuple[Case, ...]
    neighbours: tuple[Case, ...]
    actions: tuple[Action, ...]


def draw_cases(
    engine: XlaBatchEngine, count: int, seed: int, *, max_new_tokens: int = 24, every_field: bool = False
) -> list[Case]:
    """Random requests: prompt length 1..limit, cap 1..n, mixed sampling settings, some with frequent stop ids.

    Half of the prompts are cut from text the model itself continues well, if it has a tokenizer; the rest are
    random token ids, so that no two requests share a prefix by accident.

    every_field: most requests also have some of the fields that change logits, forbid tokens, end a text or ask for
        more log-probabilities (`draw_fields`).
    """
    draw, again = random.Random(seed), random.Random(f"{seed}/fields")
    vocabulary = engine.checkpoint.config.vocab_size
    limit = engine.max_model_len
    corpus = _corpus(engine)
    cases = []
    for index in range(count):
        cap = draw.choice(
            (1, 1, 2, 3, draw.randint(1, max_new_tokens), draw.randint(1, max_new_tokens), max_new_tokens)
        )
        cap = min(cap, limit - 1)
        # Mostly short prompts, a tail up to the longest that fits.
        longest = limit - cap
        length = min(longest, 1 + int(longest * draw.random() ** 3))
        if corpus and draw.random() < 0.5:
            at = draw.randrange(len(corpus))
            prompt = tuple((corpus * (1 + (at + length) // len(corpus)))[at : at + length])
        else:
            prompt = tuple(draw.randrange(vocabulary) for _ in range(length))
        params = _draw_params(draw, cap, vocabulary)
        if every_field:
            params = replace(params, **draw_fields(again, engine, params, corpus))
        cases.append(Case(request_id=f"case-{index}", prompt_token_ids=prompt, params=params))
    return cases


def draw_fields(
    draw: random.Random, engine: XlaBatchEngine, params: SamplingParams, corpus: Sequence[int]
) -> dict[str, Any]:
    """Fields beside those of every request, each for one in eight; those of text where the engine has a tokenizer.

    corpus: tokens of text that the model knows.
    """
    vocabulary = engine.checkpoint.config.vocab_size

    def some(count: int) -> list[int]:
        return draw.sample(range(vocabulary), min(count, vocabulary))

    fields: dict[str, Any] = {
        "min_tokens": draw.randint(0, params.max_tokens),
        "repetition_penalty": draw.choice((0.7, 1.3)),
        "frequency_penalty": draw.choice((-1.0, 1.5)),
        "presence_penalty": draw.choice((-1.5, 2.0)),
        "logit_bias": {token: draw.choice((-100.0, 4.5)) for token in some(3)},
        "allowed_token_ids": some(40),
        "ignore_eos": True,
        "logprobs": draw.choice((1, 5, 20)),
    }
    if engine.tokenizer is not None and corpus:
        at = draw.randrange(len(corpus))
        text = engine.tokenizer.decode((*corpus[at:], *corpus)[: draw.randint(1, 3)])
        fields["stop"] = [text] if text else []
        fields["bad_words"] = [text] if text.strip() else []
    if engine.tokenizer is not None and engine.checkpoint.eos_token_ids and find_spec("llguidance"):
        constraint = draw.choice(
            ({"regex": "[a-z_ ]{3,30}"}, {"json_object": True}, {"choice": ["yes", "no"]})
        )
        fields["structured_outputs"] = StructuredOutputsParams.from_mapping(constraint)
    drawn = {name: value for name, value in fields.items() if draw.random() < 0.125}
    if "structured_outputs" in drawn:  # only what the grammar allows, and its end
        for name in ("allowed_token_ids", "ignore_eos", "bad_words"):
            drawn.pop(name, None)
    return drawn


def _draw_params(draw: random.Random, cap: int, vocabulary: int) -> SamplingParams:
    stop = [draw.randrange(vocabulary) for _ in range(4)] if draw.random() < 0.3 else []
    if draw.random() < 0.4:
        return SamplingParams(temperature=0, max_tokens=cap, logprobs=0, stop_token_ids=stop)
    return SamplingParams(
        temperature=draw.choice((0.3, 0.7, 1.0, 1.5)),
        top_k=draw.choice((0, 0, 1, 5, 40, 200)),
        top_p=draw.choice((1.0, 1.0, 0.95, 0.5, 0.1)),
        min_p=draw.choice((0.0, 0.0, 0.05, 0.3)),
        seed=draw.choice((None, draw.randrange(2**63))),
        max_tokens=cap,
        logprobs=0,
        stop_token_ids=stop,
    )


def draw_schedule(
    cases: Sequence[Case], seed: int | str, *, lag: int, preempts: Sequence[str] = ()
) -> Schedule:
    """Random arrival turns in random order, among neighbours of which most are aborted at random turns.

    preempts: ways in which requests lose their slots at random turns, about one request in three.
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
            neighbours.append(replace(case, request_id=name, prompt_token_ids=case.prompt_token_ids[::-1]))
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
    """The reference run: the request by itself through the same executables, and nothing of it known from before."""
    engine.reset_prefix_cache()
    engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
    (output,) = engine.drain()
    return output.outputs[0]


def run_schedule(
    engine: XlaBatchEngine,
    schedule: Schedule,
    *,
    on_action: Callable[[Action, bool], None] | None = None,
    on_turn: Callable[[int, list[RequestOutput]], None] | None = None,
) -> dict[str, CompletionOutput]:
    """Run a schedule to its end; returns the final output of every request, neighbours included.

    `on_action` sees each action and whether it took effect (an abort may come too late). `on_turn` sees each turn's
    number and outputs; of turns in which nothing can happen it sees the last only, as they are passed over. The engine
    must be idle, and is idle again whatever is raised: ScheduleError where it refuses a request.
    """
    requests: Mapping[str, Case] = {case.request_id: case for case in (*schedule.cases, *schedule.neighbours)}
    results: dict[str, CompletionOutput] = {}
    pending = list(reversed(schedule.actions))
    normal_lag, engine.lag = engine.lag, schedule.lag
    turn = 0
    try:
        while pending or engine.has_unfinished:
            if not engine.has_unfinished and pending[-1].turn > turn:
                turn = pending[-1].turn
                if on_turn is not None:
                    on_turn(turn - 1, [])
            while pending and pending[-1].turn <= turn:
                took_effect = _act(engine, pending[-1], requests)
                if on_action is not None:
                    on_action(pending[-1], took_effect)
                pending.pop()
            outputs = engine.step()
            results.update((output.request_id, output.outputs[0]) for output in outputs if output.finished)
            if on_turn is not None:
                on_turn(turn, outputs)
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
    if action.kind in PREEMPTS:
        if action.kind not in engine.ways_to_preempt:
            raise ScheduleError(f"this engine cannot {action.kind} {action.request_id} in turn {action.turn}")
        return engine.preempt(action.request_id, how=action.kind)
    case = requests[action.request_id]
    try:
        engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
    except (InvalidRequestError, QueueFullError) as error:
        raise ScheduleError(
            f"this engine refuses request {case.request_id} in turn {action.turn}: {error}"
        ) from error
    return True


def _corpus(engine: XlaBatchEngine) -> tuple[int, ...]:
    """Some text the model knows: this module's own source."""
    if engine.tokenizer is None:
        return ()
    return tuple(engine.tokenizer.encode(inspect.getsource(random)))
