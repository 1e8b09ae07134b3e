"""`xla-engine cache`: list, check and delete the prefixes that `--prefix-cache-dir` keeps."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from xla_engine.cli import _common, _help

_directory = click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR"
)


@click.group(short_help="List, check and delete prefixes that are kept in files.")
def cache() -> None:
    """List, check and delete the KV blocks in a directory of --prefix-cache-dir."""


@cache.command("list", short_help="List the blocks in a directory.")
@_directory
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each kind of blocks.")
def list_(directory: Path, as_json: bool) -> None:
    """Show the kinds of blocks in DIR: model, options and machine, number of blocks, and bytes.

    Blocks of one kind are used by engines of that model, with those options, code and machine.
    """
    from xla_engine.runner.prefix_files.files import ABOUT, entries, kinds
    from xla_engine.utils.tables import aligned

    sizes: dict[Path, list[int]] = {folder: [] for folder in kinds(directory)}
    for path, size, _ in entries(directory):
        sizes[path.parent.parent].append(size)
    rows = []
    for folder, found in sizes.items():
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if as_json:
            click.echo(json.dumps({"kind": folder.name, "blocks": len(found), "bytes": sum(found), **about}))
            continue
        options = about["options"]
        rows.append(
            (
                folder.name[:12],
                about["model"][:12],
                options["quantization"] or options["dtype"],
                about["isa"],
                f"{len(found)} of {options['block_size']} tokens",
                f"{sum(found) / 2**20:.1f} MiB",
            )
        )
    if not as_json:
        header = ("kind", "model", "weights", "isa", "blocks", "size")
        click.echo(
            "\n".join(aligned([header, *rows], right=(5,))) if rows else f"{directory} holds no blocks"
        )


@cache.command(
    cls=_help.Sectioned,
    short_help="Compute stored blocks again and compare the bytes.",
    context_settings={"show_default": False},
)
@_directory
@click.option(
    "--sample", type=click.IntRange(1), default=100, show_default=True, help="Number of blocks to check."
)
@click.option("--check-seed", type=int, default=0, help="Seed of the random choice of blocks.")
@_common.model_options
def verify(directory: Path, sample: int, check_seed: int, model: str | None, **options: Any) -> None:
    """Compute blocks of DIR again, alone, with MODEL and these options, and compare them byte for byte.

    \b
    Exit status: 0 all are the same, 1 some differ or are damaged, 2 nothing to compare.
    """
    with _common.startup_errors():
        from xla_engine.config import EngineConfig
        from xla_engine.engine.batch_engine import XlaBatchEngine
        from xla_engine.equivalence.stored_blocks import check_stored

        fields = _common.config_fields(options) | {"prefix_cache_dir": str(directory)}
        if not fields.get("num_blocks") and not fields.get("kv_cache_memory_bytes"):
            fields["kv_cache_memory_bytes"] = "auto"
        check = check_stored(
            directory,
            lambda config: XlaBatchEngine.from_pretrained(model, config),
            EngineConfig(**fields),
            sample=sample,
            seed=check_seed,
        )
    click.echo(f"{check.same} blocks are the same, {len(check.different)} differ, {check.left_out} left out")
    for name in check.different:
        click.echo(f"differs: {name}")
    for line in check.damaged:
        click.echo(f"damaged: {line}")
    if not check.ok:
        sys.exit(_common.SOME_FAILED)


@cache.command(short_help="Delete the blocks in a directory.")
@_directory
@click.option("--kind", metavar="NAME", help="Only this kind, as `list` names it.")
def clear(directory: Path, kind: str | None) -> None:
    """Delete the blocks in DIR. Engines that use it compute them again."""
    from xla_engine.runner.prefix_files.files import delete_all, kinds

    chosen = [folder for folder in kinds(directory) if kind is None or folder.name.startswith(kind)]
    if kind is not None and len(chosen) != 1:
        raise click.BadParameter(
            f"{len(chosen)} kinds of blocks begin with {kind!r}; `xla-engine cache list {directory}` names them",
            param_hint="--kind",
        )
    click.echo(f"deleted {delete_all(directory, chosen)} blocks")
