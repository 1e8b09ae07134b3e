# Frozen: runs at commit 590d0eb.
"""How long does a checkpoint of 1.2 billion parameters take from the files to the device, and how much host memory?

The checkpoint has Llama 3.2 1B's shape and random bfloat16 weights in two shards; it is written once, below --cache.
Ways take turns, each in a fresh process: the engine's (leaf by leaf out of a memory map,
`xla_engine.model_loader.weights`), the same from float32 files, and the plain one (all leaves as numpy arrays, then
`jax.device_put` of the list). The peak is what the process's resident memory rose by (VmHWM against VmRSS before);
the files are in the page cache.

    python -m spikes.021_loading
"""

# %%
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("leaf by leaf", "leaf by leaf, from float32", "all, then device_put")
FINITE = "leaf by leaf, values not looked at"


# %%
def write(directory: Path, dtype: Any) -> None:
    """Tensors by name in two shards with an index, a shard at a time."""
    import numpy as np
    from safetensors.numpy import save_file

    from xla_engine.bench.models import LLAMA_3_2_1B, write_config
    from xla_engine.model_loader.families import LLAMA, tensor_sources

    directory.mkdir(parents=True)
    sources = [s for stacked in tensor_sources(LLAMA_3_2_1B, LLAMA).values() for s in stacked]
    generator = np.random.default_rng(0)
    block = (generator.standard_normal(1 << 24, dtype=np.float32) * np.float32(0.02)).astype(dtype)
    weight_map = {}
    for shard in range(2):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        part = {source.name: np.resize(block, source.shape) for source in sources[shard::2]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_config(LLAMA_3_2_1B, directory)


def memory(field: str) -> int:
    """A figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def child(way: str, directory: Path) -> None:
    """Load once and print seconds and bytes."""
    import jax
    import numpy as np

    from xla_engine.graphs.model.decoder import ModelSpec
    from xla_engine.model_loader import weights as reader
    from xla_engine.model_loader.checkpoint import load_checkpoint

    jax.block_until_ready(jax.device_put(np.zeros(8)))
    if way == FINITE:
        reader.all_finite = lambda array: True
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, began = memory("VmRSS"), time.perf_counter()
    checkpoint = load_checkpoint(directory, dtype="bfloat16")
    opened = time.perf_counter()
    spec = ModelSpec(checkpoint.config, np.dtype("bfloat16"))
    if way == WAYS[-1]:
        held = read_all(directory, spec)  # to the end, as a checkpoint of numpy arrays would be
        leaves = jax.device_put(spec.flatten(held))
    else:
        leaves = [jax.block_until_ready(jax.device_put(checkpoint.weights[name])) for name in spec.names]
    jax.block_until_ready(leaves)
    ended = time.perf_counter()
    kept, largest = sum(leaf.nbytes for leaf in leaves), max(leaf.nbytes for leaf in leaves)
    figures = {"open": opened - began, "load": ended - opened, "peak": memory("VmHWM") - before}
    print(json.dumps({**figures, "kept": kept, "largest": largest, "after": memory("VmRSS") - before}))


def read_all(directory: Path, spec: Any) -> dict[str, Any]:
    """Every leaf as numpy makes it: tensors copied out of safetensors, and stacked."""
    import numpy as np
    from safetensors import safe_open

    from xla_engine.model_loader.families import LLAMA, tensor_sources

    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(directory / name, framework="np") for name in set(weight_map.values())}
    leaves = {}
    for name, sources in tensor_sources(spec.config, LLAMA).items():
        parts = [files[weight_map[source.name]].get_tensor(source.name) for source in sources]
        dtype = spec.dtype if parts[0].ndim > 1 else np.float32
        leaves[name] = np.concatenate([part.astype(dtype, copy=False) for part in parts])
    return leaves


# %%
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "xla-engine-021")
    parser.add_argument("--child", choices=(*WAYS, FINITE), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.directory)
        return
    import ml_dtypes
    import numpy as np

    from spikes.support.timing import describe_machine, markdown_table

    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        if not (arguments.cache / name).exists():
            write(arguments.cache / name, dtype)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in (*WAYS, FINITE)}
    for _ in range(arguments.rounds):
        for way, runs in found.items():
            directory = arguments.cache / ("float32" if way.endswith("float32") else "bfloat16")
            command = [
                sys.executable,
                "-m",
                "spikes.021_loading",
                "--child",
                way,
                "--directory",
                str(directory),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    print(describe_machine())
    kept, largest = (found[WAYS[0]][0][name] for name in ("kept", "largest"))
    print(f"\nLeaves {kept / 1e9:.2f} GB, the largest {largest / 1e9:.3f} GB.\n")
    rows = []
    for way, runs in found.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows.append(
            [
                way,
                f"{middle['open']:.2f}",
                f"{middle['load']:.2f} ({min(run['load'] for run in runs):.2f})",
                f"{middle['kept'] / middle['load'] / 1e9:.1f}",
                f"{middle['peak'] / 1e9:.2f}",
                f"{(middle['peak'] - middle['kept']) / middle['largest']:.2f}",
            ]
        )
    columns = ["way", "open s", "load s (least)", "GB/s", "peak GB", "beyond the leaves, in largest tensors"]
    print(markdown_table(columns, rows))
    over = max((run["peak"] - run["kept"]) / run["largest"] for way in WAYS[:2] for run in found[way])
    print(json.dumps({"spike": "021", "beyond": over, "goal_met": over < 1.3}))


if __name__ == "__main__":
    main()
