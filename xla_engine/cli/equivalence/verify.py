"""`xla-engine verify`: batching changes no bit."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from xla_engine.cli import _common, _help
from xla_engine.utils.progress import counting


@click.command(
    cls=_help.Sectioned,
    short_help="Check that batching changes no bit.",
    context_settings={"show_default": True},
)
@_common.model_options
@_common.scheduling_options
@_common.verbose_option
@click.option("--requests", type=click.IntRange(1), default=200, help="Random requests to compare.")
@click.option(
    "--schedules", type=click.IntRange(1), default=4, help="Random schedules that share the requests."
)
@click.option("--seed", type=int, default=0, help="Chooses the random requests and schedules.")
@click.option(
    "--against",
    type=click.Choice(["alone", "config", "speculation", "transformers"]),
    default="alone",
    help="alone: among peers against alone, bit for bit. config: other engine configurations, and prefill for "
    "decode. speculation: right, wrong and mixed guesses against none. transformers: greedy tokens in float32 (extra "
    "`oracle`).",
)
@click.option(
    "--oracle-python",
    metavar="PATH",
    help="Interpreter that has torch and transformers.  [default: this one]",
)
@click.option(
    "--record",
    "record_path",
    metavar="FILE",
    help="Write the first schedule that differs, or else the last, for `xla-engine replay` and `shrink`. Schedules "
    "then start from a blank cache.",
)
def verify(
    requests: int,
    schedules: int,
    seed: int,
    against: str,
    oracle_python: str | None,
    record_path: str | None,
    **options: Any,
) -> None:
    """Check that batching changes no bit: run random requests each alone, then together, and compare.

    Prompt lengths, caps, sampling settings, arrival times and aborted neighbours are random; lag 0 and 1 take
    turns. Tokens and log-probability bits of each request must be the same among peers as alone in the same
    engine. Prints what was compared and the differences.

    That is level A, promised everywhere. Level B (--against config) is promised where the C++ operations serve, in
    bfloat16 and int8, and elsewhere reported: each first difference is printed with the gap between the two largest
    logits. Speculation
    (--against speculation) changes no bit wherever an engine takes a `speculative_config` at all. Level C
    (--against transformers) compares tokens with an external implementation.

    \b
    Exit status: 0 no difference, or none that breaks a promise, 1 a difference, 2 could not start.

    \b
    Example:
      xla-engine verify --model ./SmolLM2-135M --requests 50 --max-model-len 256
      xla-engine verify --requests 10000 --schedules 300
      xla-engine verify --num-blocks 40 --policy round_robin --quantum 1
      xla-engine verify --against config
      xla-engine verify --against speculation --requests 50
      xla-engine verify --record failing.json
    """
    if record_path is not None and against != "alone":
        raise _common.NotStarted("--record goes with --against alone: there is one engine to record")
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            engine = stack.enter_context(_common.load_one_engine(options, show=True))
            from xla_engine.equivalence import across_configurations as levels
            from xla_engine.equivalence import verify as law
            from xla_engine.equivalence.record_file import write_record
            from xla_engine.equivalence.recorder import RecordKeeper
            from xla_engine.equivalence.transformers_oracle import against_transformers

            if record_path is not None:
                open(record_path, "ab").close()  # a path that cannot be written is told before the work
        if against == "alone":
            count = stack.enter_context(counting("verifying", sys.stderr, 2 * requests))
            keeper = None if record_path is None else RecordKeeper()
            report = law.verify(
                engine, requests=requests, schedules=schedules, seed=seed, progress=count, keeper=keeper
            )
            if record_path is not None and keeper is not None and keeper.record is not None:
                with _common.startup_errors():
                    write_record(record_path, keeper.record)
            click.echo("\n".join(report.lines()))
            failed = not report.ok
        elif against == "config":
            count = stack.enter_context(counting("configurations", sys.stderr))
            results = levels.across_configurations(engine, requests=requests, seed=seed, progress=count)
            click.echo("\n".join(levels.table(results)))
            differ = any(result.differing_tokens or result.differing_bits for result in results)
            failed = differ and engine.runner.has_one_row_code  # elsewhere it is reported, not promised
        elif against == "speculation":
            count = stack.enter_context(counting("guesses", sys.stderr))
            with _common.startup_errors():
                from xla_engine.equivalence.speculation import across_speculation

                results = across_speculation(engine, requests=requests, seed=seed, progress=count)
            click.echo("\n".join(levels.table(results)))
            failed = any(result.differing_tokens or result.differing_bits for result in results)
        else:
            with _common.startup_errors():
                result = against_transformers(engine, requests=requests, seed=seed, python=oracle_python)
            click.echo("\n".join(levels.table([result])))
            failed = result.differing_tokens > 0
    if failed:
        sys.exit(_common.SOME_FAILED)
