"""Histograms count their values, and report quantiles as precisely as their buckets allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from xla_engine.observability.histogram import FEW, LONG_TIMES, RATES, SHARES, SHORT_TIMES, Histogram
from xla_engine.observability.metrics import MetricFamily, MetricSample, text_of

VALUES = st.lists(st.tuples(st.floats(0, 700, allow_nan=False), st.integers(1, 5)), max_size=40)


@given(values=VALUES, bounds=st.sampled_from([FEW, LONG_TIMES, RATES, SHARES, SHORT_TIMES]))
def test_each_value_is_in_the_first_bucket_that_holds_it(
    values: list[tuple[float, int]], bounds: tuple[float, ...]
) -> None:
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.add(value, times)
    found, all_of_them = histogram.now(), [value for value, times in values for _ in range(times)]
    assert found.count == len(all_of_them)
    assert [below for _, below in found.cumulative()] == [
        sum(value <= bound for value in all_of_them) for bound in bounds
    ]
    if all_of_them:
        assert found.mean is not None and abs(found.mean - sum(all_of_them) / len(all_of_them)) < 1e-6
        middle, bound = sorted(all_of_them)[(len(all_of_them) - 1) // 2], found.quantile(0.5)
        assert bound is not None and (middle <= bound or bound == bounds[-1])
    else:
        assert found.mean is None and found.quantile(0.5) is None


@given(text=st.text(max_size=20), values=VALUES)
def test_prometheus_reads_the_text(text: str, values: list[tuple[float, int]]) -> None:
    """Labels and descriptions may hold anything."""
    text = text.replace("\r", "")  # a reader's line end
    histogram = Histogram(SHORT_TIMES)
    for value, times in values:
        histogram.add(value, times)
    families = [
        MetricFamily(
            name="a:b",
            kind="gauge",
            about=text,
            samples=(MetricSample(1.5, {"label": text}), MetricSample(2, {})),
        ),
        MetricFamily(
            name="c_total", kind="counter", about="c", samples=(MetricSample(3, {"x": "1", "y": text}),)
        ),
        MetricFamily(
            name="d", kind="histogram", about="d", samples=(MetricSample(histogram.now(), {"x": text}),)
        ),
        MetricFamily(name="none", kind="counter", about="no values yet", samples=()),
    ]
    read = {family.name: family for family in text_string_to_metric_families(text_of(families))}
    assert [(sample.labels, sample.value) for sample in read["a:b"].samples] == [
        ({"label": text}, 1.5),
        ({}, 2),
    ]
    assert read["c"].samples[0].labels == {"x": "1", "y": text}
    (count,) = [sample.value for sample in read["d"].samples if sample.name == "d_count"]
    (last,) = [sample.value for sample in read["d"].samples if sample.labels.get("le") == "+Inf"]
    assert count == last == histogram.now().count
