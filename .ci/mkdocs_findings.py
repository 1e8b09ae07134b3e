"""mkdocs hook: findings and the index of spikes are pages of the site too; links work there as in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add findings/ and spikes/README.md to the pages of docs/."""
    found = [path for path in sorted((ROOT / "findings").rglob("*.*")) if path.suffix in (".md", ".png")]
    for path in [*found, ROOT / "spikes" / "README.md"]:
        name = path.relative_to(ROOT).as_posix()
        level = InclusionLevel.UNDEFINED if name == "findings/README.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Paths on the site: docs/ is its root, findings/ and spikes/ are folders of it."""
    if page.file.src_uri.startswith(("findings/", "spikes/")):
        return markdown.replace("../docs/", "../")
    return markdown.replace("](../findings/", "](findings/").replace("](../spikes/", "](spikes/")
