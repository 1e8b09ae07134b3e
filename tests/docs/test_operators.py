"""The operators' page and the metrics list the same names."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import MagicMock

from xla_engine.config import EngineConfig
from xla_engine.observability.metrics import CACHE_CONFIG, METRICS, engine_metrics
from xla_engine.observability.phases import PhaseTimes
from xla_engine.observability.stats import EngineStats
from xla_engine.server.info import server_metrics

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
ROW = re.compile(r"^\| `((?:vllm:|xla_engine_|process_)\w+)` \| (\w+) \| (\S.*?) \|.*\|$", re.MULTILINE)


def test_every_metric_is_in_the_page_and_the_reverse() -> None:
    told = [(name, kind) for name, kind, _ in ROW.findall(PAGE.read_text())]
    there = [(metric.name, metric.kind) for metric in METRICS] + [(CACHE_CONFIG, "gauge")]
    there += [(metric.name, metric.kind) for metric in server_metrics(MagicMock())]
    assert told == there, set(told) ^ set(there)


def test_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.about.endswith(".") and "\n" not in metric.about


def test_every_metric_of_an_engine_has_the_name_of_its_model() -> None:
    """As the page says: a dashboard that filters by model must find every metric."""
    stats = EngineStats(finished={"stop": 1}, phases=PhaseTimes())
    families = engine_metrics(stats, EngineConfig(), "mine", max_model_len=64)
    samples = [(family.name, sample.labels) for family in families for sample in family.samples]
    assert len(samples) > len(METRICS)
    assert [name for name, labels in samples if labels.get("model_name") != "mine"] == []
