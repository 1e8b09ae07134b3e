"""`xla-engine soak`: a long randomised test under load and faults."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common
from xla_engine.errors import ConfigError
from xla_engine.utils.extras import install
from xla_engine.utils.progress import counting

if TYPE_CHECKING:
    from xla_engine.tools.soak.report import SoakReport


@click.command(
    short_help="Stress-test engines and a server with faults.",
    context_settings={"show_default": True},
)
@_common.model_option
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), help="Duration of the soak.  [default: 2]"
)
@click.option("--lives", type=click.IntRange(1), help="Number of engines, in place of --minutes.")
@click.option("--rounds", type=click.IntRange(1), default=40, help="Rounds of requests per engine.")
@click.option("--requests", type=click.IntRange(1), default=24, help="Of each round.")
@click.option(
    "--tiny",
    is_flag=True,
    help="Use a model of two small layers with random weights and the embedded model's tokenizer.",
)
@click.option(
    "--http/--no-http",
    default=True,
    help="Also serve the model over HTTP, to honest and hostile clients. Needs the extra server.",
)
@click.option("--verbose", "-v", is_flag=True, help="Report after each engine.")
@click.option("--seed", type=int, default=0, help="Seed of all requests, faults and times.")
@click.option("--first-life", type=click.IntRange(0), default=0, help="Begin with this engine of the seed.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=8, help="Requests decoded together.")
@click.option(
    "--max-model-len",
    type=click.IntRange(64),
    default=256,
    help="Maximum number of prompt plus generated tokens.",
)
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", help="Of weights."
)
@click.option("--quantization", type=click.Choice(["int8", "gguf", "gguf-int8"]), help="As for `run`.")
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "int8"]), default="auto", help="As for `run`.")
@click.option("--attention-backend", metavar="NAME", default="auto", help="As for `run`.")
@click.option("--isa", metavar="NAME", default="auto", help="As for `run`.")
def soak(
    model: str | None,
    minutes: float | None,
    lives: int | None,
    rounds: int,
    requests: int,
    tiny: bool,
    http: bool,
    verbose: bool,
    seed: int,
    first_life: int,
    **options: Any,
) -> None:
    """Run engines under everything that callers and devices may do, and check for damage.

    Requests of every kind come, are aborted, preempted, run out of time or lose their readers; bad ones are
    refused. One engine of three has its requests through `AsyncLLM`. Steps fail, take long or are interrupted, with
    some requests every step fails, and some texts cannot be made. Each engine is drained, closed, hung or loses its
    device at last, and the next one begins: with slots or blocks, with speculation or without. The clock moves with
    the steps, so that a seed says what happens in each engine's life.

    A server, one for the whole soak, gets clients after each engine's life: hostile ones stop anywhere, flood heads,
    chunks and trailers, do not read, and send malformed and hostile requests and files. Honest ones beside them must
    have the answers they had alone, to the bit, no answer may be a 5xx, nothing may be left of any client, and the
    memory of the server must stay under 1.2 times what it was after the warm-up. With --tiny, too, it serves the model
    itself.

    At the end of each round every request must have one result of a reason that fits, all slots, blocks and parked
    bytes must be back, nothing may have been compiled, and some requests run alone: the bits must be the same. At the
    end of each life nothing of the engine may live on, and each request may leave at most 1 kB of memory behind.

    \b
    Exit status: 0 all held, 1 something did not, 2 could not start.

    \b
    Examples:
      xla-engine soak --minutes 2
      xla-engine soak --minutes 600 --seed 7 --model ./SmolLM2-135M
      xla-engine soak --minutes 60 -v --tiny --max-num-seqs 32 --rounds 200 --requests 120
      xla-engine soak --seed 7 --first-life 12 --lives 1
    """
    if minutes is not None and lives is not None:
        raise click.UsageError("--minutes and --lives exclude each other.")
    with contextlib.ExitStack() as stack, _common.startup_errors():
        if find_spec("xla_engine.tools.soak") is None:
            raise ConfigError(
                "wheels do not contain the soak tests; run them from a checkout, installed with pip install -e ."
            )
        from xla_engine.config import EngineConfig
        from xla_engine.environment import embedded_model_directory
        from xla_engine.model_loader.checkpoint import load_checkpoint
        from xla_engine.model_loader.model_files import open_model
        from xla_engine.tools.soak.faults import FaultyTokenizer
        from xla_engine.tools.soak.http_server import HttpServer
        from xla_engine.tools.soak.soak import soak as run
        from xla_engine.tools.soak.tiny_model import tiny_model

        config = EngineConfig(**options)
        server = stack.enter_context(HttpServer(model, options, seed)) if http and _can_serve() else None
        files = open_model(embedded_model_directory() if model is None else model)
        count = stack.enter_context(counting("rounds", sys.stderr))
        checkpoint = load_checkpoint(files, dtype=config.dtype)
        report = run(
            tiny_model(checkpoint, config.dtype) if tiny else checkpoint,
            FaultyTokenizer.of_model(files),
            config,
            minutes=2.0 if minutes is None and lives is None else minutes,
            lives=lives,
            seed=seed,
            first_life=first_life,
            rounds=rounds,
            requests=requests,
            http=server,
            on_life=_tell if verbose else None,
            progress=count,
        )
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)


def _can_serve() -> bool:
    if all(find_spec(name) for name in ("httptools", "msgspec", "python_multipart", "starlette", "uvicorn")):
        return True
    click.echo(f"the soak runs without HTTP: {install('server')}", err=True)
    return False


def _tell(report: SoakReport) -> None:
    tally = report.tally
    click.echo(
        f"{report.seconds:.0f} s, {tally.lives} engines, {tally.requests} requests, {tally.compared} compared, "
        f"{len(tally.problems)} problems; {report.memory_line()}",
        err=True,
    )
