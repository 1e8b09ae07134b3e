# Measured at commit 2535926f; runs at HEAD.
"""What gpt-oss-20b's weights take packed, and what a layer of routed experts costs by the form of its weights.

    python -m spikes.102_packed_experts sizes
    python -m spikes.102_packed_experts rates

Rates are those of Qwen3-30B-A3B's layer (2,048 wide, experts of 768, eight for a row) with 16 experts, random. Forms
take turns; the best of the rounds counts. Rows in bf16 must have the bits of the dequantised weights.
"""

import argparse
import time
from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.support.coded_blocks import dequantised_rows, random_rows
from tests.support.packing import coded_blocks
from xla_engine.graphs.config import ModelConfig, RoutedExperts
from xla_engine.graphs.experts.routing import Experts, Route
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.graphs.ops.coded import Coded, Order, coded_form
from xla_engine.runner.native_library.build import register

EXPERTS, WIDTH, INNER, CHOSEN = 16, 2048, 768, 8
KINDS = {"Q4_K, Q6_K": ("Q4_K", "Q6_K"), "MXFP4": ("MXFP4", "MXFP4")}
ROUNDS = 15


GPT_OSS = ModelConfig(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    experts=RoutedExperts(
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=2880, bias=True, swiglu_limit=7.0
    ),
    attention_sinks=True,
    qkv_bias=True,
    output_bias=True,
)


def sizes() -> None:
    """Bytes of the weights in bf16, with packed experts, and in a file."""
    plain = packed = stored = 0
    for leaf, shape in parameter_shapes(GPT_OSS).items():
        numbers = prod(shape)
        own = numbers * (2 if len(shape) > 1 else 4)
        plain += own
        if leaf.endswith(("experts.gate_up", "experts.down")):
            form = coded_form((("MXFP4", prod(shape[:2])),), shape[2])
            assert form is not None
            own, numbers = form.nbytes, numbers * 17 // 64
        packed, stored = packed + own, stored + 2 * numbers
    print(f"bf16 {plain / 1e9:.2f} GB, packed {packed / 1e9:.2f} GB, file {stored / 1e9:.2f} GB")


def coded(kind: str, raw: np.ndarray, width: int, order: Order) -> Coded:
    form = coded_form(((kind, len(raw)),), width, order=order)
    assert form is not None
    blocks = [coded_blocks(kind, part, width, order)[0].reshape(-1) for part in np.split(raw, EXPERTS)]
    return Coded(jnp.asarray(np.concatenate([form.header(), *blocks])), form)


def forms(kinds: tuple[str, str]) -> dict[str, Experts]:
    shapes = (EXPERTS * 2 * INNER, WIDTH), (EXPERTS * WIDTH, INNER)
    raw = [random_rows(shape, kind, 1) for shape, kind in zip(shapes, kinds, strict=True)]
    for kind, rows in zip(kinds, raw, strict=True):  # scales of float16 as models have them
        if kind != "MXFP4":
            blocks = rows.reshape(-1, 144 if kind == "Q4_K" else 210)
            at = slice(0, 4) if kind == "Q4_K" else slice(208, 210)
            blocks[:, at] = np.frombuffer(np.float16([0.002] * 2).tobytes()[: at.stop - at.start], np.uint8)
    plain = [
        jnp.asarray(dequantised_rows(kind, rows).astype(ml_dtypes.bfloat16).reshape(EXPERTS, -1, width))
        for kind, rows, (_, width) in zip(kinds, raw, shapes, strict=True)
    ]
    found = {"bf16": Experts(*plain)}
    orders: tuple[tuple[str, Order], ...] = (("packed", "pairs"), ("packed-int8", "fours"))
    for name, order in orders:
        found[name] = Experts(
            *(
                coded(kind, rows, width, order)
                for kind, rows, (_, width) in zip(kinds, raw, shapes, strict=True)
            )
        )
    return found


def bytes_of(experts: Experts) -> int:
    return sum(each.values.nbytes if isinstance(each, Coded) else each.nbytes for each in experts[:2])


def call_of(
    products: NativeProducts, experts: Experts, x: jax.Array, routed: Route
) -> Callable[[], np.ndarray]:
    held = [each.values if isinstance(each, Coded) else each for each in experts[:2]]
    static = [each.form if isinstance(each, Coded) else None for each in experts[:2]]

    @jax.jit
    def run(arrays: list[jax.Array], x: jax.Array, routed: Route) -> jax.Array:
        given = [
            array if form is None else Coded(array, form) for array, form in zip(arrays, static, strict=True)
        ]
        return products.experts(Experts(given[0], given[1]), x, routed, x)

    return lambda: np.asarray(run(held, x, routed))


def rates() -> None:
    products = NativeProducts(register(None, {"experts_bf16", "linear_fours"}))
    draw = np.random.default_rng(0)
    print(f"isa {products.isa}")
    for title, kinds in KINDS.items():
        made = forms(kinds)
        print(title, {name: f"{bytes_of(experts) / 1e6:.1f} MB" for name, experts in made.items()})
        for count in (1, 8, 32):
            x = jnp.asarray(draw.standard_normal((count, WIDTH)), jnp.float32)
            chosen = np.stack([draw.permutation(EXPERTS)[:CHOSEN] for _ in range(count)])
            routed = Route(jnp.asarray(chosen, jnp.int32), jnp.full((count, CHOSEN), 1 / CHOSEN, jnp.float32))
            calls = {name: call_of(products, experts, x, routed) for name, experts in made.items()}
            first = {name: call() for name, call in calls.items()}
            assert first["bf16"].tobytes() == first["packed"].tobytes(), "packed experts have other bits"
            best = dict.fromkeys(calls, 1e9)
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    began = time.perf_counter()
                    call()
                    best[name] = min(best[name], time.perf_counter() - began)
            shown = {name: f"{took * 1e3:.2f} ms, {best['bf16'] / took:.2f}" for name, took in best.items()}
            print(f"  {count:2} rows:", shown, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sizes", "rates"))
    {"sizes": sizes, "rates": rates}[parser.parse_args().what]()
