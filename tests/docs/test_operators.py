"""The operators' page and the metrics there are: each is in the other."""

from __future__ import annotations

import re
from pathlib import Path

from xla_engine.observability.metrics import CACHE_CONFIG, METRICS
from xla_engine.server.metrics import SERVER_METRICS

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
ROW = re.compile(r"^\| `((?:vllm:|xla_engine_)\w+)` \| (\w+) \| (\S.*?) \|.*\|$", re.MULTILINE)


def test_every_metric_is_in_the_page_and_the_reverse() -> None:
    told = [(name, kind) for name, kind, _ in ROW.findall(PAGE.read_text())]
    there = [(metric.name, metric.kind) for metric in METRICS] + [(CACHE_CONFIG, "gauge")]
    there += [(metric.name, metric.make.__name__) for metric in SERVER_METRICS]
    assert told == there, set(told) ^ set(there)


def test_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.about.endswith(".") and "\n" not in metric.about
