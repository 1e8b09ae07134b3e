"""The page at /: one file that loads nothing, shown by a real browser."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from tests.server.conftest import Running
from xla_engine.sampling_params import FOR_READERS
from xla_engine.scheduler import Plan, Slot, VerifyRow
from xla_engine.server.history import History
from xla_engine.server.info import Info

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_page_loads_nothing_but_its_own_data(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|@import|src=|<link|innerHTML", answer.text)


def test_the_page_sends_readable_sampling_where_the_model_recommends_none(server: Running) -> None:
    """The API keeps OpenAI's defaults; a person reads the page."""

    def page(**fields: Any) -> str:
        settings = replace(server.service.settings, **fields)
        service: Any = SimpleNamespace(settings=settings)
        page: bytes = server.run(Info(service).page(cast("Any", None))).body
        return page.decode()

    assert "const reads = {};" in page()
    assert f"const reads = {json.dumps(FOR_READERS)};" in page(reader_defaults=FOR_READERS)


def test_history_tells_who_held_which_slot(http: httpx.Client) -> None:
    for _ in range(3):
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        name = http.post("/v1/completions", json=body).json()["id"]
    state = http.get("/v1/requests", params={"since": 0}).json()
    assert name in {segment[2] for segment in state["history"]["segments"]}
    assert state["history"]["latencies"]["whole"]["count"] >= 3
    assert http.get("/v1/requests", params={"since": "nan"}).status_code == 400


def test_history_tells_of_steps_that_speculate(server: Running) -> None:
    """The plan lists their rows elsewhere."""
    history = History(server.service.engine)
    slot = Slot(index=3, epoch=0)
    history._see_plan(Plan(step=0, verify=(VerifyRow(slot=slot, request_id="x", width=2),)))
    assert [segment[:3] for segment in history.since(0)["segments"]] == [(3, "decode", "x")]


def test_history_of_engines_that_tell_no_plans(http: httpx.Client, server: Running) -> None:
    """With several engines side by side, the history reads their slots."""
    history = History(server.service.engine)  # which is not told of plans
    sampling = server.run(_started(history))
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 4, "temperature": 1}
    names = {http.post("/v1/completions", json=body).json()["id"] for _ in range(2)}
    server.loop.call_soon_threadsafe(sampling.cancel)
    seen = {segment[2].partition("[")[0] for segment in history.since(0)["segments"]}
    assert names & seen, seen


async def _started(history: History) -> asyncio.Task[None]:
    return asyncio.create_task(history.sample())


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_link_repeats_an_answer(server: Running, http: httpx.Client, tmp_path: Path) -> None:
    """The chat box streams the request in the link, and shows the answer that the same body gets by POST."""
    assert BROWSER is not None
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Add <two> num\u00fcbers."}]
    body = {"messages": messages, "temperature": 0.8, "max_tokens": 24, "seed": 7}
    reply = http.post("/v1/chat/completions", json=body).json()
    expected = html.escape(reply["choices"][0]["message"]["content"], quote=False)
    link = f"{server.url}/#{base64.b64encode(json.dumps(body).encode()).decode()}"
    for budget in (5000, 30000):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        shown = subprocess.run(
            [BROWSER, *options, f"--virtual-time-budget={budget}", "--dump-dom", link],
            capture_output=True, text=True, timeout=1800, check=True,
        ).stdout  # fmt: skip
        if f"<b>assistant</b><span>{expected}</span>" in shown:
            break
    assert "<span>Add &lt;two&gt; num\u00fcbers.</span>" in shown
    assert f"<b>assistant</b><span>{expected}</span>" in shown


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_shows_slots_and_queue(server: Running, http: httpx.Client, tmp_path: Path) -> None:
    """The table of slots shows running requests with their tokens so far."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,1300",
        f"--user-data-dir={tmp_path}",
    ]
    shown = ""
    over = threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 8})

    with ThreadPoolExecutor(2) as pool:
        try:
            busy = [pool.submit(keep_busy) for _ in range(2)]
            # milliseconds of the page's time, which stands still while it asks
            for budget in (3000, 10000, 30000):
                options = [f"--virtual-time-budget={budget}", "--dump-dom", f"{server.url}/"]
                done = subprocess.run(
                    [*command, *options], capture_output=True, text=True, timeout=1800, check=True
                )
                shown = done.stdout
                if 'class="good">ready' in shown and len(re.findall(r"<td[^>]*>cmpl-", shown)) >= 4:
                    break
        finally:
            over.set()
    assert all(each.exception() is None for each in busy)
    assert 'class="good">ready' in shown
    assert len(re.findall(r"<td[^>]*>cmpl-", shown)) >= 4
    assert re.search(r"<td[^>]*>decodes; \d+ tokens? left</td>", shown)
    assert "tokens/s" in shown and "slots in use" in shown
