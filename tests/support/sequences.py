"""Sequences without an engine."""

from __future__ import annotations

from typing import Any

from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.requests.validation import CheckedRequest
from xla_engine.sampling_params import SamplingParams


def live_sequence(
    name: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    tokenizer: Any,
    *,
    stop_ids: tuple[int, ...] = (),
    eos_ids: tuple[int, ...] = (),
    collector: OutputCollector | None = None,
) -> LiveSequence:
    """A sequence of a table of its own. tokenizer: whatever decodes."""
    table = RequestTable(tokenizer)
    checked = CheckedRequest(None, prompt, params, stop_ids, eos_ids)
    own = OutputCollector() if collector is None else collector
    table.open(name, checked, mask=None, seed=0, collector=own, now=0.0, options={})
    return table[name]
