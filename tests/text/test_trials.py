"""A constraint that would crash or block the engine's process ends one request with a reason; the process
continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.requests import comparable
from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import SamplingParams
from xla_engine.text import grammar as grammars
from xla_engine.text import trials
from xla_engine.text.grammar import Grammars
from xla_engine.text.trials import ConstraintTrials
from xla_engine.text.worker_process import WorkerProcess

pytest.importorskip("llguidance")

ROOT = Path(__file__).parents[2]


def chain_of_refs(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def chain_of_rules(length: int) -> str:
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(length)) + f'a{length}: "x"\n'


KILLERS = [
    ({"json": {"const": -(2**63)}}, "ended its process"),
    ({"json": chain_of_refs(3000)}, "ended its process"),
    ({"grammar": chain_of_rules(3000)}, "ended its process"),
    ({"json": {"type": "integer", "multipleOf": 2**31}}, "processor time"),
]


def submit(engine: XlaBatchEngine, constraint: dict[str, Any]) -> None:
    engine.submit("x", SamplingParams(max_tokens=8, structured_outputs=constraint))


@pytest.mark.parametrize(("constraint", "why"), default(KILLERS, 3))
def test_a_constraint_that_kills_or_holds_is_refused(
    embedded: XlaBatchEngine, constraint: dict[str, Any], why: str
) -> None:
    """Each of these crashed the process or never returned; another request in the batch gets the same tokens as
    alone."""
    wanted = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "[a-z ]{1,40}"})
    embedded.submit("x = ", wanted)
    (alone,) = embedded.drain()
    embedded.submit("x = ", wanted)
    kind = next(iter(constraint))
    with pytest.raises(InvalidRequestError, match=f"structured_outputs: {kind} .*{why}.*make it simpler"):
        submit(embedded, constraint)
    (beside,) = embedded.drain()
    assert comparable(beside) == comparable(alone)


@pytest.mark.full
def test_a_run_lives_through_such_lines_and_so_does_its_resume(tmp_path: Path) -> None:
    """Law 4 on the command line: one error line, the process lives, and `--resume` has nothing left to do."""
    texts = [{"regex": "[ab]{1,5}"}, {"json": {"const": -(2**63)}}, {"choice": ["yes"]}]
    lines = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "max_tokens": 6, "structured_outputs": text},
        }
        for index, text in enumerate(texts)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "xla_engine", "run", str(source), "-o", str(target)]
    for more in ([], ["--resume"]):
        done = subprocess.run(
            [*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode >= 0, done.stderr  # no signal
        found = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
        assert {name for name, record in found.items() if record["error"]} == {"1"}, found
        assert len(found) == 3 and "make it simpler" in found["1"]["error"]["message"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**64}, "64 bits"),
        ({"enum": [1, [-(10**400)]]}, "64 bits"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested deeper than 100"),
        ("[" * 100_000, "not a schema"),
    ],
)
def test_depth_and_integers_are_bounded_before_any_trial(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch, schema: Any, message: str
) -> None:
    monkeypatch.setattr(trials.PROCESS, "ask", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(InvalidRequestError, match=message):
        submit(embedded, {"json": schema})


def test_a_verdict_is_remembered_and_only_so_many_are(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = trials.PROCESS.ask
    monkeypatch.setattr(trials.PROCESS, "ask", lambda *given: asked.append(given) or real(*given))
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="ended its process"):
            submit(embedded, {"json": {"enum": [-(2**63), "remembered"]}})
    assert sum("try_constraint" in request for _, request in asked) in (1, 2)  # 2: the tokenizer was not kept
    asked.clear()
    process = SimpleNamespace(ask=lambda *given: asked.append(given) or {})
    tried = ConstraintTrials((b"a",), (), (0,), {}, process=process, most_verdicts=2)
    assert all(tried.why_not(grammar) is None for grammar in "abacab")
    assert [json.loads(request)["grammar"] for _, request in asked] == ["a", "b", "c", "b"]


def test_the_tokenizer_is_told_once_and_again_to_a_new_process(embedded: XlaBatchEngine) -> None:
    """A constraint that kills its child process does not lose the cached tokenizer; a killed worker is replaced and
    initialised again."""
    assert embedded.tokenizer is not None
    kinds: list[str] = []

    worker = WorkerProcess("trial_worker.py")

    def ask(cpu_limit_s: float, request: str) -> dict[str, Any]:
        kinds.append(json.loads(request)["kind"])
        return worker.ask(cpu_limit_s, request)

    vocabulary = [embedded.tokenizer.token_bytes(n) for n in range(4096)]
    tried = ConstraintTrials(vocabulary, (0,), (0,), {}, process=SimpleNamespace(ask=ask))

    def why_not(schema: object) -> str | None:
        return tried.why_not(json.dumps({"grammars": [{"json_schema": schema}]}))

    assert why_not({"const": 1}) is None
    kinds.clear()
    assert why_not({"const": 2}) is None
    assert "ended its process" in str(why_not({"const": -(2**63)}))
    assert why_not({"const": 3}) is None
    assert kinds == ["try_constraint"] * 3
    process = worker.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kinds.clear()
    assert why_not({"const": 4}) is None
    assert kinds == ["try_constraint", "keep_tokenizer", "try_constraint"]
    worker.stop()


def test_workers_know_no_jax() -> None:
    code = (
        "import runpy, sys; runpy.run_path('xla_engine/text/trial_worker.py');"
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'xla_engine')))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_row_whose_masks_take_too_long_ends_alone(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time is simulated: each mask takes a quarter of a second, so a few tokens exhaust the budget."""
    embedded.submit("def f(", SamplingParams(temperature=0, max_tokens=20))
    (alone,) = embedded.drain()
    now = [0.0]

    def thread_time() -> float:
        now[0] += 0.125
        return now[0]

    monkeypatch.setattr(grammars.time, "thread_time", thread_time)
    embedded.submit("def f(", SamplingParams(temperature=0, max_tokens=20), request_id="peer")
    slow = {"grammar": 'start: start start | "a"'}
    embedded.submit("x", SamplingParams(max_tokens=50, structured_outputs=slow), request_id="slow")
    outputs = {output.request_id: output for output in embedded.drain()}
    assert outputs["slow"].outputs[0].finish_reason == "error"
    assert "grammar 'start: start start" in str(outputs["slow"].error)
    assert "processor time, after" in str(outputs["slow"].error)
    assert comparable(outputs["peer"]) == comparable(alone)


def test_without_its_process_a_constraint_is_refused(embedded: XlaBatchEngine) -> None:
    assert embedded.tokenizer is not None
    process = SimpleNamespace(ask=WorkerProcess("no_such_worker.py").ask)
    compiler = Grammars(embedded.tokenizer, 4096, (0,), process=process)
    wanted = SamplingParams(structured_outputs={"regex": "abc"}).structured_outputs
    assert wanted is not None
    with pytest.raises(InvalidRequestError, match=r"regex 'abc': compiling it ended its process \(status"):
        compiler.matcher(wanted)
    process.ask = trials.PROCESS.ask
    compiler.matcher(wanted)
