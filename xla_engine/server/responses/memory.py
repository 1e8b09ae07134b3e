"""Stored responses: in memory, of bounded size, each visible only to the key that created it."""

from collections import OrderedDict, defaultdict
from typing import Any

import msgspec

from xla_engine.server.errors import ApiError

TENANT_BYTES = 16 << 20
TOTAL_BYTES = 64 << 20


class Memory:
    """The newest responses with `store: true`, as JSON. If full, the tenant with the most bytes loses its oldest
    ones."""

    def __init__(self, tenant_bytes: int = TENANT_BYTES, total_bytes: int = TOTAL_BYTES) -> None:
        self._tenant_bytes = tenant_bytes
        self._total_bytes = total_bytes
        self._kept: defaultdict[str, OrderedDict[str, tuple[bytes, bytes]]] = defaultdict(OrderedDict)
        self._held: defaultdict[str, int] = defaultdict(int)

    def keep(self, tenant: str, response: dict[str, Any], items: list[Any]) -> None:
        """Store a response. items: its whole conversation and its output, for a response that follows it."""
        data = msgspec.json.encode(response), msgspec.json.encode(items)
        self._kept[tenant][response["id"]] = data
        self._held[tenant] += sum(map(len, data))
        while self._held.get(tenant, 0) > self._tenant_bytes:
            self._forget(tenant)
        while sum(self._held.values()) > self._total_bytes:
            self._forget(max(self._held, key=self._held.__getitem__))

    def items(self, tenant: str, name: str) -> list[Any] | None:
        """The items of a response."""
        data = self._kept[tenant].get(name) if tenant in self._kept else None
        return None if data is None else list(msgspec.json.decode(data[1]))

    def response(self, tenant: str, name: str) -> bytes:
        """A response as JSON; the bytes are shared. Raises ApiError if it does not exist or is another tenant's."""
        return self.kept(tenant, name)[0]

    def kept(self, tenant: str, name: str) -> tuple[bytes, bytes]:
        """A response and its items as JSON. Raises ApiError as `response` does."""
        data = self._kept[tenant].get(name) if tenant in self._kept else None
        if data is None:
            message = (
                f"no response found with id {name[:100]!r}; store: true keeps responses for a limited time"
            )
            raise ApiError(404, message, code="not_found", param="id")
        return data

    def delete(self, tenant: str, name: str) -> None:
        """Raises ApiError as `response` does."""
        self.response(tenant, name)
        self._forget(tenant, name)

    def _forget(self, tenant: str, name: str | None = None) -> None:
        """Drop one response, or the tenant's oldest."""
        kept = self._kept[tenant]
        data = kept.popitem(last=False)[1] if name is None else kept.pop(name)
        self._held[tenant] -= sum(map(len, data))
        if not kept:
            del self._kept[tenant], self._held[tenant]
