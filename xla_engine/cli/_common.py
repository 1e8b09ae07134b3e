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
from xla_engine.cli._help import engine_option, together
from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError, XlaEngineError
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler.policy import POLICIES
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.startup import StartTimes, startup_line

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine
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
model_option = click.option(
    "--model",
    metavar="MODEL",
    help="Hugging Face model directory, .gguf file, hub id (OWNER/NAME, OWNER/NAME:Q8_0 for GGUF), or package:NAME, "
    "the model in an installed Python package.  "
    "[default: embedded model]",
)

model_argument = click.argument("model_argument", metavar="[MODEL]", required=False)


def place_model(options: dict[str, Any]) -> None:
    """Put the argument MODEL in the place of --model. Raises UsageError if both are given."""
    model = options.pop("model_argument")
    if model is not None and options["model"] is not None:
        raise click.UsageError("the model is given twice: as MODEL and by --model")
    options["model"] = model or options["model"]


# Fields of `EngineConfig` except the number of slots.
device_options = together(
    engine_option(
        "memory_utilization",
        "Use at most this share of the available memory.",
        kind=click.FloatRange(0, 1, min_open=True),
    ),
    engine_option(
        "max_model_len",
        "Maximum number of prompt plus generated tokens of a request.  [default: the model's, or what fits into a "
        "quarter of the machine's memory]",
    ),
    engine_option("dtype", "Dtype of weights and activations; auto is the checkpoint's.", kind=_help.DTYPE),
    engine_option(
        "quantization",
        "int8: quantise weights and activations to eight bits: half the memory, different tokens, a small loss. "
        "packed or gguf: keep the weights of a quantised checkpoint packed: less memory, the same tokens. "
        "packed-int8 or gguf-int8: the same with activations in eight bits: faster, different tokens, a small loss. "
        "The other names say how the checkpoint is stored: they change nothing, and any other checkpoint is refused.",
        kind=_help.QUANTIZATION,
    ),
    engine_option(
        "kv_cache_dtype",
        "int8: keep keys and values in eight bits: half the memory, long contexts decode faster, different tokens, a "
        "small loss. auto: as --dtype.",
    ),
    engine_option("enable_prefix_caching", "Compute the common beginning of prompts once."),
    engine_option("preemption", "Let a waiting request preempt a running one that is behind it in line."),
    engine_option(
        "swap_space",
        "Host memory for the KV cache of preempted requests; the rest is recomputed.",
        "GiB",
        kind=click.FloatRange(0),
    ),
    engine_option(
        "num_blocks",
        "Let slots share N KV blocks of 64 tokens and allocate them as they grow, instead of reserving "
        "--max-model-len tokens each.",
    ),
    engine_option(
        "kv_cache_memory_bytes",
        "Like --num-blocks, with as many blocks as fit into N bytes; auto uses the available memory.",
        "N|auto",
    ),
    engine_option(
        "mamba_cache_mode",
        "align: models with recurrent layers also reuse prefixes that prompts share, from states that are saved "
        "every --mamba-block-size tokens.",
    ),
    engine_option(
        "mamba_block_size",
        "Tokens from one saved state of recurrent layers to the next.  [default: 1024]",
        "N",
    ),
    engine_option(
        "mamba_cache_states",
        "Maximum number of saved states of recurrent layers.  [default: two for each slot]",
        "N",
    ),
    engine_option(
        "prefix_cache_dir",
        "Keep the KV blocks of shared prefixes in files here, for later starts and other processes. Needs "
        "--num-blocks or --kv-cache-memory-bytes. The files contain prompts in clear.",
        "DIR",
    ),
    engine_option(
        "prefix_cache_bytes",
        "Delete the least recently used of these files beyond N bytes.",
        "N",
    ),
    engine_option(
        "image_cache_bytes",
        "Memory for the features of pictures; with 0, the vision tower is not loaded.  [default: 64 MiB]",
        "N",
    ),
    engine_option(
        "allowed_local_media_path",
        "Requests may name pictures in this folder by path.",
        "DIR",
    ),
    engine_option(
        "allowed_media_domains",
        "Requests may name pictures on these hosts by address; exact names, with commas between them.",
        "HOSTS",
        default="",
    ),
    engine_option(
        "mm_processor_kwargs",
        "Replace fields of the checkpoint's image processor: '{\"max_pixels\": 262144}'.",
        "JSON",
    ),
    engine_option(
        "tensor_parallel_size",
        "Number of devices that share the model; each holds a part of every weight.",
        "N",
    ),
    engine_option("attention_backend", "auto is the fastest on this device; xla is pure JAX.", "NAME"),
    engine_option(
        "bits",
        "machine: what is fastest here. portable: the same bits on every processor with AVX2, AVX-512 or NEON; what "
        "cannot have them is refused.",
    ),
    engine_option(
        "isa",
        "Instruction set of the C++ kernels, such as avx2; auto is the best one; none is pure JAX.",
        "NAME",
    ),
    engine_option("enable_dry", "Support dry_multiplier and penalty_last_n in requests."),
    engine_option(
        "speculative_config",
        "Draft tokens and verify several in one step, without changing results: "
        '\'{"method": "suffix"}\', "ngram", "mtp", or "draft_model" or "eagle3" with "model"; and '
        '"num_speculative_tokens".',
        "JSON",
    ),
    engine_option(
        "shadow_rate",
        "Fraction of requests to run again, alone and by plain decode, to check that they get the same bits.",
        "SHARE",
        kind=click.FloatRange(0, 1),
    ),
)


