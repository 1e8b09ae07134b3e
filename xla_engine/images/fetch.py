"""Fetch pictures over http and https: from hosts that the operator allows, and from public addresses only.

A picture's address comes from a stranger, so a server could be made to read what only its own network can reach
(server-side request forgery). The rules against it: hosts by an exact list, ports 80 and 443, no user names, every
address of the host public, the connection to the address that was checked, no redirects and no proxies.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, parse_headers
from io import BytesIO
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from xla_engine.errors import (
    ImageNotAllowedError,
    ImageTooLargeError,
    ImageUnreachableError,
    InvalidImageError,
)
from xla_engine.utils.digits import number_of

TIMEOUT_S = 10.0  # of one picture, from the first look-up to the last byte
AT_ONCE = 8  # pictures of one host; others of it wait, and its time limit counts
_MOST_URL = 8192  # characters
_MOST_HEAD = 64 << 10  # bytes of an answer's status and fields
_PORTS = {"http": 80, "https": 443}

# Of IPv6 only 2000::/3 is assigned to hosts of the internet, which leaves out loopback, link-local, unique local,
# multicast, NAT64 (64:ff9b::/96, 64:ff9b:1::/48) and all embedded IPv4 forms but 6to4 and Teredo.
_UNICAST_V6 = ip_network("2000::/3")
_RESERVED = tuple(
    map(
        ip_network,
        (  # IANA's registries of special-purpose addresses
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            "168.63.129.16/32",  # Azure's own services, seen from its machines
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        ),
    )
)

Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to a host of the internet. IPv4 in IPv6 (::ffff:a.b.c.d) counts as IPv4."""
    try:
        found: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if isinstance(found, IPv6Address) and (found.scope_id is not None or found not in _UNICAST_V6):
        return False
    return not any(found in network for network in _RESERVED if network.version == found.version)


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """An address of an allowed host. target: path and query."""

    scheme: str
    host: str
    target: str

    @property
    def port(self) -> int:
        return _PORTS[self.scheme]


