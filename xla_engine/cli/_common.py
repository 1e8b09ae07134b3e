"""Shared by commands: exit statuses, options of engines, loading the engine, and start-up errors."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _help
from xla_engine.cli._help import engine_options, together
from xla_engine.config import EngineConfig
from xla_engine.environment import has_accelerator
from xla_engine.errors import ConfigError, XlaEngineError
from xla_engine.sampling_params import FOR_READERS, SamplingParams
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.startup import StartTimes, startup_line

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.model_loader.describe import ModelDescription
    from xla_engine.open_engine import EngineClient

SOME_FAILED, NOT_STARTED, INTERRUPTED = 1, 2, 130  # exit statuses other than 0


class NotStarted(click.ClickException):
    """The command could not start; the message says why."""

    exit_code = NOT_STARTED


def _object(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, Any]:
    found = {} if value is None else _help.json_value(context, option, value)
    if not isinstance(found, dict):
        raise click.BadParameter('give an object of sampling fields, such as {"top_p": 0.9}')
    return found


data_parallel_option = click.option(
    "--data-parallel-size",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of engines on this machine, each in a process; results are the same.",
)
hosts_options = together(
    click.option(
        "--num-hosts",
        type=click.IntRange(1, 4096),
        default=1,
        help="Number of hosts whose devices share the model; run xla-engine join on the others.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="With --num-hosts: an address of this host at which the others join; the next port is used, too.",
    ),
)
model_option = click.option(
    "--model",
    metavar="MODEL",
    help="Hugging Face model directory, .gguf file (any part of a split one) or its folder, hub id (OWNER/NAME, "
    "OWNER/NAME:Q8_0 for GGUF), or package:NAME, the model in an installed Python package.  "
    "[default: embedded model]",
)

model_argument = click.argument("model_argument", metavar="[MODEL]", required=False)


def place_model(options: dict[str, Any]) -> None:
    """Put the argument MODEL in the place of --model. Raises UsageError if both are given."""
    model = options.pop("model_argument")
    if model is not None and options["model"] is not None:
        raise click.UsageError("the model is given twice: as MODEL and by --model")
    options["model"] = model or options["model"]


# Fields of `EngineConfig` except the number of slots; then all.
device_options = engine_options("model")
slot_options = engine_options("slots", "model")
# Options of every command that loads a model.
model_options = together(model_option, slot_options)


def _log(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Show the package's log until the command ends."""
    if not value:
        return
    log, handler = logging.getLogger("xla_engine"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    context.call_on_close(partial(log.setLevel, log.level))
    context.call_on_close(partial(log.removeHandler, handler))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


phase_timers_option = engine_options("timers")
verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_log,
    help="Log limits, progress, and failed steps.",
)


scheduling_options = engine_options("scheduling")
generation_config_option = together(
    click.option(
        "--generation-config",
        type=click.Choice(["model", "engine"]),
        default="model",
        help="Defaults of sampling fields: model uses the values that the checkpoint recommends, if any; engine uses "
        "the defaults of docs/sampling.md.",
    ),
    click.option(
        "--override-generation-config",
        metavar="JSON",
        callback=_object,
        help='Sampling fields for requests that do not set them: \'{"top_p": 0.9, "top_k": 40}\'.',
    ),
)
chat_template_option = click.option(
    "--chat-template",
    "chat_template_path",
    metavar="FILE",
    help="A jinja2 template to use for chats in place of the checkpoint's.",
)
# Sampling fields for requests that do not set them.
request_defaults = together(
    click.option("--seed", type=int, default=0, help="Seed for requests that have none."),
    click.option(
        "--max-tokens",
        type=int,
        help="max_tokens for requests without one.  [default: 16; for chats all that fit]",
    ),
    click.option(
        "--temperature",
        type=float,
        help="temperature for requests without one.  [default: the model's, or 1.0]",
    ),
)


# Time limits on the device, for commands that run unattended.
time_limits = together(
    engine_options("limits"),
    click.option(
        "--start-timeout",
        "start_timeout_s",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Exit with status 2 if the engine is not ready within this time.  [default: wait]",
    ),
)


pooling_options = engine_options("pooling")


