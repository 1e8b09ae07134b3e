"""Files and batches give the results of `xla-engine run`, exactly once, also while interactive requests run."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.bodies import BODIES, TOOL
from tests.server.conftest import Running
from tests.support.command_line import ROOT
from tests.support.instruction_sets import HAS_KERNELS
from xla_engine.errors import ConfigError
from xla_engine.openai.fields import CHAT_URL
from xla_engine.receipts import AuditReport, audit
from xla_engine.server.batches.store import BatchRecord, BatchStore
from xla_engine.text.parsers.chats import Dialect
from xla_engine.utils import file_lock


def lines_of(bodies: list[dict[str, Any]], url: str = "/v1/completions") -> bytes:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch").id


def create(
    client: openai.OpenAI, data: bytes, endpoint: Any = "/v1/completions", *, receipts: bool = False
) -> Any:
    return client.batches.create(
        input_file_id=upload(client, data),
        endpoint=endpoint,
        completion_window="24h",
        metadata={"a": "b"},
        extra_body={"receipts": True} if receipts else None,
    )


def finished(client: openai.OpenAI, batch_id: str, seconds: float = 600) -> Any:
    limit = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch_id)).status not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        assert time.monotonic() < limit, batch
        time.sleep(0.05)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    entries = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {entry["custom_id"]: entry for entry in entries}
    assert len(found) == len(entries), "a line was answered twice"
    return found


def test_a_batch_has_the_bits_of_a_run(client: openai.OpenAI, expected: list[dict[str, Any]]) -> None:
    numbers = [number for number, (url, _) in enumerate(BODIES) if url == "/v1/completions"]
    batch = create(client, lines_of([BODIES[number][1] for number in numbers]))
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"a": "b"}
    batch = finished(client, batch.id)
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert batch.request_counts.completed == batch.request_counts.total == len(numbers)
    found = results(client, batch.output_file_id)
    for place, number in enumerate(numbers):
        assert found[f"r{place}"]["response"]["body"]["choices"] == expected[number]["choices"]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in {each.id for each in client.batches.list(limit=5)}


def audited(client: openai.OpenAI, batch: Any, folder: Path) -> AuditReport:
    out, kept = folder / "out.jsonl", folder / "receipts.jsonl"
    out.write_text(client.files.content(batch.output_file_id).text)
    kept.write_text(client.files.content(batch.receipts_file_id).text)
    return audit(out, kept, max_num_seqs=8)


@pytest.mark.skipif(not HAS_KERNELS, reason="only the C++ kernels verify what they decoded")
def test_a_batch_with_receipts_is_audited(client: openai.OpenAI, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "x = ", "max_tokens": 9},
        {"prompt": "def f(", "max_tokens": 0},
        {"prompt": ["a", "b"], "n": 2, "logprobs": 1},
    ]
    batch = create(client, lines_of(bodies), receipts=True)
    assert batch.receipts_file_id is None
    batch = finished(client, batch.id)
    assert batch.status == "completed" and batch.error_file_id is not None
    report = audited(client, batch, tmp_path)
    assert report.ok, report.lines()
    assert (report.answers, report.errors, report.checked) == (3, 1, 3)
    assert client.files.retrieve(batch.receipts_file_id).filename == f"{batch.id}_receipts.jsonl"


def test_a_line_that_cannot_run_harms_no_other(client: openai.OpenAI) -> None:
    batch = finished(
        client, create(client, lines_of([{"prompt": "x"}, {"prompt": "x", "max_tokens": -1}])).id
    )
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert results(client, batch.error_file_id)["r1"]["error"]["code"] == "invalid_request"
    assert list(results(client, batch.output_file_id)) == ["r0"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (b"{\n", "invalid_json_line"),
        (lines_of([{"prompt": "x"}]) * 2, "duplicate_custom_id"),
        (lines_of([{"prompt": "x"}], "/v1/chat/completions"), "mismatched_endpoint"),
        (lines_of([{"prompt": "x", "model": "gpt"}]), "model_not_found"),
    ],
)
def test_a_file_that_is_no_batch_fails_as_a_whole(client: openai.OpenAI, data: bytes, code: str) -> None:
    batch = finished(client, create(client, data).id)
    assert batch.status == "failed" and batch.output_file_id is None
    assert batch.errors.data[0].code == code


def test_interactive_requests_go_first(client: openai.OpenAI, http: httpx.Client, server: Running) -> None:
    """A request waits a few steps at most, although a batch fills every slot for seconds."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    batch = create(client, lines_of([body] * 100))
    server.wait_until(lambda: server.service.engine.num_running == server.service.engine.max_num_seqs)
    before = server.service.engine.snapshot().counters
    answer = http.post("/v1/completions", json={"prompt": "def", "max_tokens": 4, "temperature": 0})
    steps = server.service.engine.snapshot().counters.steps_planned - before.steps_planned
    assert answer.status_code == 200 and steps < 100
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    batch = finished(client, batch.id)
    assert batch.status == "cancelled" and batch.request_counts.completed < 100
    server.wait_until(lambda: not server.service.engine.has_work)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_files_are_listed_read_and_deleted(client: openai.OpenAI, http: httpx.Client) -> None:
    names = [upload(client, b"%d\n" % number) for number in range(3)]
    listed = [file.id for file in client.files.list(purpose="batch", limit=2)]
    assert [name for name in listed if name in names] == names[::-1]
    assert client.files.content(names[1]).text == "1\n"
    assert client.files.delete(names[1]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(names[1])
    answer = http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "fine-tune"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "purpose"
    assert http.get("/v1/files", params={"limit": "x"}).status_code == 400
    assert http.get("/v1/batches/nothing").status_code == 404


def test_an_expired_batch_answers_every_line(client: openai.OpenAI, server: Running) -> None:
    """Lines that did not run are in the error file."""
    store = server.batches.store
    now = int(time.time())
    record = BatchRecord(
        id="batch_zz",
        endpoint="/v1/completions",
        input_file_id=upload(client, lines_of([{"prompt": "x"}] * 5)),
        completion_window="24h",
        created_at=now - 10,
        expires_at=now - 1,
        results_id="file-zz1",
        errors_id="file-zz2",
    )
    store.add_batch(record)
    batch = finished(client, record.id)
    assert batch.status == "expired" and batch.output_file_id is None
    codes = [entry["error"]["code"] for entry in results(client, batch.error_file_id).values()]
    assert codes == ["batch_expired"] * 5


def test_a_folder_has_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "PATIENCE_S", 0)
    store = BatchStore(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        BatchStore(tmp_path)
    store.close()
    BatchStore(tmp_path).close()


class Process:
    """A server process that the test can kill. lines: results that a batch writes before `folder / "go"` exists."""

    def __init__(self, folder: Path, lines: int | None = None) -> None:
        self.socket = folder / "socket"
        options = {"--uds": str(self.socket), "--batch-dir": str(folder / "store"), "--max-num-seqs": "8"}
        program = [sys.executable, "-m", "xla_engine"]
        if lines is not None:
            program = [sys.executable, "-m", "tests.support.stops_writing", str(lines), str(folder / "go")]
        with open(folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*program, "serve", "--no-access-log", *itertools.chain(*options.items())],
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"XLA_ENGINE_API_KEY": "alpha,beta"},
            )
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self.http = httpx.Client(transport=transport, base_url="http://x", timeout=1800)
        self.client = openai.OpenAI(base_url="http://x/v1", api_key="alpha", http_client=self.http)
        limit = time.monotonic() + 600
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < limit, (folder / "log").read_text()
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return self.http.get("/ready").status_code == 200

    def end(self, number: signal.Signals) -> int:
        os.kill(self.process.pid, number)
        self.client.close()
        return self.process.wait(600)


