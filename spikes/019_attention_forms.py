# Frozen: runs at commit 84bfb74.
"""What do windows, norms, caps, sinks and pages cost and save in the C++ attention?

python -m spikes.019_attention_forms [--before COMMIT]
"""

# %%
from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import SMOLLM2_135M, Times, describe_machine, interleave, markdown_table
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.config import AttentionForm
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.runner.native_library.build import register

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=15)
arguments.add_argument(
    "--before", help="commit whose operation is held against this one, with five operands less"
)
options = arguments.parse_known_args()[0]

ISA = register()
BF16 = jnp.dtype(jnp.bfloat16)
LAYERS = 6  # of one call, each with a cache of its own: no cache of the processor holds them
PLAIN = AttentionForm(scale=0.125, window=None, softcap=None, norm_eps=1e-6)
rng = np.random.default_rng(19)
print(describe_machine(), "\n")


class Call:
    """Attention of several layers over `rows` slots that hold `length` keys: `width` new positions each."""

    def __init__(
        self,
        attention: Any,
        *,
        rows: int,
        length: int,
        heads: tuple[int, int, int] = (16, 8, 128),
        width: int = 1,
        form: AttentionForm = PLAIN,
        weights: AttentionWeights | None = None,
        block_size: int | None = None,
        call_positions: int | None = None,
    ) -> None:
        count, kv_heads, head_dim = heads
        positions = -(-(length + width) // 256) * 256
        config = replace(
            SMOLLM2_135M,
            num_attention_heads=count,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            num_hidden_layers=LAYERS,
            layer_types=("sliding_attention",) * LAYERS,
            sliding_window=form.window,
        )
        backend, tables = NativeAttention(call_positions=call_positions), None
        sizes = rows, positions
        if block_size is not None:
            pages = positions // block_size
            tables = rng.permutation(rows * pages).reshape(rows, pages).astype(np.int32)
            sizes = rows * pages, block_size
        self.cache = [backend.make_store(config, (0,), *sizes, BF16) for _ in range(LAYERS)]
        features = (count + 2 * kv_heads) * head_dim
        qkv = rng.standard_normal((rows * width, features), np.float32)
        rope = np.ones((rows, width, 2, head_dim // 2), np.float32)
        at = np.full(rows, length, np.int32)
        call = AttentionCall(form, weights or AttentionWeights(), rope, positions, BF16, tables)

        def layer(each: LayerCache, x: jax.Array) -> tuple[LayerCache, jax.Array]:
            if width == 1:
                live = np.ones(rows, bool)
                return attention.attend_decode(each, x, call._replace(rope=rope[:, 0]), length=at, live=live)
            lanes = Extents(np.arange(rows, dtype=np.int32), at, np.full(rows, width, np.int32))
            return attention.attend_prefill(each, x, call, lanes)

        def layers(cache: list[LayerCache], x: jax.Array) -> tuple[list[LayerCache], jax.Array]:
            updated = []
            for each in cache:
                new, out = layer(each, x)
                updated.append(new)
                x = x + 0 * out[:1, :1].astype(jnp.float32)  # one after the other
            return updated, x[:1, :1]

        self._call, self._qkv = jax.jit(layers, donate_argnums=0), qkv

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def __call__(self) -> None:
        self.cache, last = self._call(self.cache, self._qkv)
        last.block_until_ready()


class Before:
    """The operation of an earlier commit: plain attention over contiguous slots."""

    def __init__(self, commit: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            for name in ("attention.cc", "common.h"):
                text = subprocess.check_output(["git", "show", f"{commit}:graphs/native/{name}"])
                (Path(scratch) / name).write_bytes(text)
            made = Path(scratch) / "before.so"
            flags = [
                "-std=c++17",
                "-O3",
                "-march=native",
                "-fPIC",
                "-shared",
                f"-isystem{jax.ffi.include_dir()}",
            ]
            subprocess.run(["c++", *flags, str(Path(scratch) / "attention.cc"), "-o", str(made)], check=True)
            library = ctypes.CDLL(str(made))
        jax.ffi.register_ffi_target("before", jax.ffi.pycapsule(library.XlaEngineAttend), platform="cpu")

    def attend_decode(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, *, length: Any, live: Any
    ) -> Any:
        slot = np.arange(len(length), dtype=np.int32)
        return self._call(layer, qkv.T, call.rope, slot, length, live.astype(np.int32), feature_major=True)

    def attend_prefill(self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents) -> Any:
        rope = call.rope.reshape(-1, *call.rope.shape[2:])
        return self._call(layer, qkv, rope, *lanes, feature_major=False)

    def _call(self, layer: LayerCache, qkv: jax.Array, rope: Any, *place: Any, feature_major: bool) -> Any:
        layer = LayerCache(*(leaf[0] for leaf in layer))  # it knows one layer only
        features = qkv.size // len(rope) - 4 * layer.keys.shape[1] * rope.shape[-1]
        shapes = [jax.ShapeDtypeStruct((len(rope), features), BF16)]
        shapes += [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layer]
        call = jax.ffi.ffi_call("before", shapes, input_output_aliases={5: 1, 6: 2})
        out, *cache = call(qkv, rope, *place, *layer, feature_major=feature_major)
        return LayerCache(*(leaf[None] for leaf in cache)), out


def report(title: str, variants: dict[str, Any], base: str) -> dict[str, Times]:
    times = interleave(variants, options.rounds, warm_up=2)
    rows = []
    for name, each in times.items():
        ratio = np.median(np.divide(each.seconds, times[base].seconds))
        rows.append([name, each.milliseconds(2), f"{ratio:.2f}", f"{variants[name].bytes / 2**20:.0f}"])
    print(markdown_table([title, "ms a call", f"against {base}", "cache MiB"], rows), "\n")
    return times


native = NativeAttention(ISA)
SMOLLM = (9, 3, 64)

# %% What plain attention pays for the rest
if options.before:
    before = Before(options.before)
    for name, sizes in {
        "decode, 8 rows, 192 keys": {"rows": 8, "length": 192, "heads": SMOLLM},
        "decode, 32 rows, 192 keys": {"rows": 32, "length": 192, "heads": SMOLLM},
        "decode, 8 rows, 1800 keys, Qwen3's heads": {"rows": 8, "length": 1800},
        "prefill, 8 x 32 behind 448 keys": {"rows": 8, "length": 448, "width": 32, "heads": SMOLLM},
    }.items():
        report(name, {"before": Call(before, **sizes), "now": Call(native, **sizes)}, "before")

# %% What each costs where it is used
norm = np.ones(128, np.float32)
forms: dict[str, tuple[AttentionForm, AttentionWeights]] = {
    "plain": (PLAIN, AttentionWeights()),
    "norms of heads": (PLAIN, AttentionWeights(norm, norm)),
    "cap": (replace(PLAIN, softcap=50.0), AttentionWeights()),
    "sinks": (PLAIN, AttentionWeights(sinks=np.ones(16, np.float32))),
}
for width, length in ((1, 192), (32, 448)):
    calls = {
        name: Call(native, rows=8, length=length, width=width, form=form, weights=weights)
        for name, (form, weights) in forms.items()
    }
    report(f"{'decode' if width == 1 else 'prefill'}, 8 x {width} behind {length} keys", calls, "plain")
    del calls

# %% Windows at long context: 4 rows, decode and a prefill call of 4 x 32
for width in (1, 32):
    calls = {"all keys": Call(native, rows=4, length=8000, width=width)}
    for window in (512, 1024, 4096):
        own = {"rows": 4, "length": 8000, "width": width, "form": replace(PLAIN, window=window)}
        calls[f"window {window}, whole slots"] = Call(native, **own)
        calls[f"window {window}, ring"] = Call(native, **own, call_positions=128)
    report(f"{'decode' if width == 1 else 'prefill'}, 4 x {width} behind 8000 keys", calls, "all keys")
    del calls

# %% Pages in any order against contiguous slots
for sizes in (
    {"rows": 32, "length": 192},
    {"rows": 8, "length": 2000},
    {"rows": 8, "length": 448, "width": 32},
):
    calls = {"contiguous": Call(native, **sizes)}
    calls |= {f"pages of {size}": Call(native, **sizes, block_size=size) for size in (32, 64, 128, 256)}
    form = "decode" if "width" not in sizes else "prefill"
    report(
        f"{form}, {sizes['rows']} x {sizes.get('width', 1)} behind {sizes['length']} keys",
        calls,
        "contiguous",
    )
    del calls
