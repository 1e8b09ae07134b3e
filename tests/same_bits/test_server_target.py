"""What is sent to a server and read from it is limited, and nothing is sent elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command_line import ROOT, assert_not_started, invoke
from tests.support.liar import serving
from xla_engine.same_bits import Ask, HttpTarget, TargetError, check
from xla_engine.same_bits.server import Limits


def test_only_this_machine_is_asked_unless_told() -> None:
    for url in ("http://192.0.2.1:8000", "http://[2001:db8::1]", "https://0.0.0.0/"):
        with pytest.raises(TargetError, match="is not this machine"):
            HttpTarget(url)
    for url in (
        "file:///etc/passwd",
        "127.0.0.1:8000",
        "http://user:word@127.0.0.1",
        "http://127.0.0.1:99999",
    ):
        with pytest.raises(TargetError, match="not the address of a server"):
            HttpTarget(url)
    with serving() as server:
        url = server.url
    with pytest.raises(TargetError, match="refused"):
        HttpTarget(url)
    with serving("not json") as server, pytest.raises(TargetError, match="an answer that is not JSON"):
        HttpTarget(server.url)


def test_redirects_are_not_followed_and_proxies_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as server:
        assert HttpTarget(server.url).model == "liar"
    with (
        serving("redirect") as server,
        pytest.raises(TargetError, match=r"redirects to http://127.0.0.2:1/v1"),
    ):
        HttpTarget(server.url)


@pytest.mark.full
def test_limits_are_kept_and_end_without_a_verdict() -> None:
    for limits, words in (
        (Limits(requests=40), "limit of 40 requests"),
        (Limits(tokens=6000), "6,000 tokens"),
    ):
        with serving() as server:
            report = check(HttpTarget(server.url, limits=limits), requests=8)
            sent = [body for _, body in server.requests]
        assert len(sent) <= limits.requests
        assert sum(body["max_tokens"] * body.get("n", 1) for body in sent) <= limits.tokens
        assert report.exit_status == 2 and words in report.text()


def test_a_server_that_trickles_ends_with_the_time() -> None:
    with serving() as server:
        target = HttpTarget(server.url, limits=Limits(seconds=1.0))
        server.liar.fault, began = "trickle", time.monotonic()
        with pytest.raises(TargetError, match="limit of 1 s"):
            target.run([Ask(prompt="a", stream=True)])
        assert server.liar.fired > 3 and time.monotonic() - began < 60


@pytest.mark.full
def test_429_is_obeyed() -> None:
    with serving("too many") as server:
        report = check(HttpTarget(server.url), requests=4, among=[8])
        assert server.liar.fired > 0 and report.exit_status == 0, report.text()


@pytest.mark.full
def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-123")
    with serving("tells the key") as server:
        refused = invoke("verify", "--url", server.url, "--api-key-env", "MY_KEY")
        assert server.requests[0][0]["authorization"] == "Bearer sesame-123"
    assert_not_started(refused, "status 500: bad key Bearer [key]")
    with serving("noise in batches") as server:
        options = ("--requests", "3", "--api-key-env", "MY_KEY", "--markdown")
        result = invoke("verify", "--url", server.url, *options)
    assert result.exit_code == 1 and 'Authorization: Bearer $MY_KEY"' in result.stdout
    assert "sesame" not in result.output + refused.output and "\x1b" not in refused.output
    assert_not_started(invoke("verify", "--url", server.url, "--api-key-env", "NO_KEY"), "NO_KEY")


@pytest.mark.full
def test_the_command_tells_its_limits_first_and_refuses_options_of_an_engine() -> None:
    with serving() as server:
        result = invoke("verify", "--url", server.url, "--requests", "3", "--json")
        sent = len(server.requests)
        for option, value, said in (
            ("--max-num-seqs", "4", "leave --max-num-seqs out"),
            ("--save", "/no/such.json", "/no/such.json"),
            ("--baseline", "/no/such.json", "/no/such.json"),
        ):
            assert_not_started(invoke("verify", "--url", server.url, option, value), said)
        assert len(server.requests) == sent, "sent although an option or a file was wrong"
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0].endswith("at most 400 requests, 60,000 tokens, 600 s")
    assert_not_started(invoke("verify", "--save", "a.json"), "--save needs --url")


@pytest.mark.full
def test_the_fixture_fails_a_test_whose_function_depends_on_the_batch(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def good(prompts): return [prompt[::-1] for prompt in prompts]\n"
        "def bad(prompts): return [prompt[len(prompts):] for prompt in prompts]\n"
        "def test_good(same_bits): same_bits(good, requests=3).raise_if_different()\n"
        "def test_bad(same_bits): same_bits(bad, requests=3).raise_if_different()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xla_engine.same_bits.pytest_plugin", tmp_path],
        cwd=tmp_path,
        env=os.environ
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout and "DIFFERENT answers" in done.stdout, (
        done.stdout + done.stderr
    )
    entry = 'pytest11]\nxla-engine-same-bits = "xla_engine.same_bits.pytest_plugin"'
    assert entry in (ROOT / "pyproject.toml").read_text()
