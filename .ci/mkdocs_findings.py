"""mkdocs hook: findings and the index of spikes are pages of the site too, and the command line's help is one; links
work there as in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add findings/ and spikes/README.md to the pages of docs/."""
    found = [path for path in sorted((ROOT / "findings").rglob("*.*")) if path.suffix in (".md", ".png")]
    for path in [*found, ROOT / "spikes" / "README.md"]:
        name = path.relative_to(ROOT).as_posix()
        level = InclusionLevel.UNDEFINED if name == "findings/README.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=level))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def command_line() -> str:
    """The page of every command's help, as `--help` prints it."""
    from xla_engine.cli import main

    parts = ["# Command line", "Each command's `--help`, with every option."]
    with click.Context(main, info_name="xla-engine", max_content_width=110, terminal_width=110) as context:
        for name in main.list_commands(context):
            command = main.get_command(context, name)
            assert command is not None
            text = command.get_help(click.Context(command, context, name, terminal_width=110))
            parts.append(f"## xla-engine {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Paths on the site: docs/ is its root, findings/ and spikes/ are folders of it. Titles of code blocks that say
    what the tests do with them are for developers, and a site would show them."""
    markdown = re.sub(r'(?m)^( *```\w+) title="(?:not run in the tests|run by)[^"]*"', r"\1", markdown)
    if page.file.src_uri.startswith(("findings/", "spikes/")):
        return markdown.replace("../docs/", "../")
    return markdown.replace("](../findings/", "](findings/").replace("](../spikes/", "](spikes/")