@pytest.mark.full
def test_killed_and_stopped_servers_lose_no_line(tmp_path: Path) -> None:
    """kill -9 in the middle of a batch, then SIGTERM in the middle of the rest; a third server finishes it.
    The results are those of an undisturbed run, each exactly once, also for lines without a seed."""
    bodies = [{"prompt": f"x{number} = ", "max_tokens": 60, "ignore_eos": True} for number in range(300)]
    data = lines_of(bodies)
    server = Process(tmp_path, lines=30)
    batch = create(server.client, data, receipts=True)
    record = json.loads((tmp_path / "store" / "batches" / batch.id / "batch.json").read_bytes())
    output = tmp_path / "store" / "files" / record["results_id"] / "data"

    def wait_for_lines(count: int) -> None:
        while not output.exists() or output.read_bytes().count(b"\n") < count:
            assert server.process.poll() is None
            time.sleep(0.01)

    wait_for_lines(20)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    before = output.read_bytes().count(b"\n")
    assert before < 300
    server = Process(tmp_path, lines=before + 30)
    assert server.client.batches.retrieve(batch.id).request_counts.completed >= before
    wait_for_lines(before + 20)
    os.kill(server.process.pid, signal.SIGTERM)
    while "draining" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert server.process.wait(600) == 0
    server.client.close()
    assert output.read_bytes().endswith(b"\n") and output.read_bytes().count(b"\n") < 300
    server = Process(tmp_path)
    done = finished(server.client, batch.id)
    assert done.status == "completed" and done.request_counts.completed == 300
    found = results(server.client, done.output_file_id)
    whole = finished(server.client, create(server.client, data).id)
    expected = results(server.client, whole.output_file_id)
    assert len(found) == 300
    report = audited(server.client, done, tmp_path)
    assert report.ok and report.checked == 300, report.lines()
    for name, entry in expected.items():
        assert found[name]["response"]["body"]["choices"] == entry["response"]["body"]["choices"]
    another_key_sees_nothing(server, batch.id, done.output_file_id)
    a_stream_ends_before_its_server(server)


