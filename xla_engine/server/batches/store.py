"""Files and batches in a folder; there is no database. Every change is whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from xla_engine.errors import ConfigError
from xla_engine.server.batches.records import UNFINISHED, BatchRecord, FileRecord, new_id, save, sync_folder
from xla_engine.server.errors import ApiError

MAX_FILES = 10_000  # of one tenant
MAX_UNFINISHED = 1_000  # batches of one tenant
_COPY_BYTES = 1 << 20

R = TypeVar("R", FileRecord, BatchRecord)


class Store:
    """`FOLDER/files/<id>/{data,meta.json}` and `FOLDER/batches/<id>/batch.json`, each record held in memory too.

    One process owns a folder. A file without meta.json is one that is being written. Raises ConfigError where another
    server has the folder, and OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        for each in (self._files_folder, self._batches_folder):
            each.mkdir(parents=True, exist_ok=True)
        self._saving = threading.Lock()
        self._lock = open(folder / "lock", "wb")  # noqa: SIM115, it is held as long as the store
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(
                f"another server has {folder}; give this one a --batch-dir of its own"
            ) from error
        self.files = _load(self._files_folder, "meta.json", FileRecord)
        self.batches = _load(self._batches_folder, "batch.json", BatchRecord)
        self._drop_torn_files()

    def close(self) -> None:
        """Give the folder back."""
        self._lock.close()

    # -- files ------------------------------------------------------------------------------------------------

    def data_path(self, file_id: str) -> Path:
        return self._files_folder / file_id / "data"

    def add_file(
        self, source: BinaryIO, *, filename: str, purpose: str, tenant: str, expires_at: int | None
    ) -> FileRecord:
        """Take what an upload holds."""
        if sum(record.tenant == tenant for record in list(self.files.values())) >= MAX_FILES:
            raise ApiError(429, f"there are {MAX_FILES} files; delete some", code="too_many_files")
        file_id = self.open_file()
        with open(self.data_path(file_id), "wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            target.flush()
            os.fsync(target.fileno())
        return self.finish_file(
            file_id, filename=filename, purpose=purpose, tenant=tenant, expires_at=expires_at
        )

    def open_file(self, file_id: str | None = None) -> str:
        """Make room for a file that is written from now on; nobody sees it."""
        file_id = file_id or new_id("file-")
        (self._files_folder / file_id).mkdir(exist_ok=True)
        return file_id

    def finish_file(
        self, file_id: str, *, filename: str, purpose: str, tenant: str, expires_at: int | None = None
    ) -> FileRecord:
        """Show a file whose data are whole."""
        record = FileRecord(
            id=file_id,
            bytes=self.data_path(file_id).stat().st_size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
            tenant=tenant,
            expires_at=expires_at,
        )
        save(self._files_folder / file_id / "meta.json", record)
        sync_folder(self._files_folder)
        self.files[file_id] = record
        return record

    def delete_file(self, file_id: str) -> None:
        """Forget a file. Raises ApiError where a batch still reads it."""
        for batch in list(self.batches.values()):
            if batch.status in UNFINISHED and batch.input_file_id == file_id:
                message = f"batch {batch.id} still reads this file; cancel it first"
                raise ApiError(409, message, code="file_in_use")
        self.files.pop(file_id, None)
        folder = self._files_folder / file_id
        with contextlib.suppress(FileNotFoundError):
            (folder / "meta.json").unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def expire_files(self, now: float) -> None:
        """Delete the files whose time is over, but for those that are read."""
        for record in list(self.files.values()):
            if record.expires_at is not None and record.expires_at <= now:
                with contextlib.suppress(ApiError):
                    self.delete_file(record.id)

    def _drop_torn_files(self) -> None:
        """Uploads that a killed server did not finish; not the results of a batch that goes on."""
        kept = {name for batch in self.batches.values() for name in (batch.results_id, batch.errors_id)}
        for folder in self._files_folder.iterdir():
            if folder.name not in self.files and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    # -- batches ----------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        mine = [each for each in list(self.batches.values()) if each.tenant == record.tenant]
        if sum(each.status in UNFINISHED for each in mine) >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches are not finished; wait for one or cancel it"
            raise ApiError(429, message, code="too_many_batches")
        (self._batches_folder / record.id).mkdir()
        self.save_batch(record)
        sync_folder(self._batches_folder)
        self.batches[record.id] = record

    def save_batch(self, record: BatchRecord) -> None:
        with self._saving:  # the event loop and the batch's own thread may do so at a time
            save(self._batches_folder / record.id / "batch.json", record)


def owned(records: dict[str, R], name: str, tenant: str, what: str) -> R:
    """The record of this id, if it is the tenant's; another's is as one that does not exist."""
    record = records.get(name)
    if record is None or record.tenant != tenant:
        raise ApiError(404, f"no {what} found with id {name[:100]!r}", code="not_found", param="id")
    return record


def page(records: Iterable[R], after: str | None, limit: int, *, newest_first: bool) -> tuple[list[R], bool]:
    """At most `limit` records behind the id `after`, and whether there are more."""
    ordered = sorted(
        records, key=lambda record: record.id.partition("-")[2] or record.id, reverse=newest_first
    )
    if after is not None:
        names = [record.id for record in ordered]
        ordered = ordered[names.index(after) + 1 :] if after in names else []
    return ordered[:limit], len(ordered) > limit


def _load(folder: Path, name: str, kind: type[R]) -> dict[str, R]:
    records = {}
    for path in sorted(folder.glob(f"*/{name}")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is damaged ({error}); move its folder away") from error
        records[record.id] = record
    return records
