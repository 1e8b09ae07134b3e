"""Records of files and batches, as stored on disk and shown to clients, with OpenAI's field names."""

import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class FileRecord(msgspec.Struct, kw_only=True):
    """A file. tenant: hash of the owner's key; not shown to clients."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    tenant: str = ""


class Counts(msgspec.Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch.

    tenant, results_id, errors_id, output_expires_s: not shown to clients.
    results_id, errors_id: become `output_file_id` and `error_file_id` when the files are complete.
    output_expires_s: lifetime of these files in seconds; None keeps them.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None
    model: str | None = None
    tenant: str = ""
    results_id: str = ""
    errors_id: str = ""
    output_expires_s: int | None = None

    def output_expiry(self) -> int | None:
        """When an output file that is finished now expires, in Unix seconds."""
        return None if self.output_expires_s is None else int(time.time()) + self.output_expires_s

    def enter(self, status: str) -> None:
        """Change the status and record the time."""
        self.status = status
        name = f"{status}_at"
        if hasattr(self, name) and getattr(self, name) is None:
            setattr(self, name, int(time.time()))

    def note(self, *problems: dict[str, Any]) -> None:
        """Record why the batch fails. problems: code, message and, if known, line."""
        data = [{"line": None, "param": None, **problem} for problem in problems]
        self.errors = {"object": "list", "data": data}


def shown(record: FileRecord | BatchRecord) -> dict[str, Any]:
    """The fields of a record that clients see."""
    private = ("tenant", "results_id", "errors_id", "output_expires_s")
    return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in private}


def new_id(prefix: str) -> str:
    """A random id that cannot be guessed. Later ids sort after earlier ones."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def save(path: Path, record: msgspec.Struct) -> None:
    """Replace a record's file atomically: if the process or the machine dies, the old or the new state remains."""
    fresh = path.with_name(f".{path.name}.new")
    with open(fresh, "wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that new names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
