"""`xla-engine run`: run a file of requests, check it, run a stream, or complete one prompt.

Modules that read and write files of requests are imported for such files only, so that a prompt's answer comes sooner.
"""

from __future__ import annotations

import os
from glob import has_magic
from typing import TYPE_CHECKING, Any

import click

from xla_engine.batch.datasets.answers import AnswerColumns, read_schema
from xla_engine.batch.encodings import MAX_LINE_BYTES, check_encoding
from xla_engine.cli import _common, _help
from xla_engine.cli._answer import run_prompt
from xla_engine.cli._table_options import TableOptions, table_options
from xla_engine.errors import ConfigError

if TYPE_CHECKING:
    from xla_engine.batch.shards import Shard


def _shard(context: click.Context, option: click.Parameter, value: str | None) -> Shard | None:
    if value is None:
        return None
    from xla_engine.batch.shards import Shard

    try:
        return Shard.parse(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _encoding(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    try:
        encoding = None if value is None else check_encoding(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return None if encoding == "utf-8" else encoding


@click.command(cls=_help.Sectioned, short_help="Complete a file of requests.")
@click.argument("input_path", metavar="INPUT", required=False)
@click.option(
    "--prompt",
    metavar="TEXT",
    help="Send TEXT as a chat message if the model has a chat template, else complete it; print the answer. Takes "
    "no INPUT and no OUTPUT.",
)
@click.option(
    "--raw", is_flag=True, help="With --prompt: complete the text as it is, without the chat template."
)
@click.option("--chat", is_flag=True, help="Send each text prompt as a chat message.")
@click.option("--system", metavar="TEXT", help="System message for chats without one; implies --chat.")
@click.option("-o", "--output", "output_path", metavar="OUTPUT", help="Results file, or -.")
@click.option(
    "--errors",
    "errors_path",
    metavar="FILE",
    help="Write lines without a result to this file.  [default: OUTPUT]",
)
@click.option(
    "--receipts",
    "receipts_path",
    metavar="FILE",
    help="Write a receipt of each answer to this file, for `xla-engine audit`.",
)
@click.option(
    "--sign",
    "sign_path",
    metavar="KEY",
    help="Sign the receipts with the Ed25519 private key in this file, in PEM or OpenSSH's format (extra `receipts`).",
)
@click.option("--resume", is_flag=True, help="Continue from the results in OUTPUT.")
@click.option("--retry-failed", is_flag=True, help="Like --resume, but run lines with an error again.")
@click.option("--overwrite", is_flag=True, help="Replace the results in OUTPUT.")
@click.option(
    "--shard",
    metavar="I/N",
    callback=_shard,
    help="Run only job I of N (from 0) over the same INPUT; `xla-engine merge` joins their outputs.",
)
@table_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check every line and count tokens; run nothing. It takes all options of the run, and writes no file.",
)
@click.option(
    "--stream",
    is_flag=True,
    help="Write an event to standard output for each token; INPUT may contain control lines.",
)
@click.option(
    "--status-file",
    "status_path",
    metavar="FILE",
    help="Write queue, slots and counters to this file as JSON, every second.",
)
@click.option(
    "--metrics-file",
    "metrics_path",
    metavar="FILE",
    help="Write metrics to this file in Prometheus' text format, every second.",
)
@click.option(
    "--step-log",
    "--record",
    "step_log_path",
    cls=_help.RenamedOption,
    metavar="FILE",
    help="Write every step with its times to this file, for `timeline` and `simulate`.",
)
@_common.model_options
@_common.lora_options
@_common.pooling_options
@_common.time_limits
@_common.data_parallel_option
@_common.hosts_options
@click.option(
    "--lag",
    type=click.IntRange(0, 1),
    default=1,
    help="Steps that the device is ahead of the host. With 0 the host reads each step before the next starts, which "
    "is slower.",
)
@_common.scheduling_options
@_common.phase_timers_option
@_common.verbose_option
@_help.engine_options("kept")
@_common.generation_config_option
@_common.chat_template_option
@click.option(
    "--tool-parser",
    metavar="NAME",
    help="Extract tool calls from replies: hermes, qwen3_coder, llama3, mistral or harmony.  "
    "[default: leave them in the text]",
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help="Extract reasoning from replies: think or harmony.  [default: leave it in the text]",
)
@_common.request_defaults
@click.option(
    "--truncate-prompt-tokens",
    metavar="N",
    type=click.IntRange(-1),
    help="Keep only the last N tokens of longer prompts, for requests that do not say; -1 keeps as many as fit.  "
    "[default: a prompt that does not fit is an error]",
)
@click.option(
    "--json-schema",
    "schema_path",
    metavar="FILE",
    help="Answers are JSON that matches the schema in this file, for requests without a format of their own.",
)
@click.option("--ordered", is_flag=True, help="Write results in input order, not as they finish.")
@click.option(
    "--max-line-bytes",
    type=click.IntRange(1),
    default=MAX_LINE_BYTES,
    help="Maximum length of an input line; longer lines get an error.",
)
@click.option(
    "--encoding",
    metavar="NAME",
    callback=_encoding,
    help="Encoding of a text INPUT, such as cp1252 (Excel's), latin-1 or utf-16.  [default: utf-8]",
)
@click.option("--created", type=int, help='Unix time written as "created".  [default: now]')
@click.option("--fingerprint", is_flag=True, help="Add hashes to results, for `xla-engine compare`.")
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="After SIGTERM, cancel requests that have not finished within this time.  [default: wait for all]",
)
@click.option("--no-progress", is_flag=True, help="Print only the summary.")
def run(
    input_path: str | None,
    prompt: str | None,
    raw: bool,
    chat: bool,
    system: str | None,
    output_path: str | None,
    errors_path: str | None,
    receipts_path: str | None,
    sign_path: str | None,
    resume: bool,
    retry_failed: bool,
    overwrite: bool,
    dry_run: bool,
    stream: bool,
    max_tokens: int | None,
    temperature: float | None,
    truncate_prompt_tokens: int | None,
    chat_template_path: str | None,
    schema_path: str | None,
    tool_parser: str | None,
    reasoning_parser: str | None,
    **options: Any,
) -> None:
    """Complete every line of INPUT (a JSONL file, compressed if its name ends in .gz, or - for standard input; or a
    table: .parquet, .csv, .arrow or a folder of them; or a URL of either).

    A line is a request: a prompt (text or token ids) or the messages of a chat with any sampling fields, or an
    OpenAI Batch line for /v1/completions, /v1/chat/completions or /v1/responses. All may be mixed; blank lines are
    skipped.

    \b
    {"prompt": "def main(", "max_tokens": 32, "temperature": 0}
    {"custom_id": "b", "prompt": [17, 4, 99], "temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": 0}
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x =", "max_tokens": 8}}
    {"custom_id": "d", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}

    Sampling fields have vLLM's names, in OpenAI lines OpenAI's. An unknown field is an error, never ignored.

    OUTPUT gets one OpenAI Batch result line per request, written as it finishes; match them by custom_id
    (line-<n> if the input has none). A line that cannot run gets "error": {"code", "message", "line"};
    other lines are not affected. Results in OUTPUT are never replaced without --overwrite. OUTPUT has all
    finished results even if the run is killed (in a .gz file, all but the last 64 KiB): the same command
    with --resume completes it, with the lines of an uninterrupted run and, with --ordered, the same bytes.

    With --dry-run every line is checked as by the engine, and error codes and a token estimate are printed. With
    --stream requests are read from INPUT while others run, and each token is an event on standard output;
    lines with an "op" control the run: {"op": "cancel", "id": ID}, and extend, list, peek, stats, step,
    drain.

    \b
    Exit status: 0 all lines have results, 1 some failed, 2 could not start, 130 interrupted by Ctrl-C or SIGTERM.
    The first Ctrl-C or SIGTERM lets running requests finish; the second stops at once, as does
    --drain-timeout after a SIGTERM; a third kills the process. Requests without a result then get no line.

    \b
    Examples:
      xla-engine run --prompt "def fibonacci(n):" --max-tokens 64 --temperature 0
      xla-engine run examples/requests.jsonl -o out.jsonl
      xla-engine run in.jsonl.gz -o out.jsonl.gz --errors errors.jsonl --resume --model ./SmolLM2-135M
      xla-engine run in.jsonl --dry-run --model ./SmolLM2-135M --max-tokens 64
      cat in.jsonl | xla-engine run - -o - --ordered > out.jsonl
      cat in.jsonl | xla-engine run --stream
    """
    with _common.startup_errors():
        if prompt is None and input_path is not None and input_path != "-":
            from xla_engine.batch.datasets.files import is_url

            if not is_url(input_path) and not has_magic(input_path):
                os.stat(input_path)  # a missing file is told before the model is opened
        if dry_run:
            _common.pause_collections()
        else:
            _common.begin_start(options)
        defaults = _common.sampling_fields(
            options,
            for_reader=prompt is not None,
            max_tokens=max_tokens,
            temperature=temperature,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        if (template := _common.text_of(chat_template_path)) is not None:
            defaults["chat_template"] = template
        if tool_parser is not None or reasoning_parser is not None:
            from xla_engine.text.parsers.chats import Dialect

            defaults |= Dialect.named(tool_parser, reasoning_parser).as_defaults()
        answers = None
        if schema_path is not None:
            schema = read_schema(schema_path)
            defaults["structured_outputs"] = {"json": schema}
            answers = AnswerColumns.of(schema) if options["json_columns"] else None
        elif options["json_columns"]:
            raise click.UsageError("--json-columns needs --json-schema FILE.")
    tables, shard = TableOptions(**_common.take(options, TableOptions)), options["shard"]
    if options["data_parallel_size"] > 1 and options["step_log_path"] is not None:
        raise click.UsageError("--step-log writes the steps of one engine; leave out --data-parallel-size.")
    _one_of({"--resume": resume, "--retry-failed": retry_failed, "--overwrite": overwrite})
    _one_of({"--dry-run": dry_run, "--stream": stream})
    _one_of({"--stream": stream, "-o": output_path is not None})
    _one_of({"--stream": stream, "--receipts": receipts_path is not None})
    _one_of({"--stream": stream, "--shard": shard is not None})
    _one_of({"--raw": raw, "--chat": chat, "--system": system is not None and not chat})
    _one_of({"--stream": stream, "--encoding": options["encoding"] is not None})
    _one_of({"--stream": stream, "options of tables": tables != TableOptions()})
    if prompt is not None:
        _one_of(
            {
                "--prompt": True,
                "INPUT": input_path is not None,
                "-o": output_path is not None,
                "--receipts": receipts_path is not None,
                "--dry-run": dry_run,
                "--stream": stream,
                "--shard": shard is not None,
                "options of tables": tables != TableOptions(),
            }
        )
        for name in ("tool_parser", "reasoning_parser"):
            defaults.pop(name, None)
        completes = raw or options["model"] is None  # the embedded model completes code
        as_chat = True if chat or system is not None else False if completes else None
        run_prompt(prompt, defaults, options, chat=as_chat, system=system)
        return
    if raw:
        raise click.UsageError(
            "--raw needs --prompt; without --chat, prompts in a file are always completed as they are."
        )
    if chat or system is not None:
        defaults["chat_system"] = system or ""
    if input_path is None:
        if not stream:
            raise click.UsageError(
                "Missing argument 'INPUT': a file of requests, - for standard input; or --prompt TEXT."
            )
        input_path = "-"
    if sign_path is not None and receipts_path is None:
        raise click.UsageError("--sign signs receipts; add --receipts FILE.")
    if retry_failed and options["ordered"]:
        raise _common.NotStarted("--retry-failed appends lines that failed before, so it excludes --ordered")
    from xla_engine.batch.output_file import Mode
    from xla_engine.cli import _run

    settings = _run.Settings(
        defaults=defaults,
        tables=tables,
        answers=answers,
        watched=_run.Watched(**_common.take(options, _run.Watched)),
        **_common.take(options, _run.Settings),
    )
    if dry_run:
        _run.dry_run(input_path, settings, options)
    elif stream:
        _run.run_stream(input_path, settings, options)
    elif output_path is None:
        raise click.UsageError("Missing option '-o': the results file, - for standard output.")
    else:
        mode = Mode.RETRY if retry_failed else Mode.RESUME if resume else Mode.NEW
        files = _run.Files(
            source=input_path,
            output=output_path,
            errors=errors_path,
            mode=Mode.OVERWRITE if overwrite else mode,
            receipts=receipts_path,
            sign=sign_path,
        )
        _run.run_file(files, settings, options)


def _one_of(given: dict[str, bool]) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} exclude each other.")
