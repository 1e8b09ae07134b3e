"""Settings of the server, in addition to the engine's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Names, keys, defaults and limits of one server.

    model_names: names that clients may use; answers to requests without a model have the first one.
    adapter_names: those of `model_names` that are adapters.
    api_keys: one of them is needed for every path except the probes; empty: no key is needed.
    sampling_defaults: sampling fields, and `chat_template`, for requests that do not set them.
    reader_defaults: sampling fields that the page at / sends, where a person reads the answer.
    max_tokens: default of requests; None means 16 for completions and the rest of the context for chats.
    max_waiting: limit on waiting sequences, in addition to those in slots; further requests get status 429.
    max_answer_values: limit on tokens plus log-probabilities of an answer; see `answer_values`. A single sequence is
        always allowed. All live answers together may hold twice as many log-probabilities.
    max_body_bytes: limit on a request's body. All bodies being read or parsed may have `BODIES` times as much.
    max_header_bytes: limit on a request's line and headers, on its trailers, and on a line between its chunks.
    header_timeout_s, body_timeout_s: time for a client to send either.
    request_timeout_s: time for an answer; None is unlimited. A request may set a lower limit.
    send_timeout_s: time for a client to read a part of an answer; after that its request is aborted.
    drain_grace_s: seconds after SIGTERM in which new requests are still accepted.
    drain_timeout_s: seconds after that in which live requests may finish.
    batch_dir: folder of files and batches; None disables both.
    max_file_bytes, max_file_lines: limits on an uploaded file.
    max_stored_bytes: limit on one key's files and batch results; further uploads get status 413.
    allowed_origins: for CORS; empty disables it.
    allow_runtime_changes: clients may load and unload adapters, and reset the prefix cache.
    otlp_traces_endpoint: address of an OpenTelemetry collector that a span of each request is sent to; None is off.
    tool_parser, reasoning_parser: formats of `parsers.chats`; "auto" reads them from the chat template, "none" leaves
        all text as it is.
    """

    model_names: tuple[str, ...] = ("embedded",)
    adapter_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    reader_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    max_waiting: int = 1024
    max_answer_values: int = 1 << 21
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 16 << 10
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    send_timeout_s: float = 60.0
    drain_grace_s: float = 0.0
    drain_timeout_s: float = 30.0
    batch_dir: Path | None = None
    max_file_bytes: int = 200 << 20
    max_file_lines: int = 50_000
    max_stored_bytes: int = 10 << 30
    allowed_origins: tuple[str, ...] = ()
    allow_runtime_changes: bool = False
    otlp_traces_endpoint: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("the model needs at least one name, and no empty one")

    @property
    def base_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.model_names if name not in self.adapter_names)

    def defaults(self) -> dict[str, Any]:
        """Fields for requests that do not set them."""
        return ({} if self.max_tokens is None else {"max_tokens": self.max_tokens}) | dict(
            self.sampling_defaults
        )


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read the keys in a file: one a line, stripped. Empty lines and lines that begin with # are skipped.

    Raises ConfigError for a file without a key, and OSError.
    """
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} contains no key; write one per line, or leave --api-key-file out")
    return keys
