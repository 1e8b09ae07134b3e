"""The cheapest way to cheat is to run the same weights with fewer bits. An audit with the demanded model finds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.gguf_checks import embedded_tokenizer
from tests.support.gguf_files import Kind, write_gguf
from tests.support.instruction_sets import HAS_KERNELS
from tests.support.receipts import audited, forge, run, write
from xla_engine.config import GGUF_INT8, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.receipts.recompute import DRAFTS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not HAS_KERNELS, reason="GGUF files stay packed in C++ only"),
]

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=128, quantization=GGUF_INT8)
TEXTS = [
    "def area(",
    "import ",
    "class Queue:",
    "for i in range(",
    "return self.",
    "x = [",
    "if not ",
    "try:",
]
LINES = [
    {
        "custom_id": f"c{n}",
        "prompt": text,
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": (n % 2) * 0.8,
        "seed": n,
    }
    for n, text in enumerate(TEXTS)
]


def quantised(folder: Path, kind: Kind) -> Path:
    """The embedded model, which is trained, in a GGUF file."""
    return write_gguf(
        embedded_model_directory(), folder / f"{kind.name}.gguf", kind=kind, tokenizer=embedded_tokenizer
    )


def test_four_bits_in_place_of_eight_are_rejected_by_name(tmp_path: Path) -> None:
    with XlaBatchEngine.from_pretrained(quantised(tmp_path, Kind.Q8_0), CONFIG) as engine:
        honest = run(engine, LINES, tmp_path / "honest")
    with XlaBatchEngine.from_pretrained(quantised(tmp_path, Kind.Q4_0), CONFIG) as engine:
        cheated = run(engine, LINES, tmp_path / "cheated")
    answers, (named, *receipts, _) = cheated.read()
    _, (header, *true, _) = honest.read()
    with XlaBatchEngine.from_pretrained(
        tmp_path / "Q8_0.gguf", replace(CONFIG, speculative_config=DRAFTS)
    ) as auditor:
        assert audited(auditor, honest, demanded=("model",)).ok
        report = audited(auditor, cheated, demanded=("model",))
        assert {each.custom_id for each in report.rejected} == {line["custom_id"] for line in LINES}
        assert all("weights_sha256 of the model is" in each.why for each in report.rejected)
        assert audited(auditor, cheated).exit_status == 2
        # The cheater claims the model that was demanded.
        for answer in answers:
            answer["response"]["body"]["system_fingerprint"] = header["system_fingerprint"]
        write(cheated, answers, [header, *receipts])
        forge(cheated, lambda answer, receipt: None)
        report = audited(auditor, cheated, demanded=("model",))
    tokens = {each["custom_id"]: each["choices"][0]["token_ids"] for each in true}
    false = {
        each["custom_id"] for each in receipts if each["choices"][0]["token_ids"] != tokens[each["custom_id"]]
    }
    assert {each.custom_id for each in report.rejected} == false and len(false) >= len(LINES) // 2
    assert all("where the model gives" in each.why for each in report.rejected), report.lines()
    assert named["model"]["weights_sha256"] != header["model"]["weights_sha256"]