def _adapters(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if len(pairs) < len(values) or not all(name and path for name, path in pairs.items()):
        raise click.BadParameter("give NAME=PATH, each name once")
    return pairs


# Adapters that requests select by name, and their limits.
lora_options = together(
    engine_options("lora"),
    click.option(
        "--lora-modules",
        metavar="NAME=PATH",
        multiple=True,
        callback=_adapters,
        help="A LoRA adapter in PEFT's format, for requests whose model is NAME; repeatable. Needs --enable-lora.",
    ),
)


@contextlib.contextmanager
def _start_limit(seconds: float | None) -> Iterator[None]:
    """End the process if the block takes longer, because a hang in a driver or compiler cannot be interrupted."""
    if seconds is None:
        yield
        return
    over = threading.Timer(seconds, _give_up, (seconds,))
    over.daemon = True
    over.start()
    try:
        yield
    finally:
        over.cancel()


def _give_up(seconds: float) -> None:
    click.echo(
        f"Error: the engine was not ready after {seconds:g} s (--start-timeout): the device does not answer, or "
        f"compiling takes longer; allow more time",
        err=True,
    )
    os._exit(NOT_STARTED)


@contextlib.contextmanager
def startup_errors() -> Iterator[None]:
    """Turn a start-up error into one line and exit status 2."""
    try:
        yield
    except OSError as error:
        raise NotStarted(os_message(error)) from error
    except XlaEngineError as error:
        raise NotStarted(f"{error.code}: {error}") from error
    except (RuntimeError, MemoryError) as error:  # XLA raises RuntimeError, for example when memory runs out
        raise NotStarted(f"the engine could not start: {type(error).__name__}: {error}") from error


def pause_collections() -> None:
    """Let Python collect no garbage until `resume_collections`, or until the command ends: imports and the reading of
    a model make many objects that stay, and a collection looks at all of them."""
    if gc.isenabled():
        gc.disable()
        click.get_current_context().call_on_close(gc.enable)


def resume_collections() -> None:
    """Let Python collect garbage again, without a look at the objects that exist now."""
    gc.freeze()
    gc.enable()


def begin_start(options: Mapping[str, Any]) -> None:
    """Begin what takes long while jax is imported: a part of the C++ kernels compiles at a first start, and the pages
    of packed weights are made. Until the engine is ready, Python collects no garbage.
    """
    from xla_engine.model_loader.gguf.parts import parts_of
    from xla_engine.runner.native_library.compiled import begin_compiling
    from xla_engine.utils.pages_ahead import touch_ahead

    model = Path(options["model"] or "")
    stays_packed = model.suffix == ".gguf" and options["quantization"] not in (None, "none", "int8")
    if stays_packed and options.get("data_parallel_size", 1) == 1 and not has_accelerator():
        with contextlib.suppress(OSError):  # reported when the file is opened
            touch_ahead(sum(part.stat().st_size for part in parts_of(model)))
    pause_collections()
    begin_compiling(options["isa"])


def check_model(options: dict[str, Any], config: EngineConfig) -> ModelDescription:
    """Open the model for `load_engine`, and describe it.

    Raises CheckpointError or ConfigError before jax is imported if its files show that it cannot run, or not with
    these options.
    """
    from xla_engine.environment import embedded_model_directory
    from xla_engine.model_loader.describe import describe_decoder
    from xla_engine.model_loader.model_files import open_model

    if "files" not in options:
        options["files"] = open_model(options["model"] or embedded_model_directory())
    model = describe_decoder(options["files"], config)
    model.options.context_length(model.config.max_position_embeddings)
    return model


def begin_kernels(model: ModelDescription) -> None:
    """Compile the C++ kernels that the model will probably need, if this is their first start."""
    from xla_engine.runner.native_library.compiled import begin_compiling
    from xla_engine.runner.native_library.needed import expected_parts

    tensors = model.files.tensors().tensors.values() if model.files.path.suffix == ".gguf" else ()
    begin_compiling(model.options.isa, expected_parts(model.options, model.config, tensors))


@contextlib.contextmanager
def load_engine(
    options: dict[str, Any], *, show: bool, times: StartTimes | None = None
) -> Iterator[EngineClient]:
    """An engine with these options, closed at the end.

    show: print the progress of loading. times: records how long each part took.
    """
    fields = config_fields(options)
    begin_kernels(check_model(options, EngineConfig(**fields)))
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.model_loader.peft.request import LoRARequest
    from xla_engine.observability.log import engine_log
    from xla_engine.open_engine import open_engine
    from xla_engine.runner.weight_form import note_of

    screen, limit_s = sys.stderr if show else io.StringIO(), options.get("start_timeout_s")
    engines = options.get("data_parallel_size", 1)
    with _start_limit(limit_s), startup_line(screen) as progress:
        progress = progress if times is None else times.following(progress)
        model = options["files"] if engines == 1 else options["model"]
        hosts = {name: options[name] for name in ("num_hosts", "coordinator") if name in options}
        engine = open_engine(model, EngineConfig(**fields), engines=engines, progress=progress, **hosts)
    resume_collections()
    with engine:
        for number, (name, path) in enumerate(options.get("lora_modules", {}).items(), 1):
            engine.add_lora(LoRARequest(name, number, path))
            engine.pin_lora(number)
        if isinstance(engine, XlaBatchEngine):
            note = engine.runner.form_note
        else:
            note = note_of(engine.identity().config["quantization"])
        if note is not None and not engine_log.isEnabledFor(logging.INFO):
            click.echo(note, err=True)
        if isinstance(engine, XlaBatchEngine) and fields.get("max_model_len") is None:
            limit = engine.checkpoint.config.max_position_embeddings
            if engine.max_model_len < limit:
                click.echo(
                    f"max_model_len is {engine.max_model_len}; the model allows {limit}; use --max-model-len for more",
                    err=True,
                )
        yield engine


@contextlib.contextmanager
def load_one_engine(options: dict[str, Any], *, show: bool) -> Iterator[XlaBatchEngine]:
    """`load_engine` for commands that need a single engine (without `data_parallel_option`)."""
    with load_engine(options, show=show) as engine:
        from xla_engine.engine.batch_engine import XlaBatchEngine

        assert isinstance(engine, XlaBatchEngine)
        yield engine


def sampling_fields(options: dict[str, Any], *, for_reader: bool = False, **given: Any) -> dict[str, Any]:
    """Sampling fields for requests that do not set them.

    They are the model's recommendations, unless switched off by an option, those of --override-generation-config, and
    those of `given` that are not None.

    for_reader: a person reads the answer, so `reader_defaults` apply, which one line says.
    """
    from xla_engine.environment import embedded_model_directory
    from xla_engine.model_loader.describe import sampling_defaults
    from xla_engine.model_loader.model_files import open_model

    fields: dict[str, Any] = {}
    if options["generation_config"] == "model":
        # opened here once, and used again by `load_engine`
        options["files"] = open_model(options["model"] or embedded_model_directory())
        fields = sampling_defaults(options["files"])
    chosen = options.pop("override_generation_config")
    chosen |= {name: value for name, value in given.items() if value is not None}
    defaults = reader_defaults(options) if for_reader else {}
    fields = {**defaults, **fields, **chosen}
    SamplingParams.from_mapping(fields)
    if defaults and "temperature" not in chosen:
        check_model(options, EngineConfig(**config_fields(options)))
        from xla_engine.runner.jax_settings import check_platform

        if options.get("num_hosts", 1) == 1:  # jax joins other hosts before it is used
            check_platform()  # if there is no such device, that is all that is said
        used = ", ".join(f"{name} {fields[name]}" for name in defaults)
        click.echo(
            f"(the model recommends no sampling: {used}; --temperature 0 gives the likeliest text)", err=True
        )
    return fields


def reader_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields for answers that a person reads, if the model is asked and recommends none."""
    from xla_engine.model_loader.describe import sampling_defaults

    if options["generation_config"] != "model":
        return {}
    return {} if not sampling_defaults(options["files"]).keys().isdisjoint(FOR_READERS) else dict(FOR_READERS)


def check_tokenizer(model: str | None, otherwise: str = "") -> None:
    """Raise NotStarted if a model's directory has no tokenizer, which text needs. otherwise: another remedy."""
    from xla_engine.model_loader.safetensors_files import has_weight_files  # imports numpy

    files = Path(model or "")
    if not model or not (files / "config.json").exists() or not has_weight_files(files):
        return
    if not (files / "tokenizer.json").exists():
        raise NotStarted(
            f"no_tokenizer: {model} has no tokenizer.json, which text needs; put the model's tokenizer.json "
            f"there{otherwise}"
        )


def text_of(path: str | Path | None) -> str | None:
    """Read the file that an option names."""
    try:
        return None if path is None else Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise NotStarted(f"{path}: not text in UTF-8: {error}") from error


def config_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `EngineConfig` among a command's options, with room for the adapters in the options."""
    fields = {name: options[name] for name in EngineConfig.__dataclass_fields__ if name in options}
    if adapters := options.get("lora_modules"):
        if not fields["enable_lora"]:
            raise ConfigError("--lora-modules needs --enable-lora")
        fields["max_loras"] = max(fields["max_loras"], len(adapters))
    return fields


def take(options: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Remove the options that are fields of the record `kind` from a command's options, and return them."""
    return {name: options.pop(name) for name in kind.__dataclass_fields__ if name in options}


def os_message(error: OSError, path: str | None = None) -> str:
    """The message of an OSError; `path` is used if the error names no file."""
    name = error.filename or path
    hint = did_you_mean_path(name) if isinstance(error, FileNotFoundError) else ""
    return f"{name}: {error.strerror or error}{hint}" if name else str(error)


def did_you_mean_path(path: str | None) -> str:
    """`; did you mean ...?` if an existing file has a similar name, else an empty string."""
    folder, name = os.path.split(path or "")
    try:
        return did_you_mean(name, os.listdir(folder or "."))
    except OSError:
        return ""


def silence_stdout() -> None:
    """Discard the buffer of standard output after a failed write, so that it does not fail again at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
