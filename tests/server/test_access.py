"""Who may connect: TLS with and without certificates of clients, and browsers' pages of other origins."""

from __future__ import annotations

import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.server.conftest import Running
from tests.support.certificates import make_certificate
from xla_engine.server.app import make_app
from xla_engine.server.service import Service


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    found = folder / "cert.pem", folder / "key.pem"
    make_certificate(*found, "x", "subjectAltName=IP:127.0.0.1").check_returncode()
    return found


@pytest.fixture(scope="module", params=["server's", "both"])
def address(
    request: pytest.FixtureRequest, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, bool]]:
    """A server with TLS, and whether it asks clients for a certificate."""
    certfile, keyfile = map(str, certificate)
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "xla_engine", "serve", "--port", "0", "--ssl-certfile", certfile]
    command += ["--ssl-keyfile", keyfile, *(["--ssl-ca-certs", certfile] if request.param == "both" else [])]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        while "https://127.0.0.1:" not in (text := log.read_text()):
            assert process.poll() is None, text
            time.sleep(0.05)
        assert "Unable to initialize" not in text, "jax tells which accelerators are not there"
        yield next(word for word in text.split() if word.startswith("https://")), request.param == "both"
    finally:
        process.terminate()
        assert process.wait(600) == 0


@pytest.mark.full
def test_tls_asks_for_what_it_was_told(address: tuple[str, bool], certificate: tuple[Path, Path]) -> None:
    url, asks_clients = address
    certfile, keyfile = map(str, certificate)

    def ask(context: ssl.SSLContext) -> int:
        with httpx.Client(verify=context, timeout=1800) as client:
            body = {"prompt": "x", "max_tokens": 2, "stream": True}
            return client.post(f"{url}/v1/completions", json=body).status_code

    with pytest.raises(httpx.TransportError):  # nobody vouches for the certificate
        ask(ssl.create_default_context())
    anonymous = ssl.create_default_context(cafile=certfile)
    if asks_clients:
        with pytest.raises(httpx.TransportError):
            ask(anonymous)
    else:
        assert ask(anonymous) == 200
    known = ssl.create_default_context(cafile=certfile)
    known.load_cert_chain(certfile, keyfile)
    assert ask(known) == 200
    with pytest.raises(httpx.TransportError):  # not TLS at all
        httpx.get(url.replace("https", "http") + "/health")


@pytest.mark.parametrize("allowed", [(), ("https://app.example",)])
def test_browsers_of_allowed_origins_only(server: Running, allowed: tuple[str, ...]) -> None:
    settings = replace(server.service.settings, allowed_origins=allowed, api_keys=("alpha",), batch_dir=None)
    app = make_app(Service(server.service.llm, settings))

    async def fails(_: Request) -> Response:
        raise ZeroDivisionError("nobody expects this")

    app.router.routes.append(Route("/fails", fails))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    async def main() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for origin in ("https://app.example", "https://evil.example"):
                before = await client.options("/v1/models", headers={"origin": origin, **asked})
                key = {"authorization": "Bearer alpha"}
                answer = await client.get("/v1/models", headers={"origin": origin, **key})
                for each in (before, answer):
                    assert (each.headers.get("access-control-allow-origin") == origin) == (origin in allowed)
                assert answer.status_code == 200
                refused = await client.get("/v1/models", headers={"origin": origin})
                wrong = await client.post("/tokenize", headers={"origin": origin, **key}, content=b"no")
                assert (refused.status_code, wrong.status_code) == (401, 400)
                failed = await client.get("/fails", headers={"origin": origin, **key})
                error = failed.json()["error"]
                assert (failed.status_code, error["code"]) == (500, "internal_error")
                for each in (refused, wrong, failed):  # without it, scripts see "network error"
                    assert (each.headers.get("access-control-allow-origin") == origin) == (origin in allowed)
                answer = await client.post("/v1/files", headers=key)
                assert answer.status_code == 404 and "--batch-dir" in answer.json()["error"]["message"]

    server.run(main())
