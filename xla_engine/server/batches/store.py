"""Files and batches: their records, with OpenAI's field names, and a folder that keeps them, without a database. Every
change is atomic."""

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from xla_engine.errors import ConfigError
from xla_engine.server.errors import ApiError
from xla_engine.utils.file_lock import lock
from xla_engine.utils.new_file import replacing

UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
MAX_FILES = 10_000  # per tenant
MAX_UNFINISHED = 1_000  # batches per tenant
MAX_ENDED = 1_000  # ended batches per tenant; older ones are forgotten
_COPY_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileRecord(msgspec.Struct, kw_only=True):
    """A file. tenant: hash of the owner's key; not shown to clients."""

    id: str = msgspec.field(default_factory=lambda: new_id("file-"))
    bytes: int = 0
    created_at: int = msgspec.field(default_factory=lambda: int(time.time()))
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    tenant: str = ""


class LineCounts(msgspec.Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch.

    tenant, results_id, errors_id, receipts_id, output_expires_s: not shown to clients.
    results_id, errors_id, receipts_id: become `output_file_id`, `error_file_id` and `receipts_file_id` when the files
        are complete. receipts_id: "" without receipts.
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
    receipts_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = msgspec.field(default_factory=LineCounts)
    metadata: dict[str, str] | None = None
    model: str | None = None
    tenant: str = ""
    results_id: str = ""
    errors_id: str = ""
    receipts_id: str = ""
    output_expires_s: int | None = None

    @property
    def output_ids(self) -> tuple[str, ...]:
        """The ids of its files: results, errors and, if asked for, receipts."""
        return tuple(filter(None, (self.results_id, self.errors_id, self.receipts_id)))

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
    private = {"tenant", "results_id", "errors_id", "receipts_id", "output_expires_s"}
    if isinstance(record, BatchRecord) and not record.receipts_id:
        private.add("receipts_file_id")  # not a field of OpenAI's
    return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in private}


