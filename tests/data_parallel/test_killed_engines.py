"""Engine processes are killed while users' commands run: files and streams are the same as without kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command_line import ROOT
from tests.support.processes import children

pytestmark = pytest.mark.full

# `xla-engine run` that kills one of its engines when it has heard of the 8th and the 40th result. Not a third time: a
# request that was in both runs alone by then, and a third end would be its own.
RUN_AND_KILL = """
import os, random, signal, sys
from xla_engine.cli import main
from xla_engine.data_parallel.turns import FleetLoop

heard, draw, take = 0, random.Random(3), FleetLoop._take

def take_and_kill(turns, member, news):
    global heard
    heard += 1
    if heard in (8, 40):
        os.kill(draw.choice([each.pid for each in turns.fleet.members if each.pid]), signal.SIGKILL)
        print("killed one", file=sys.stderr)
    take(turns, member, news)

FleetLoop._take = take_and_kill
main(prog_name="xla-engine")
"""


def test_a_run_with_killed_engines_writes_the_bytes_of_one_engine(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    source = ROOT / "examples" / "requests.jsonl"
    options = ["run", str(source), "--ordered", "--created", "17", "--no-progress"]
    command = [sys.executable, "-m", "xla_engine", *options, "-o", str(one)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    several = [sys.executable, "-c", RUN_AND_KILL, *options, "-o", str(two), "--data-parallel-size", "2"]
    done = subprocess.run(several, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed one") == 2
    assert two.read_bytes() == one.read_bytes()


def test_a_server_of_several_engines_streams_on_when_one_is_killed(tmp_path: Path) -> None:
    import httpx

    socket = tmp_path / "socket"
    command = [sys.executable, "-m", "xla_engine", "serve", "--uds", str(socket), "--data-parallel-size", "2"]
    process = subprocess.Popen(
        [*command, "--max-num-seqs", "2", "--max-model-len", "256"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 600
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.2)
        body = {"model": "embedded", "prompt": "def f(x):", "max_tokens": 200, "seed": 1, "ignore_eos": True}
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(base_url="http://server", transport=transport, timeout=1800) as client:
            whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            text, killed = "", False
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    if len(text) > 40 and not killed:
                        for pid in children(process.pid):
                            if "data_parallel" in Path(f"/proc/{pid}/cmdline").read_text():
                                os.kill(pid, signal.SIGKILL)
                        killed = True
            assert killed and text == whole
            assert client.get("/health").status_code == 200
            assert "vllm:num_requests_running" in client.get("/metrics").text
    finally:
        process.terminate()
        process.wait(timeout=1800)
