# Frozen: runs at commit 18445cb.
"""Would the C++ products make the vision tower faster, and what is the time of a tile made of?

    nice -n 15 python -m spikes.094_tower

One process, turns interleaved: a tile of SmolVLM-256M's shape in bfloat16 through the tower as it is, and through the
same programs with `NativeProducts` and weights packed at load; then each product of a layer, and its other parts,
alone. Processor time counts all threads of the process: other programs change it less than they change the clock.
"""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.inventory import compiler_options
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import rows_first
from xla_engine.graphs.vision import tower as graphs
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.model_loader.weights import DTYPES
from xla_engine.runner.backends import serving_isa
from xla_engine.runner.vision_tower import VisionTower

D, F, ROWS, LAYERS, HEADS, TURNS = 768, 3072, 1024, 12, 12, 7
CONFIG = VisionConfig(
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    image_size=512,
    patch_size=16,
    layer_norm_eps=1e-6,
    scale_factor=4,
    text_size=576,
)
DTYPE = DTYPES["bfloat16"]


def interleaved(jobs):
    """The least and the median of the wall and processor times of each job, in ms."""
    seen = {name: [] for name in jobs}
    for turn in range(TURNS + 1):
        for name, job in jobs.items():
            began, used = time.perf_counter(), time.process_time()
            job()
            if turn:  # the first warms up
                seen[name].append((time.perf_counter() - began, time.process_time() - used))
    for name, times in seen.items():
        wall, used = 1e3 * np.array(times).T
        print(
            f"{name}: wall {wall.min():.1f} {np.median(wall):.1f}, processor {used.min():.1f} {np.median(used):.1f}",
            flush=True,
        )


def by_thread():
    """The processor time that each thread of this process has used, in seconds."""
    tick = os.sysconf("SC_CLK_TCK")
    stats = {task.name: (task / "stat").read_text() for task in Path("/proc/self/task").iterdir()}
    return {
        name: sum(map(int, stat.rpartition(")")[2].split()[11:13])) / tick for name, stat in stats.items()
    }


def shares(call):
    """How the processor time of a call is shared among threads."""
    before = by_thread()
    for _ in range(3):
        call()
    used = sorted((seconds - before.get(name, 0.0) for name, seconds in by_thread().items()), reverse=True)
    return " ".join(f"{seconds / sum(used):.2f}" for seconds in used[:3])


def towers(products):
    draw = np.random.default_rng(0)
    weights = {
        name: (0.02 * draw.standard_normal(shape, dtype=np.float32)).astype(
            DTYPE if len(shape) > 1 else np.float32
        )
        for name, shape in graphs.vision_shapes(CONFIG).items()
    }
    table = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))
    tile = draw.integers(0, 256, (512, 512, 3), dtype=np.uint8)
    ours = VisionTower(CONFIG, "bfloat16", weights, table)
    packed = {
        name: products.pack(weight) if weight.ndim > 1 and name != "positions" else weight
        for name, weight in weights.items()
    }
    graphs.rows_first = products.linear  # the programs' products, while they are traced
    native = VisionTower(CONFIG, "bfloat16", packed, table)
    graphs.rows_first = rows_first
    one, other = ours(tile), native(tile)
    print(f"features differ by {np.abs(one - other).max() / np.abs(one).max():.1e} of the largest")
    interleaved({"tile, XLA": lambda: ours(tile), "tile, C++": lambda: native(tile)})
    print("shares of the three busiest threads, XLA:", shares(lambda: ours(tile)))
    print("shares of the three busiest threads, C++:", shares(lambda: native(tile)))
    text = ours._inventory.text(graphs.LAYER)
    print(f"a layer has {text.count(' dot(')} products in {text.count('kind=kCustom')} fusions of a library")
    ours.close(), native.close()


def parts(products):
    draw = np.random.default_rng(1)
    jobs = {}

    def job(name, function, *arguments):
        call = jax.jit(function).lower(*arguments).compile(compiler_options=compiler_options())
        jobs[name] = lambda: call(*arguments).block_until_ready()

    for name, (features, width) in {
        "qkv": (3 * D, D),
        "output": (D, D),
        "up": (F, D),
        "down": (D, F),
    }.items():
        weight = draw.standard_normal((features, width), dtype=np.float32).astype(DTYPE)
        x = jnp.asarray(draw.standard_normal((ROWS, width), dtype=np.float32))
        job(f"{name}, XLA", rows_first, jnp.asarray(weight), x)
        job(f"{name}, C++", products.linear, jnp.asarray(products.pack(weight)), x)

    def attention(qkv):
        q, k, v = qkv.reshape(ROWS, 3, HEADS, -1).transpose(1, 2, 0, 3)
        scores = graphs.batched(q, k, 2) / 8
        seen = graphs.batched(jax.nn.softmax(scores, axis=-1).astype(qkv.dtype), v, 1)
        return seen.transpose(1, 0, 2).reshape(ROWS, D)

    def norm(x):
        return graphs.layer_norm(CONFIG, {"n": x[0], "n_bias": x[1]}, "n", x)

    wide = jnp.asarray(draw.standard_normal((ROWS, F), dtype=np.float32))
    job("attention", attention, wide[:, : 3 * D].astype(DTYPE))
    job("GELU", lambda x: jax.nn.gelu(x, approximate=True), wide)
    job("LayerNorm", norm, wide[:, :D])
    interleaved(jobs)


if __name__ == "__main__":
    isa = serving_isa("auto", frozenset({"linear_bf16"}))
    print(isa, jax.__version__)
    towers(NativeProducts(isa))
    parts(NativeProducts(isa))
