# Frozen: runs at commit 590d0eb.
"""What XLA:GPU writes down while it compiles: what of a program is in CUDA graphs, and what its kernels take."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

KERNELS = ("write_kernel", "split_kernel", "combine_kernel", "prefill_kernel", "gated_kernel", "down_kernel")


def newest(directory: Path, ending: str) -> Path:
    return max(directory.glob(f"*{ending}"), key=lambda path: path.stat().st_mtime_ns)


def launches(directory: Path) -> list[object]:
    """Of the program compiled last: CUDA graphs that are launched one after the other, kernels outside of them, loops,
    conditionals, and how many of these two are outside, so that the host reads their predicate and waits.

    What is inside of a branch counts as outside if it is not in the graph of somebody around it.
    """
    graphs = outside = loops = conditionals = decided = 0
    graph: int | None = None  # indentation of the graph that we are in
    for line in newest(directory, "thunk_sequence_after_thunk_passes.txt").read_text().splitlines():
        found = re.match(r"( *)\d+: (k\w+)", line)
        if not found:
            continue
        indent, kind = len(found[1]), found[2]
        if graph is not None and indent <= graph:
            graph = None
        loops += kind == "kWhile"
        conditionals += kind == "kConditional"
        if graph is not None:
            continue
        if kind == "kCommandBuffer":
            graph, graphs = indent, graphs + 1
        elif kind in ("kWhile", "kConditional"):
            decided += 1
        else:
            outside += 1
    return [graphs, outside, loops, conditionals, decided]


def kernels(directory: Path) -> list[list[object]]:
    """Per Pallas kernel of the programs compiled: threads, registers, bytes spilled, 16-byte loads and other loads."""
    nvidia = importlib.util.find_spec("nvidia.cu13")
    assert nvidia is not None and nvidia.submodule_search_locations is not None
    ptxas = Path(next(iter(nvidia.submodule_search_locations)), "bin", "ptxas")
    table: dict[str, list[object]] = {}
    for path in sorted(directory.glob("*.ptx")):
        text = path.read_text()
        name = re.search(r"\.entry (\w+?)(?:_\d+)?\(", text)
        if name is None or name[1] not in KERNELS:
            continue
        command = [str(ptxas), "-v", "-arch=sm_90a", str(path), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spilled = (
            re.search(r"Used (\d+) registers", said),
            re.search(r"(\d+) bytes spill stores", said),
        )
        threads = re.search(r"\.reqntid (\d+)", text)
        assert registers and spilled and threads
        wide = len(re.findall(r"ld\.global\S*\.v4\.b32", text))
        wide += len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], *\[[^]]*\], *(?:0x10|16)", text))
        loads = len(re.findall(r"ld\.global|cp\.async\.c[ag]", text))
        table[name[1]] = [name[1], threads[1], registers[1], spilled[1], wide, loads - wide]
    return list(table.values())
