"""`xla-engine lm-eval`: lm-evaluation-harness with this engine as its model."""

import sys

import click

from xla_engine.utils.extras import install

_CHOOSES_MODEL = ("--model", "-M")


@click.command(
    short_help="Evaluate with lm-evaluation-harness.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def lm_eval(context: click.Context, words: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness (extra `lm-eval`) on this engine; all arguments are the harness's own.

    \b
    xla-engine lm-eval run --tasks my_task --include_path tasks --model_args pretrained=./SmolLM2-135M
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        from xla_engine import lm_eval as ours
    except ImportError as error:
        missing = f"lm-evaluation-harness is missing ({error}): {install('lm-eval')}"
        if set(words) <= {"-h", "--help"}:  # the harness's own help follows
            click.echo(f"{context.get_help()}\n\n{missing}")
            return
        raise click.ClickException(missing) from error
    given = list(words)
    runs = bool(given) and given[0] not in ("ls", "validate", "-h", "--help")
    if runs and not any(word.partition("=")[0] in _CHOOSES_MODEL for word in given):
        given += ["--model", ours.NAME]
    sys.argv = ["xla-engine lm-eval", *given]
    cli_evaluate()
