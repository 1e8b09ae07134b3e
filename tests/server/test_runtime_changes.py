"""Runtime changes to a server: adapters and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running
from tests.support.adapters import adapters, llama_checkpoint
from tests.support.models import TINY_ENGINE
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings

ASKED: dict[str, Any] = {"prompt": [5, 7, 9], "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def changing() -> Iterator[httpx.Client]:
    engine = XlaBatchEngine(
        llama_checkpoint(), None, replace(TINY_ENGINE, enable_lora=True, max_loras=2, max_lora_rank=16)
    )
    settings = ServerSettings(model_names=("tiny", "alias"), allow_runtime_changes=True)
    running = Running(Service(AsyncLLM.from_engine(engine), settings))
    with httpx.Client(base_url=running.url, timeout=1800) as client:
        yield client
    running.stop()


def tokens(http: httpx.Client, model: str) -> Any:
    answer = http.post("/v1/completions", json={**ASKED, "model": model})
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code


def load(http: httpx.Client, name: str, path: str, **fields: Any) -> int:
    body = {"lora_name": name, "lora_path": path, **fields}
    return http.post("/v1/load_lora_adapter", json=body).status_code


def test_adapters_come_and_go(changing: httpx.Client, tmp_path: Path) -> None:
    paths = [each.lora_path for each in adapters(tmp_path, llama_checkpoint(), 3)]
    own = tokens(changing, "tiny")
    assert tokens(changing, "alias") == own and tokens(changing, "a") == 404
    assert load(changing, "a", paths[0]) == 200 and load(changing, "b", paths[1]) == 200
    with_a, with_b = tokens(changing, "a"), tokens(changing, "b")
    assert own != with_a != with_b != own and tokens(changing, "alias") == own
    names = {model["id"] for model in changing.get("/v1/models").json()["data"]}
    assert names == {"tiny", "alias", "a", "b"}
    assert load(changing, "a", paths[2]) == 400  # the name is taken
    assert load(changing, "c", paths[2]) == 400  # there is room for two
    assert load(changing, "a", paths[2], load_inplace=True) == 200
    assert tokens(changing, "a") not in (own, with_a, with_b)
    for name in ("a", "b"):
        assert changing.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        assert tokens(changing, name) == 404
    assert changing.post("/v1/unload_lora_adapter", json={"lora_name": "tiny"}).status_code == 404
    assert tokens(changing, "tiny") == own


@pytest.mark.parametrize("name", ["missing", "empty", "no adapter"])
def test_what_is_no_adapter_is_the_callers_fault(changing: httpx.Client, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name != "missing":
        path.mkdir()
    if name == "no adapter":
        (path / "adapter_config.json").write_text("{")
    assert load(changing, "x", str(path)) == 400 and load(changing, "x", "") == 400
    assert load(changing, "x", str(path), more=1) == 400
    assert tokens(changing, "x") == 404


def test_the_prefix_cache_is_forgotten(changing: httpx.Client) -> None:
    asked = {**ASKED, "prompt": list(range(40, 90)), "max_tokens": 1}

    def cached() -> int:
        usage = changing.post("/v1/completions", json=asked).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert changing.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0 < cached()


def test_nobody_changes_a_server_that_does_not_allow_it(http: httpx.Client) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"):
        answer = http.post(path, json={"lora_name": "a", "lora_path": "/"})
        assert answer.status_code == 403 and "--allow-runtime-changes" in answer.text


def test_the_description_names_every_path_and_field(http: httpx.Client, server: Running) -> None:
    found = http.get("/openapi.json").json()
    routes = server.server.config.loaded_app.app.routes
    paths = {route.path.replace(":path}", "}") for route in routes} - {"/openapi.json"}
    assert paths == set(found["paths"]) and found["openapi"] == "3.1.0"
    fields = found["components"]["schemas"]["SamplingParams"]["properties"]
    assert fields["temperature"]["type"] == "number" and fields["top_k"]["type"] == "integer"
    assert {"messages", "tools", "max_completion_tokens", "metadata"} <= set(fields)
    operation = found["paths"]["/v1/responses/{id}"]["get"]
    assert operation["parameters"][0]["name"] == "id" and "security" not in operation


def test_process_memory_is_a_metric(http: httpx.Client) -> None:
    line = next(
        each
        for each in http.get("/metrics").text.splitlines()
        if each.startswith("process_resident_memory_bytes ")
    )
    assert 50e6 < float(line.split()[1]) < 1e12
