"""The real engine under anything a caller and a device may do, in any order: hypothesis draws it, and shrinks what
fails. Stop strings, priorities, deadlines, faults and interrupts are part of it.

Two engines of one configuration on a very small random model: one is driven, the other runs each request alone. More
examples: `pytest tests/laws/test_stateful_engine.py --hypothesis-profile random`.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.recovery import FAULTS_IN_A_ROW
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.schedule import run_alone
from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.runner.compile_cache import compiles_of_this_thread
from xla_engine.runner.in_flight import InFlight
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import StepResult
from xla_engine.text.tokenizer import Tokenizer

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
CONFIG = EngineConfig(
    max_num_seqs=3, max_model_len=64, prefill_lanes=(2,), chunk_size=8, key_buckets=(128,), block_size=8
)
BY_DEFAULT = settings.get_current_profile_name() == "few"
SETTINGS = settings(
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

request_ids = st.sampled_from(list("abcdefgh"))  # few, so that ids return while their tokens are in flight
token_ids = st.integers(0, MODEL.vocab_size - 1)
prompts = st.lists(token_ids, min_size=1, max_size=40) | st.integers(9, 40).map(
    lambda count: ([7, 11, 13] * 14)[:count]
)
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
    stop=st.lists(st.text("ab", min_size=2, max_size=9), max_size=2),
    include_stop_str_in_output=st.booleans(),
)
priorities = st.sampled_from([0, 0, 0, -10, 1, 10])
patience = st.none() | st.none() | st.integers(1, 30)


def letters() -> Tokenizer:
    """A vocabulary of short strings of two letters, so that stop strings span several tokens."""
    strings = ["".join(word) for length in range(1, 6) for word in itertools.product("ab", repeat=length)]
    model = tokenizers.models.WordLevel(
        {word: number for number, word in enumerate(strings[: MODEL.vocab_size])}
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend)


class Clock:
    """The engine's clock, moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def engine() -> XlaBatchEngine:
    checkpoint = random_checkpoint(MODEL, seed=2, scale=0.4, eos_token_ids=(0,))
    return XlaBatchEngine(checkpoint, letters(), CONFIG)


@dataclass(slots=True)
class Life:
    """One use of a request id, with the result of that request run alone."""

    case: Case
    alone: CompletionOutput
    deadline: float | None
    queue_deadline: float | None
    faults: int  # of the engine, when it came
    tokens: int = 0  # delivered so far


