"""What commands share: exit statuses, options of the engine, loading it, errors before the start."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from xla_engine.errors import XlaEngineError
from xla_engine.scheduler.policy import POLICIES
from xla_engine.utils.progress import counting, loading

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine

SOME_FAILED, NOT_STARTED, INTERRUPTED = 1, 2, 130  # exit statuses beside 0


class NotStarted(click.ClickException):
    """Nothing ran; the message says why."""

    exit_code = NOT_STARTED


class RenamedOption(click.Option):
    """An option of several names, of which help shows the first: the others are what it was called before."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy.copy(self)
        shown.opts, shown.secondary_opts = self.opts[:1], self.secondary_opts[:1]
        return super(RenamedOption, shown).get_help_record(ctx)


def _slots(context: click.Context, option: click.Parameter, value: str) -> int | str:
    """A number of slots, or auto."""
    return value if value == "auto" else click.IntRange(1)(value, option, context)


def _bytes(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """A number of bytes, or auto."""
    return value if value in (None, "auto") else click.IntRange(1)(value, option, context)


def _json(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f'{error}; give JSON, such as {{"method": "suffix"}}') from error


model_option = click.option(
    "--model",
    metavar="MODEL",
    help="Hugging Face model directory, .gguf file, or hub id (OWNER/NAME).  [default: embedded model]",
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that loads a model: which one, and `engine_options`."""
    return model_option(engine_options(command))


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Fields of `EngineConfig`."""
    width = click.option(
        "--max-num-seqs",
        metavar="N|auto",
        default="16",
        callback=_slots,
        help="Requests decoded together; auto takes what the device has memory for.",
    )
    return width(device_options(command))


def device_options(command: Callable[..., None]) -> Callable[..., None]:
    """Fields of `EngineConfig` beside the number of slots."""
    options = (
        click.option(
            "--memory-utilization",
            type=click.FloatRange(0, 1, min_open=True),
            default=0.9,
            help="Take at most this share of the available memory.",
        ),
        click.option(
            "--max-model-len",
            type=click.IntRange(2),
            help="Prompt plus generated tokens of a request at most.  [default: the model's, at most 2048]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float32"]),
            default="auto",
            help="Type of weights and activations; auto is the checkpoint's.",
        ),
        click.option(
            "--quantization",
            type=click.Choice(["int8"]),
            help="Keep the weights of a dense model in eight bits: half the memory, other tokens.",
        ),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=True,
            help="Compute the common beginning of prompts once.",
        ),
        click.option(
            "--preemption/--no-preemption",
            default=True,
            help="A request may take the slot of one that is behind it in line.",
        ),
        click.option(
            "--swap-space",
            type=click.FloatRange(0),
            default=4.0,
            metavar="GiB",
            help="Host memory for the KV cache of preempted requests; what does not fit is computed again.",
        ),
        click.option(
            "--num-blocks",
            type=click.IntRange(1),
            help="KV blocks of 64 tokens that slots borrow as they grow, instead of --max-model-len each.",
        ),
        click.option(
            "--kv-cache-memory-bytes",
            metavar="N|auto",
            callback=_bytes,
            help="The same, with as many blocks as this memory holds; auto takes what the device has.",
        ),
        click.option(
            "--attention-backend",
            metavar="NAME",
            default="auto",
            help="auto takes the fastest here; xla is pure JAX.",
        ),
        click.option(
            "--isa",
            metavar="NAME",
            default="auto",
            help="Instruction set of the C++ operations, such as avx2; auto takes the best; none is pure JAX.",
        ),
        click.option(
            "--speculative-config",
            metavar="JSON",
            callback=_json,
            help="Check several guessed tokens in a step, which changes no result: "
            '\'{"method": "suffix"}\' or "ngram", and "num_speculative_tokens".',
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def scheduling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Fields of `EngineConfig` that say which request goes first, and how much runs in a step."""
    options = (
        click.option(
            "--policy",
            "scheduling_policy",
            type=click.Choice(list(POLICIES)),
            default="priority",
            help="Which request gets a slot next.",
        ),
        click.option(
            "--quantum",
            type=click.IntRange(1),
            default=64,
            help="Steps of a request's turn under the policy round_robin.",
        ),
        click.option(
            "--priority-aging",
            type=click.IntRange(1),
            default=64,
            help="How many earlier requests one class of priority overtakes; under shortest_prompt, deadline and "
            "longest_prefix, how many requests may go before the one that waits longest.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=click.IntRange(1),
            help="Tokens computed in one step at most.  [default: all slots and the largest prefill call]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextlib.contextmanager
def startup_errors() -> Iterator[None]:
    """Make of an error that keeps a command from starting one line and exit status 2."""
    try:
        yield
    except OSError as error:
        raise NotStarted(os_message(error)) from error
    except XlaEngineError as error:
        raise NotStarted(f"{error.code}: {error}") from error
    except (RuntimeError, MemoryError) as error:  # XLA raises RuntimeErrors, for lack of memory among others
        raise NotStarted(f"the engine could not start: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def load_engine(options: dict[str, Any], *, show: bool) -> Iterator[XlaBatchEngine]:
    """An engine with these options, closed at the end; `show` draws bars while it loads and compiles."""
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine

    fields = {name: value for name, value in options.items() if name != "model"}
    screen = sys.stderr if show else io.StringIO()
    with loading(screen) as load, counting("compiled", screen) as count:
        engine = XlaBatchEngine.from_pretrained(
            options["model"], EngineConfig(**fields), progress=count, load_progress=load
        )
    with engine:
        limit = engine.checkpoint.config.max_position_embeddings
        if engine.max_model_len < limit and fields.get("max_model_len") is None:
            click.echo(
                f"max_model_len is {engine.max_model_len}; the model allows {limit}, which --max-model-len gives",
                err=True,
            )
        yield engine


def os_message(error: OSError, path: str | None = None) -> str:
    """An error of the system in words; `path` names the file where the error does not."""
    name = error.filename or path
    return f"{name}: {error.strerror or error}" if name else str(error)
