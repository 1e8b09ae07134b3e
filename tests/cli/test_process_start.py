"""A run counts its cold start from the start of this program, whatever the process ran before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGE = (
    "import time; from xla_engine.cli._run import _process_start; print(time.monotonic() - _process_start())"
)
LONG_S = 30


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process began")
def test_what_a_shell_ran_before_in_the_same_process_is_not_counted(tmp_path: Path) -> None:
    """`pip install ... && xla-engine run` ends in an exec in many shells. The process is made to look old by a clock
    that is set forward, so that the test does not wait."""
    clock = f"import time; real = time.clock_gettime; time.clock_gettime = lambda id: real(id) + {LONG_S}; "
    for before in ("", clock):
        found = subprocess.run(
            [sys.executable, "-c", before + AGE], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert 0 < float(found.stdout) < LONG_S
