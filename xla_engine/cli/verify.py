"""`xla-engine verify`: check that batching changes no bit, in this engine or in a server."""

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from xla_engine.cli import _common, _help
from xla_engine.config import AUTO
from xla_engine.utils.progress import counting


@click.command(cls=_help.Sectioned, short_help="Check that batching changes no bit, here or in a server.")
@click.option(
    "--url", metavar="URL", help="Check an OpenAI-compatible server instead; --model is its name there."
)
@click.option("--remote", is_flag=True, help="Allow a --url that is not on this machine.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable with the server's API key.")
@click.option(
    "--long", "is_long", is_flag=True, help="Also test 256 concurrent requests, with three times the limits."
)
@click.option("--save", metavar="FILE", help="Write the server's answers, for a later --baseline.")
@click.option(
    "--baseline", metavar="FILE", help="Compare with answers that --save wrote, for example before a restart."
)
@click.option(
    "--markdown",
    "form",
    flag_value="markdown",
    default=None,
    help="With --url: a report for an issue tracker.",
)
@click.option("--json", "form", flag_value="json", help="The report as one JSON document on standard output.")
@_common.model_options
@_common.scheduling_options
@_common.verbose_option
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=200,
    help="Random requests to compare; 30 with --url, 8 with --against reference.",
)
@click.option(
    "--schedules", type=click.IntRange(1), default=4, help="Random schedules that share the requests."
)
@click.option("--seed", type=int, default=0, help="Seed of the random requests and schedules.")
@click.option(
    "--against",
    type=click.Choice(["alone", "config", "speculation", "reference", "transformers", "golden"]),
    default="alone",
    help="alone: in a batch against alone, bit for bit. config: other engine configurations, and prefill for "
    "decode. speculation: right, wrong and mixed drafts against none. reference: greedy tokens and their "
    "log-probabilities against a forward pass in NumPy that shares no code with the engine, in float32 and as "
    "configured. transformers: greedy tokens in float32 (extra `oracle`; no GGUF files). golden: the embedded model "
    "with --bits portable, against the bits that every processor must give.",
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
@click.pass_context
def verify(
    context: click.Context,
    /,
    requests: int,
    schedules: int,
    seed: int,
    against: str,
    oracle_python: str | None,
    record_path: str | None,
    url: str | None,
    **options: Any,
) -> None:
    """Check that batching changes no bit: run random requests each alone, then together, and compare.

    Prompt lengths, limits, sampling settings, arrival times and aborted neighbours are random; lag 0 and 1
    alternate. Tokens and log-probability bits of each request must be the same among peers as alone in the same
    engine. Prints what was compared and the differences.

    That is level A, promised everywhere. Level B (--against config) is promised with the C++ kernels, in
    bfloat16 and int8, and elsewhere reported: each first difference is printed with the gap between the two largest
    logits. Speculation
    (--against speculation) changes no bit wherever an engine takes a `speculative_config` at all. Level C compares
    with another implementation: --against reference reads any model itself, GGUF and packed files included, and
    allows differences of log-probabilities up to a tolerance, 0.001 nats in float32; --against transformers needs
    torch.

    With --url a server answers: repeated requests, among 8 and 48 others, after cached prefixes, streamed, cut,
    scored, with equal seeds. Only addresses of this machine, unless --remote; at most 400 requests, 60,000 tokens
    and 600 seconds.

    \b
    Exit status: 0 no difference, or none that breaks a promise, 1 a difference, 2 could not start, or too little of
    the server was visible for a verdict.

    \b
    Example:
      xla-engine verify --model ./SmolLM2-135M --requests 50 --max-model-len 256
      xla-engine verify --requests 10000 --schedules 300
      xla-engine verify --num-blocks 40 --policy round_robin --quantum 1
      xla-engine verify --against config
      xla-engine verify --against speculation --requests 50
      xla-engine verify --model ./model.Q4_K_M.gguf --against reference
      xla-engine verify --against golden --isa avx2
      xla-engine verify --record failing.json
      xla-engine verify --url http://127.0.0.1:8000
    """
    if url is not None:
        sys.exit(_verify_url(context))
    for name in _OF_SERVERS[1:]:
        if _given(context, name) and options[name] != "json":
            raise _common.NotStarted(
                f"{'--markdown' if name == 'form' else _option(context, name)} needs --url"
            )
        del options[name]
    if against == "golden":
        sys.exit(_verify_golden(context))
    if record_path is not None and against != "alone":
        raise _common.NotStarted("--record works with --against alone only, which has one engine to record")
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            engine = stack.enter_context(_common.load_one_engine(options, show=True))
            from xla_engine.equivalence import levels
            from xla_engine.equivalence import verify as law
            from xla_engine.equivalence.record import write_record

            if record_path is not None:
                open(record_path, "ab").close()  # report an unwritable path before the work begins
        if against == "alone":
            count = stack.enter_context(counting("verifying", sys.stderr, 2 * requests))
            report = law.verify(
                engine,
                requests=requests,
                schedules=schedules,
                seed=seed,
                progress=count,
                keep_record=record_path is not None,
            )
            if record_path is not None and report.record is not None:
                with _common.startup_errors():
                    write_record(record_path, report.record)
            _print(context, report.lines, report.as_json)
            failed = not report.ok
        elif against == "reference":
            from xla_engine.equivalence import against_reference

            with _common.startup_errors():
                count = stack.enter_context(
                    counting("reference", sys.stderr, engine.checkpoint.config.num_hidden_layers)
                )
                outcomes = against_reference.against_reference(
                    engine,
                    requests=requests if _given(context, "requests") else against_reference.REQUESTS,
                    seed=seed,
                    progress=count,
                )
            _print(
                context,
                lambda: against_reference.lines(outcomes),
                lambda: against_reference.as_json(outcomes),
            )
            failed = not all(each.ok for each in outcomes)
        else:
            with _common.startup_errors():
                if against == "transformers":
                    results = [
                        levels.against_transformers(
                            engine, requests=requests, seed=seed, python=oracle_python
                        )
                    ]
                else:
                    what, across = {
                        "config": ("configurations", levels.across_configurations),
                        "speculation": ("proposers", levels.across_speculation),
                    }[against]
                    count = stack.enter_context(counting(what, sys.stderr))
                    results = _counted(across(engine, requests=requests, seed=seed), count)
            promised = against != "config" or engine.runner.has_one_row_code  # otherwise only reported
            failed = promised and not all(each.compared.ok for each in results)
            ok = not failed
            _print(context, lambda: levels.table(results), lambda: levels.as_json(against, results, ok=ok))
    if failed:
        sys.exit(_common.SOME_FAILED)


def _counted(results: Iterable[Any], count: Callable[[str], None] | None) -> list[Any]:
    """The results, each counted by its name when it is there."""
    found = []
    for result in results:
        found.append(result)
        if count is not None:
            count(result.name)
    return found


def _verify_golden(context: click.Context) -> int:
    """Repeat the golden file of bits "portable" and return the exit status."""
    known = ("against", "form", "isa", "quantization", "verbose")
    if others := _others(context, known):
        raise _common.NotStarted(
            f"--against golden uses its own model and options, apart from --isa and --quantization: leave "
            f"{others} out"
        )
    with _common.startup_errors(), counting("engines", sys.stderr) as count:
        from xla_engine.equivalence import portable

        asked = context.params["quantization"]
        names = [name for name, kind in portable.PRECISIONS.items() if asked in (AUTO, kind or "none")]
        if not names:
            raise _common.NotStarted(
                f"--against golden compares bfloat16 and int8, not --quantization {asked}"
            )
        results = _counted(portable.against_golden(context.params["isa"], names), count)
    _print(context, lambda: portable.lines(results), lambda: portable.as_json(results))
    return _common.SOME_FAILED if any(each.differing for each in results) else 0


def _print(
    context: click.Context, lines: Callable[[], Sequence[str]], as_json: Callable[[], dict[str, Any]]
) -> None:
    """Print a report: as text, or with --json as one line."""
    if context.params["form"] == "json":
        click.echo(json.dumps(as_json(), allow_nan=False))
    else:
        click.echo("\n".join(lines()))


_OF_SERVERS = ("url", "remote", "api_key_env", "is_long", "save", "baseline", "form")


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _option(context: click.Context, name: str) -> str:
    """A parameter as it is written on the command line."""
    return " or ".join(max(each.opts, key=len) for each in context.command.params if each.name == name)


def _others(context: click.Context, known: Collection[str]) -> str:
    """The options that were given and are not known here."""
    names = [name for name in context.params if name not in known and _given(context, name)]
    return ", ".join(_option(context, name) for name in sorted(names))


def _verify_url(context: click.Context) -> int:
    """Check a server and return the exit status. Prints its limits first, and the report to standard output."""
    given = context.params
    known = {*_OF_SERVERS, "requests", "seed", "model"}
    if others := _others(context, known):
        raise _common.NotStarted(f"with --url, a server runs the model: leave {others} out")
    from xla_engine.environment import api_key
    from xla_engine.same_bits import checks
    from xla_engine.same_bits.server import LONG, HttpTarget, Limits
    from xla_engine.same_bits.target import TargetError

    key_env = given["api_key_env"]
    key = None if key_env is None else api_key(key_env)
    if key_env is not None and not key:
        raise _common.NotStarted(f"the environment variable {key_env} (--api-key-env) is not set")
    limits = LONG if given["is_long"] else Limits()
    requests = given["requests"] if _given(context, "requests") else 30
    try:
        with _common.startup_errors():
            if given["baseline"] is not None:  # files first: a run takes minutes
                checks.load_answers(given["baseline"], requests=requests, seed=given["seed"])
            if given["save"] is not None:
                open(given["save"], "ab").close()
            click.echo(f"sending to {given['url']} at most {limits}", err=True)
            target = HttpTarget(
                given["url"],
                model=given["model"],
                api_key=key,
                key_env=key_env,
                remote=given["remote"],
                limits=limits,
            )
            report = checks.check(
                target,
                requests=requests,
                seed=given["seed"],
                among=checks.LONG if given["is_long"] else checks.AMONG,
                save=given["save"],
                baseline=given["baseline"],
                progress=lambda name: click.echo(f"checking: {name}", err=True),
            )
    except TargetError as error:
        raise _common.NotStarted(str(error)) from None
    click.echo({"markdown": report.markdown, "json": report.json}.get(given["form"] or "", report.text)())
    return report.exit_status