def media_url(url: str, domains: Sequence[str]) -> MediaUrl:
    """Read an address. domains: the allowed hosts. Raises ImageNotAllowedError."""
    if not domains:
        raise ImageNotAllowedError(
            "pictures are not fetched over http: allow hosts with allowed_media_domains, or send the picture itself "
            "as a data: URI"
        )
    if (
        len(url) > _MOST_URL
        or not url.isascii()
        or any(char <= " " or char in '\\"<>^`{|}\x7f' for char in url)
    ):
        raise ImageNotAllowedError(
            f"the address must be at most {_MOST_URL} ASCII characters without blanks; percent-encode others"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ImageNotAllowedError(f"the address cannot be read ({error})") from error
    scheme = parts.scheme.lower()
    if "@" in parts.netloc:
        raise ImageNotAllowedError("the address has a user name; remove it")
    if port not in (None, 80, 443) or (port is not None and port != _PORTS[scheme]):
        raise ImageNotAllowedError(f"port {port} is not allowed; only 80 of http and 443 of https are")
    if not host or host not in {name.lower() for name in domains}:
        raise ImageNotAllowedError(
            f"the host {host or ''!r} is not allowed; allowed_media_domains names those that are"
        )
    query = f"?{parts.query}" if parts.query else ""
    return MediaUrl(scheme, host, f"{parts.path or '/'}{query}")


def resolved(host: str, port: int) -> Sequence[str]:
    """The addresses of a host. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(slots=True)
class _Host:
    """Look-ups hang in a thread, so each host has its own; and a slow host fills only its own places."""

    lookups: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "look-up"))
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class Fetcher:
    """Fetches pictures in a thread of its own, many at once. Thread-safe."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        max_bytes: int,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = resolved,
        connect: Connect = asyncio.open_connection,
    ) -> None:
        """domains: allowed hosts, by exact name. max_bytes: of a picture. resolve: gives a host's addresses."""
        self._domains = tuple(domains)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._connect = connect
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, url: str) -> Future[bytes]:
        """The content at an address. Raises ImageNotAllowedError at once if its address is not allowed.

        The future raises ImageNotAllowedError, ImageUnreachableError or ImageTooLargeError, at the latest after the
        time limit.
        """
        place = media_url(url, self._domains)
        return asyncio.run_coroutine_threadsafe(self._fetch(place), self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="pictures", daemon=True)
                self._thread.start()
            return self._loop

    async def _fetch(self, url: MediaUrl) -> bytes:
        host = self._hosts.setdefault(url.host, _Host())
        try:
            async with asyncio.timeout(self._timeout_s), host.places:
                return await self._get(url, host)
        except InvalidImageError:
            raise
        except TimeoutError:
            raise ImageUnreachableError(
                f"{url.host} did not send it within {self._timeout_s:g} s; try again, or send it as a data: URI"
            ) from None
        except (OSError, EOFError, ValueError, HTTPException, asyncio.LimitOverrunError) as error:
            raise ImageUnreachableError(
                f"{url.host} cannot be read ({type(error).__name__}: {error})"
            ) from error

    async def _get(self, url: MediaUrl, host: _Host) -> bytes:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(host.lookups, self._resolve, url.host, url.port)
        if not found or not all(map(is_public, found)):
            raise ImageNotAllowedError(f"{url.host} is not a host of the public internet")
        reader, writer = await self._connected(url, found)
        try:
            name = f"[{url.host}]" if ":" in url.host else url.host
            writer.write(
                f"GET {url.target} HTTP/1.1\r\nHost: {name}\r\nAccept: image/*\r\n"
                "Accept-Encoding: identity\r\nUser-Agent: xla-engine\r\nConnection: close\r\n\r\n".encode(
                    "ascii"
                )
            )
            return await self._received(url, reader)
        finally:
            writer.transport.abort()

    async def _connected(
        self, url: MediaUrl, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first of the addresses that answers; names are not looked up again."""
        secure = ssl.create_default_context() if url.scheme == "https" else None
        last: OSError | None = None
        for address in addresses:
            try:
                return await self._connect(
                    address,
                    url.port,
                    ssl=secure,
                    server_hostname=None if secure is None else url.host,
                    limit=_MOST_HEAD,
                )
            except OSError as error:
                last = error
        assert last is not None
        raise last

    async def _received(self, url: MediaUrl, reader: asyncio.StreamReader) -> bytes:
        head = BytesIO(await reader.readuntil(b"\r\n\r\n"))
        words = head.readline().split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ImageUnreachableError(f"{url.host} does not answer in HTTP/1.1")
        if (status := int(words[1])) != 200:
            hint = "; redirects are not followed, give the last address" if 300 <= status < 400 else ""
            raise ImageUnreachableError(f"{url.host} answers with status {status}{hint}")
        fields = parse_headers(head)
        if fields.get("content-encoding", "identity").lower() != "identity":
            raise ImageUnreachableError(
                f"{url.host} sends it compressed, although the request did not allow that"
            )
        return await self._body(fields, reader)

    async def _body(self, fields: Message, reader: asyncio.StreamReader) -> bytes:
        length = fields.get("content-length", "")
        if fields.get("transfer-encoding", "").lower() == "chunked":
            return await self._chunks(reader)
        if (size := number_of(length, self._max_bytes)) is not None:
            self._check_size(size)
            return await reader.readexactly(size)
        body = bytearray()
        while part := await reader.read(_MOST_HEAD):
            body += part
            self._check_size(len(body))
        return bytes(body)

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        while True:
            word = (await reader.readuntil(b"\r\n")).partition(b";")[0].strip()
            if not 0 < len(word) <= 8 or word.strip(b"0123456789abcdefABCDEF"):
                raise OSError("its chunks have no sizes")
            if (size := int(word, 16)) == 0:
                return bytes(body)
            self._check_size(len(body) + size)
            body += await reader.readexactly(size)
            if await reader.readexactly(2) != b"\r\n":
                raise OSError("its chunks do not end")

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise ImageTooLargeError(
                f"it has at least {size} bytes; at most {self._max_bytes} (max_image_bytes)"
            )

    def close(self) -> None:
        """Stop fetching; what is being fetched is cancelled."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        for host in self._hosts.values():
            host.lookups.shutdown(wait=False, cancel_futures=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop):  # at its end, tasks are cancelled and the loop is closed
        loop.run_forever()
