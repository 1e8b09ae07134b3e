"""Every instruction set of this machine can be asked for, keeps the laws, and says that it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.models import TINY_ENGINE
from xla_engine.config import ISAS, EngineConfig, requested_isa
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.runner.native_library.instruction_sets import INSTRUCTION_SETS, available

HERE = [each.name for each in available()]
LEVELS = [
    pytest.param(isa, marks=[pytest.mark.slow] if place else []) for place, isa in enumerate([*HERE, "none"])
]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("isa", LEVELS)
def test_law_1_holds_in_every_instruction_set(
    make_engine: Callable[..., XlaBatchEngine], isa: str, quantization: str | None
) -> None:
    engine = make_engine(replace(TINY_ENGINE, isa=isa, quantization=quantization))
    found = engine.runner.platform
    assert engine.self_check is not None
    if isa == "none":
        assert engine.runner.isa is None and (found["attention"], found["linear"]) == ("xla", "xla")
    else:
        assert engine.runner.isa == isa and engine.self_check.promise.endswith(f"({isa})")
    report = verify(engine, requests=40, schedules=2, seed=2, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())
    assert report.compiles_after_warmup == 0


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="isa must be one of auto, amx"):
        EngineConfig(isa="mmx")
    monkeypatch.setenv("XLA_ENGINE_ISA", "mmx")
    with pytest.raises(ConfigError, match="XLA_ENGINE_ISA must be one of auto, amx"):
        requested_isa()
    assert requested_isa("avx2") == "avx2"
    assert {*ISAS} == {"auto", "none", *(each.name for each in INSTRUCTION_SETS)}


def test_an_instruction_set_of_other_machines_is_refused(make_engine: Callable[..., XlaBatchEngine]) -> None:
    foreign = next(each.name for each in INSTRUCTION_SETS if each.name not in HERE)
    with pytest.raises(ConfigError, match=f"isa '{foreign}' is not of this machine; use one of auto, "):
        make_engine(replace(TINY_ENGINE, isa=foreign))


@pytest.mark.slow
def test_the_environment_chooses_where_the_option_does_not(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    monkeypatch.setenv("XLA_ENGINE_ISA", "none")
    assert make_engine(replace(TINY_ENGINE, self_check=False)).runner.isa is None
    assert make_engine(replace(TINY_ENGINE, isa=HERE[0], self_check=False)).runner.isa == HERE[0]


def test_what_was_written_before_instruction_sets_had_names_stays_valid() -> None:
    assert "isa" not in EngineConfig().options()
    assert EngineConfig(isa="none").options()["isa"] == "none"
