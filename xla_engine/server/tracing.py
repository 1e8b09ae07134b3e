"""OpenTelemetry traces, sent to a collector in the background: one span for each prompt of a POST, with vLLM's name
and attributes, as a child of the span in the client's `traceparent`. Imported only when traces are on."""

import time
from collections.abc import Iterable
from typing import Any

from xla_engine import __version__
from xla_engine.errors import ConfigError
from xla_engine.openai.requests import LineRequest
from xla_engine.outputs import RequestOutput
from xla_engine.utils.extras import install

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(f"--otlp-traces-endpoint needs more packages ({error}): {install('otel')}") from error

_PROPAGATED = (b"traceparent", b"tracestate")


class Tracing:
    """Makes a span of each request that has ended. Spans wait in a bounded queue, and no request waits for them."""

    def __init__(self, endpoint: str, model: str) -> None:
        """endpoint: of a collector's OTLP receiver over HTTP. model: its name. Raises ConfigError."""
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint must be an HTTP address, such as http://localhost:4318/v1/traces, not "
                f"{endpoint!r}"
            )
        named = Resource.create({"service.name": "xla-engine", "service.version": __version__})
        resource = named.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME has the last word
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("xla_engine", __version__)
        self._model = model

    @staticmethod
    def context(headers: Iterable[tuple[bytes, bytes]]) -> Context:
        """What a client's headers say of the trace that its request belongs to; one that is malformed is none."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _PROPAGATED}
        return TraceContextTextMapPropagator().extract(carrier)

    def record(self, request: LineRequest, output: RequestOutput, context: Context | None) -> None:
        """Make the span of a prompt that has just ended. output: all of it."""
        metrics = output.metrics
        if metrics is None or metrics.finished_time is None:
            return
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=context,
            kind=trace.SpanKind.SERVER,
            start_time=end - round(1e9 * (metrics.finished_time - metrics.arrival_time)),
            attributes=self._attributes(request, output),
        )
        reasons = [each.finish_reason or "error" for each in output.outputs]
        if output.error is not None or "error" in reasons:
            span.set_status(trace.StatusCode.ERROR, output.error)
        span.end(end)

    def close(self) -> None:
        """Send what waits to be sent."""
        self._provider.shutdown()

    def _attributes(self, request: LineRequest, output: RequestOutput) -> dict[str, Any]:
        metrics, params, name = output.metrics, request.params, request.model or self._model
        assert metrics is not None
        new = sum(len(each.token_ids) for each in output.outputs)
        kind = "chat" if request.is_chat else "text_completion" if request.pooling is None else "embeddings"
        found: dict[str, Any] = {
            "gen_ai.operation.name": kind,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.model": name,
            "gen_ai.response.model": name,
            "gen_ai.response.finish_reasons": [each.finish_reason or "error" for each in output.outputs],
            "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.output_tokens": new,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),  # vLLM's names of the two
            "gen_ai.usage.completion_tokens": new,
            "gen_ai.usage.cached_tokens": output.num_cached_tokens,
        }
        for field in ("temperature", "top_p", "top_k", "max_tokens", "n", "seed"):
            found[f"gen_ai.request.{field}"] = getattr(params, field, None)
        arrival, admitted = metrics.arrival_time, metrics.admitted_time
        first, end = metrics.first_token_time, metrics.finished_time
        for latency, begin, until in (
            ("e2e", arrival, end),
            ("time_in_queue", arrival, admitted),
            ("time_to_first_token", arrival, first),
            ("time_in_model_prefill", admitted, first),
            ("time_in_model_decode", first, end),
            ("time_in_model_inference", admitted, end),
        ):
            if begin is not None and until is not None:
                found[f"gen_ai.latency.{latency}"] = until - begin
        return {key: value for key, value in found.items() if value is not None}
