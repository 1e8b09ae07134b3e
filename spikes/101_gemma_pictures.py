# Frozen: runs at commit bdf76f7.
"""What does a picture of Gemma 3 cost: its tower's layers, and attention in which its positions see each other?

    nice -n 5 python -m spikes.101_gemma_pictures attention
    nice -n 5 python -m spikes.101_gemma_pictures layers

One process, turns interleaved. Shapes of gemma-3-4b-it, random weights in bfloat16. The tower's layer is that of one
tile of 4,096 patches, with the scores of one head, or of all heads, in memory at once. Attention is one prefill call
of 8 lanes of 32 positions, a picture, over keys of a window of 1,024: causal and reaching, in C++ and in plain JAX.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import AttentionForm
from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.graphs.vision import tower as graphs
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.runner.backends import choose_attention

CONFIG = VisionConfig(
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=27,
    num_attention_heads=16,
    image_size=896,
    patch_size=14,
    layer_norm_eps=1e-6,
    scale_factor=4,
    text_size=2560,
    averages=True,
)
HEADS, KV_HEADS, HEAD_DIM, LANES, WIDTH, WINDOW, LENGTH = 8, 4, 256, 8, 32, 1024, 2048


def interleaved(jobs, turns):
    """The least and the median of the wall and processor times of each job, in ms."""
    seen = {name: [] for name in jobs}
    for turn in range(turns + 1):
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


def layers():
    draw, jobs = np.random.default_rng(0), {}
    leaves = {
        name: jnp.asarray(
            0.02 * draw.standard_normal(shape, np.float32), jnp.bfloat16 if len(shape) > 1 else jnp.float32
        )
        for name, shape in graphs.layer_shapes(CONFIG).items()
    }
    x = draw.standard_normal((CONFIG.patches, CONFIG.hidden_size), np.float32)
    for name, together in (("one head at a time", 2048), ("all heads", 4096)):
        graphs._TOGETHER, inventory = together, Inventory()
        inventory.compile([graphs.vision_programs(CONFIG, jnp.dtype(jnp.bfloat16))[1]])
        (report,) = inventory
        print(f"layer, {name}: {report.temp_bytes / 2**20:.0f} MiB beside its arguments")
        jobs[f"layer, {name}"] = lambda own=inventory: own(
            graphs.LAYER, leaves, jnp.asarray(x)
        ).block_until_ready()
    interleaved(jobs, 2)


def attention():
    form = AttentionForm(scale=1 / 16, window=WINDOW, softcap=None, norm_eps=1e-6)
    draw, jobs = np.random.default_rng(1), {}
    start = np.arange(1024, 1024 + LANES * WIDTH, WIDTH, dtype=np.int32)
    slot, count = np.zeros(LANES, np.int32), np.full(LANES, WIDTH, np.int32)
    position = start[:, None] + np.arange(WIDTH, dtype=np.int32)
    qkv = draw.standard_normal((LANES * WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), np.float32)
    rope = draw.standard_normal((LANES, WIDTH, 2, HEAD_DIM // 2), np.float32)
    for backend in (choose_attention("auto"), XlaAttention()):
        shape = (1, KV_HEADS, LENGTH, HEAD_DIM)
        keys = draw.standard_normal(shape, np.float32).astype(jnp.bfloat16)
        for name, reach in (("causal", None), ("reaching", np.full_like(position, start[-1] + WIDTH))):

            def run(layer, qkv, reach=reach, backend=backend):
                call = AttentionCall(
                    form, AttentionWeights(), rope, LENGTH, jnp.dtype(jnp.bfloat16), reach=reach
                )
                return backend.attend_prefill(layer, qkv, call, Extents(slot, start, count))

            program = jax.jit(run, donate_argnums=0)
            held = [backend.from_host(keys.copy(), keys.copy())]

            def job(program=program, held=held):
                held[0], out = program(held[0], qkv)
                out.block_until_ready()

            jobs[f"attention, {backend.name}, {name}"] = job
    interleaved(jobs, 30)


if __name__ == "__main__":
    {"attention": attention, "layers": layers}[sys.argv[1]]()
