"""`audit` accepts exactly the answers that the engine gives, whatever the requests ask for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.instruction_sets import HAS_KERNELS
from tests.support.models import TINY_ENGINE, tiny_checkpoint
from tests.support.receipts import Record, audited, forge, run, write
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.errors import ConfigError
from xla_engine.openai.requests import line_of
from xla_engine.receipts.recompute import DRAFTS, audit_files

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="only the C++ kernels verify what they decoded")

# The auditor's engine has other sizes than the one that generates.
OTHER = replace(
    TINY_ENGINE, max_num_seqs=5, chunk_size=32, prefill_lanes=(4,), speculative_config=DRAFTS, lag=0
)


@pytest.fixture(scope="module")
def engine() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine(tiny_checkpoint(), None, TINY_ENGINE) as made:
        yield made


@pytest.fixture(scope="module", params=default(["regeneration", "prefill"]))
def auditor(request: pytest.FixtureRequest, engine: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    if request.param == "regeneration":
        yield engine
        return
    with XlaBatchEngine(tiny_checkpoint(), None, OTHER) as made:
        yield made


def lines_of(engine: XlaBatchEngine, count: int, seed: int) -> list[Record]:
    """Drawn lines of all sampling fields that need no text; some have n answers or several prompts."""
    draw = random.Random(seed)
    lines = [
        line_of(case.request_id, case.prompt_token_ids, case.params)
        for case in draw_cases(engine, count, seed, every_field=True)
        if len(case.prompt_token_ids) < 150
    ]
    for line in lines:
        if draw.random() < 0.2 and line.get("temperature") != 0:
            line["n"] = draw.randint(2, 3)
        if draw.random() < 0.3:
            line.pop("seed", None)
    return lines


def test_honest_answers_are_accepted(engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path) -> None:
    """Every drawn field, errors of requests, and n answers. By prefill, most tokens are accepted drafts."""
    lines = lines_of(engine, 40, seed=3)
    lines += [
        {"custom_id": "bad", "prompt": [1], "max_tokens": 0},
        {"custom_id": "long", "prompt": [1] * 400},
    ]
    before = auditor.stats()
    report = audited(auditor, run(engine, lines, tmp_path))
    assert report.ok, report.lines()
    assert report.checked == report.answers == len(lines) and report.errors == 2
    if report.method == "regeneration":
        return
    after = auditor.stats()
    drafted, accepted = (
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )
    assert accepted == drafted > report.tokens / 2


@pytest.mark.release
@pytest.mark.parametrize("seed", range(25))
def test_ten_thousand_honest_answers_are_accepted(
    seed: int, engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    report = audited(auditor, run(engine, lines_of(engine, 450, seed=100 + seed), tmp_path))
    assert report.ok and report.checked >= 400, report.lines()


def _other_token(answer: Record, receipt: Record) -> None:
    receipt["choices"][0]["token_ids"][-1] ^= 1


def _cut(answer: Record, receipt: Record) -> None:
    """The last token is left out, and the answer called complete."""
    del receipt["choices"][0]["token_ids"][-1]
    answer["response"]["body"]["choices"][0]["finish_reason"] = "stop"


def _renamed(answer: Record, receipt: Record) -> None:
    answer["response"]["body"]["choices"][0]["finish_reason"] = "content_filter"


def _longer(answer: Record, receipt: Record) -> None:
    receipt["choices"][0]["token_ids"].append(5)


def _counted(answer: Record, receipt: Record) -> None:
    answer["response"]["body"]["usage"]["completion_tokens"] += 1


def _bits(answer: Record, receipt: Record) -> None:
    receipt["choices"][0]["logprob_bits_sha256"] = "0" * 64


def _refused(answer: Record, receipt: Record) -> None:
    receipt.update(error="token_limit_exceeded", choices=[])
    answer.update(response=None, error={"code": "token_limit_exceeded", "message": "too long"})


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (_other_token, "choice 0, token"),
        (_cut, "the answer ends, where the model goes on"),
        (_longer, "token"),
        (_renamed, "finish_reason"),
        (_counted, "completion_tokens"),
        (_bits, "log-probability bits"),
        (_refused, "where the model gives an answer"),
    ],
)
def test_a_forged_answer_is_rejected_by_name(
    fault: Any, why: str, engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    """The cheater computes every digest and the root again, so only the model can tell."""
    lines = [{"custom_id": f"c{n}", "prompt": [n, 7], "max_tokens": 6, "logprobs": 0} for n in range(1, 9)]
    job = run(engine, lines, tmp_path)
    forge(job, lambda answer, receipt: fault(answer, receipt) if answer["custom_id"] == "c3" else None)
    report = audited(auditor, job)
    assert [each.custom_id for each in report.rejected] == ["c3"], report.lines()
    assert why in report.rejected[0].why and report.exit_status == 1


# What a cheater changes in requests before they run, to save work or to please.
FAULTS: dict[str, Any] = {
    "temperature": lambda line: {**line, "temperature": 0.31},
    "seed": lambda line: {**line, "seed": 12345},
    "trimmed prompt": lambda line: {**line, "prompt": line["prompt"][1:] or [9]},
    "fewer tokens": lambda line: {**line, "max_tokens": max(line["max_tokens"] - 1, 1)},
    "no penalties": lambda line: {
        name: value for name, value in line.items() if "penalty" not in name and name != "logit_bias"
    },
    "top_k": lambda line: {**line, "top_k": 2},
}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), fault=st.sampled_from(sorted(FAULTS)))
@pytest.mark.full
def test_audit_accepts_exactly_what_the_engine_generates(
    seed: int, fault: str, engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    """A cheater runs some of the requests with another field, and writes receipts with the requests that were asked.
    Exactly those answers are rejected that are not the honest ones."""
    lines = lines_of(engine, 12, seed)
    draw = random.Random(seed)
    changed = [FAULTS[fault](line) if draw.random() < 0.5 else line for line in lines]
    honest, cheated = run(engine, lines, tmp_path / "honest"), run(engine, changed, tmp_path / "cheated")
    asked = {line["custom_id"]: line for line in lines}
    forge(cheated, lambda answer, receipt: receipt.update(request=asked[receipt["custom_id"]]))
    true, claimed = (
        {each["line"]: _content(each) for each in job.read()[1][1:-1]} for job in (honest, cheated)
    )
    false = {lines[number - 1]["custom_id"] for number in true if true[number] != claimed[number]}
    assert audited(auditor, honest).ok
    report = audited(auditor, cheated)
    assert {each.custom_id for each in report.rejected} == false, report.lines()


def _content(receipt: Record) -> Any:
    return receipt["choices"], receipt["error"]


def test_swapped_answers_are_rejected(
    engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    lines = [{"custom_id": f"c{n}", "prompt": [n, 7], "max_tokens": 6} for n in range(1, 5)]
    job = run(engine, lines, tmp_path)
    answers, (header, *receipts, _) = job.read()
    receipts.sort(key=lambda each: each["line"])
    receipts[0]["choices"], receipts[1]["choices"] = receipts[1]["choices"], receipts[0]["choices"]
    write(job, answers, [header, *receipts])
    report = audited(auditor, job)
    assert {each.custom_id for each in report.rejected} == {"c1", "c2"}


def test_a_sample_is_chosen_by_the_auditors_seed(
    engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    lines = [{"custom_id": f"c{n}", "prompt": [n, 7], "max_tokens": 3} for n in range(1, 21)]
    job = run(engine, lines, tmp_path)
    report = audited(auditor, job, sample=0.2, sample_seed=1)
    assert report.ok and report.checked == 4 and report.answers == 20
    forge(job, lambda answer, receipt: _other_token(answer, receipt))
    for seed in range(3):
        report = audited(auditor, job, sample=0.2, sample_seed=seed)
        assert report.checked == len(report.rejected) == 4
    chances = dict(report.detection())
    assert chances[0.25] == pytest.approx(1 - (15 * 14 * 13 * 12) / (20 * 19 * 18 * 17))


def test_another_model_is_rejected_if_it_was_demanded(
    engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    lines = [{"custom_id": f"c{n}", "prompt": [n, 7], "max_tokens": 3} for n in range(1, 4)]
    job = run(engine, lines, tmp_path)
    answers, (header, *receipts, _) = job.read()
    header["model"]["weights_sha256"] = "0" * 64
    write(job, answers, [header, *receipts])
    report = audited(auditor, job)
    assert report.exit_status == 2 and "--model" in report.unchecked[0].why
    report = audited(auditor, job, demanded=("model",))
    assert report.exit_status == 1 and len(report.rejected) == 3


def test_a_model_that_cannot_run_as_that_of_the_receipts_is_not_checked(
    engine: XlaBatchEngine, tmp_path: Path
) -> None:
    """Such as the default model, whose weights are in no GGUF file. A model that was given has its own error."""
    job = run(engine, [{"custom_id": "a", "prompt": [7], "max_tokens": 3}], tmp_path)

    def load(fields: dict[str, Any]) -> Any:
        raise ConfigError("quantization 'gguf-int8' is for GGUF files")

    report = audit_files(job.results, job.receipts, load)
    assert report.exit_status == 2 and "of the model 'tiny'" in report.unchecked[0].why
    with pytest.raises(ConfigError, match="GGUF"):
        audit_files(job.results, job.receipts, load, demanded=("model",))


def test_another_arithmetic_is_not_checked_and_names_the_remedy(
    engine: XlaBatchEngine, auditor: XlaBatchEngine, tmp_path: Path
) -> None:
    job = run(engine, [{"custom_id": "a", "prompt": [7], "max_tokens": 3}], tmp_path)
    answers, (header, *receipts, _) = job.read()
    header["arithmetic"]["class"] = "cpu amx"
    write(job, answers, [header, *receipts])
    report = audited(auditor, job)
    assert report.exit_status == 2 and "--bits portable" in report.unchecked[0].why


@pytest.mark.full
def test_answers_without_the_kernels_are_generated_again_with_the_sizes_of_the_receipts(
    engine: XlaBatchEngine, tmp_path: Path
) -> None:
    plain = replace(TINY_ENGINE, isa="none")
    lines = [{"custom_id": f"c{n}", "prompt": [n, 7], "max_tokens": 6, "logprobs": 0} for n in range(1, 9)]
    with XlaBatchEngine(tiny_checkpoint(), None, plain) as made:
        job = run(made, lines, tmp_path)

    def load(fields: dict[str, Any]) -> Any:
        return XlaBatchEngine(tiny_checkpoint(), None, EngineConfig(**fields))

    report = audit_files(job.results, job.receipts, load)
    assert report.ok and report.method == "regeneration" and report.checked == 8, report.lines()
    report = audited(engine, job, demanded=("isa",))
    assert report.exit_status == 2 and "--isa none" in report.unchecked[0].why