def new_id(prefix: str) -> str:
    """A random id that cannot be guessed. Later ids sort after earlier ones."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def save(path: Path, record: msgspec.Struct) -> None:
    """Replace a record's file atomically: if the process or the machine dies, the old or the new state remains."""
    with replacing(path) as file:
        file.write(msgspec.json.encode(record))
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that new names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BatchStore:
    """`FOLDER/files/<id>/{data,meta.json}` and `FOLDER/batches/<id>/batch.json`; all records are also in memory.

    One process owns the folder. A file without meta.json is still being written. Raises ConfigError if another
    server uses the folder, and OSError.

    max_stored_bytes: limit on the files and results of one tenant.
    """

    def __init__(self, folder: Path, max_stored_bytes: int = 10 << 30) -> None:
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        for each in (self._files_folder, self._batches_folder):
            each.mkdir(parents=True, exist_ok=True)
        self._saving = threading.Lock()
        self._lock = open(folder / "lock", "wb")  # noqa: SIM115, open as long as the store
        with contextlib.suppress(ImportError):
            if not lock(self._lock):
                self._lock.close()
                raise ConfigError(f"another server uses {folder}; use another --batch-dir")
        self.files = _load(self._files_folder, "meta.json", FileRecord)
        self.batches = _load(self._batches_folder, "batch.json", BatchRecord)
        self.stored = StoredBytes(max_stored_bytes)
        self._drop_torn_folders()
        for file in self.files.values():
            self.stored.replace(file.id, file.tenant, file.bytes)
        for batch in self.batches.values():
            if batch.status in UNFINISHED:
                self.count_results(batch)
        for tenant in {batch.tenant for batch in self.batches.values()}:
            self.forget_ended(tenant)

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    # -- files ------------------------------------------------------------------------------------------------

    def data_path(self, file_id: str) -> Path:
        return self._files_folder / file_id / "data"

    def add_file(self, source: BinaryIO, record: FileRecord) -> None:
        """Store an upload completely or not at all. Raises ApiError if the tenant's quota or the disk is full."""
        self._check_number_of_files(record.tenant)
        try:
            self.stored.add(record.id, record.tenant, source.seek(0, os.SEEK_END))
            source.seek(0)
            with room_on_disk():
                self.open_file(record.id)
                with open(self.data_path(record.id), "wb") as target:
                    shutil.copyfileobj(source, target, _COPY_BYTES)
                    target.flush()
                    os.fsync(target.fileno())
                self.finish_file(record)
        except BaseException:
            self._remove(record.id)
            raise

    def _check_number_of_files(self, tenant: str) -> None:
        if sum(record.tenant == tenant for record in list(self.files.values())) >= MAX_FILES:
            raise ApiError(
                429, f"there are {MAX_FILES} files; delete some (DELETE /v1/files/ID)", code="too_many_files"
            )

    def open_file(self, file_id: str) -> None:
        """Create the folder of a file that will be written. Clients do not see it yet."""
        (self._files_folder / file_id).mkdir(exist_ok=True)

    def finish_file(self, record: FileRecord) -> None:
        """Make a completely written file visible."""
        record.bytes = self.data_path(record.id).stat().st_size
        save(self._files_folder / record.id / "meta.json", record)
        sync_folder(self._files_folder)
        self.stored.replace(record.id, record.tenant, record.bytes)
        self.files[record.id] = record

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises ApiError if a batch is reading it."""
        for batch in list(self.batches.values()):
            reads = batch.status in UNFINISHED and batch.status != "finalizing"
            if reads and batch.input_file_id == file_id:
                message = f"batch {batch.id} still reads this file; cancel it first"
                raise ApiError(409, message, code="file_in_use")
        self._remove(file_id)

    def _remove(self, file_id: str) -> None:
        self.files.pop(file_id, None)
        self.stored.remove(file_id)
        folder = self._files_folder / file_id
        with contextlib.suppress(FileNotFoundError):
            (folder / "meta.json").unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def expire_files(self, now: float) -> None:
        """Delete expired files, except those that a batch is reading."""
        for record in list(self.files.values()):
            if record.expires_at is not None and record.expires_at <= now:
                with contextlib.suppress(ApiError):
                    self.delete_file(record.id)

    def _drop_torn_folders(self) -> None:
        """Remove unfinished uploads and new batches of a killed server, but not results of batches that will
        resume."""
        unfinished = [batch for batch in self.batches.values() if batch.status in UNFINISHED]
        kept = {name for batch in unfinished for name in batch.output_ids}
        for folder in self._files_folder.iterdir():
            if folder.name not in self.files and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self._batches_folder.iterdir():
            if folder.name not in self.batches:
                shutil.rmtree(folder, ignore_errors=True)

    # -- batches ----------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """Store a new batch. Raises ApiError if the tenant's quota or the disk has no room for it or its results."""
        mine = [each for each in list(self.batches.values()) if each.tenant == record.tenant]
        if sum(each.status in UNFINISHED for each in mine) >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches are not finished; wait for one or cancel it"
            raise ApiError(429, message, code="too_many_batches")
        self._check_number_of_files(record.tenant)
        folder = self._batches_folder / record.id
        try:
            with room_on_disk():
                folder.mkdir()
                self.save_batch(record)
                sync_folder(self._batches_folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.batches[record.id] = record

    def count_results(self, record: BatchRecord) -> None:
        """Set the counts of a batch from its result files, and cut off torn ends of these files."""
        counts = record.request_counts
        paths = self.data_path(record.results_id), self.data_path(record.errors_id)
        (counts.completed, end), (counts.failed, other_end) = map(_whole_lines, paths)
        for file_id, path, size in zip(
            (record.results_id, record.errors_id), paths, (end, other_end), strict=True
        ):
            if path.exists():
                os.truncate(path, size)
                self.stored.replace(file_id, record.tenant, size)

    def forget_ended(self, tenant: str) -> None:
        """Forget all but the latest `MAX_ENDED` ended batches of a tenant. Their files stay until they are deleted."""
        ended = [
            batch
            for batch in list(self.batches.values())
            if batch.tenant == tenant and batch.status not in UNFINISHED
        ]
        for batch in sorted(ended, key=lambda batch: (batch.created_at, batch.id))[:-MAX_ENDED]:
            self.batches.pop(batch.id, None)
            shutil.rmtree(self._batches_folder / batch.id, ignore_errors=True)

    def save_batch(self, record: BatchRecord) -> None:
        with self._saving:  # called by the event loop and by the batch's thread
            save(self._batches_folder / record.id / "batch.json", record)


class StoredBytes:
    """Bytes of each tenant's files and batch results. Thread-safe.

    limit: bytes per tenant.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._files: dict[str, tuple[str, int]] = {}  # tenant and bytes of each file
        self._sums: Counter[str] = Counter()

    def add(self, file_id: str, tenant: str, size: int) -> None:
        """Count bytes of a file before they are written. Raises ApiError if they exceed the tenant's limit."""
        with self._lock:
            held = self._sums[tenant]
            if held + size > self._limit:
                raise ApiError(
                    413,
                    f"the files and results of this key have {held} bytes, and the limit is {self._limit}; delete "
                    f"some (DELETE /v1/files/ID), or ask the server's operator to raise --max-stored-bytes",
                    code="storage_limit_exceeded",
                )
            self._files[file_id] = (tenant, self._files.get(file_id, (tenant, 0))[1] + size)
            self._sums[tenant] = held + size

    def replace(self, file_id: str, tenant: str, size: int) -> None:
        """Set a file's size on disk, regardless of the limit."""
        with self._lock:
            self._sums[tenant] += size - self._files.get(file_id, (tenant, 0))[1]
            self._files[file_id] = (tenant, size)

    def remove(self, file_id: str) -> None:
        """Stop counting a file."""
        with self._lock:
            tenant, size = self._files.pop(file_id, ("", 0))
            self._sums[tenant] -= size


@contextlib.contextmanager
def room_on_disk() -> Iterator[None]:
    """Turn an OSError for a full disk into an ApiError with status 507."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ApiError(
            507,
            "the server's disk is full; delete files (DELETE /v1/files/ID), or ask its operator for space",
            code="insufficient_storage",
        ) from error


def _whole_lines(path: Path) -> tuple[int, int]:
    """The number of whole lines in a file, and where the last one ends; zeros if the file does not exist."""
    lines = end = read = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while block := file.read(_COPY_BYTES):
            lines += block.count(b"\n")
            end = read + block.rfind(b"\n") + 1 if b"\n" in block else end
            read += len(block)
    return lines, end


R = TypeVar("R", FileRecord, BatchRecord)


def owned(records: dict[str, R], name: str, tenant: str, what: str) -> R:
    """The tenant's record with this id. Raises ApiError if it does not exist or belongs to another tenant."""
    record = records.get(name)
    if record is None or record.tenant != tenant:
        raise ApiError(404, f"no {what} found with id {name[:100]!r}", code="not_found", param="id")
    return record


def newest_last(record: FileRecord | BatchRecord) -> str:
    """A key that sorts records by age."""
    return record.id.partition("-")[2] or record.id


def _load(folder: Path, name: str, kind: type[R]) -> dict[str, R]:
    records = {}
    for path in sorted(folder.glob(f"*/{name}")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is damaged ({error}); move its folder away") from error
        records[record.id] = record
    return records
