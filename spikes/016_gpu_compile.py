# Frozen: runs at commit 84bfb74.
"""What does XLA make of the engine's programs for an H200, seen from a machine without one?

Compiles for a described device: kernels per layer, whether the cache stays in place, scratch memory, what is in a CUDA
graph, what the Pallas kernels take. Needs the CUDA plugin (`pip install -e '.[cuda13]'`) and no GPU; nothing is tuned
and nothing runs, so there are no times.

    python -m spikes.016_gpu_compile            # programs
    python -m spikes.016_gpu_compile kernels    # registers and loads of the Pallas kernels
"""

# %%
from __future__ import annotations

import os
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["DUMPED"] = tempfile.mkdtemp(prefix="xla-dump-")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_gpu_autotune_level=0 --xla_dump_to={os.environ['DUMPED']}"
    + (" --xla_gpu_dump_llvmir=true --xla_dump_emitter_re=.*" if "kernels" in sys.argv else "")
)

import dataclasses
import functools
import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from spikes.support.gpu_dumps import kernels as kernel_table
from spikes.support.gpu_dumps import launches
from spikes.support.gpu_scale import LLAMA_3_1_8B
from spikes.support.timing import SMOLLM2_135M, markdown_table
from xla_engine.graphs.attention.backend import Attention, AttentionCall, AttentionWeights
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import DeltaForm, ModelConfig, RoutedExperts
from xla_engine.graphs.experts.gpu import gpu_experts
from xla_engine.graphs.experts.routing import Experts, Route
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops import fixed_order_sums as sums
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.graphs.row_state.rows import Pool, make_rows, make_tables
from xla_engine.graphs.steps import decode
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk

warnings.simplefilter("ignore", DeprecationWarning)
DUMPED = Path(os.environ["DUMPED"])
ROWS, POSITIONS, LANES, TOKENS = 64, 2048, 2, 512

# The device as its driver describes it; XLA's own tools call this a target configuration.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  driver_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 13 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
topology = topologies.get_topology_desc("H200", "cuda", target_config=H200, topology="1x1x1")
device = jax.sharding.SingleDeviceSharding(topology.devices[0])
described = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)


