"""Each pair of engine options runs a request, or is refused with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from tests.support.option_pairs import VALUES, WITHOUT
from xla_engine.config import EngineConfig

PARTS = 12


def test_every_option_is_paired_or_left_out_on_purpose() -> None:
    assert {each.name for each in fields(EngineConfig)} == VALUES.keys() | WITHOUT
    assert not VALUES.keys() & WITHOUT


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_each_pair_of_options_starts_or_is_one_sentence(part: int) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "tests.support.option_pairs", str(part), str(PARTS)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert not ran.stdout, ran.stdout