# Fields of `EngineConfig`.
engine_options = together(
    engine_option(
        "max_num_seqs",
        "Number of requests decoded together; auto is as many as fit into memory.",
        "N|auto",
    ),
    device_options,
)
# Options of every command that loads a model.
model_options = together(model_option, engine_options)


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


phase_timers_option = engine_option(
    "phase_timers",
    "Measure the host's time in each step, for step logs, the status file and metrics.",
    is_flag=True,
)
verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_log,
    help="Log limits, progress, and failed steps.",
)


# Fields of `EngineConfig` for the order of requests and the size of steps.
scheduling_options = together(
    engine_option(
        "scheduling_policy",
        f"Which request gets a slot next: {', '.join(POLICIES)}, or your own by its import path.",
        kind=_help.Policy(),
        name="--policy",
    ),
    engine_option("quantum", "Steps in a request's time slice under the policy round_robin."),
    engine_option(
        "priority_aging",
        "How many later requests may overtake a waiting one: for each level of priority between them, and under "
        "shortest_prompt, deadline and longest_prefix in total.",
    ),
    engine_option(
        "max_num_batched_tokens",
        "Maximum number of tokens computed in one step.  [default: all slots and the largest prefill call]",
    ),
)


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
    engine_option(
        "step_timeout_s",
        "If a step takes longer, treat the device as lost and end every request with an error.  [default: wait]",
        "SECONDS",
        kind=click.FloatRange(0, min_open=True),
        name="--step-timeout",
    ),
    click.option(
        "--start-timeout",
        "start_timeout_s",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Exit with status 2 if the engine is not ready within this time.  [default: wait]",
    ),
)


# Fields of `EngineConfig` for pooling.
pooling_options = together(
    engine_option("runner", "Generate text, or one vector per prompt; auto follows the checkpoint."),
    engine_option(
        "pooler_config", 'Override how the checkpoint pools: \'{"pooling_type": "MEAN"}\'.', "JSON"
    ),
    engine_option("hf_overrides", "Override fields of config.json of a pooling model.", "JSON"),
)


def _adapters(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if len(pairs) < len(values) or not all(name and path for name, path in pairs.items()):
        raise click.BadParameter("give NAME=PATH, each name once")
    return pairs


# Adapters that requests select by name, and their limits.
lora_options = together(
    engine_option("enable_lora", "Let each request use its own LoRA adapter.", is_flag=True),
    click.option(
        "--lora-modules",
        metavar="NAME=PATH",
        multiple=True,
        callback=_adapters,
        help="A LoRA adapter in PEFT's format, for requests whose model is NAME; repeatable. Needs --enable-lora.",
    ),
    engine_option(
        "max_loras",
        "Maximum number of adapters in memory; at least those of --lora-modules.",
    ),
    engine_option("max_lora_rank", "Highest rank of an adapter."),
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


def begin_start(options: Mapping[str, Any]) -> None:
    """Begin what takes long at a first start: a part of the C++ kernels compiles while jax is imported.

    Until the engine is ready, or the command ends, Python collects no garbage: a start makes many objects that stay.
    """
    from xla_engine.runner.native_library.compiled import begin_compiling

    if gc.isenabled():
        gc.disable()
        click.get_current_context().call_on_close(gc.enable)
    begin_compiling(options["isa"])


@contextlib.contextmanager
def load_engine(
    options: dict[str, Any], *, show: bool, times: StartTimes | None = None
) -> Iterator[EngineClient]:
    """An engine with these options, closed at the end.

    show: print the progress of loading. times: records how long each part took.
    """
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.model_loader.peft.request import LoRARequest
    from xla_engine.open_engine import open_engine

    fields = config_fields(options)
    screen, limit_s = sys.stderr if show else io.StringIO(), options.get("start_timeout_s")
    engines = options.get("data_parallel_size", 1)
    with _start_limit(limit_s), startup_line(screen) as progress:
        progress = progress if times is None else times.following(progress)
        model = options.get("files", options["model"]) if engines == 1 else options["model"]
        engine = open_engine(model, EngineConfig(**fields), engines=engines, progress=progress)
    gc.enable()
    with engine:
        for number, (name, path) in enumerate(options.get("lora_modules", {}).items(), 1):
            engine.add_lora(LoRARequest(name, number, path))
            engine.pin_lora(number)
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
    from xla_engine.engine.batch_engine import XlaBatchEngine

    with load_engine(options, show=show) as engine:
        assert isinstance(engine, XlaBatchEngine)
        yield engine


def sampling_fields(options: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Sampling fields for requests that do not set them.

    They are the model's recommendations, unless switched off by an option, those of --override-generation-config, and
    those of `given` that are not None.
    """
    from xla_engine.environment import embedded_model_directory
    from xla_engine.model_loader.describe import sampling_defaults
    from xla_engine.model_loader.model_files import open_model

    fields: dict[str, Any] = {}
    if options["generation_config"] == "model":
        # opened here once, and used again by `load_engine`
        options["files"] = open_model(options["model"] or embedded_model_directory())
        fields = sampling_defaults(options["files"])
    fields |= options.pop("override_generation_config")
    fields |= {name: value for name, value in given.items() if value is not None}
    SamplingParams.from_mapping(fields)
    return fields


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
