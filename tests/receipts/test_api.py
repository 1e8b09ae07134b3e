"""Receipts from Python and in pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.instruction_sets import HAS_KERNELS
from xla_engine import LLM, SamplingParams, receipts
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.errors import InvalidRequestError, OutputError, ReceiptError
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt

REQUESTS = [
    {"custom_id": "a", "prompt": "def main(", "max_tokens": 6, "temperature": 0},
    {
        "custom_id": "b",
        "prompt": "class A:",
        "max_tokens": 9,
        "seed": 1,
        "logprobs": 0,
        "stop": ["\n"],
        "n": 2,
    },
]


def test_what_is_written_is_verified_without_a_model(tmp_path: Path) -> None:
    out, kept = tmp_path / "out.jsonl", tmp_path / "receipts.jsonl"
    receipts.write(FakeEngine(), [{"prompt": "x"}, {"promt": "y"}], out, kept)  # type: ignore[arg-type]
    report = receipts.verify(out, kept)
    assert report.ok and (report.answers, report.errors, report.checked) == (2, 1, 0)
    with pytest.raises(OutputError, match="already has receipts"):
        receipts.write(FakeEngine(), [], tmp_path / "other", kept)  # type: ignore[arg-type]
    kept.write_text(kept.read_text().replace("promt", "prompt"))
    report = receipts.verify(out, kept)
    assert not report.ok and report.rejected[0].custom_id == "line-2"
    with pytest.raises(AssertionError, match="request_sha256"):
        report.raise_if_rejected()


def test_the_plugin_does_not_import_jax() -> None:
    code = "import sys, xla_engine.receipts.pytest_plugin; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not HAS_KERNELS, reason="only the C++ kernels verify what they decoded")
def test_outputs_of_python_are_saved_and_audited(embedded: XlaBatchEngine, tmp_path: Path) -> None:
    """Fields of every kind, also those that the run of a file would take from the model: all stand in the requests."""
    llm, out, kept = LLM.from_engine(embedded), tmp_path / "out.jsonl", tmp_path / "receipts.jsonl"
    drawn = draw_cases(embedded, 12, 5, every_field=True)
    prompts: list[Prompt] = ["def main(", {"prompt": "import os"}, *(case.prompt_token_ids for case in drawn)]
    params = [
        SamplingParams(max_tokens=None, stop=["\n"]),
        SamplingParams(n=2, logprobs=1, truncate_prompt_tokens=1),
        *(case.params for case in drawn),
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False, receipts=True)
    late = llm.generate("x =", {"max_tokens": 99}, use_tqdm=False, receipts=True, deadline_s=1e-9)
    receipts.save(embedded, [*outputs, *late], out, kept)
    report = receipts.audit(out, kept, max_num_seqs=2)
    assert report.ok, report.lines()
    assert (report.answers, report.errors, report.checked) == (15, 1, 14)
    with pytest.raises(ReceiptError, match="receipts=True"):
        receipts.save(embedded, llm.generate("x", use_tqdm=False), tmp_path / "a", tmp_path / "b")
    with pytest.raises(InvalidRequestError, match="pictures"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": b""}}, receipts=True)


def test_a_trainer_accepts_only_what_its_own_weights_sample(embedded: XlaBatchEngine) -> None:
    """One worker is honest, one replaced a token, one writes another log-probability."""
    params = SamplingParams(max_tokens=8, logprobs=0, n=2)
    prompts = ["def main(", "import os", "x ="]
    honest = LLM.from_engine(embedded).generate(prompts, params, use_tqdm=False, receipts=True)
    assert receipts.audit_outputs(embedded, honest).ok

    def changed(output: RequestOutput, **fields: Any) -> RequestOutput:
        first, *rest = output.outputs
        return replace(output, outputs=(replace(first, **fields), *rest))

    token_ids, logprobs = honest[1].outputs[0].token_ids, honest[2].outputs[0].logprobs
    assert logprobs is not None
    claimed = [
        honest[0],
        changed(honest[1], token_ids=(*token_ids[:4], token_ids[4] ^ 1, *token_ids[5:])),
        changed(honest[2], logprobs=(logprobs[0] + 2**-20, *logprobs[1:])),
    ]
    report = receipts.audit_outputs(embedded, claimed)
    assert [each.custom_id for each in report.rejected] == [each.request_id for each in honest[1:]]
    assert "choice 0, token 4" in report.rejected[0].why
    with pytest.raises(ReceiptError, match="receipts=True"):
        receipts.audit_outputs(embedded, [replace(honest[0], request=None)])


@pytest.mark.full
def test_a_team_audits_in_pytest(tmp_path: Path) -> None:
    out, kept = tmp_path / "out.jsonl", tmp_path / "receipts.jsonl"
    with XlaBatchEngine.from_pretrained() as engine:
        receipts.write(engine, REQUESTS, out, kept)
    (tmp_path / "test_ours.py").write_text(
        "def test_answers(audit_receipts):\n"
        f"    report = audit_receipts({str(out)!r}, {str(kept)!r}, max_num_seqs=2)\n"
        "    assert report.checked == 2 and report.method in ('prefill', 'regeneration')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xla_engine.receipts.pytest_plugin", str(tmp_path)]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | alone)
    assert done.returncode == 0, done.stdout + done.stderr