def another_key_sees_nothing(server: Process, batch_id: str, file_id: str) -> None:
    headers = {"authorization": "Bearer beta"}
    for path in (f"/v1/batches/{batch_id}", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert server.http.get(path, headers=headers).status_code == 404
    assert server.http.post(f"/v1/batches/{batch_id}/cancel", headers=headers).status_code == 404
    assert server.http.get("/v1/batches", headers=headers).json()["data"] == []
    assert server.http.get("/v1/files").status_code == 401


def a_stream_ends_before_its_server(server: Process) -> None:
    """SIGTERM in the middle of a stream: its client gets the whole of it, and the exit status is 0."""
    stream = server.client.completions.create(
        model="embedded", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = iter(stream)
    next(pieces)
    os.kill(server.process.pid, signal.SIGTERM)
    last = [choice.finish_reason for piece in pieces for choice in piece.choices][-1]
    assert last == "length"
    server.client.close()
    assert server.process.wait(600) == 0


def test_a_line_has_the_message_of_a_post(client: openai.OpenAI, http: httpx.Client, server: Running) -> None:
    """Calls and reasoning are parsed in a batch as in a POST; the model is constrained to a text that has some."""
    call = '{"name": "add", "arguments": {"a": 1}}'
    text = f"<think>so</think>I add.<tool_call>{call}</tool_call>"
    chat = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 100, "tools": [TOOL], "seed": 1}
    bodies = [{**chat, "structured_outputs": {"choice": [text]}}, {**chat, "tool_choice": "required"}]
    before = server.service.dialect
    server.service.dialect = Dialect(tools="hermes", reasoning="think")
    try:
        batch = finished(client, create(client, lines_of(bodies, CHAT_URL), CHAT_URL).id)
        found = results(client, batch.output_file_id)
        posted = [http.post(CHAT_URL, json=body).json()["choices"][0] for body in bodies]
    finally:
        server.service.dialect = before
    lines = [found[f"r{number}"]["response"]["body"]["choices"][0] for number in range(len(bodies))]
    ids = [each.pop("id") for choice in (*lines, *posted) for each in choice["message"]["tool_calls"]]
    assert lines == posted and len(set(ids)) == len(ids) and lines[0]["message"]["reasoning"] == "so"


def test_a_line_that_streams_fails_its_file(client: openai.OpenAI) -> None:
    data = lines_of([{"prompt": "x", "max_tokens": 1}, {"prompt": "x", "stream": True}, {"max_tokens": 1}])
    batch = finished(client, create(client, data).id)
    assert batch.status == "failed"
    assert [(each.line, each.param) for each in batch.errors.data] == [(2, "body.stream"), (3, "body.prompt")]
