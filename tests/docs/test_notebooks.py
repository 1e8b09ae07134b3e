"""The notebooks have the code of their sources, and show what it prints, to the byte except for times."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.instruction_sets import NAMES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


TIMED = {  # cells that print times, or what follows from them: these are compared but for numbers
    "first_minute": ("subprocess.run", "time.monotonic() - began"),
    "equivalence": ("verify(",),
    "what_if": ("compare", "SchedulerConfig"),
    "grpo": ("get_ipython",),
}


def code_cells(name: str, folder: Path = EXAMPLES) -> list[dict[str, Any]]:
    notebook = json.loads((folder / f"{name}.ipynb").read_text())
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


def shown(name: str, cell: dict[str, Any]) -> str:
    """What a cell prints and shows as text, without progress bars."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output.get("name") == "stderr" or "application/vnd.jupyter.widget-view+json" in data:
            continue
        parts += [
            "".join(output.get("text", "")),
            *("".join(data[kind]) for kind in sorted(data) if "text" in kind),
        ]
    text = "".join(parts).strip()
    if any(words in "".join(cell["source"]) for words in TIMED.get(name, ())):
        text = re.sub(r"compared[ ,].*", "compared", text)
        text = re.sub(r" +", " ", re.sub(r"[+-]?[\d.,]*\d", "0", text))
    return text


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the extra `notebook`")
    pytest.importorskip("jupytext", reason="needs the extra `notebook`")
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    command = [sys.executable, tmp_path / "examples" / "build.py", name]
    # Their outputs are those of vector instructions: tiles add in another order, which changes what a model writes.
    isa = next((name for name in NAMES if name != "amx"), "none")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_ENGINE_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    for old, new in zip(code_cells(name), code_cells(name, tmp_path / "examples"), strict=True):
        assert shown(name, new) == shown(name, old), f"run examples/build.py {name}: {''.join(old['source'])}"
