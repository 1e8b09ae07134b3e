"""A caller's own scheduling policy orders the queue. If it fails, one request is refused and no other is affected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models import TINY_ENGINE
from tests.support.policy_loop import PolicyLoop
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Request, Scheduler, SchedulerConfig
from xla_engine.scheduler.pipeline import restarted
from xla_engine.scheduler.user_policy import PolicyError, find_policy

SOURCE = '''
calls = []

def fewest_tokens(facts):
    return facts.prompt_tokens + facts.max_tokens

class Tenants:
    def place(self, facts):
        calls.append(facts)
        return {"gold": 0, "silver": 1}.get(facts.cache_salt, 2)

class Breaks:
    def place(self, facts):
        if facts.max_tokens == 7:
            raise KeyError("seven")
        return {8: float("nan"), 9: "9", 10: True, 11: None}.get(facts.max_tokens, 0)

class Once:
    """Fails when it is asked again."""
    def __init__(self):
        self.seen = 0
    def place(self, facts):
        self.seen += 1
        if self.seen > 3:
            raise RuntimeError("asked again")
        return -self.seen

class Dies:
    def __init__(self):
        raise SystemExit(3)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_policies.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_policies", None)


def config(name: str, **fields: int) -> SchedulerConfig:
    sizes = {"max_num_seqs": 1, "chunk_size": 4, "max_num_batched_tokens": 40, **fields}
    return SchedulerConfig(scheduling_policy=name, **sizes)  # type: ignore[arg-type]


def ask(name: str, prompt: int = 2, tokens: int = 3, salt: str = "") -> Request:
    return Request(request_id=name, prompt_token_ids=(1,) * prompt, max_tokens=tokens, cache_salt=salt)


def order(name: str, requests: list[Request], **fields: int) -> list[str]:
    loop = PolicyLoop(config(name, **fields))
    for request in requests:
        loop.submit(request)
    loop.drain(1)
    return [admitted for plan in loop.plans for admitted in plan.admitted]


def test_a_function_and_a_class_order_the_line() -> None:
    sizes = [ask("long", 9, 6), ask("short", 1, 2), ask("mid", 4, 3), ask("also short", 2, 1)]
    assert order("my_policies:fewest_tokens", sizes) == ["short", "also short", "mid", "long"]
    salts = [ask("a"), ask("b", salt="silver"), ask("c", salt="gold"), ask("d", salt="gold"), ask("e")]
    assert order("my_policies:Tenants", salts) == ["c", "d", "b", "a", "e"]
    facts = sys.modules["my_policies"].calls[-1]
    assert (facts.turn, facts.prompt_tokens, facts.max_tokens, facts.cache_salt) == (4, 2, 3, "")


def test_no_request_waits_for_ever() -> None:
    """Even if the policy puts it last, it is next after `priority_aging` others."""
    requests = [ask("none")] + [ask(f"gold {n}", salt="gold") for n in range(9)]
    assert order("my_policies:Tenants", requests, priority_aging=4).index("none") == 4


@pytest.mark.parametrize("tokens", [7, 8, 9, 10, 11])
def test_a_request_for_which_it_fails_is_not_taken(tokens: int) -> None:
    loop = PolicyLoop(config("my_policies:Breaks"))
    loop.submit(ask("before"))
    with pytest.raises(PolicyError, match=r"'my_policies:Breaks' (failed|returned)"):
        loop.scheduler.submit(ask("bad", tokens=tokens))
    loop.scheduler.check()
    loop.submit(ask("after"))
    loop.drain(1)
    assert {life.request.request_id for life in loop.ended} == {"before", "after"}


def test_requests_that_were_taken_stay_when_it_fails_later() -> None:
    scheduler = Scheduler(config("my_policies:Once", max_num_seqs=2))
    for name in "abc":
        scheduler.submit(ask(name))
    scheduler.plan()
    assert scheduler.preempt("c", how="replay") == "replay"  # the policy fails, and it waits all the same
    scheduler.check()
    fresh = restarted(scheduler)
    fresh.check()
    assert fresh.num_waiting == 3
    with pytest.raises(PolicyError):
        scheduler.submit(ask("d"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:Name", "ModuleNotFoundError"),
        ("my_policies:Name", "AttributeError"),
        ("my_policies:SOURCE.x", "AttributeError"),
        ("my_policies:calls", "a method `place`"),
        ("my_policies:Dies", "SystemExit"),
        (":", "cannot be loaded"),
        ("lifo", "choose one of"),
    ],
)
def test_what_is_no_policy_is_named_at_the_start(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_policy(path)
    with pytest.raises(ConfigError, match=words):
        EngineConfig(scheduling_policy=path)
    with pytest.raises(ValueError, match=words):
        config(path)


def test_an_engine_refuses_one_request_and_serves_the_others(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    engine = make_engine(replace(TINY_ENGINE, scheduling_policy="my_policies:Breaks"))
    engine.submit([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    with pytest.raises(InvalidRequestError, match="KeyError: 'seven'"):
        engine.submit([1, 2], SamplingParams(max_tokens=7))
    engine.submit([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(engine.drain()) == 2 and engine.num_waiting == engine.num_running == 0
    engine.scheduler.check()
