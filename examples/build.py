"""Run the notebooks and keep their outputs: `python examples/build.py [NAME ...]`. Needs the extra `notebook`.

The sources are the `.py` files of this folder, in which `# %%` begins a cell; the `.ipynb` files are made from them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NOTEBOOKS = ("first_minute", "first_batch", "slots", "equivalence", "what_if", "grpo", "captions", "audit")


def executed(name: str) -> Any:
    """The notebook of a source, run from its first cell to its last. Raises where a cell does."""
    import jupytext
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same at every build
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in the file system: a TCP port that was free when chosen may be taken when the kernel binds it.
        sockets = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        resources = {"metadata": {"path": str(FOLDER)}}
        NotebookClient(notebook, timeout=240, resources=resources, config=sockets).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", {}):
                output.data.pop("text/plain", None)  # the same, longer
    return notebook


def main() -> None:
    import nbformat

    for name in sys.argv[1:] or NOTEBOOKS:
        nbformat.write(executed(name), FOLDER / f"{name}.ipynb")
        print(f"examples/{name}.ipynb")


if __name__ == "__main__":
    main()
