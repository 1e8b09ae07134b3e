"""Where pictures come from: what is allowed is read, and everything else is refused by name."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.again import again
from tests.support.certificates import make_certificate
from xla_engine.errors import (
    ConfigError,
    ImageNotAllowedError,
    ImageTooLargeError,
    ImageUnreachableError,
    InvalidImageError,
)
from xla_engine.images.decoder import ImageLimits
from xla_engine.images.fetch import Fetcher, _run, is_public, media_url
from xla_engine.images.sources import ImageAccess, ImageSources

SMALL = ImageLimits(max_image_bytes=1000)
PUBLIC = "93.184.216.34"

REFUSED = (  # at least 40; the first names its kind
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255"),
    *("172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255"),
    *("169.254.169.254", "169.254.0.1", "100.64.0.1", "100.100.100.200", "100.127.255.255"),
    *("192.0.0.1", "192.0.0.192", "192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "198.19.255.255"),
    *("192.88.99.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
    *("fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "100::1"),
    *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "2001::1", "2001:0:7f00:1::", "2001:10::1"),
    *("2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1", "5f00::1", "localhost", "", "1"),
)


class Site:
    """A web server on this machine that stands for the public host."""

    def __init__(self, answer: Callable[[bytes], bytes | None], secure: ssl.SSLContext | None = None) -> None:
        self.asked: list[bytes] = []
        self._answer = answer
        self._secure = secure is not None
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=_run, args=(self._loop,), daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=secure), self._loop
        ).result()
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        answer = self._answer(self.asked[-1])
        if answer is None:  # one byte after another, for ever
            try:
                while not writer.is_closing():
                    writer.write(b"H")
                    await asyncio.sleep(0.05)
            finally:
                writer.transport.abort()
            return
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async def connect(self, address: str, port: int, **options: Any) -> Any:
        assert (address, port) == (PUBLIC, 443 if self._secure else 80)
        assert (options["ssl"] is not None) == self._secure
        assert options["server_hostname"] == ("pictures.example" if self._secure else None)
        return await asyncio.open_connection("127.0.0.1", self.port, **options)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextmanager
def site(
    answer: Callable[[bytes], bytes | None], *, secure: ssl.SSLContext | None = None, **options: Any
) -> Iterator[tuple[Site, Fetcher]]:
    server = Site(answer, secure)
    given = {"resolve": lambda host, port: [PUBLIC], "connect": server.connect, "max_bytes": 1000}
    fetcher = Fetcher(("pictures.example", "other.example"), **(given | options))
    try:
        yield server, fetcher
    finally:
        fetcher.close()
        server.close()


def read(sources: ImageSources, source: object) -> bytes:
    found = sources.start(source)
    return found if isinstance(found, bytes) else found.result()


def answer(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *fields, "", "")).encode() + body


@pytest.mark.parametrize("address", REFUSED)
def test_hosts_that_are_not_public_are_never_connected_to(address: str) -> None:
    assert len(REFUSED) >= 40 and not is_public(address)

    async def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was connected to")

    for found in ([address], [PUBLIC, address], []):
        fetcher = Fetcher(
            ("pictures.example",),
            max_bytes=1000,
            resolve=lambda host, port, found=found: found,
            connect=connect,
        )
        with pytest.raises(
            ImageNotAllowedError, match=r"pictures\.example is not a host of the public internet"
        ):
            fetcher.start("http://pictures.example/a.png").result(600)
        fetcher.close()


@pytest.mark.parametrize(
    "address", [PUBLIC, "8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2620:4f:8000::1"]
)
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.example/a.png", "host 'other.example' is not allowed"),
        ("http://sub.pictures.example/", "is not allowed"),
        ("http://pictures.example./", "is not allowed"),
        ("http://pictures.example.evil/", "is not allowed"),
        ("http://evil\\@pictures.example/", "ASCII"),
        ("http://evil/ @pictures.example", "ASCII"),
        ("http://pictures.example\r\nHost: evil/", "ASCII"),
        ("http://p\u0131ctures.example/", "ASCII"),
        ("http://user@pictures.example/", "user name"),
        ("http://pictures.example:80@evil/", "user name"),
        ("http://pictures.example:8080/", "port 8080"),
        ("http://pictures.example:443/", "port 443"),
        ("https://pictures.example:80/", "port 80"),
        ("http://pictures.example:99999/", "cannot be read"),
        ("http://[::1/", "cannot be read"),
        ("http:///a.png", "host '' is not allowed"),
        ("http:pictures.example", "host '' is not allowed"),
        ("http://pictures.example/" + "a" * 9000, "at most 8192"),
    ],
)
def test_addresses_are_read_strictly(url: str, message: str) -> None:
    with pytest.raises(ImageNotAllowedError, match=message):
        media_url(url, ("pictures.example",))


def test_a_picture_is_fetched_from_an_allowed_host() -> None:
    chunked = answer(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
    for whole in (answer(b"abcde", "Content-Length: 5"), answer(b"abcde"), chunked):
        with site(lambda _, whole=whole: whole) as (server, fetcher):
            sources = ImageSources(fetcher=fetcher)
            assert read(sources, "HTTP://Pictures.Example/a%20b.png?c=d#e") == b"abcde"
            lines = server.asked[0].decode().split("\r\n")
            assert lines[0] == "GET /a%20b.png?c=d HTTP/1.1" and "Host: pictures.example" in lines


@pytest.mark.parametrize(
    ("whole", "kind", "message"),
    [
        (
            answer(b"", "Location: http://127.0.0.1/", status="302 Found"),
            ImageUnreachableError,
            "redirects are",
        ),
        (answer(b"", status="404 Not Found"), ImageUnreachableError, "status 404"),
        (answer(b"x", "Content-Length: 2000"), ImageTooLargeError, "at most 1000"),
        (answer(b"x", "Content-Length: " + "9" * 5000), ImageTooLargeError, "at most 1000"),
        (answer(b"x" * 2000), ImageTooLargeError, "at most 1000"),
        (answer(b"7d1\r\n" + b"x" * 2001, "Transfer-Encoding: chunked"), ImageTooLargeError, "at most 1000"),
        (answer(b"x", "Content-Length: 5"), ImageUnreachableError, "IncompleteRead"),
        (answer(b"-5\r\nabc", "Transfer-Encoding: chunked"), ImageUnreachableError, "chunks"),
        (answer(b"x", "Content-Encoding: gzip"), ImageUnreachableError, "compressed"),
        (answer(b"", *("a: b" for _ in range(200))), ImageUnreachableError, "cannot be read"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", ImageUnreachableError, "HTTP/1.1"),
        (b"", ImageUnreachableError, "IncompleteRead"),
    ],
)
def test_other_answers_are_errors(whole: bytes, kind: type[Exception], message: str) -> None:
    with site(lambda _: whole) as (_, fetcher), pytest.raises(kind, match=message) as caught:
        fetcher.start("http://pictures.example/").result(600)
    assert type(caught.value) is kind


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with site(lambda _: answer(b"abc")) as (_, fetcher):
        assert fetcher.start("http://pictures.example/").result(600) == b"abc"


def certificate(folder: Path, host: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate of a host that signs itself, and what a server needs to show it."""
    key, own = folder / f"{host}.key", folder / f"{host}.pem"
    extensions = (f"subjectAltName=DNS:{host}", "keyUsage=critical,digitalSignature,keyCertSign")
    done = make_certificate(own, key, host, *extensions)
    if done.returncode:
        pytest.skip(f"this openssl makes no such certificate: {done.stderr[-200:]}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    return own, context


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl for a certificate")
def test_the_certificate_of_a_host_must_be_trusted_and_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the address that was checked, and the certificate is compared with the host's name."""
    own, shown = certificate(tmp_path, "pictures.example")
    other, others = certificate(tmp_path, "evil.example")
    whole = answer(b"abcde", "Content-Length: 5")
    for trusted, context, error in (
        (own, shown, None),
        (other, shown, "CERTIFICATE_VERIFY_FAILED"),  # nobody vouches for it
        (other, others, "CERTIFICATE_VERIFY_FAILED.*pictures.example"),  # trusted, but of another host
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
        with site(lambda _: whole, secure=context, timeout_s=60.0) as (server, fetcher):
            found = fetcher.start("https://pictures.example/a.png?b")
            if error is None:
                assert found.result(600) == b"abcde" and server.asked[0].startswith(b"GET /a.png?b ")
                continue
            with pytest.raises(ImageUnreachableError, match=error):
                found.result(600)
            assert not server.asked  # nothing of the request was sent


@pytest.mark.full
@again
def test_a_slow_host_delays_only_its_own_pictures() -> None:
    """It sends a byte now and then, or its name is never resolved; both end at the limit, others meanwhile."""
    release: list[bool] = []

    def resolve(host: str, port: int) -> Sequence[str]:
        while host == "other.example" and not release:
            time.sleep(0.02)
        return [PUBLIC]

    def reply(asked: bytes) -> bytes | None:
        return None if b"/slow" in asked else answer(b"abc")

    with site(reply, resolve=resolve, timeout_s=2.0) as (_, fetcher):
        hung = [fetcher.start("http://other.example/") for _ in range(50)]
        slow = [fetcher.start("http://pictures.example/slow") for _ in range(4)]
        assert fetcher.start("http://pictures.example/").result(600) == b"abc"
        assert not any(each.done() for each in (*hung, *slow))
        for each in (*hung, *slow):
            with pytest.raises(ImageUnreachableError, match="within 2 s"):
                each.result(600)
        release.append(True)


def test_nothing_outside_of_a_request_is_read_by_default(tmp_path: Path) -> None:
    sources = ImageSources()
    (tmp_path / "a.png").write_bytes(b"abc")
    for place in (str(tmp_path / "a.png"), tmp_path / "a.png", f"file://{tmp_path}/a.png", {"path": "a.png"}):
        with pytest.raises(ImageNotAllowedError, match="allowed_local_media_path"):
            read(sources, place)
    with pytest.raises(ImageNotAllowedError, match="allowed_media_domains"):
        read(sources, "https://pictures.example/a.png")
    with pytest.raises(ImageNotAllowedError, match="s3:// is not supported"):
        read(sources, "s3://bucket/a.png")


def test_files_in_the_allowed_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a b.png").write_bytes(b"abc")
    (folder / "link.png").symlink_to("inner/a b.png")
    sources = ImageSources(ImageAccess(allowed_local_media_path=folder))
    place = folder / "inner" / "a b.png"
    for name in ("inner/a b.png", str(place), place, place.as_uri(), "./inner/../inner/a b.png", "link.png"):
        assert read(sources, name) == b"abc"
    assert read(sources, {"bytes": None, "path": "inner/a b.png"}) == b"abc"
    assert read(sources, {"bytes": b"x", "path": "missing"}) == b"x"


def test_nothing_else_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "scans-too").mkdir()
    (tmp_path / "scans-too" / "a.png").write_bytes(b"secret")
    (folder / "out.png").symlink_to("../secret.png")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    (folder / "large.png").write_bytes(b"x" * 1001)
    os.mkfifo(folder / "pipe.png")
    sources = ImageSources(ImageAccess(allowed_local_media_path=folder), SMALL)
    outside = (
        *("../secret.png", "out.png", "up/secret.png", "loop", "missing.png", "", ".", "/etc/passwd", "a\0b"),
        *(str(tmp_path / "secret.png"), "../scans-too/a.png", "x" * 5000, f"file://{tmp_path}/secret.png"),
        *("file:///%2e%2e/secret.png", f"file://host{folder}/a.png"),
    )
    for name in outside:
        with pytest.raises(ImageNotAllowedError):
            read(sources, name)
    with pytest.raises(ImageNotAllowedError, match="not a regular file"):
        read(sources, "pipe.png")
    with pytest.raises(ImageTooLargeError, match="1001 bytes; at most 1000"):
        read(sources, "large.png")
    for missing in (tmp_path / "none", tmp_path / "secret.png"):
        with pytest.raises(ConfigError, match="allowed_local_media_path"):
            ImageSources(ImageAccess(allowed_local_media_path=missing))


def test_data_uris() -> None:
    sources = ImageSources(limits=SMALL)
    text = base64.b64encode(b"abcd").decode()
    for head in ("data:image/png;base64,", "DATA:image/jpeg;name=x;base64,", "data:;base64,"):
        assert read(sources, head + text) == b"abcd"
    for uri, message in (
        (f"data:image/png,{text}", "base64"),
        ("data:image/png;base64,!!!!", "not base64"),
        ("data:image/png;base64,YQ", "not base64"),
        ("data:image/png;base64", "base64"),
        (f"data:text/html;base64,{text}", "base64"),
        (f"data:application/pdf;base64,{text}", "render its pages"),
        (f"data:audio/wav;base64,{text}", "audio is not supported"),
        (f"data:video/mp4;base64,{text}", "video is not supported"),
        (f"data:image/svg+xml;base64,{text}", "SVG is not supported"),
    ):
        with pytest.raises(InvalidImageError, match=message):
            read(sources, uri)
    with pytest.raises(ImageTooLargeError):
        read(sources, "data:image/png;base64," + base64.b64encode(b"x" * 1001).decode())
    with pytest.raises(ImageTooLargeError):
        read(sources, b"x" * 1001)


def opened(file: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(BytesIO(file)).convert("RGB"))


def test_images_and_arrays_become_lossless_files_of_any_size() -> None:
    sources = ImageSources(limits=SMALL)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    for given in (pixels, Image.fromarray(pixels), bytes_of(pixels)):
        file = given if isinstance(given, bytes) else read(sources, given)
        np.testing.assert_array_equal(opened(file), pixels)
    np.testing.assert_array_equal(opened(read(sources, pixels[..., 0])), np.stack([pixels[..., 0]] * 3, -1))
    assert Image.open(BytesIO(read(sources, Image.new("CMYK", (3, 3))))).mode == "RGB"
    turned = Image.fromarray(pixels)
    turned.getexif()[0x0112] = 6
    np.testing.assert_array_equal(opened(read(sources, turned)), np.rot90(pixels, -1))


def bytes_of(pixels: np.ndarray[Any, Any]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "given",
    [
        None,
        3,
        ["a.png"],
        {"bytes": "text"},
        {"path": 3},
        {"url": "x"},
        {},
        np.zeros((4, 4), np.float32),
        np.zeros((3, 5, 6), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        Image.new("F", (3, 3)),
    ],
)
def test_everything_else_is_an_error(given: object) -> None:
    with pytest.raises(InvalidImageError):
        ImageSources().start(given)
