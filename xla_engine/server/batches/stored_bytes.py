"""Count the bytes that each key stores on the server's disk."""

import threading
from collections import Counter

from xla_engine.server.errors import ApiError


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
