"""The real engine under anything a caller may do, in any order: hypothesis draws it, and shrinks what fails.

Two engines of one configuration on a very small random model: one is driven, the other runs each request alone. More
examples: `pytest tests/test_stateful_engine.py --hypothesis-profile NAME`, with a profile that sets `max_examples`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphs.config import ModelConfig
from xla_engine.checkpoint import Checkpoint, random_weights
from xla_engine.config import EngineConfig
from xla_engine.engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.schedule import Case, run_alone

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
CONFIG = EngineConfig(max_num_seqs=3, max_model_len=64, prefill_lanes=(2,), chunk_size=8, key_buckets=(128,))
BY_DEFAULT = settings.get_current_profile_name() in ("default", "ci")
SETTINGS = settings(
    max_examples=250 if BY_DEFAULT else settings().max_examples,
    stateful_step_count=40,
    derandomize=BY_DEFAULT,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

request_ids = st.sampled_from(list("abcdefgh"))  # few, so that ids return while their tokens are in flight
token_ids = st.integers(0, MODEL.vocab_size - 1)
prompts = st.lists(token_ids, min_size=1, max_size=40)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 16),
    logprobs=st.just(0),
    stop_token_ids=st.lists(token_ids, max_size=3),
)


def engine() -> XlaBatchEngine:
    weights = random_weights(MODEL, dtype="bfloat16", seed=2, scale=0.4)
    checkpoint = Checkpoint(
        path=Path("nano"),
        config=MODEL,
        weights=weights,
        eos_token_ids=(0,),
        bos_token_id=None,
        dtype="bfloat16",
        fingerprint="nano",
    )
    return XlaBatchEngine(checkpoint, None, CONFIG)


@dataclass(slots=True)
class Life:
    """One life of a request id, and what it returns when it is alone."""

    case: Case
    alone: CompletionOutput
    tokens: int = 0  # delivered so far


class EngineMachine(RuleBasedStateMachine):
    """Submit, step, abort, drain, change the lag, look: the laws hold after each."""

    driven: ClassVar[XlaBatchEngine]
    aside: ClassVar[XlaBatchEngine]
    most_waiting: ClassVar[int] = 0
    alone: ClassVar[dict[str, CompletionOutput]] = {}  # by content

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Life] = {}
        self.aborted: dict[str, deque[Life]] = {}  # ended, their output not delivered yet

    @rule(request_id=request_ids, prompt=prompts, params=params)
    def submit(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        case = Case(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)
        if request_id in self.live:
            with pytest.raises(InvalidRequestError, match="choose another"):
                self.driven.submit(prompt, params, request_id=request_id)
            return
        self.driven.submit(prompt, params, request_id=request_id)
        content = repr(case)
        if content not in self.alone:
            self.alone[content] = run_alone(self.aside, case)
        self.live[request_id] = Life(case, self.alone[content])

    @rule(prompts=st.lists(st.tuples(request_ids, prompts, params), min_size=3, max_size=6))
    def submit_more_than_there_are_slots(self, prompts: list[tuple[str, list[int], SamplingParams]]) -> None:
        for request_id, prompt, params in prompts:
            self.submit(request_id, prompt, params)

    @rule(turns=st.integers(1, 5))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.take(self.driven.step())

    @rule(request_id=request_ids)
    def abort(self, request_id: str) -> None:
        life = self.live.pop(request_id, None)
        assert self.driven.abort(request_id) == (life is not None)
        if life is not None:
            self.aborted.setdefault(request_id, deque()).append(life)

    @rule()
    def drain(self) -> None:
        self.take(self.driven.drain())
        assert not self.driven.has_unfinished
        assert not self.live and not any(self.aborted.values()), "ended without a terminal output"

    @rule(lag=st.integers(0, 3))
    def change_lag(self, lag: int) -> None:
        self.driven.lag = lag

    @rule()
    def look(self) -> None:
        snapshot = self.driven.snapshot()
        held = {view.request.request_id for view in snapshot.slots if view.request is not None}
        waiting = {view.request_id for view in snapshot.waiting}
        type(self).most_waiting = max(self.most_waiting, len(waiting))
        assert held | waiting <= set(self.live) and not held & waiting
        assert len(held) <= CONFIG.max_num_seqs

    @invariant()
    def scheduler_is_sound(self) -> None:
        self.driven.scheduler.check()
        assert self.driven.num_running + self.driven.num_waiting == len(self.live)

    def teardown(self) -> None:
        """Leave the engine idle for the next example, whatever happened in this one."""
        try:
            self.drain()
        finally:
            if self.driven._closed is not None or self.driven.has_unfinished:
                self.driven.close()
                type(self).driven = engine()
            self.driven.lag = CONFIG.lag

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Check what a turn delivered, against what the requests return alone."""
        for output in outputs:
            (found,) = output.outputs
            if found.finish_reason == "abort":
                life = self.aborted[output.request_id].popleft()
            else:
                life = self.live[output.request_id]
            assert output.prompt_token_ids == life.case.prompt_token_ids
            count = len(found.token_ids)
            assert found.token_ids == life.alone.token_ids[:count]
            assert bits(found) == bits(life.alone)[: 4 * count]
            assert life.tokens <= count, "a token was taken back"
            assert output.finished == (found.finish_reason is not None)
            life.tokens = count
            if output.finished and found.finish_reason != "abort":
                assert (count, found.finish_reason) == (len(life.alone.token_ids), life.alone.finish_reason)
                del self.live[output.request_id]


def bits(output: CompletionOutput) -> bytes:
    return np.asarray(output.logprobs, np.float32).tobytes()


def test_any_use_of_the_engine_keeps_the_laws() -> None:
    EngineMachine.driven, EngineMachine.aside = engine(), engine()
    compiled = EngineMachine.driven.stats().compiles_after_warmup  # by the other engine
    try:
        run_state_machine_as_test(EngineMachine, settings=SETTINGS)
        assert EngineMachine.driven.stats().compiles_after_warmup == compiled
        assert EngineMachine.most_waiting > 1, "slots were contended"
        counters = EngineMachine.driven.snapshot().counters
        assert counters.tokens_dropped > 0, "tenancies ended with tokens in flight"
    finally:
        EngineMachine.alone.clear()
        EngineMachine.driven.close()
        EngineMachine.aside.close()


def test_an_id_that_returns_at_once_loses_no_output() -> None:
    """Shrunk by the machine above: submit, abort, submit the same id, and step with lag 0."""
    with engine() as driven:
        driven.lag = 0
        driven.submit([0], SamplingParams(max_tokens=1), request_id="a")
        driven.abort("a")
        driven.submit([0], SamplingParams(max_tokens=1), request_id="a")
        assert len(driven.drain()) == 2
