"""The notebooks are those of their sources, have run without an error, and still do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


def code_cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_source_has_a_notebook() -> None:
    sources = {path.stem for path in EXAMPLES.glob("*.py") if "# %%" in path.read_text().splitlines()}
    assert sources == set(NOTEBOOKS) and sources


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_holds_the_code_of_its_source_and_its_outputs(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    cells = ["".join(cell["source"]) for cell in code_cells(name)]
    parts = [
        part.split("\n", 1)[1] for part in source.split("\n# %%")[1:] if not part.startswith(" [markdown]")
    ]
    assert [cell.strip() for cell in cells] == [part.strip() for part in parts], "run examples/build.py"
    outputs = [output for cell in code_cells(name) for output in cell["outputs"]]
    assert outputs and all(output["output_type"] != "error" for output in outputs)


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the extra `notebook`")
    pytest.importorskip("jupytext", reason="needs the extra `notebook`")
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    command = [sys.executable, tmp_path / "examples" / "build.py", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
