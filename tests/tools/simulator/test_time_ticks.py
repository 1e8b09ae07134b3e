"""The labels below the pictures of `simulate --plot`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_engine.tools.simulator import report
from xla_engine.tools.simulator.report import MOST_TICKS, time_ticks
from xla_engine.utils.quantiles import Quantiles


@given(low=st.floats(1e-6, 1e3), factor=st.floats(3, 1e9))
def test_labels_are_few_and_inside(low: float, factor: float) -> None:
    ticks = time_ticks(low, low * factor)
    assert 1 <= len(ticks) <= MOST_TICKS
    assert all(low <= tick <= low * factor for tick in ticks) and ticks == sorted(set(ticks))


@pytest.mark.parametrize(("low", "high"), [(0.011, 0.052), (0.011, 0.95), (0.0003, 40.0)])
def test_labels_do_not_overlap(
    low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    values = Quantiles()
    for step in range(40):
        values.add(low * (high / low) ** (step / 39))
    times = type("Times", (), {"first_token": values, "inter_token": values, "whole": values})()
    report.plot({"fcfs": times}, tmp_path / "plot.png", "title")
    [figure] = figures
    for axes in figure.axes:
        boxes = [
            label.get_window_extent() for label in axes.get_xticklabels(which="both") if label.get_text()
        ]
        assert len(boxes) >= 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
