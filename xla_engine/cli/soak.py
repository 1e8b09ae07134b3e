"""`xla-engine soak`: a long randomised test under load and faults."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import Any

import click

from xla_engine.cli import _common, _help
from xla_engine.errors import ConfigError
from xla_engine.utils.extras import install
from xla_engine.utils.progress import counting


@click.command(short_help="Stress-test engines and a server with faults.")
@_common.model_option
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), help="Duration of the soak.  [default: 2]"
)
@click.option("--lives", type=click.IntRange(1), help="Number of engines, in place of --minutes.")
@click.option("--rounds", type=click.IntRange(1), default=40, help="Rounds of requests per engine.")
@click.option("--requests", type=click.IntRange(1), default=24, help="Requests in each round.")
@click.option(
    "--tiny",
    is_flag=True,
    help="Use a model of two small layers with random weights and the embedded model's tokenizer.",
)
@click.option(
    "--http/--no-http",
    default=True,
    help="Also serve the model over HTTP, to honest and hostile clients. Needs the extra test.",
)
@click.option("--verbose", "-v", is_flag=True, help="Report after each engine.")
@click.option("--seed", type=int, default=0, help="Seed of all requests, faults and times.")
@click.option("--first-life", type=click.IntRange(0), default=0, help="Index of the engine to start with.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=8, help="Requests decoded together.")
@click.option(
    "--max-model-len",
    type=click.IntRange(64),
    default=256,
    help="Maximum number of prompt plus generated tokens.",
)
@_help.engine_option("dtype", "Dtype of the weights.")
@_help.engine_option("quantization", "As for `run`.")
@_help.engine_option("kv_cache_dtype", "As for `run`.")
@_help.engine_option("attention_backend", "As for `run`.")
@_help.engine_option("isa", "As for `run`.")
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
    """Stress engines with everything that callers and devices may do, and check for damage.

    Requests of every kind are submitted, aborted, preempted, run out of time or lose their readers; invalid ones are
    refused. One engine of three is driven through `AsyncLLM`. Steps fail, take long or are interrupted; some requests
    make every step fail, and some texts cannot be decoded. In the end each engine is drained or closed, hangs or loses
    its device, and the next one starts: with slots or blocks, with or without speculation. The clock advances with the
    steps, so a seed determines what happens to each engine.

    One server runs during the whole soak. After each engine it gets clients. Hostile ones stop at any byte, flood it
    with headers, chunks and trailers, do not read, and send malformed requests and files. Honest clients meanwhile
    must get the answers they got alone, to the bit. No answer may be a 5xx, nothing of any client may be left, and the
    server's memory must stay below 1.2 times that after the warm-up. --tiny does not change its model.

    At the end of each round every request must have exactly one result with a fitting reason, all slots, blocks and
    parked bytes must be free, nothing may have been compiled, and some requests run again alone, with the same bits.
    When an engine ends, none of its objects may be left, and each request may leave at most 1 kB of memory.

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

        config = EngineConfig(**options)
        opened: dict[str, Any] = {"model": model}
        _common.check_model(opened, config)
        from xla_engine.model_loader.checkpoint import load_checkpoint
        from xla_engine.tools.soak.faults import FaultyTokenizer
        from xla_engine.tools.soak.report import SoakReport
        from xla_engine.tools.soak.soak import soak as run
        from xla_engine.tools.soak.soak import tiny_model

        report = SoakReport(seed, first_life)
        server = None
        if http and _can_serve():
            from xla_engine.tools.soak.http_rounds import serving

            server = stack.enter_context(serving(model, options, report))
        files = opened["files"]
        count = stack.enter_context(counting("rounds", sys.stderr))
        checkpoint = load_checkpoint(files, dtype=config.dtype)
        for _ in run(
            report,
            tiny_model(checkpoint, config.dtype) if tiny else checkpoint,
            FaultyTokenizer.of_model(files),
            config,
            minutes=2.0 if minutes is None and lives is None else minutes,
            lives=lives,
            rounds=rounds,
            requests=requests,
            http=server,
            progress=count,
        ):
            if verbose:
                click.echo(report.short(), err=True)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)


def _can_serve() -> bool:
    if all(
        find_spec(name)
        for name in ("httptools", "httpx", "msgspec", "python_multipart", "starlette", "uvicorn")
    ):
        return True
    click.echo(f"the soak runs without HTTP: {install('test')}", err=True)
    return False