class EngineMachine(RuleBasedStateMachine):
    """Submit, step, abort, drain, change the lag, inspect: the laws hold after each action."""

    clock: ClassVar[Clock]
    driven: ClassVar[XlaBatchEngine]
    aside: ClassVar[XlaBatchEngine]
    most_waiting: ClassVar[int] = 0
    ends: ClassVar[Counter[str]] = Counter()
    in_trouble: ClassVar[BaseException | None] = None  # what the next read of a step raises
    faults: ClassVar[int] = 0
    stop_strings: ClassVar[int] = 0
    alone: ClassVar[dict[str, CompletionOutput]] = {}  # by content

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Life] = {}
        self.aborted: dict[str, deque[Life]] = {}  # ended, their output not delivered yet

    @rule(
        request_id=request_ids,
        prompt=prompts,
        params=params,
        priority=priorities,
        deadline_s=patience,
        queue_timeout_s=patience,
    )
    def submit(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        deadline_s: int | None = None,
        queue_timeout_s: int | None = None,
    ) -> None:
        case = Case(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)
        if request_id in self.live:
            with pytest.raises(InvalidRequestError, match="choose another"):
                self.driven.submit(prompt, params, request_id=request_id)
            return
        self.driven.submit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            queue_timeout_s=queue_timeout_s,
        )
        content = repr(case)
        if content not in self.alone:
            self.alone[content] = run_alone(self.aside, case)
        now = self.clock.now
        deadline, queue_deadline = (
            None if seconds is None else now + seconds for seconds in (deadline_s, queue_timeout_s)
        )
        self.live[request_id] = Life(case, self.alone[content], deadline, queue_deadline, self.faults)

    @rule(prompts=st.lists(st.tuples(request_ids, prompts, params), min_size=3, max_size=6))
    def submit_more_than_there_are_slots(self, prompts: list[tuple[str, list[int], SamplingParams]]) -> None:
        for request_id, prompt, params in prompts:
            self.submit(request_id, prompt, params)

    @rule(turns=st.integers(1, 5))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.run(self.driven.step)

    @rule(request_id=request_ids)
    def abort(self, request_id: str) -> None:
        life = self.live.pop(request_id, None)
        assert self.driven.abort(request_id) == (life is not None)
        if life is not None:
            self.aborted.setdefault(request_id, deque()).append(life)

    @rule(request_id=request_ids, how=st.sampled_from([None, "park", "replay"]), to_back=st.booleans())
    def preempt(self, request_id: str, how: str | None, to_back: bool) -> None:
        self.driven.preempt(request_id, how=how, to_back=to_back)

    @rule()
    def drain(self) -> None:
        while self.driven.has_unfinished:
            self.run(self.driven.drain)
        assert not self.live and not any(self.aborted.values()), "ended without a terminal output"

    @rule(seconds=st.integers(1, 60))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(error=st.sampled_from([RuntimeError("planted"), MemoryError("planted"), KeyboardInterrupt()]))
    def trouble(self, error: BaseException) -> None:
        type(self).in_trouble = error

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
        """Leave the engine idle for the next example."""
        try:
            self.drain()
        finally:
            if self.driven.state.closed is not None or self.driven.has_unfinished:
                self.driven.close()
                self.start()
            self.driven.lag = CONFIG.lag

    def run(self, call: Callable[[], list[RequestOutput]]) -> None:
        try:
            self.take(call())
        except KeyboardInterrupt:
            self.take(self.driven.step())  # what had ended before the interrupt is there

    @classmethod
    def start(cls) -> None:
        """A fresh engine, whose next read of a step may raise, though not four times in a row."""
        cls.driven = engine()
        real, in_a_row = cls.driven.runner.wait, 0

        def wait(step: InFlight) -> StepResult:
            nonlocal in_a_row
            error, cls.in_trouble = cls.in_trouble, None
            in_a_row = 0 if error is None else in_a_row + 1
            if error is None or in_a_row == FAULTS_IN_A_ROW:
                in_a_row = 0
                return real(step)
            cls.faults += isinstance(error, Exception)
            raise error

        cls.driven.runner.wait = wait  # type: ignore[method-assign]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Compare a turn's outputs with the results of the same requests run alone."""
        for output in outputs:
            (found,) = output.outputs
            if found.finish_reason == "abort":
                life = self.aborted[output.request_id].popleft()
            else:
                life = self.live[output.request_id]
            if output.finished:
                self.ends[str(found.finish_reason)] += 1
            assert output.prompt_token_ids == life.case.prompt_token_ids
            count = len(found.token_ids)
            assert found.token_ids == life.alone.token_ids[:count]
            assert bits(found) == bits(life.alone)[: 4 * count]
            assert life.tokens <= count, "a token was taken back"
            assert output.finished == (found.finish_reason is not None)
            life.tokens = count
            if not output.finished:
                assert life.alone.text.startswith(found.text)
            elif found.finish_reason != "abort":
                self.check_end(life, output, found)
                del self.live[output.request_id]

    def check_end(self, life: Life, output: RequestOutput, found: CompletionOutput) -> None:
        """A request that ends by itself ends as it does alone, text included; every other end has a known cause."""
        now = self.clock.now
        match found.finish_reason:
            case "deadline":
                assert life.deadline is not None and life.deadline <= now
            case "queue_timeout":
                assert life.queue_deadline is not None and life.queue_deadline <= now and not found.token_ids
            case "error":
                assert self.faults >= life.faults + 2 and "planted" in str(output.error)
            case _:
                assert found == life.alone
                type(self).stop_strings += isinstance(found.stop_reason, str)


def bits(output: CompletionOutput) -> bytes:
    return np.asarray(output.logprobs, np.float32).tobytes()


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.full)])
def test_any_use_of_the_engine_keeps_the_laws(examples: int) -> None:
    most = examples if BY_DEFAULT else max(1000, settings().max_examples)
    EngineMachine.most_waiting = EngineMachine.stop_strings = EngineMachine.faults = 0
    EngineMachine.start()
    EngineMachine.driven.clock = EngineMachine.clock = Clock()
    EngineMachine.aside = engine()
    compiled = compiles_of_this_thread()
    try:
        run_state_machine_as_test(EngineMachine, settings=settings(SETTINGS, max_examples=most))
        assert compiles_of_this_thread() == compiled
        assert EngineMachine.most_waiting > 1, "slots were contended"
        counters = EngineMachine.driven.snapshot().counters
        assert counters.tokens_dropped > 0, "occupancies ended with tokens in flight"
        # Few examples do not bring about every end, nor always a preemption.
        rare = {"error"} if most >= 250 else {"error", "deadline", "queue_timeout"}
        seen = set(EngineMachine.ends)
        assert seen - rare == {"stop", "length", "abort", "deadline", "queue_timeout"} - rare, seen
        assert (counters.preemptions > 10 or most < 250) and counters.cached_tokens > 100
        assert EngineMachine.stop_strings > 0 and EngineMachine.driven.stats().recoveries > 0
    finally:
        EngineMachine.alone.clear()
        EngineMachine.ends.clear()
        EngineMachine.driven.close()
        EngineMachine.aside.close()


def test_an_id_that_returns_at_once_loses_no_output() -> None:
    """Found and shrunk by the machine above: submit, abort, submit the same id, and step with lag 0."""
    with engine() as driven:
        driven.lag = 0
        driven.submit([0], SamplingParams(max_tokens=1), request_id="a")
        driven.abort("a")
        driven.submit([0], SamplingParams(max_tokens=1), request_id="a")
        assert len(driven.drain()) == 2
