"""`xla-engine merge`: merge the outputs of all shards into one file."""

from pathlib import Path

import click

from xla_engine.batch.shards import merge as merge_shards
from xla_engine.cli import _common


@click.command(short_help="Merge the outputs of all shards into one file.")
@click.argument("shards", metavar="SHARD...", nargs=-1, required=True)
@click.option("-o", "--output", "output_path", metavar="OUTPUT", required=True, help="The merged file.")
@click.option(
    "--receipts",
    "receipts_paths",
    metavar="FILE",
    multiple=True,
    help="The receipts of a shard; repeatable, once for each shard.",
)
@click.option(
    "--receipts-output", "receipts_output", metavar="FILE", help="The merged receipts; needs --receipts."
)
@click.option("--sign", "sign_path", metavar="KEY", help="Sign the merged receipts, as in `run`.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@click.option(
    "--any-engine", is_flag=True, help="Merge even if the engines had different devices or options."
)
def merge(
    shards: tuple[str, ...],
    output_path: str,
    receipts_paths: tuple[str, ...],
    receipts_output: str | None,
    sign_path: str | None,
    overwrite: bool,
    any_engine: bool,
) -> None:
    """Merge the outputs of `xla-engine run --shard 0/N` to `N-1/N` in the order of the input.

    Each SHARD is an output with its .shard.json next to it. If a shard is missing, duplicate, unfinished,
    or of another input, the command fails and writes nothing.

    The receipts of the shards become one file in the same order, whose root is signed anew; `audit` checks it.

    OUTPUT is byte for byte what one run over the whole input with --ordered writes, if all had the same --created.

    \b
    Example:
      for i in 0 1 2; do xla-engine run in.jsonl -o part-$i.jsonl --shard $i/3 --created 1767225600; done
      xla-engine merge part-*.jsonl -o out.jsonl
    """
    if bool(receipts_paths) != (receipts_output is not None):
        raise click.UsageError("--receipts, for each shard, and --receipts-output go together.")
    if receipts_paths and len(receipts_paths) != len(shards):
        raise click.UsageError(f"{len(receipts_paths)} files of --receipts for {len(shards)} shards.")
    with _common.startup_errors():
        from xla_engine.batch.receipts import merge_receipts
        from xla_engine.batch.shards import is_empty
        from xla_engine.batch.signatures import Signer

        signer = None if sign_path is None else Signer.read(sign_path)
        done = merge_shards(
            [Path(path) for path in shards], Path(output_path), overwrite=overwrite, any_engine=any_engine
        )
        if receipts_output is not None:
            pairs = zip(shards, map(Path, receipts_paths), strict=True)
            paths = [path for shard, path in pairs if path.exists() or not is_empty(shard)]
            merge_receipts(paths, Path(receipts_output), signer=signer, overwrite=overwrite)
    click.echo(f"{done.lines} lines of {done.shards} shards, {done.errors} of them errors", err=True)
