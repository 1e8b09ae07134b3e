"""A model over two hosts, here two processes, gives the bits of one; and a process that ends, ends the other."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.hosts import address, run, start
from tests.support.models import TINY
from tests.support.tensor_parallel import run as run_in_one
from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.open_engine import open_engine
from xla_engine.runner import hosts
from xla_engine.runner.hosts import Hosts, address_of, check_config
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.step_messages import StepReader, StepSender
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import (
    BlockCopy,
    BlockTable,
    Chunk,
    Continuation,
    Moves,
    Plan,
    Reuse,
    Row,
    SavedState,
    Slot,
    Swap,
)
from xla_engine.text.token_mask import TokenMask
from xla_engine.tools.bench.models import write_checkpoint

SLOTS = [Slot(index=index, epoch=index + 3) for index in range(4)]


@pytest.mark.full
@pytest.mark.parametrize("engine", [{"preemption": True}, {"num_blocks": 20}], ids=["slots", "blocks"])
def test_two_processes_have_the_bits_of_one(engine: dict[str, object]) -> None:
    """With requests of every kind, cached prefixes, and requests that are parked in the memory of their hosts."""
    job = {"model": "tiny", "preempts": True, "engine": engine | {"self_check": True}}
    (one,) = run_in_one(job, sizes=(2,))
    two = run(job)
    assert two["outputs"] == one[2]["outputs"]
    assert two["compiles"] == 0 and two["preemptions"] > 0 and two["cached"] > 0
    assert two["weights"] == one[2]["weights"] and two["cache"] == one[2]["cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "model"
    write_checkpoint(TINY, random_weights(TINY, dtype="bfloat16", scale=0.3), path)
    return path


def _lines(path: Path, count: int, **fields: object) -> Path:
    rows = ({"prompt": [1 + index % 90, 5, 9], "max_tokens": 40, **fields} for index in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def _both(
    model: Path, lines: Path, out: Path
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """The processes of `run` and of `join`."""
    where = address()
    shared = (
        "--model",
        str(model),
        "--tensor-parallel-size",
        "2",
        "--max-num-seqs",
        "8",
        "--max-model-len",
        "128",
    )
    hosts = ("--num-hosts", "2", "--coordinator", where)
    files = (str(lines), "-o", str(out), "--ordered", "--created", "0", "--no-progress")
    first = start("xla_engine", "run", *files, *shared, *hosts)
    second = start("xla_engine", "join", where, "--host-rank", "1")
    try:
        yield first, second
    finally:
        for each in (first, second):
            each.kill()
            each.communicate()


@pytest.mark.full
def test_run_over_two_processes_writes_the_file_of_one(model: Path, tmp_path: Path) -> None:
    lines = _lines(tmp_path / "in.jsonl", 20, logprobs=1, seed=3)
    with _both(model, lines, tmp_path / "two.jsonl") as (first, second):
        told = first.communicate(timeout=600)[1]
        assert first.returncode == 0, told
        told = second.communicate(timeout=60)[1]
        assert second.returncode == 0 and "host 1 of 2 is ready" in told
    arguments = ("--model", str(model), "--max-num-seqs", "8", "--max-model-len", "128", "--no-progress")
    alone = start(
        *("xla_engine", "run", str(lines), "-o", str(tmp_path / "one.jsonl"), "--ordered", "--created", "0"),
        *arguments,
    )
    assert alone.wait(timeout=600) == 0
    alone.communicate()
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other(model: Path, tmp_path: Path, killed: int) -> None:
    """With the name of the host, and soon: its connection ends with it."""
    lines = _lines(tmp_path / "in.jsonl", 100_000)
    with _both(model, lines, tmp_path / "out.jsonl") as both:
        until = time.monotonic() + 600
        while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").stat().st_size:
            assert all(each.poll() is None for each in both) and time.monotonic() < until
            time.sleep(0.1)
        both[killed].send_signal(signal.SIGKILL)
        left = both[1 - killed]
        told = left.communicate(timeout=120)[1]
        assert left.returncode == 1 and f"host {killed} has ended" in told, told


def test_a_plan_arrives_as_it_was_sent() -> None:
    mask = TokenMask(64, allowed=(3, 40), bad_words=((3, 40),))
    params = SamplingParams(logit_bias={5: 2.5}, min_tokens=2, max_tokens=9, prompt_logprobs=1, stop=("x",))
    rows = {
        "a": RowSettings(
            max_tokens=9, stop_token_ids=(7,), params=params, seed=2**64 - 1, prompt_token_ids=(1, 2)
        ),
        "b": RowSettings(max_tokens=8, stop_token_ids=(), params=SamplingParams(), seed=0, mask=mask),
    }
    decode = (Row(slot=SLOTS[1], request_id="b"),)
    moves = Moves(
        parks=(Swap(slot=SLOTS[2], request_id="c", length=9, blocks=(4, -1)),),
        resumes=(Swap(slot=SLOTS[0], request_id="a", length=8),),
        copies=(BlockCopy(source=1, target=2),),
        continues=(Continuation(slot=SLOTS[1], request_id="b", length=4, remaining=3),),
        reuses=(Reuse(slot=SLOTS[0], request_id="a", source=3, length=64, place=1),),
        tables=(BlockTable(slot=SLOTS[0], request_id="a", blocks=(5, 6), start=1),),
        saves=(SavedState(slot=SLOTS[0], length=32, place=0),),
    )
    chunk = Chunk(SLOTS[0], "a", 64, (4, 5), True, 1)
    plans = [Plan(step=0, chunks=(chunk,), decode=decode, moves=moves), Plan(step=1, decode=decode)]
    sender, reader = StepSender(), StepReader(64)
    for plan in plans:
        assert reader.plan(json.loads(json.dumps(sender.message(plan, rows)))) == plan
        sent = reader.settings["b"].mask
        assert sent is not None and sent.constrained and np.array_equal(sent.words, mask.words)
        mask.push(3)
    sent_params = reader.settings["a"].params
    assert isinstance(sent_params, SamplingParams) and sent_params.logit_bias == {5: 2.5}
    assert reader.settings["a"].seed == 2**64 - 1 and reader.settings["a"].prompt_token_ids == (1, 2)
    reader.plan(sender.message(Plan(step=2, decode=decode), {"b": rows["b"]}))
    assert set(reader.settings) == {"b"}


@pytest.mark.parametrize("given", ["10.0.0.1", "10.0.0.1:", ":80", "host:x", "host:65535"])
def test_an_address_needs_host_and_port(given: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        address_of(given)
    assert address_of("[::1]:80") == ("::1", 80)


def test_options_that_hosts_cannot_share_are_refused_at_once() -> None:
    for config, why in (
        (EngineConfig(), "tensor_parallel_size is 1"),
        (EngineConfig(tensor_parallel_size=3), "a multiple of 2"),
        (EngineConfig(tensor_parallel_size=2, shadow_rate=0.5), "no shadow_rate"),
        (EngineConfig(tensor_parallel_size=2, runner="pooling"), "pooling"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_config(config, 2)
    for options, why in (
        ({"num_hosts": 2}, "needs coordinator"),
        ({"coordinator": "a:1"}, "needs num_hosts"),
        ({"num_hosts": 2, "engines": 2}, "data_parallel_size"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_engine(None, EngineConfig(tensor_parallel_size=2), **options)  # type: ignore[arg-type]


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "JOIN_S", 0.05)
    where = address()
    with pytest.raises(ConfigError, match=r"no process has joined as host 1, 2: run `xla-engine join"):
        Hosts.lead(where, 3, EngineConfig(tensor_parallel_size=3), None)
    with pytest.raises(ConfigError, match="no engine answers at"):
        Hosts.join(where, 1)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("GET / HTTP/1.1", "use `xla-engine join`"),
        ('{"rank": 2, "versions": ""}', "not between 1 and 1"),
        ('{"rank": 1, "versions": "jax 0"}', "install the same versions"),
    ],
)
def test_a_stranger_is_told_why_it_is_refused(told: str, why: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall(told.encode() + b"\n")
        assert why in (hosts._introduced(ours, 2, {})[1] or "")
