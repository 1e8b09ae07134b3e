"""The sweep: its warnings by hand-made points, its figures on a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.models import TINY_ENGINE, tiny_checkpoint
from xla_engine.cli import main
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.tools.bench import sweep
from xla_engine.tools.bench.figures import Spread


def point(slots: int, rate: float, step: float) -> sweep.Point:
    return sweep.Point(slots=slots, figures={"decode_tok_s": Spread((rate,)), "itl_p50_ms": Spread((step,))})


def test_smooth_curve_has_no_cliff_and_names_the_width_that_is_enough() -> None:
    found = sweep.warnings([point(8, 800, 10), point(16, 1500, 10.7), point(32, 1550, 20.6)])
    assert found == [
        "a request has its tokens within 5 % of the shortest time at up to 8 slots",
        "16 slots decode within 5 % of the most measured",
    ]


def test_widest_width_is_not_called_enough() -> None:
    *_, found = sweep.warnings([point(8, 800, 10), point(16, 1500, 10.7)])
    assert (
        found
        == "16 slots decode within 5 % of the most measured; more slots were not measured and may be faster"
    )


def test_rounds_that_differ_are_told() -> None:
    uneven = sweep.Point(
        slots=8, figures={"decode_tok_s": Spread((500.0, 800.0)), "itl_p50_ms": Spread((10.0, 16.0))}
    )
    assert sweep.warnings([uneven])[0] == "8 slots: rounds differ by 60 %; measure on an idle machine"


def test_cliffs_are_named() -> None:
    found = sweep.warnings(
        [point(8, 899, 8.9), point(16, 142, 112.5), point(24, 1957, 12.3), point(32, 1470, 21.8)]
    )
    assert found[0] == "cliff: 16 slots decode 84 % fewer tokens per second than 8"
    assert found[1] == "cliff: 32 slots decode 25 % fewer tokens per second than 24"
    (found, *_) = sweep.warnings([point(8, 800, 10), point(10, 790, 30)])
    assert "a step takes 3.0 times as long for 1.2 times the rows" in found


def test_real_widths_are_measured_and_what_does_not_fit_is_told() -> None:
    def make(config: EngineConfig) -> XlaBatchEngine:
        return XlaBatchEngine(tiny_checkpoint(), None, config)

    points = list(sweep.sweep(make, TINY_ENGINE, [8, 10**9], prompt_tokens=9, new_tokens=6, rounds=2))
    assert points[0].refusal is None and points[0].cache > 0
    for name in sweep.FIGURES:
        spread = points[0].figures[name]
        assert len(spread.values) == 2 and min(spread.values) > 0, name
    assert points[1].refusal is not None and "1000000000 slots x" in points[1].refusal
    assert json.dumps([each.record() for each in points])
    assert any("1000000000 slots:" in text for text in sweep.warnings(points))
    assert "does not fit" in sweep.table(points)[-1]


@pytest.mark.parametrize("widths", ["0", "8,x", ""])
def test_wrong_widths_are_refused(widths: str, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["sweep", "--widths", widths]).exit_code == 2
