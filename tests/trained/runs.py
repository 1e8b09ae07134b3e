"""Runs of a trained model under the laws: alone, together, and with other configurations."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.golden.make import make_golden_trained as maker
from tests.support.instruction_sets import NAMES
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams

SIZES: dict[str, Any] = {"max_model_len": 256}
CONFIGURATIONS = [
    pytest.param({"max_num_seqs": 9, "chunk_size": 16, "prefill_lanes": (1,)}, id="B-widths"),
    pytest.param({"enable_prefix_caching": False, "lag": 0, "num_blocks": 24}, id="B-blocks"),
    pytest.param({"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}}, id="S"),
    *(
        pytest.param({"isa": isa, "max_num_seqs": 7, "chunk_size": 64}, id=isa, marks=pytest.mark.release)
        for isa in NAMES[1:]  # the others have the best one
    ),
]
Outputs = dict[str, CompletionOutput]


def opened(file: Path, **options: Any) -> XlaBatchEngine:
    return XlaBatchEngine.from_pretrained(file, EngineConfig(**{**SIZES, **options}))


def requests(engine: XlaBatchEngine) -> Iterator[tuple[str, str, SamplingParams]]:
    """Chats, if the model has a template, and texts: greedy and sampled, of several lengths."""
    chats = maker.conversations()[::3] if engine.chat_template is not None else []
    for number, messages in enumerate(chats):
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=12 + 5 * number, logprobs=0, **drawn)
        yield f"chat {number}", engine.render_chat(messages), params
    passage = pydoc_data.topics.topics["assert"][:600]  # longer than a block of the prefix cache
    yield "counting", "1, 2, 3, 4, 5, " * 8, SamplingParams(temperature=0, max_tokens=40, logprobs=0)
    for number, text in enumerate([passage, *maker.TEXTS[::4]]):
        yield f"text {number}", text, SamplingParams(max_tokens=24, logprobs=0, seed=number)


def together(engine: XlaBatchEngine) -> Outputs:
    for name, prompt, params in requests(engine):
        engine.submit(prompt, params, request_id=name, add_special_tokens=False)
    return {output.request_id: output.outputs[0] for output in engine.drain()}


def differing(found: Outputs, expected: Outputs) -> list[str]:
    """Requests of which a token or a bit of a log-probability differs."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, each in expected.items()
        if (found[name].token_ids, found[name].logprobs) != (each.token_ids, each.logprobs)
    ]


def check_alone(engine: XlaBatchEngine, expected: Outputs) -> None:
    """Law A; each request runs twice alone, the second time with its prompt in the prefix cache if there is one."""
    alone: tuple[Outputs, Outputs] = {}, {}
    for name, prompt, params in requests(engine):
        for found in alone:
            engine.submit(prompt, params, request_id=name, add_special_tokens=False)
            found.update({output.request_id: output.outputs[0] for output in engine.drain()})
    assert differing(alone[0], expected) == differing(alone[1], expected) == []


def configured(engine: XlaBatchEngine, **options: Any) -> XlaBatchEngine:
    """Another engine of the same model."""
    config = replace(engine.config, **options)
    return XlaBatchEngine(engine.checkpoint, engine.tokenizer, config, chat_template=engine.chat_template)


def check_configuration(engine: XlaBatchEngine, expected: Outputs, options: dict[str, Any]) -> None:
    """Other options give the same results. Those of another instruction set are those of AVX512-BF16 on a machine with
    AMX, whose tiles add pairs in one operation."""
    checked = "speculative_config" in options  # speculation wants to know what the start-up check saw
    if "isa" in options and engine.runner.isa == "amx":
        with configured(engine, isa="avx512_bf16", self_check=False) as without_tiles:
            expected = together(without_tiles)
    with configured(engine, self_check=checked, **options) as other:
        assert differing(together(other), expected) == []
        if checked:
            assert other.stats().accepted_tokens > 0
