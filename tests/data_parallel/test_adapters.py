"""Adapters with several engines: each request gets its own on any engine, even when processes die."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.adapters import adapters, write_adapter
from tests.support.command_line import ROOT, invoke
from tests.support.engine_faults import bits
from tests.support.tensor_parallel import GOLDEN
from xla_engine.config import EngineConfig
from xla_engine.data_parallel.adapters import FleetAdapters
from xla_engine.data_parallel.engine import DataParallelEngine
from xla_engine.data_parallel.fleet import Member
from xla_engine.data_parallel.request import RemoteRequest
from xla_engine.data_parallel.routing import PrefixRouter
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import AdaptersBusyError, InvalidRequestError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.sampling_params import SamplingParams

MODEL = GOLDEN / "qwen3"
CONFIG = EngineConfig(
    max_num_seqs=2, max_model_len=64, prefill_lanes=(2,), chunk_size=16, self_check=False,
    enable_lora=True, max_loras=2,
)  # fmt: skip
Wanted = list[tuple[str, list[int], SamplingParams, LoRARequest | None]]


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    return adapters(tmp_path_factory.mktemp("adapters"), load_checkpoint(MODEL), 4)


def requests(loras: list[LoRARequest], count: int) -> Wanted:
    """Requests with each adapter and with none."""
    draw = random.Random(count)
    return [
        (
            f"r{number}",
            [draw.randrange(1, 199) for _ in range(draw.randrange(1, 30))],
            SamplingParams(temperature=0.8, max_tokens=draw.randrange(1, 30), logprobs=0, ignore_eos=True),
            draw.choice([None, *loras]),
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def single() -> Iterator[XlaBatchEngine]:
    """One engine with room for all adapters."""
    with XlaBatchEngine.from_pretrained(MODEL, replace(CONFIG, max_loras=4)) as engine:
        yield engine


def expected(single: XlaBatchEngine, wanted: Wanted) -> dict[str, bytes]:
    submit(single, wanted)
    return ended(single)


def submit(engine: Any, wanted: Wanted) -> None:
    for name, prompt, params, lora in wanted:
        engine.submit(prompt, params, request_id=name, lora_request=lora)


def ended(engine: Any) -> dict[str, bytes]:
    outputs = engine.drain()
    assert [each.error for each in outputs] == [None] * len(outputs)
    return {output.request_id: bits(output.outputs[0]) for output in outputs}


@pytest.mark.full
def test_results_are_those_of_one_engine(
    single: XlaBatchEngine, loras: list[LoRARequest], tmp_path: Path
) -> None:
    """Four adapters in two engines with room for two each: requests wait until their adapter has room."""
    wanted = requests(loras, 40)
    with DataParallelEngine(MODEL, CONFIG, engines=2) as several:
        submit(several, wanted)
        found = ended(several)
        assert found == expected(single, wanted)
        without = [(*each[:3], None) for each in wanted if each[3] is not None]
        submit(several, without)
        assert not ended(several).items() & found.items(), "adapters change what comes"

        first, second, third, _ = loras
        for number in several.list_loras():
            assert several.remove_lora(number)
        assert several.add_lora(first) and not several.add_lora(first) and several.list_loras() == {1}
        assert several.pin_lora(1) and not several.pin_lora(7)
        single.add_lora(first)
        single.pin_lora(1)
        assert several.identity().config["adapters"] == single.identity().config["adapters"]
        assert several.identity().config["max_loras"] == 2 < single.identity().config["max_loras"]
        assert several.adapter_named("adapter-1") == first and several.adapter_named("qwen3") is None
        with pytest.raises(InvalidRequestError, match="no model 'other'; here are qwen3, adapter-1"):
            several.adapter_named("other")
        with pytest.raises(InvalidRequestError, match="give 'other' another id"):
            several.submit([1], lora_request=LoRARequest("other", 1, second.lora_path))
        with pytest.raises(InvalidRequestError, match=r"adapter 'none'.*no such directory"):
            several.submit([1], lora_request=LoRARequest("none", 9, str(tmp_path / "none")))
        with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
            several.submit([1], lora_request="adapter")  # type: ignore[arg-type]

        several.submit([1, 2], wanted[0][2], lora_request=second)
        with pytest.raises(InvalidRequestError, match="adapter 2 has running"):
            several.remove_lora(2)
        several.submit([1, 2], wanted[0][2], lora_request=third)
        with pytest.raises(AdaptersBusyError, match="no room for the adapters of running"):
            several.pin_lora(2)
        ended(several)
        assert several.pin_lora(2) and set(several.identity().config["adapters"]) == {
            "adapter-1",
            "adapter-2",
        }
        with pytest.raises(AdaptersBusyError, match="and pinned"):
            several.submit([1], lora_request=third)
        assert several.remove_lora(2) and several.list_loras() == {1}


@pytest.mark.full
def test_killed_processes_change_nothing(single: XlaBatchEngine, loras: list[LoRARequest]) -> None:
    """A killed process loads its adapters again when it restarts; its requests run on the other process."""
    wanted = requests(loras, 150)
    found: dict[str, bytes] = {}
    draw, killed = random.Random(2), 0
    with DataParallelEngine(MODEL, CONFIG, engines=2) as several:
        several.add_lora(loras[0])
        several.pin_lora(1)
        submit(several, wanted)
        while several.has_unfinished:
            for output in several.step(only_finished=True):
                assert output.error is None and output.request_id not in found
                found[output.request_id] = bits(output.outputs[0])
            ready = [member for member in several.fleet.members if member.ready]
            if killed < 3 and ready and len(found) > 30 * killed + 5:
                pid = draw.choice(ready).pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert killed == 3 and several.stats().recoveries >= 2
        assert 1 in several.list_loras()
    assert found == expected(single, wanted)


@pytest.mark.full
def test_files_that_have_changed_are_not_taken_for_what_they_were(
    loras: list[LoRARequest], tmp_path: Path
) -> None:
    """A request has one adapter from its first token to its last, on whichever engine it runs."""
    shutil.copytree(loras[0].lora_path, tmp_path / "adapter")
    adapter = LoRARequest("mine", 5, str(tmp_path / "adapter"))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with DataParallelEngine(MODEL, CONFIG, engines=1) as several:
        several.submit([1], params, lora_request=adapter)
        assert several.drain()[0].error is None
        shutil.rmtree(tmp_path / "adapter")
        write_adapter(tmp_path / "adapter", load_checkpoint(MODEL), seed=99)
        several.submit([1], params, lora_request=adapter)
        assert several.drain()[0].error is None  # it is loaded
        os.kill(several.pids[0], signal.SIGKILL)
        several.submit([1], params, request_id="again", lora_request=adapter)
        (output,) = several.drain()
        assert "have changed since it was first loaded" in str(output.error)
        assert several.remove_lora(5)
        several.submit([1], params, lora_request=adapter)
        assert several.drain()[0].error is None


@pytest.mark.full
def test_a_run_chooses_adapters_by_name(tmp_path: Path) -> None:
    """The lines of one engine, byte for byte; an audit needs the adapters that the receipts name."""
    model = embedded_model_directory()
    path = write_adapter(tmp_path / "adapter", load_checkpoint(model), modules=("q_proj", "down_proj"))
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": "def f(x):", "max_tokens": 12, "logprobs": 0, "seed": number},
        }
        for number in range(6)
        for name in [("mine", model.name)[number % 2]]
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = []
    for engines in (1, 2):
        target = tmp_path / f"{engines}.jsonl"
        adapters = ["--enable-lora", "--lora-modules", f"mine={path}"]
        options = [
            *adapters,
            "--data-parallel-size",
            str(engines),
            "--receipts",
            str(tmp_path / f"{engines}"),
        ]
        command = ["run", str(tmp_path / "in.jsonl"), "-o", str(target), *options, "--max-num-seqs", "2"]
        command += ["--max-model-len", "128", "--ordered", "--created", "17", "--no-progress"]
        done = subprocess.run(
            [sys.executable, "-m", "xla_engine", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
        written.append(target.read_bytes())
    assert written[0] == written[1]
    texts = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in written[0].splitlines()]
    assert len(set(texts)) > 1
    for options, status in ((adapters, 0), ([], 2)):
        found = invoke("audit", tmp_path / "2.jsonl", "--receipts", tmp_path / "2", "--json", *options)
        assert found.exit_code == status, found.output
        assert json.loads(found.stdout)["checked"] == (0 if status else 6)


@dataclass
class Heard:
    """A fake process with room for a fixed number of adapters."""

    room: int
    has: list[int] = field(default_factory=list)

    def tell(self, message: dict[str, Any]) -> None:
        if message["op"] == "unload":
            self.has.remove(message["adapter"])
        else:
            number = message["adapter"]["request"]["lora_int_id"]
            if number not in self.has:
                self.has.append(number)
            assert len(self.has) <= self.room


def lora(number: int) -> LoRARequest:
    return LoRARequest(f"a{number}", number, f"/{number}")


@dataclass
class World:
    """Engines in name only, the adapters that they have, and requests that run on them."""

    room: int
    members: list[Member]
    live: dict[str, RemoteRequest] = field(default_factory=dict)
    adapters: FleetAdapters = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = FleetAdapters(lambda one: one.lora_name, self.room, self.members, self.live.values)

    def begin(self, name: str, number: int, loads: dict[int, int], slack: int) -> int | None:
        adapter = self.adapters.of(lora(number))
        assert adapter is not None
        near, having = self.adapters.engines_for(adapter, loads, slack)
        if not near:
            return None
        index = PrefixRouter(16, slack).choose([], "", near, having)
        member = self.members[index]
        self.adapters.make_room(member, adapter)
        request = RemoteRequest(
            name, 0, None, (1,), SamplingParams(), OutputCollector(), 0.0, adapter=adapter, engine=index
        )
        self.live[name] = request
        member.live[len(name)] = request
        assert member.process is not None
        member.process.tell(request.command(len(name), index, 0.0))
        return index


def world(engines: int, room: int) -> World:
    members: list[Any] = [Member(index, Heard(room)) for index in range(engines)]  # type: ignore[arg-type]
    return World(room, members)


def test_an_engine_that_has_the_adapter_goes_first() -> None:
    """Where another would have to be dropped for it, also with more requests; else only among equals."""
    made = world(2, 1)
    assert made.begin("a", 1, {0: 0, 1: 0}, 4) == 0
    assert made.begin("aa", 1, {0: 1, 1: 0}, 4) == 1  # there is room, so that both are used
    assert made.begin("aaa", 1, {0: 1, 1: 1}, 4) == 0
    assert made.begin("aaaa", 2, {0: 2, 1: 1}, 4) is None  # requests have both places
    made.members[1].live.clear()
    assert made.begin("aaaa", 2, {0: 2, 1: 0}, 4) == 1
    made.members[1].live.clear()
    assert made.begin("aaaaa", 1, {0: 4, 1: 0}, 4) == 0  # not worth it to drop the other
    assert made.begin("aaaaaa", 1, {0: 5, 1: 0}, 4) == 1
    assert [each.adapters for each in made.members] == [[1], [1]]


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=40),
)
def test_engines_do_what_the_parent_thinks(engines: int, room: int, moves: list[tuple[int, int]]) -> None:
    """Whatever comes, ends, is pinned or removed: no engine is told of more than it has room for, or of what it lacks,
    and what has requests stays."""
    made, names = world(engines, room), iter("x" * length for length in range(1, 99))
    for move, number in moves:
        loads = {member.index: len(member.live) for member in made.members}
        if move <= 1:
            all_pinned = len(made.adapters.pinned) >= room and f"a{number}" not in made.adapters.pinned
            if all_pinned:
                with pytest.raises(AdaptersBusyError):
                    made.begin(next(names), number, loads, 2)
            elif made.begin(next(names), number, loads, 2) is None:
                for member in made.members:
                    assert {each.adapter.number for each in member.live.values() if each.adapter} - {number}
        elif move == 2 and made.live:
            name = sorted(made.live)[number % len(made.live)]
            request = made.live.pop(name)
            assert request.engine is not None
            del made.members[request.engine].live[len(name)]
        elif move == 3:
            has = any(each.adapter == made.adapters.known.get(number) for each in made.live.values())
            try:
                assert made.adapters.remove(number) or not has
            except InvalidRequestError:
                assert has
        elif move == 4:
            known = any(number in member.adapters for member in made.members)
            try:
                assert made.adapters.pin(number) is known
            except AdaptersBusyError:
                assert made.live
        for member in made.members:
            process: Any = member.process
            assert sorted(process.has) == sorted(member.adapters) and len(member.adapters) <= room
            for each in member.live.values():
                assert each.adapter is not None and each.adapter.number in member.adapters
        made.adapters.tidy()
        assert set(made.adapters.known) == {number for member in made.members for number in member.adapters}
