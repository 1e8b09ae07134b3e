"""`xla-engine merge`: merge the outputs of all shards into one file."""

from pathlib import Path

import click

from xla_engine.batch.shards import merge as merge_shards
from xla_engine.cli import _common


@click.command(short_help="Merge the outputs of all shards into one file.")
@click.argument("shards", metavar="SHARD...", nargs=-1, required=True)
@click.option("-o", "--output", "output_path", metavar="OUTPUT", required=True, help="The merged file.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@click.option(
    "--any-engine", is_flag=True, help="Merge even if the engines had different devices or options."
)
def merge(shards: tuple[str, ...], output_path: str, overwrite: bool, any_engine: bool) -> None:
    """Merge the outputs of `xla-engine run --shard 0/N` to `N-1/N` in the order of the input.

    Each SHARD is an output with its .shard.json next to it. If a shard is missing, duplicate, unfinished,
    or of another input, the command fails and writes nothing.

    OUTPUT is byte for byte what one run over the whole input with --ordered writes, if all had the same --created.

    \b
    Example:
      for i in 0 1 2; do xla-engine run in.jsonl -o part-$i.jsonl --shard $i/3 --created 1767225600; done
      xla-engine merge part-*.jsonl -o out.jsonl
    """
    with _common.startup_errors():
        done = merge_shards(
            [Path(path) for path in shards], Path(output_path), overwrite=overwrite, any_engine=any_engine
        )
    click.echo(f"{done.lines} lines of {done.shards} shards, {done.errors} of them errors", err=True)
