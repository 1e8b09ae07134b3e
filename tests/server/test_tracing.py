"""Traces: what an OpenTelemetry collector receives about requests over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.conftest import Running
from xla_engine.async_llm import AsyncLLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REFUSED = PARENT[:-1] + "0"  # the client does not want it recorded


class Collector(HTTPServer):
    """Keeps the spans that it receives as OTLP protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        for part in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.server.resources.append(values(part.resource.attributes))
            self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


def test_each_request_has_a_span_in_its_clients_trace(collector: Collector) -> None:
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    settings = ServerSettings(model_names=("embedded",), otlp_traces_endpoint=url)
    engine = XlaBatchEngine.from_pretrained(
        None, EngineConfig(max_num_seqs=4, max_model_len=128, self_check=False)
    )
    running = Running(Service(AsyncLLM.from_engine(engine), settings))
    body = {"prompt": "def add(a, b):", "max_tokens": 5, "temperature": 0.5, "seed": 1}
    try:
        with httpx.Client(base_url=running.url, timeout=1800) as http:
            http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            asked = body | {"stream": True, "n": 2}
            http.post("/v1/completions", json=asked, headers={"traceparent": "nonsense"})
            http.post("/v1/completions", json=body, headers={"traceparent": REFUSED})
            two = http.post("/v1/completions", json=body | {"prompt": ["x", "y"]}).json()
    finally:
        running.stop()  # sends what waits
    spans = {values(span.attributes)["gen_ai.request.id"]: span for span in collector.spans}
    assert len(spans) == len(collector.spans) == 4 and {two["id"], f"{two['id']}-1"} < spans.keys()
    assert collector.resources[0]["service.name"] == "xla-engine"
    first = next(span for span in collector.spans if span.parent_span_id)
    assert f"00-{first.trace_id.hex()}-{first.parent_span_id.hex()}-01" == PARENT
    assert first.name == "llm_request" and first.kind == 2  # a server's
    assert len({span.trace_id for span in collector.spans}) == 4
    told = values(first.attributes)
    usage = [told[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens", "completion_tokens")]
    assert usage == [len(engine.tokenizer.encode(body["prompt"])), 5, 5]  # type: ignore[union-attr]
    assert told["gen_ai.response.finish_reasons"] == ["length"] and told["gen_ai.request.model"] == "embedded"
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.max_tokens"]) == (0.5, 5)
    latency = {key.rpartition(".")[2]: value for key, value in told.items() if ".latency." in key}
    parts = latency["time_in_queue"] + latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert parts == pytest.approx(latency["e2e"]) and 0 < latency["time_to_first_token"] <= latency["e2e"]
    assert (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9 == pytest.approx(latency["e2e"])
    outputs = sorted(values(span.attributes)["gen_ai.usage.output_tokens"] for span in collector.spans)
    assert outputs == [5, 5, 5, 10]


@pytest.mark.parametrize("url", ["grpc://localhost:4317", "localhost:4318"])
def test_an_endpoint_that_is_no_http_address_is_refused(server: Running, url: str) -> None:
    with pytest.raises(ConfigError, match="must be an HTTP address, such as http://localhost:4318/v1/traces"):
        Service(server.service.llm, replace(server.service.settings, otlp_traces_endpoint=url))


@pytest.mark.full
def test_nothing_is_imported_while_it_is_off() -> None:
    code = "import sys, xla_engine.cli.serve, xla_engine.server.app; print([m for m in sys.modules if 'opentel' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
