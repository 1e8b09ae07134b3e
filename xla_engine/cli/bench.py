"""`xla-engine bench`: the benchmark. It has its own option parser, so that it also runs without click."""

import sys

import click


@click.command(
    short_help="Measure against other engines.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def bench(words: tuple[str, ...]) -> None:
    """Measure this engine and its peers on the same weights, prompts and threads; `bench --help` tells the rest."""
    from xla_engine.tools.bench.__main__ import main

    sys.exit(main(words))
