"""`xla-engine serve`: serve the engine over OpenAI's HTTP protocol."""

import contextlib
import errno
import gc
import logging
import socket
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from xla_engine.cli import _common, _help
from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.server.settings import ServerSettings, read_api_keys
from xla_engine.utils.extras import install

LARGEST_PORT = 65535
_SECONDS = click.FloatRange(0, min_open=True)
_UVICORN = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_setting = partial(_help.field_option, ServerSettings)


def _keys_in(path: Path | None) -> tuple[str, ...]:
    try:
        return () if path is None else read_api_keys(path)
    except OSError as error:
        raise ConfigError(
            f"--api-key-file {_common.os_message(error, str(path))}. Write the keys into it, one per line, or "
            "leave the option out"
        ) from error


@click.command(cls=_help.Sectioned, short_help="Serve OpenAI's HTTP protocol.")
@_common.model_argument
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", type=click.IntRange(0, LARGEST_PORT), default=8000, help="0 picks a free port.")
@click.option("--uds", metavar="FILE", help="Listen on this Unix socket instead.")
@click.option("--served-model-name", "names", multiple=True, help="What clients call the model; repeatable.")
@click.option(
    "--api-key-file", type=Path, help="File with one API key per line; XLA_ENGINE_API_KEY adds more."
)
@click.option("--ssl-certfile", metavar="FILE", help="Serve TLS with this certificate.")
@click.option("--ssl-keyfile", metavar="FILE", help="The key of this certificate.")
@click.option(
    "--ssl-ca-certs", metavar="FILE", help="Require clients to have a certificate from these authorities."
)
@_setting(
    "allowed_origins",
    "Allow browsers' requests from this origin (CORS).",
    name="--allowed-origin",
    multiple=True,
)
@_setting("batch_dir", "Directory for files and batches; they are disabled without it.", Path)
@_setting("max_stored_bytes", "Bytes of files and batch results in --batch-dir, per key.", click.IntRange(1))
@_setting(
    "allow_runtime_changes",
    "Let clients load and unload adapters and reset the prefix cache.",
    is_flag=True,
)
@_setting(
    "otlp_traces_endpoint",
    "Send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318/v1/traces.",
    metavar="URL",
)
@_setting(
    "tool_parser",
    "Extract tool calls from replies: hermes, qwen3_coder, llama3, mistral or harmony; auto follows the chat "
    "template, none leaves them in the text.",
    metavar="NAME",
)
@_setting(
    "reasoning_parser",
    "Extract reasoning from replies: think or harmony; auto and none as for --tool-parser.",
    metavar="NAME",
)
@_setting("max_tokens", "max_tokens for requests without one.", click.IntRange(1))
@click.option("--temperature", type=float, help="temperature for requests without one.")
@_setting("max_waiting", "Maximum length of the queue; further requests get status 429.", click.IntRange(0))
@_setting("max_body_bytes", "Maximum size of the body of a request.", click.IntRange(1))
@_setting(
    "max_answer_values",
    "Maximum number of tokens of an answer, counted with their logprobs.",
    click.IntRange(1),
)
@click.option(
    "--max-connections", type=click.IntRange(1), default=4096, help="Maximum number of open connections."
)
@_setting("request_timeout_s", "Time limit of a request in seconds.", _SECONDS, name="--request-timeout")
@_setting(
    "send_timeout_s",
    "Disconnect a client that reads nothing for this many seconds.",
    _SECONDS,
    name="--send-timeout",
)
@_setting(
    "drain_grace_s",
    "Seconds from SIGTERM until new requests get status 503.",
    click.FloatRange(0),
    name="--drain-grace",
)
@_setting(
    "drain_timeout_s",
    "Seconds from then until running requests are cancelled.",
    click.FloatRange(0),
    name="--drain-timeout",
)
@_common.model_options
@_common.chat_template_option
@_common.lora_options
@_common.pooling_options
@_common.time_limits
@_common.data_parallel_option
@_common.hosts_options
@_common.scheduling_options
@_common.phase_timers_option
@click.option("--seed", type=int, default=0, help="Seed for batch lines that have none.")
@_common.generation_config_option
@click.option("--no-access-log", is_flag=True, help="Do not log requests.")
def serve(
    names: tuple[str, ...],
    api_key_file: Path | None,
    chat_template_path: str | None,
    temperature: float | None,
    max_connections: int,
    no_access_log: bool,
    **options: Any,
) -> None:
    """Answer completions and chats over HTTP, streamed or whole, from one engine.

    A POST gets the same bits as a line of `xla-engine run` with the same body. The paths are in docs/server.md;
    the page at / shows slots and queue. With --batch-dir there are /v1/files and /v1/batches: their lines
    run when no other request needs the slot, and a server that was killed continues them after a restart.

    After SIGTERM, /ready returns 503 and the server ends: see --drain-grace and --drain-timeout. Batches stop after
    a line. A second SIGTERM ends the server at once.

    \b
    Examples:
      xla-engine serve
      xla-engine serve ./Qwen3-0.6B --served-model-name qwen --api-key-file keys --batch-dir ./batches
      curl localhost:8000/v1/completions -d '{"prompt": "def fib(n):", "max_tokens": 32, "temperature": 0}'
    """
    _common.place_model(options)
    with _common.startup_errors():
        _needs_extra()
        from xla_engine.environment import api_keys_from_environment
        from xla_engine.text.parsers.chats import REASONING_PARSERS, TOOL_PARSERS

        keys = api_keys_from_environment() + _keys_in(api_key_file)
        model = options["model"]
        own = names or ("embedded" if model is None else Path(model).name or str(model),)
        if taken := set(own) & options["lora_modules"].keys():
            raise ConfigError(f"{min(taken)!r} is a name of the model; give the adapter another")
        if options["uds"] is None:
            _check_address(options["host"], options["port"])
        _common.begin_start(options)
        defaults = _common.sampling_fields(options, temperature=temperature)
        if (template := _common.text_of(chat_template_path)) is not None:
            defaults["chat_template"] = template
        settings = ServerSettings(
            model_names=(*own, *options["lora_modules"]),
            adapter_names=tuple(options["lora_modules"]),
            api_keys=keys,
            sampling_defaults=defaults,
            reader_defaults=_common.reader_defaults(options),
            **_common.take(options, ServerSettings),
        )
        _check_one_of("--tool-parser", settings.tool_parser, TOOL_PARSERS)
        _check_one_of("--reasoning-parser", settings.reasoning_parser, REASONING_PARSERS)
        _common.check_model(options, EngineConfig(**_common.config_fields(options)))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # jax logs every platform that is missing
    logging.getLogger("xla_engine.server.access").disabled = no_access_log
    place = {name: options.pop(name) for name in _UVICORN}
    with _common.startup_errors():
        if (place["ssl_certfile"] is None) != (place["ssl_keyfile"] is None):
            raise ConfigError("TLS needs both --ssl-certfile and --ssl-keyfile")
    _load_and_serve(settings, options, {**place, "max_connections": max_connections, "log_config": None})


def _load_and_serve(settings: Any, options: dict[str, Any], place: dict[str, Any]) -> None:
    from xla_engine.async_llm import AsyncLLM
    from xla_engine.server.launch import serve as run
    from xla_engine.server.service import Service

    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            engine = stack.enter_context(_common.load_engine(options, show=True))
            service = Service(AsyncLLM.from_engine(engine), settings)
        gc.collect()
        # otherwise full collections visit all modules and the engine, and block the event loop for 0.2 s
        gc.freeze()
        run(service, **place)


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError before the model is loaded if the server could not listen there."""
    errors: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            errors.append(error)
    # A name may have an address that this machine lacks, such as that of IPv6; uvicorn then takes the others.
    if errors and (len(errors) == len(found) or any(each.errno != errno.EADDRNOTAVAIL for each in errors)):
        raise ConfigError(
            f"cannot listen at {host}:{port}: {errors[-1].strerror}; name another --port or --host"
        )


def _check_one_of(option: str, name: str, names: Iterable[str]) -> None:
    known = ("auto", "none", *names)
    if name not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, not {name!r}")


def _needs_extra() -> None:
    try:
        import msgspec  # noqa: F401
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn.protocols.http.httptools_impl  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error}): {install('server')}") from error
