"""The requests of a soak: every kind that a caller can send, what happens to each, and what each may end with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.protocol import RequestOptions
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.sequence import sequence_ids
from xla_engine.equivalence.cases import draw_cases
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams

READERS = ("step", "step", "own", "slow", "gone")
OWN_ENDS = ("stop", "length")
_USUAL_SLOTS = 8
_STEM = 48  # tokens that many prompts of a life begin with


@dataclass(slots=True, kw_only=True, eq=False)
class SoakRequest:
    """One request, what happens to it, and what came back.

    reader: "step" finds its news in `XlaBatchEngine.step`; the others have a collector of their own, which is read in
        every turn ("own"), now and then ("slow"), or never, by a reader that has gone away ("gone").
    abort_turn: None lets it run. preempt: (turn, how). text_fails: its text fails after this many tokens.
    poison: every step with it fails, or with "decode" every one in which it decodes; "" for a good one.
    ends: its terminal results. aborted: whether the abort took effect. left: its reader was cancelled.
    tokens: of each sequence, when last looked at.
    """

    name: str
    prompt: Prompt
    params: SamplingParams
    turn: int
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    reader: str = "step"
    abort_turn: int | None = None
    preempt: tuple[int, str] | None = None
    text_fails: int | None = None
    poison: str = ""
    collector: OutputCollector | None = None
    ends: list[RequestOutput] = field(default_factory=list)
    aborted: bool = False
    left: bool = False
    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def sequences(self) -> list[str]:
        return sequence_ids(self.name, self.params.n)

    def allowed_ends(self) -> set[str]:
        """The reasons that one of its sequences may end for."""
        allowed = set() if self.poison == "all" else set(OWN_ENDS)
        if self.aborted:
            allowed.add("abort")
        if self.poison or self.text_fails is not None:
            allowed.add("error")
        if "deadline_s" in self.options:
            allowed.add("deadline")
        if "queue_timeout_s" in self.options:
            allowed.add("queue_timeout")
        return allowed


def draw_requests(
    engine: XlaBatchEngine, draw: random.Random, count: int, name: str, stems: Sequence[tuple[int, ...]]
) -> list[SoakRequest]:
    """Draw requests that come in the first turns of a round, named after it: more of them a turn
    where there are more slots. stems: what prompts may begin with."""
    pace = draw.choice((0.3, 1.0, 4.0)) * max(1.0, engine.max_num_seqs / _USUAL_SLOTS)  # arrivals a turn
    turn, requests = 0.0, []
    limit = engine.max_model_len
    for index, case in enumerate(draw_cases(engine, count, draw.randrange(2**32), every_field=True)):
        turn += draw.expovariate(pace)
        prompt: Any = case.prompt_token_ids
        params = _more_fields(draw, case.params)
        if draw.random() < 0.4:
            stem = draw.choice(stems)
            prompt = (stem[: draw.randrange(len(stem))] + prompt)[: limit - params.token_limit]
        if engine.tokenizer is not None and draw.random() < 0.1:
            text = engine.tokenizer.decode(prompt[:12])
            prompt = text if len(text) > 1 else prompt
        requests.append(
            SoakRequest(
                name=f"{name}-{index}",
                prompt=prompt,
                params=params,
                turn=int(turn),
                options=_options(draw),
                reader=draw.choice(READERS),
            )
        )
    poisoned = draw.choice(requests) if draw.random() < 0.5 else None
    for request in requests:
        _draw_fate(draw, request, engine.ways_to_preempt, has_text=engine.tokenizer is not None)
        if request is poisoned:
            request.poison = draw.choice(("all", "decode"))
    return requests


def stems(engine: XlaBatchEngine, draw: random.Random) -> list[tuple[int, ...]]:
    """Two beginnings of prompts, for a prefix cache to find."""
    vocabulary, length = engine.checkpoint.config.vocab_size, min(_STEM, engine.max_model_len // 2)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(2)]


def _more_fields(draw: random.Random, params: SamplingParams) -> SamplingParams:
    """Fields that `draw_cases` leaves alone."""
    if params.temperature > 0 and draw.random() < 0.15:
        params = replace(params, n=draw.randint(2, 3))
    if draw.random() < 0.1:
        params = replace(params, prompt_logprobs=draw.choice((0, 2)))
    if draw.random() < 0.05:
        params = replace(params, detokenize=False, stop=(), bad_words=params.bad_words)
    return params


def _options(draw: random.Random) -> RequestOptions:
    options = RequestOptions()
    if draw.random() < 0.3:
        options["priority"] = draw.choice((-10, -1, 1, 10))
    if draw.random() < 0.12:
        options["deadline_s"] = draw.choice((0.02, 0.1, 0.4, 100.0))
    if draw.random() < 0.08:
        options["queue_timeout_s"] = draw.choice((0.02, 0.2, 100.0))
    if draw.random() < 0.2:
        options["cache_salt"] = draw.choice(("tenant", "other"))
    return options


def _draw_fate(draw: random.Random, request: SoakRequest, ways: Sequence[str], *, has_text: bool) -> None:
    if request.reader == "gone" or draw.random() < 0.12:
        request.abort_turn = request.turn + draw.randrange(12)
    if draw.random() < 0.2:
        request.preempt = (request.turn + draw.randrange(1, 16), draw.choice(ways))
    if has_text and request.params.detokenize and draw.random() < 0.04:
        request.text_fails = draw.randrange(4)


def bad_requests(engine: XlaBatchEngine, live: str | None) -> list[dict[str, Any]]:
    """Arguments of `submit` that are refused: fields of `SamplingParams` under "params". live: an id in use."""
    vocabulary, limit = engine.checkpoint.config.vocab_size, engine.max_model_len
    bad: list[dict[str, Any]] = [
        {"prompt": []},
        {"prompt": [vocabulary]},
        {"prompt": [-1]},
        {"prompt": [1] * (limit + 1)},
        {"prompt": [1], "params": {"max_tokens": 10**9}},
        {"prompt": [1], "params": {"max_tokens": 0}},
        {"prompt": [1], "params": {"n": 10**6}},
        {"prompt": [1], "params": {"n": 2, "temperature": 0}},
        {"prompt": [1], "params": {"temperature": float("nan")}},
        {"prompt": [1], "params": {"top_p": 0.0}},
        {"prompt": [1], "params": {"logit_bias": {vocabulary: 1.0}}},
        {"prompt": [1], "params": {"allowed_token_ids": []}},
        {"prompt": [1], "params": {"best_of": 10**9}},
        {"prompt": [1], "params": {"no_such_field": 1}},
        {"prompt": [1], "params": {"logprobs": 10**6}},
        {"prompt": [1], "priority": 99},
        {"prompt": [1], "deadline_s": -1.0},
        {"prompt": [1], "cache_salt": 7},
        {"prompt": {"prompt_embeds": [0.0]}},
    ]
    if engine.tokenizer is not None:
        constraints: tuple[dict[str, Any], ...] = (
            {"regex": "("},
            {"json": {"type": 7}},
            {"grammar": "start: start"},
            {"json": "{"},
            {},
        )
        bad += [{"prompt": [1], "params": {"structured_outputs": each}} for each in constraints]
        bad.append({"prompt": "\ud800"})
    if live is not None:
        bad.append({"prompt": [1], "request_id": live})
    return bad
