"""mkdocs hook: the findings are pages of the site too, so that links to them work there as in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add findings/ beside the pages of docs/."""
    for path in sorted((ROOT / "findings").iterdir()):
        name = f"findings/{path.name}"
        level = InclusionLevel.UNDEFINED if path.name == "README.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of docs/ to ../findings lead to the site's own pages; those of findings/ to ../docs likewise."""
    if page.file.src_uri.startswith("findings/"):
        return markdown.replace("](../docs/", "](../").replace(
            "](../spikes/README.md)", "](../CONTRIBUTING.md)"
        )
    return markdown.replace("](../findings/", "](findings/")