# %%
def abstract(make: Callable[[], Any]) -> Any:
    """The shapes of what `make` returns, on the described device."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), jax.eval_shape(make)
    )


def compiled(
    layers: int,
    attention: Attention,
    *,
    prefill: bool = False,
    page: int | None = None,
    model: ModelConfig = LLAMA_3_1_8B,
    processed_logprobs: bool = False,
) -> tuple[Any, int]:
    """A program of `layers` layers, and the bytes of its cache; `page`: positions of a page, None for slots."""
    config = dataclasses.replace(model, num_hidden_layers=layers)
    spec = ModelSpec(config, jnp.dtype(jnp.bfloat16), attention)
    length = page or POSITIONS
    pool = ROWS * POSITIONS // length
    borrowed = None if page is None else Pool(pool, page, POSITIONS // page)
    cache = abstract(lambda: make_cache(spec, pool, length))
    state = (
        abstract(lambda: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in spec.leaves]),
        abstract(lambda: jnp.zeros((1, POSITIONS, 2, config.head_dim // 2))),
        cache,
        abstract(lambda: make_rows(ROWS, 4, POSITIONS, borrowed)),
    )
    tables = abstract(
        lambda: jax.tree.map(jnp.asarray, make_tables(ROWS, config.vocab_size, has_blocks=page is not None))
    )
    if prefill:
        one = jnp.zeros(LANES, jnp.int32)
        work = abstract(
            lambda: Lanes(
                tokens=jnp.zeros((LANES, TOKENS), jnp.int32),
                slot=one,
                start=one,
                count=one,
                is_last=one > 0,
                prompt_length=one,
                max_tokens=one,
                min_tokens=one,
                stop_ids=jnp.zeros((LANES, 4), jnp.int32),
                sampling=make_rows(LANES, 4, 1).sampling,
            )
        )
        function: Callable[..., Any] = functools.partial(
            prefill_chunk, spec, POSITIONS, 8, processed_logprobs=processed_logprobs
        )
    else:
        work = abstract(lambda: jnp.zeros(ROWS, bool))
        function = functools.partial(decode_step, spec, POSITIONS, processed_logprobs=processed_logprobs)
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(function, donate_argnums=(2, 3)).lower(*state, work, tables).compile()
    return program, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def kernels(program: Any) -> int:
    """Fusions, products and custom calls of the entry computation: what is launched when no condition holds."""
    text = program.as_text()
    return len(re.findall(r" (?:fusion|custom-call|copy|sort)\(", text[text.index("\nENTRY") :]))


def line(name: str, attention: Attention, *, prefill: bool = False, page: int | None = None) -> list[object]:
    (one, _), (two, cache) = (compiled(layers, attention, prefill=prefill, page=page) for layers in (1, 2))
    memory = two.memory_analysis()
    return [
        name,
        kernels(two) - kernels(one),
        2 * kernels(one) - kernels(two),
        f"{memory.alias_size_in_bytes / cache:.0%}",
        f"{memory.temp_size_in_bytes / 1e6:.0f}",
    ]


QWEN3_30B_A3B = dataclasses.replace(
    LLAMA_3_1_8B,
    vocab_size=151936,
    hidden_size=2048,
    num_key_value_heads=4,
    qk_norm="head",
    experts=RoutedExperts(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
)


LINEAR = dataclasses.replace(
    LLAMA_3_1_8B,
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=1,
    layer_types=("linear_attention",),
    delta=DeltaForm(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6),
)


# %%
def programs() -> None:
    """Kernels per layer and memory; what is in CUDA graphs."""
    table = [line("decode, gpu", GpuAttention())]
    with mock.patch.object(sums, "_reduce_last", sums._in_order_last):
        table.append(line("decode, gpu, sums in a written-out order", GpuAttention()))
    with mock.patch.object(decode, "WEIGHT_LEFT", ROWS_LEFT):
        table.append(line("decode, gpu, rows as left operand", GpuAttention()))
    table.append(line("decode, xla", XlaAttention()))
    table.append(line(f"prefill of {LANES} x {TOKENS}, gpu", GpuAttention(), prefill=True))
    table.append(line("decode, gpu, pages of 64", GpuAttention(), page=64))
    table.append(
        line(f"prefill of {LANES} x {TOKENS}, gpu, pages of 64", GpuAttention(), prefill=True, page=64)
    )
    print(
        f"jax {jax.__version__}, Llama-3.1-8B shapes, {ROWS} rows of {POSITIONS} positions, bf16, 2 layers\n"
    )
    print(markdown_table(("program", "kernels per layer", "besides", "alias of cache", "temp MB"), table))

    recorded = []
    for name, options in {
        "decode, Llama-3.1-8B": {},
        "the same, processed log-probabilities": {"processed_logprobs": True},
        "decode, Llama-3.1-8B, pages of 64": {"page": 64},
        "decode, SmolLM2-135M": {"model": SMOLLM2_135M},
        "decode, Qwen3-30B-A3B": {"model": QWEN3_30B_A3B},
        f"prefill of {LANES} x {TOKENS}, Llama-3.1-8B": {"prefill": True},
        f"prefill of {LANES} x {TOKENS}, Qwen3-30B-A3B": {"prefill": True, "model": QWEN3_30B_A3B},
        "decode, gated DeltaNet": {"model": LINEAR},
        f"prefill of {LANES} x {TOKENS}, gated DeltaNet": {"prefill": True, "model": LINEAR},
    }.items():
        compiled(1, GpuAttention(), **options)
        recorded.append([name, *launches(DUMPED)])
    print(f"\nOne layer, {ROWS} rows\n")
    header = (
        "program",
        "CUDA graphs",
        "kernels outside",
        "loops",
        "conditionals",
        "loops and conditionals outside",
    )
    print(markdown_table(header, recorded))


# %%
def kernels_alone() -> None:
    """Attention of one layer and its experts, nothing else, and what their kernels take."""
    c, experts = LLAMA_3_1_8B, QWEN3_30B_A3B.experts
    assert experts is not None
    wide, kept = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, jnp.bfloat16
    half, inner, d = c.head_dim // 2, experts.moe_intermediate_size, QWEN3_30B_A3B.hidden_size

    def f32(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    def compile_alone(function: Callable[..., Any], make: Callable[[], Any]) -> None:
        with jax.sharding.use_abstract_mesh(mesh):
            jax.jit(function).lower(*abstract(make)).compile()

    attention, some = GpuAttention(), jnp.zeros(LANES, jnp.int32)

    def call(rope: jax.Array) -> AttentionCall:
        return AttentionCall(c.attention(0), AttentionWeights(), rope, POSITIONS, jnp.dtype(kept))

    compile_alone(
        lambda layer, qkv, rope, length, live: attention.attend_decode(
            layer, qkv, call(rope), length=length, live=live
        ),
        lambda: (
            attention.make_store(c, (0,), ROWS, POSITIONS, jnp.dtype(kept)),
            *(f32(ROWS, wide), f32(ROWS, 2, half), jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, bool)),
        ),
    )
    compile_alone(
        lambda layer, qkv, rope, lane: attention.attend_prefill(
            layer, qkv, call(rope), Extents(lane, lane, lane)
        ),
        lambda: (
            attention.make_store(c, (0,), ROWS, POSITIONS, jnp.dtype(kept)),
            *(f32(LANES * TOKENS, wide), f32(LANES, TOKENS, 2, half), some),
        ),
    )
    compile_alone(
        lambda gate_up, down, x, expert, weight: gpu_experts(
            Experts(gate_up, down), x, Route(expert, weight), x
        ),
        lambda: (
            jnp.zeros((experts.num_experts, 2 * inner, d), kept),
            jnp.zeros((experts.num_experts, d, inner), kept),
            f32(ROWS, d),
            jnp.zeros((ROWS, experts.num_experts_per_tok), jnp.int32),
            f32(ROWS, experts.num_experts_per_tok),
        ),
    )
    header = ("kernel", "threads", "registers", "bytes spilled", "loads of 16 bytes", "other loads")
    print(markdown_table(header, kernel_table(DUMPED)))


# %%
kernels_alone() if "kernels" in sys.argv else programs()
shutil.rmtree(DUMPED)
