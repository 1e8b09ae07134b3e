"""`xla-engine perplexity`: measure a model's perplexity on a text, and the effect of a different precision."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from xla_engine.cli import _common, _help
from xla_engine.utils.progress import counting


@click.command(cls=_help.Sectioned, short_help="Measure the perplexity of a text, and compare precisions.")
@click.argument("text_path", metavar="TEXT_FILE")
@click.option("-c", "--ctx-size", type=click.IntRange(4), default=512, help="Tokens of a window.")
@click.option("--chunks", type=click.IntRange(1), help="Maximum number of windows.  [default: all]")
@click.option("--save-logits", metavar="FILE", help="Write the logits, for --against or llama-perplexity.")
@click.option(
    "--against",
    metavar="FILE",
    help="Compare with the logits that --save-logits, or llama-perplexity --kl-divergence-base, wrote.",
)
@click.option("--against-model", metavar="MODEL", help="Compare with this model.  [default: --model]")
@click.option(
    "--against-dtype",
    type=_help.choice_of("dtype"),
    help="Compare with this dtype.  [default: --dtype]",
)
@click.option(
    "--against-quantization",
    type=click.Choice(["none", "int8", "packed", "packed-int8", "gguf", "gguf-int8"]),
    help="Compare with these weights.  [default: none]",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@_common.model_options
@_common.verbose_option
def perplexity(
    text_path: str,
    ctx_size: int,
    chunks: int | None,
    save_logits: str | None,
    against: str | None,
    against_model: str | None,
    against_dtype: str | None,
    against_quantization: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the perplexity of a UTF-8 text with a model, and compare two precisions of it, as llama-perplexity does.

    The text is cut into windows of --ctx-size tokens, and the tokens in the second half of each are scored. Digits do
    not depend on --max-num-seqs or the prefix cache. With one of --against-model, --against-dtype and
    --against-quantization, both models run one after the other. docs/evaluation.md explains the figures.

    \b
    Exit status: 0 measured, 2 could not start, or the text, the logits or the file are not usable.

    \b
    Example:
      xla-engine perplexity README.md --model ./SmolLM2-135M
      xla-engine perplexity README.md --quantization int8 --against-dtype float32
      xla-engine perplexity README.md --dtype float32 --save-logits f32.logits
      xla-engine perplexity README.md --against f32.logits --json
    """
    base = {"model": against_model, "dtype": against_dtype, "quantization": against_quantization}
    compares = any(each is not None for each in base.values())
    if compares and against is not None:
        raise _common.NotStarted(
            "--against names saved logits; leave out --against-model, -dtype, -quantization"
        )
    if options["max_model_len"] in (None, ctx_size):  # one more position, for the token after a window
        options["max_model_len"] = ctx_size + 1
    with contextlib.ExitStack() as stack, _common.startup_errors():
        text = _read(text_path)
        if save_logits is not None and not Path(save_logits).parent.is_dir():
            # reported before the work begins
            raise _common.NotStarted(f"{save_logits}: no such folder")
        if compares:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xla-engine-"))
            against = str(Path(folder, "base.logits"))
            other = {name: each or options[name] for name, each in base.items()}
            other["quantization"] = None if against_quantization in (None, "none") else against_quantization
            _measure(text, options | other, ctx_size=ctx_size, chunks=chunks, save_logits=against)
        found = _measure(
            text, options, ctx_size=ctx_size, chunks=chunks, save_logits=save_logits, against=against
        )
    click.echo(json.dumps(found.to_json(), allow_nan=False) if as_json else "\n".join(found.lines()))


def _measure(text: str, options: dict[str, Any], **measured: Any) -> Any:
    """The report of one engine, which is closed at the end, so that only one is in memory at a time."""
    from xla_engine.perplexity import measure

    with _common.load_one_engine(options, show=True) as engine, counting("windows", sys.stderr) as progress:
        return measure(engine, text, progress=progress, **measured)


def _read(path: str) -> str:
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _common.NotStarted(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
