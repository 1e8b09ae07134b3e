"""`--record`: the card as a section of the page of this kind of machine, under its command."""

import datetime
import re
import shlex
import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from xla_engine import __version__
from xla_engine.tools.bench.card import card
from xla_engine.tools.bench.peers import OURS

_ROOT = Path(__file__).parents[3]
_FILES = {"--cache", "--output", "--plot", "--record"}  # options that do not affect what is measured
_FORMS = {"table": "{}", "heading": "### {}", "list": "- {}"}


def write(record: dict[str, Any], words: Sequence[str], directory: Path) -> Path:
    """Write the card of `record` to DIRECTORY/MACHINE.md; returns the path.

    words: the command line behind `xla-engine bench`. A section of the same command is replaced; others stay.
    """
    processor, isa = record["processor"], record["engines"][OURS].get("isa", "none")
    kind = f"{processor['model']}, {isa}, {processor['cores']} cores"
    path = directory / (re.sub(r"[^a-z0-9]+", "_", kind.lower()) + ".md")
    text = path.read_text() if path.exists() else f"# {kind}\n\nWritten by `xla-engine bench --record`.\n"
    page, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    heading = f"## `{command(words)}`\n"
    when = (
        f"Measured on {datetime.date.today().isoformat()} at {_version()}; load before it {record['load']:g}."
    )
    section = f"{heading}\n{when}\n\n{_markdown(card(record))}\n"
    places = [place for place, each in enumerate(sections) if each.startswith(heading)]
    if places:
        sections[places[0]] = section
    else:
        sections.append(section)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(each.rstrip("\n") + "\n" for each in (page, *sections)))
    return path


def command(words: Sequence[str]) -> str:
    """The command that measures the same again, without options for files and with PYTHON for peers' interpreters."""
    kept: list[str] = []
    skipping = False
    for word in words:
        name, equals, _ = word.partition("=")
        if name.startswith("--"):
            skipping = name in _FILES
        if not skipping:
            is_peer = equals and (name == "--peer" or kept[-1:] == ["--peer"])
            kept.append(re.sub(r"(\w)=[^=]*$", r"\1=PYTHON", word) if is_peer else word)
    return shlex.join(["xla-engine", "bench", *kept])


def _markdown(text: str) -> str:
    """A card as Markdown: its tables as they are, headings for workloads, and lists of all other lines."""
    blocks = []
    for form, lines in groupby(filter(None, text.splitlines()), key=_form):
        blocks.append("\n".join(_FORMS[form].format(line.strip()) for line in lines))
    return "\n\n".join(blocks)


def _form(line: str) -> str:
    if line.startswith("|"):
        return "table"
    return "heading" if line.startswith("B = ") else "list"


def _version() -> str:
    """The commit of the checkout, or the version of an installed package."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout

    try:
        changed = ", with changes" if git("status", "--porcelain", ":!findings").strip() else ""
        return f"commit {git('rev-parse', '--short', 'HEAD').strip()}{changed}"
    except (OSError, subprocess.CalledProcessError):
        return f"version {__version__}"
