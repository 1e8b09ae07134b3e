"""Result files and streams that somebody has edited, torn or made up are read, or refused in words; what is refused
stays as it was. The number of examples is the time budget: each test takes a few seconds."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.batch_lines import HEADER, prompts
from tests.support.fake_engine import FakeEngine
from tests.support.profiles import examples
from xla_engine.batch.compare import compare_files
from xla_engine.batch.lines import read_lines
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.stream import EventStream
from xla_engine.errors import CompareError, OutputError, ResumeError

FUZZ = settings(
    max_examples=examples(50, 200),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["batch_req_1_0000000000000000", "\ud800", "prompt_token_ids", "error", "response"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "id",
                    "custom_id",
                    "response",
                    "error",
                    "body",
                    "choices",
                    "created",
                    "code",
                    "line",
                    "token_ids",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 40), st.binary(max_size=8)), min_size=1, max_size=4
)


def edited(content: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for at, deleted, inserted in edits:
        content = content[:at] + inserted + content[at + deleted :]
    return content


def run(path: Path, mode: Mode) -> None:
    done = FinishedLines()
    with OutputFile(str(path), mode) as output:
        output.claim(done)
        lines = read_lines(io.BytesIO(prompts(4)))
        totals = BatchRun(FakeEngine(), lines, output.begin(), header=HEADER, done=done).run()
    assert totals.failure is None or isinstance(totals.failure, ResumeError)


def goes_on_or_refuses(path: Path, content: bytes, mode: Mode) -> None:
    """A run to go on with is whole afterwards (a blank line is none); any other file has the bytes that it had."""
    path.write_bytes(content)
    try:
        run(path, mode)
    except (OutputError, ResumeError):
        assert path.read_bytes() == content
        return
    raw = path.read_bytes()
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).split(b"\n"):
        assert not line.strip() or json.loads(line)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Results of the run's lines, by suffix."""
    found = {}
    for suffix in (".jsonl", ".jsonl.gz"):
        path = tmp_path_factory.mktemp("whole") / f"out{suffix}"
        run(path, Mode.NEW)
        found[suffix] = path.read_bytes()
    return found


@FUZZ
@given(
    edits=EDITS,
    mode=st.sampled_from([Mode.RESUME, Mode.RETRY]),
    suffix=st.sampled_from([".jsonl", ".jsonl.gz"]),
)
def test_an_edited_result_file(
    edits: list[tuple[int, int, bytes]], mode: Mode, suffix: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    goes_on_or_refuses(tmp_path / f"out{suffix}", edited(whole[suffix], edits), mode)


@FUZZ
@given(records=st.lists(VALUES, max_size=4), mode=st.sampled_from([Mode.RESUME, Mode.RETRY]))
def test_a_made_up_result_file(records: list[Any], mode: Mode, tmp_path: Path) -> None:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    goes_on_or_refuses(tmp_path / "out.jsonl", content, mode)


@FUZZ
@given(records=st.lists(VALUES, max_size=3), edits=EDITS, made_up=st.booleans())
def test_files_that_are_compared(
    records: list[Any],
    edits: list[tuple[int, int, bytes]],
    made_up: bool,
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    good, other = tmp_path / "good.jsonl", tmp_path / "other.jsonl"
    good.write_bytes(whole[".jsonl"])
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    other.write_bytes(text if made_up else edited(whole[".jsonl"], edits))
    try:
        "\n".join(compare_files(good, other).lines())
    except CompareError as error:
        assert str(other) in str(error)


LINES = st.one_of(
    st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ") + b"\n"),
    VALUES.map(lambda value: json.dumps(value).encode() + b"\n"),
    st.dictionaries(
        st.sampled_from(
            ["op", "id", "prompt", "messages", "n", "max_tokens", "stop", "priority", "echo", "url", "body"]
        ),
        VALUES | st.sampled_from(["submit", "cancel", "list", "x", "/v1/completions", 2, [1, 2]]),
        max_size=5,
    ).map(lambda fields: json.dumps(fields).encode() + b"\n"),
)


@FUZZ
@given(lines=st.lists(LINES, max_size=8), torn=st.binary(max_size=10), seed=st.integers(0, 9))
def test_any_stream_is_answered_to_its_end(lines: list[bytes], torn: bytes, seed: int) -> None:
    """Each line that asks for something has one answer, the good request behind them its result, and none stays."""
    good = b'{"id": "good", "prompt": "abc", "max_tokens": 2}\n'
    engine, sink = FakeEngine(max_num_seqs=2, seed=seed), io.BytesIO()
    totals = EventStream(engine, io.BytesIO(b"".join(lines) + good + torn), sink, max_line_bytes=10_000).run()
    events = [json.loads(line) for line in sink.getvalue().splitlines()]
    ends = [
        event["event"]
        for event in events
        if event.get("id") == "good" and event["event"] in ("finish", "error")
    ]
    assert totals.failure is None and ends and events[-1]["event"] == "end" and not engine.live
