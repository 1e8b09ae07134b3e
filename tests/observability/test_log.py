"""The log of an engine: limits, progress, failed steps; and nothing unless logging is configured."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine_faults import fail_at
from xla_engine.engine import loop
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def lines(caplog: pytest.LogCaptureFixture, begin: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.getMessage().startswith(begin)]


def test_a_start_tells_the_limits_in_force(
    make_engine: Callable[..., XlaBatchEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="xla_engine"):
        engine = make_engine()
    (line,) = lines(caplog, "ready: ")
    for text in (
        "max_num_seqs 8",
        "max_model_len 300",
        "chunk_size 16",
        "scheduling_policy priority",
        "lag 1",
    ):
        assert text in line
    assert f"max_num_batched_tokens {engine.config.token_budget}" in line and "\n" not in line


def test_progress_is_told_every_so_many_steps(
    tiny: XlaBatchEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 10)
    before = tiny.stats().steps
    with caplog.at_level(logging.INFO, logger="xla_engine"):
        for number in range(12):
            tiny.submit([number + 1], PARAMS)
        tiny.drain()
    told = lines(caplog, "step ")
    assert len(told) == tiny.stats().steps // 10 - before // 10 > 2
    assert re.match(
        r"step \d+: [0-8] of 8 slots, \d+ sequences wait, KV cache \d+%; since .* tokens/s", told[0]
    )


def test_each_failed_step_and_the_recovery_is_a_line(
    tiny: XlaBatchEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, tiny, "wait", {3, 9}, RuntimeError("planted"))
    with caplog.at_level(logging.INFO, logger="xla_engine"):
        tiny.submit([1], PARAMS)
        tiny.submit([2], PARAMS)
        tiny.drain()
    failed = [
        each for each in caplog.records if "failed (1 in a row): RuntimeError: planted" in each.getMessage()
    ]
    assert len(failed) == 2 and all(each.levelno == logging.WARNING for each in failed)
    assert len(lines(caplog, "recovered: ")) == 2


@pytest.mark.full
def test_who_configures_nothing_sees_nothing() -> None:
    """Python prints warnings of loggers without a handler; a library's are its own."""
    script = (
        "from dataclasses import replace\n"
        "from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint\n"
        "from xla_engine import SamplingParams, XlaBatchEngine\n"
        "model = replace(TINY, num_hidden_layers=1)\n"  # every program is compiled here
        "config = replace(TINY_ENGINE, preemption=False, enable_prefix_caching=False)\n"
        "engine = XlaBatchEngine(tiny_checkpoint(model=model), None, config)\n"
        "real, count = engine.runner.wait, []\n"
        "def wait(step):\n"
        "    count.append(1)\n"
        "    if len(count) == 2: raise RuntimeError('planted')\n"
        "    return real(step)\n"
        "engine.runner.wait = wait\n"
        "engine.submit([1], SamplingParams(max_tokens=9))\n"
        "engine.drain()\n"
        "assert engine.stats().recoveries == 1\n"
        "engine.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
