"""`xla-engine audit`: check that the answers of a run are those of its requests."""

import json
import sys
from typing import Any

import click
from click.core import ParameterSource

from xla_engine.cli import _common, _help
from xla_engine.utils.progress import counting

_QUESTION = ("results", "receipts", "sample", "sample_seed", "public_key", "requests")  # of `audit_files`
_COLUMNS = ("prompt", "template", "id", "image", "sampling")  # of a table as INPUT


@click.command(cls=_help.Sectioned, short_help="Check the answers of a run against their receipts.")
@click.argument("results", metavar="RESULTS")
@click.option("--receipts", metavar="FILE", required=True, help="What `run --receipts` wrote.")
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Compute only a random share of the answers again, such as 0.05.  [default: all]",
)
@click.option(
    "--sample-seed",
    type=click.IntRange(0),
    metavar="N",
    help="Seed of the sample. Keep it secret until the answers are written.  [default: random]",
)
@click.option(
    "--public-key",
    metavar="KEY",
    help="Reject receipts that are not signed with this Ed25519 key: 64 hex digits, or a file in PEM or OpenSSH's "
    "format.",
)
@click.option(
    "--input",
    "requests",
    metavar="INPUT",
    help="Reject receipts whose requests are not the lines of this file, or the rows of this table.  [default: accept "
    "those of the receipts]",
)
@click.option("--prompt-column", "prompt", metavar="NAME", help="As in `run`, for a table as INPUT.")
@click.option("--prompt-template", "template", metavar="TEXT", help="As in `run`.")
@click.option("--id-column", "id", metavar="NAME", help="As in `run`.")
@click.option("--image-column", "image", metavar="NAME", help="As in `run`.")
@click.option("--sampling-columns", "sampling", metavar="NAME,...", help="As in `run`.")
@click.option("--shard", metavar="I/N", help="INPUT is that of all shards, and RESULTS of this one.")
@click.option("--json", "as_json", is_flag=True, help="A report as JSON.")
@_common.model_options
@_common.lora_options
@_common.pooling_options
@_common.verbose_option
@click.pass_context
def audit(
    context: click.Context,
    /,
    shard: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Check that each answer in RESULTS is the one that the model gives to its request.

    First the files: the digests in each receipt, the root over all of them, each answer once and none missing. Then
    each answer, or a random sample of them, is computed again: the claimed tokens are verified in steps of
    many, and the whole output line must be the same, token for token and bit for bit, at any temperature, with
    penalties, schemas, stop strings and log-probabilities.

    The requests and the options that change answers are in the receipts. Slots, threads, chunks, and other
    instruction sets change no bit. Give the model with --model, as to `run`.

    \b
    Exit status: 0 accepted, 1 an answer or the file is rejected, 2 cannot be checked here; the message says what would
    make it possible.

    \b
    Example:
      xla-engine run in.jsonl -o out.jsonl --receipts out.receipts.jsonl
      xla-engine audit out.jsonl --receipts out.receipts.jsonl
      xla-engine audit out.jsonl --receipts out.receipts.jsonl --input in.jsonl --sample 0.05 --json
    """
    question = {name: options.pop(name) for name in _QUESTION}
    columns = {name: options.pop(name) for name in _COLUMNS}
    if question["requests"] is None and (any(columns.values()) or shard is not None):
        raise click.UsageError("columns and --shard are those of --input; add --input INPUT.")
    columns["sampling"] = [name for name in (columns["sampling"] or "").split(",") if name]
    demanded = {name for name in options if _given(context, name)}

    def load(fields: dict[str, Any]) -> Any:
        return _common.load_one_engine({**options, **fields}, show=True)

    with _common.startup_errors(), counting("answers", sys.stderr) as count:
        from xla_engine.receipts.recompute import audit_files
        from xla_engine.receipts.requests import Asked

        if question["requests"] is not None:
            question["requests"] = Asked.of(question["requests"], columns, shard)
        report = audit_files(
            load=load,
            demanded=demanded,
            progress=None if count is None else lambda done: count(""),
            **question,
        )
    click.echo(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    sys.exit(report.exit_status)


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE
