"""`xla-engine compare`: compare two result files."""

import sys

import click

from xla_engine.batch.compare import compare_files
from xla_engine.cli import _common


@click.command(short_help="Compare two result files.")
@click.argument("a", metavar="A.jsonl")
@click.argument("b", metavar="B.jsonl")
def compare(a: str, b: str) -> None:
    """Compare the results of two runs, matched by custom_id: tokens and log-probability bits.

    With `xla-engine run --fingerprint` lines hold hashes of both, and a fingerprint of model, options, jax and device.
    Without it token ids are compared if "logprobs": 0 put them into the lines, else the texts.

    \b
    Exit status: 0 the same, 1 a difference, 2 a file could not be read.
    """
    with _common.startup_errors():
        report = compare_files(a, b)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)
