"""The site that mkdocs builds (extra `docs`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_a_reader_of_the_site_sees_no_notes_for_the_tests() -> None:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    spec = importlib.util.spec_from_file_location("mkdocs_findings", ROOT / ".ci" / "mkdocs_findings.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = (ROOT / "docs" / "index.md").read_text()
    shown = hook.on_page_markdown(text + '\n```sh title="takes a minute"\n```\n', page, None, None)
    assert "not run in the tests" in text and "not run in the tests" not in shown
    assert "```sh\npip install" in shown and 'title="takes a minute"' in shown
