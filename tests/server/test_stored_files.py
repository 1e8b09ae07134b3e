"""Stored files: limited per key, complete or absent, and invisible to other keys."""

from __future__ import annotations

import contextlib
import errno
import io
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import Running
from tests.server.test_batches import create, finished, lines_of, results, upload
from tests.support.again import again
from xla_engine.server.batches import store as store_module
from xla_engine.server.batches import worker
from xla_engine.server.batches.store import BatchRecord, BatchStore, FileRecord, LineCounts
from xla_engine.server.errors import ApiError

LARGEST = 16 << 10  # bytes of a file while the disk is full


@pytest.fixture
def store(server: Running) -> BatchStore:
    return server.batches.store


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """A disk that fails in the middle of a write after `LARGEST` bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def record(**fields: Any) -> BatchRecord:
    now = int(time.time())
    return BatchRecord(
        endpoint="/v1/completions",
        completion_window="24h",
        input_file_id="file-in",
        created_at=now,
        expires_at=now + 3600,
        **fields,
    )


def add(store: BatchStore, size: int, tenant: str = "") -> str:
    data = io.BytesIO(b"x" * size)
    record = FileRecord(filename="a", purpose="batch", tenant=tenant)
    store.add_file(data, record)
    return record.id


@pytest.mark.parametrize("size", [100_000, 3_000_000], ids=["from memory", "from a temporary file"])
def test_an_upload_to_a_full_disk_leaves_nothing(http: httpx.Client, store: BatchStore, size: int) -> None:
    folder = store.data_path("x").parents[1]
    before = set(folder.iterdir())
    form: Any = {"files": {"file": ("a", b"x" * size)}, "data": {"purpose": "batch"}}
    with full_disk():
        answer = http.post("/v1/files", **form)
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "insufficient_storage", answer.text
    assert set(folder.iterdir()) == before
    answer = http.post("/v1/files", **form)
    assert answer.status_code == 200 and http.delete(f"/v1/files/{answer.json()['id']}").status_code == 200
    assert set(folder.iterdir()) == before


def test_a_batch_on_a_full_disk_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "save", full)
        with pytest.raises(ApiError, match="disk is full") as failed:
            store.add_batch(record(id="batch_a"))
    assert failed.value.status == 507 and not store.batches and not list((tmp_path / "batches").iterdir())
    store.close()


def test_bytes_of_a_key_are_bounded(tmp_path: Path) -> None:
    """Uploads and growing results count; another key has its own room; deleted and refused files do not
    count, also after a restart."""
    store = BatchStore(tmp_path, 100)
    first = add(store, 60, "a")
    with pytest.raises(
        ApiError, match=r"60 bytes, and the limit is 100; delete .*--max-stored-bytes"
    ) as full:
        add(store, 41, "a")
    assert full.value.status == 413
    add(store, 100, "b")
    add(store, 40, "a")
    with pytest.raises(ApiError):
        store.stored.add("file-results", "a", 1)
    store.delete_file(first)
    store.stored.add("file-results", "a", 60)
    with pytest.raises(ApiError):
        add(store, 1, "a")
    store.close()
    store = BatchStore(tmp_path, 100)
    with pytest.raises(ApiError):
        add(store, 61, "a")
    add(store, 60, "a")
    store.close()


@again
def test_uploads_of_a_key_at_the_same_time_are_few(server: Running, http: httpx.Client) -> None:
    """Each has a temporary file, which no other limit counts."""
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            connection.sendall(head + b"content-length: 1000\r\n\r\n--b\r\n")
        limit = time.monotonic() + 5
        while (answer := http.post("/v1/files", files={"file": b"x"})).status_code != 429:
            assert time.monotonic() < limit
        assert answer.json()["error"]["code"] == "too_many_uploads"
    while http.post("/v1/files", files={"file": b"x"}).status_code == 429:
        assert time.monotonic() < limit + 600


def test_what_a_killed_server_left_torn_is_removed(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    whole = add(store, 10)
    store.add_batch(record(id="batch_a", status="in_progress", results_id="file-r", errors_id="file-e"))
    store.add_batch(record(id="batch_b", status="failed", results_id="file-s", errors_id="file-t"))
    for name in ("file-torn", "file-r", "file-s"):
        store.open_file(name)
        store.data_path(name).write_bytes(b"{}\n{")
    (tmp_path / "batches" / "batch_torn").mkdir()
    store.close()
    BatchStore(tmp_path).close()
    assert {each.name for each in (tmp_path / "files").iterdir()} == {whole, "file-r"}
    assert {each.name for each in (tmp_path / "batches").iterdir()} == {"batch_a", "batch_b"}


def test_counts_are_known_at_once_after_a_restart(tmp_path: Path) -> None:
    """The last server's record of them is older than its result files."""
    store = BatchStore(tmp_path)
    batch = record(id="batch_a", status="in_progress", results_id="file-r", errors_id="file-e")
    batch.request_counts = LineCounts(total=500)
    store.add_batch(batch)
    for name, data in (("file-r", b"{}\n" * 349 + b'{"id'), ("file-e", b"{}\n" * 2)):
        store.open_file(name)
        store.data_path(name).write_bytes(data)
    store.close()
    with contextlib.closing(BatchStore(tmp_path)) as store:
        assert store.batches["batch_a"].request_counts == LineCounts(total=500, completed=349, failed=2)


