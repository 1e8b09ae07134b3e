"""Each planted fault is seen to happen and is named, and honest targets raise no alarm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.liar import Liar, LiarTarget, serving
from tests.support.tiers import default
from xla_engine.same_bits import Answer, Ask, CallableTarget, Choice, HttpTarget, Report, TargetError, check
from xla_engine.same_bits.report import DifferenceFound, cause_of, compare

# A fault, the checks that see it, and the cause or words that name it.
NUMBERS: list[tuple[str, str, str]] = [
    ("noise in batches", "co-batch, 8 others", "rounding"),
    ("noise in all batches", "co-batch, 8 others", "unclear: a draw, where other answers changed too"),
    ("noise above 44", "co-batch, 48 others", "rounding"),
    ("noise alone", "repeat", "not repeatable"),
    ("noise at first", "repeat", "run 1 differs from runs 2 to 5"),
    ("stale prefix", "prefix", "not rounding"),
    ("swapped answers", "co-batch, 8 others", "this is the answer to request"),
    ("swapped tokens", "co-batch, 48 others", "not rounding"),
    ("seed ignored", "seed", "seed ignored"),
    ("one seed", "seed", "two seeds give one answer"),
    ("seed by batch", "co-batch, 8 others", "the draw depends on the batch"),
    ("n alike", "n", "all choices are alike"),
    ("cut changes", "cut", "not rounding"),
    ("scores differ", "score", "rounding"),
    ("rounded logprobs", "", "rounded to"),
]
OF_HTTP = [
    ("drops a token", "stream", "not rounding"),
    ("other bits unstreamed", "stream", "rounding"),
    ("serial", "co-batch, 8 others", "no overlap was proven"),
    ("endless stream", "", "goes on after"),
    ("breaks off", "", "breaks off"),
    ("too long", "", "tokens for max_tokens"),
    ("dies", "", "the answer ended early"),
    ("nested", "", "a stream with the event"),
]


def assert_named(report: Report, fault: str, where: str, words: str) -> None:
    text = report.text()
    assert words in text, text
    rows = {row.name: row.verdict for row in report.rows}
    if fault == "serial":
        assert rows[where] == "not visible" and report.exit_status == 2
    elif where:
        assert rows[where] == "differs" and report.exit_status == 1, text


@pytest.mark.parametrize(("fault", "where", "words"), default(NUMBERS, 6), ids=[each[0] for each in NUMBERS])
def test_a_planted_fault_happens_and_is_named(fault: str, where: str, words: str) -> None:
    liar = Liar(fault)
    report = check(LiarTarget(liar), requests=12)
    assert liar.fired > 0
    assert_named(report, fault, where, words)
    if fault == "noise in all batches":
        assert report.causes == {"rounding", "unclear"}
        counted = [row.remarks() for row in report.rows if row.name == where]
        assert re.match(r"\d+ unclear; \d+ rounding; overlap", counted[0])
    if fault == "noise above 44":
        assert {row.name for row in report.rows if row.findings} == {where}
        assert report.causes == {"rounding"}


@pytest.mark.parametrize(("fault", "where", "words"), default(OF_HTTP, 0), ids=[each[0] for each in OF_HTTP])
def test_a_fault_of_a_server_happens_and_is_named(fault: str, where: str, words: str) -> None:
    with serving(fault) as server:
        report = check(HttpTarget(server.url), requests=4, among=[8])
        assert server.liar.fired > 0
        assert_named(report, fault, where, words)
        if fault != "other bits unstreamed":
            assert report.exit_status == (
                1 if where == "stream" else 2 if fault == "serial" else report.exit_status
            )


@pytest.mark.parametrize("wanted", [400, pytest.param(10_000, marks=pytest.mark.full)], ids=["400", "10,000"])
def test_an_honest_target_raises_no_alarm(wanted: int) -> None:
    asked, seed = 0, 0
    while asked < wanted:
        target = LiarTarget(Liar())
        report = check(target, seed=seed)
        assert report.exit_status == 0, report.text()
        assert all(row.verdict == "same" for row in report.rows if row.name != "stream"), report.text()
        asked, seed = asked + target.asked, seed + 1


@pytest.mark.full
def test_an_honest_server_is_the_same_and_the_report_says_what_was_seen(tmp_path: Path) -> None:
    saved = str(tmp_path / "a.json")
    with serving() as server:
        report = check(HttpTarget(server.url), requests=6, save=saved)
        again = check(HttpTarget(server.url), requests=6, among=[8], baseline=saved)
    assert report.exit_status == again.exit_status == 0, report.text() + again.text()
    batch = next(row for row in report.rows if row.name == "co-batch, 48 others")
    assert batch.overlap is not None and batch.overlap[1] > 8 and "(95 %)" in batch.remarks()
    assert "same answers" in report.markdown() and '"exit_status": 0' in report.json()
    assert "offers             streams, prompts of token ids, log-probabilities of prompts" in report.text()
    assert "checked by         xla-engine " in report.text()
    assert next(row for row in again.rows if row.name == "restart").compared == 7


def test_a_restart_with_other_bits_is_found(tmp_path: Path) -> None:
    saved, liar = str(tmp_path / "a.json"), Liar("other bits after a restart")
    check(LiarTarget(liar), requests=6, save=saved)
    liar.restarts = 1
    report = check(LiarTarget(liar), requests=6, baseline=saved)
    assert next(row for row in report.rows if row.name == "restart").verdict == "differs"
    with pytest.raises(TargetError, match="use the same"):
        check(LiarTarget(Liar()), requests=5, baseline=saved)
    Path(saved).write_text("[]")
    with pytest.raises(TargetError, match="is not a file that --save"):
        check(LiarTarget(Liar()), requests=6, baseline=saved)


def test_a_function_is_checked_and_what_it_does_not_show_is_not_called_same() -> None:
    def honest(prompts: Sequence[str]) -> list[str]:
        return [f"{len(prompt)} {prompt[::-3]}" for prompt in prompts]

    def by_batch(prompts: Sequence[str]) -> list[tuple[list[int], list[float]]]:
        return [([1, 2], [-0.5, -0.25 - 1e-6 * len(prompts)]) for _ in prompts]

    report = check(honest, requests=5)
    report.raise_if_different()
    assert "no cached tokens are reported (vLLM reports them with --" in report.text()
    assert {row.name: row.verdict for row in report.rows} | {"repeat": "same", "cut": "not visible"} == {
        **{row.name: "not visible" for row in report.rows},
        **dict.fromkeys(("repeat", "co-batch, 8 others", "co-batch, 48 others"), "same"),
    }
    with pytest.raises(DifferenceFound, match="rounding"):
        check(by_batch, requests=5).raise_if_different()
    with pytest.raises(TargetError, match="returned 1 answers to 9 prompts"):
        check(lambda prompts: ["a"], requests=3, among=[8])
    with pytest.raises(TargetError, match="return a text, token ids"):
        CallableTarget(lambda prompts: [3.5]).run([Ask(prompt="a")])


def test_answers_that_fail_are_no_verdict() -> None:
    class Failing(LiarTarget):
        def run(self, asks: Sequence[Ask]) -> Sequence[Answer]:
            return (
                [Answer(error="status 500"), *super().run(asks)[1:]] if len(asks) % 3 else super().run(asks)
            )

    report = check(Failing(Liar()), requests=6)
    assert report.exit_status == 2 and "without an answer: status 500" in report.text()


def test_a_difference_is_classified_by_what_rounding_can_do() -> None:
    def made(second: int, logprob: float, gap: float) -> Choice:
        return Choice(tokens=(1, second), logprobs=(logprob, -1.0), gaps=(3.0, gap))

    right = made(2, -0.5, 0.01)
    near, far = compare(right, made(3, -0.51, 0.005)), compare(right, made(3, -0.5, 4.0))
    large = compare(right, made(2, -1.5, 0.01))
    assert near is not None and (near.position, near.gap, cause_of(near, near.delta or 0)) == (
        1,
        0.01,
        "rounding",
    )
    assert far is not None and cause_of(far, 0.01) == "not rounding" and cause_of(far, 1.0) == "unclear"
    assert large is not None and large.position is None and cause_of(large, 1.0) == "not rounding"
    assert (
        compare(right, right) is None and compare(Choice(text="ab"), Choice(text="abc"), begins=True) is None
    )
    infinite = compare(right, made(2, float("nan"), 0.01))
    assert infinite is not None and infinite.delta == float("inf")
    shorter = compare(right, Choice(tokens=(1,), logprobs=(-0.5,)))
    assert shorter is not None and shorter.found == "the end"
