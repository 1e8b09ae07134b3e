"""JAX's settings of the process, and its platforms: an engine has the same bits under all, or says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.models import TINY_ENGINE, tiny_checkpoint
from tests.support.tiers import in_ci
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.runner.jax_settings import check_platform, own_settings
from xla_engine.sampling_params import SamplingParams

SETTINGS: dict[str, Any] = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "highest",
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_transfer_guard": "disallow_explicit",
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_debug_key_reuse": True,
    "jax_random_seed_offset": 3,
}
ALL = "all of them"
SCRIPT = """
import sys
import jax
from tests.runner.test_jax_settings import SETTINGS, bits

chosen, when = sys.argv[1:]
def change():
    for name in SETTINGS:
        if chosen in (name, "all of them"):
            jax.config.update(name, SETTINGS[name])
    if chosen in ("jax_default_device", "all of them"):
        jax.config.update("jax_default_device", jax.devices()[0])

if when == "before":
    change()
print(bits(change if when == "after" else lambda: None))
"""


def bits(between: Any = lambda: None) -> str:
    """Tokens and log-probabilities of a request. between: called when the engine has started."""
    with XlaBatchEngine(tiny_checkpoint(), None, TINY_ENGINE) as engine:
        between()
        params = SamplingParams(max_tokens=6, logprobs=2, seed=5)
        engine.submit([3, 1, 4, 1, 5], params)
        (done,) = [output for output in engine.drain() if output.finished]
    (found,) = done.outputs
    return repr((found.token_ids, [float(each).hex() for each in found.logprobs or ()]))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", in_ci([ALL, *SETTINGS, "jax_default_device"], [ALL]))
def test_no_setting_of_the_process_changes_a_bit(name: str, when: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, when], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == bits()


def test_the_caller_keeps_its_settings() -> None:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.debug_nans(True):
        with own_settings():
            assert not jax.config.jax_enable_x64 and not jax.config.jax_debug_nans
            assert jax.config.jax_default_matmul_precision is None
        assert bits() == bits()
        assert jax.config.jax_enable_x64 and jax.config.jax_debug_nans
        assert jax.config.jax_default_matmul_precision == "highest"


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': none\nmore")]
)
def test_a_platform_without_a_device_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr("xla_engine.runner.jax_settings.asked_platforms", lambda: ("JAX_PLATFORMS", "cuda"))
    with pytest.raises(
        ConfigError, match=r"^JAX_PLATFORMS=cuda: there is no such device here.*cpu.*Unset"
    ) as caught:
        check_platform()
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xla_engine", "run", "--prompt", "x =", "--max-tokens", "2"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cuda"}, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("Error: invalid_config: JAX_PLATFORMS=cuda: there is no such device here")
    assert ran.stderr.count("\n") == 1