def long_batch(client: openai.OpenAI, lines: int = 40) -> Any:
    return create(client, lines_of([{"prompt": "x", "max_tokens": 100, "ignore_eos": True}] * lines))


def test_a_batch_that_fails_midway_shows_what_it_has(client: openai.OpenAI) -> None:
    """The disk fills up in the middle of a line; the output has all complete lines before it."""
    with full_disk():
        batch = finished(client, long_batch(client).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "insufficient_storage"
    found = results(client, batch.output_file_id)
    assert 10 < len(found) < 40 and batch.request_counts.completed == len(found)
    assert batch.request_counts.total == 40 and batch.request_counts.failed == 0
    assert all(entry["response"]["body"]["usage"]["completion_tokens"] == 100 for entry in found.values())


def test_a_batch_ends_where_its_key_has_no_more_room(
    client: openai.OpenAI, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.stored, "_limit", store.stored._sums[""] + 20_000)
    batch = finished(client, long_batch(client).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "storage_limit_exceeded"
    assert 0 < len(results(client, batch.output_file_id)) < 40
    with pytest.raises(openai.APIStatusError, match="; delete some") as full:
        upload(client, b"x" * 20_000)
    assert full.value.status_code == 413
    client.files.delete(batch.output_file_id)
    client.files.delete(upload(client, b"x" * 10_000))


def test_results_are_shown_when_the_disk_has_room_again(
    client: openai.OpenAI, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = store.finish_file, 0

    def finish(*arguments: Any, **fields: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **fields)

    monkeypatch.setattr(worker, "RETRY_S", 0.05)
    source = upload(client, lines_of([{"prompt": "x", "max_tokens": 2}]))
    monkeypatch.setattr(store, "finish_file", finish)
    batch = client.batches.create(input_file_id=source, endpoint="/v1/completions", completion_window="24h")
    batch = finished(client, batch.id)
    assert batch.status == "completed" and calls == 3 and len(results(client, batch.output_file_id)) == 1


def test_batches_that_are_over_are_few_and_small(
    client: openai.OpenAI, http: httpx.Client, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad files make no list grow: the oldest batches are forgotten, and each shows a few short problems."""
    monkeypatch.setattr(store_module, "MAX_ENDED", 3)
    source = upload(client, lines_of([{"prompt": "x"}] * 200, "/" + "é" * 5000))
    names = []
    for _ in range(5):
        batch = client.batches.create(
            input_file_id=source, endpoint="/v1/completions", completion_window="24h"
        )
        names.append(batch.id)
        if len(names) <= 3:
            batch = finished(client, batch.id)
            assert batch.status == "failed" and len(batch.to_json()) < 50_000 and len(batch.errors.data) == 50
        else:
            while store.batches[batch.id].status != "failed" or len(store.batches) > 3:
                time.sleep(0.01)
    assert [each.id for each in client.batches.list(limit=2)] == names[:1:-1]
    assert http.get(f"/v1/batches/{names[0]}").status_code == 404
    assert {each.name for each in (store.data_path("x").parents[2] / "batches").iterdir()} == set(names[2:])
    assert http.get("/v1/batches", params={"limit": 101}).status_code == 400
    assert client.files.delete(source).deleted


def test_results_expire_where_their_batch_asks_for_it(client: openai.OpenAI, http: httpx.Client) -> None:
    source = upload(client, lines_of([{"prompt": "x", "max_tokens": 2}]))
    body: dict[str, Any] = {
        "input_file_id": source,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }
    sent = http.post("/v1/batches", json=body).json()
    batch = finished(client, sent["id"])
    file = client.files.retrieve(batch.output_file_id)
    assert file.expires_at is not None and 3600 <= file.expires_at - batch.in_progress_at < 3700
    for wrong in ({"seconds": 3600}, {"anchor": "created_at", "seconds": 1}, {"anchor": "created_at"}):
        assert http.post("/v1/batches", json={**body, "output_expires_after": wrong}).status_code == 400


def test_requests_do_not_tell_the_ids_of_batches(
    client: openai.OpenAI, http: httpx.Client, server: Running
) -> None:
    """Every key sees which slots are in use; it must not learn the ids of others' batches from that."""
    batch = long_batch(client, 200)
    server.wait_until(lambda: server.service.engine.num_running == server.service.engine.max_num_seqs)
    found = http.get("/v1/requests", params={"since": 0}).text
    client.batches.cancel(batch.id)
    assert batch.id not in found and "batch-" in found
    assert finished(client, batch.id).status == "cancelled"
