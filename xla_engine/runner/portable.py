"""`EngineConfig(bits="portable")`: which instruction sets, programs and libraries give the same bits everywhere.

What the kernels make of fixed numbers stands in the golden file beside `xla_engine.equivalence.portable`; a start
compares this library's with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import AUTO, EngineConfig
from xla_engine.environment import requested_isa
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.native import NativeProducts, fits
from xla_engine.graphs.linear.products import Norm, Weight
from xla_engine.graphs.ops.int8 import Quantized, quantize_weight
from xla_engine.graphs.ops.rope import cosines_and_sines
from xla_engine.graphs.portable import ARITHMETIC, ISAS, refusals
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.graphs.row_state.sampling_fields import make_sampling_rows
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sampling.native import native_logprobs, native_sample
from xla_engine.runner.native_library.build import library_digest, register
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.runner.native_library.recipe import NativeBuildError

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

GOLDEN = Path(__file__).parents[1] / "equivalence" / "portable_golden.json"
_INSTEAD = {
    "amx": "avx512_bf16",
    "neon_bf16": "neon",
}  # sets with an order of their own, and those inside of them


def with_portable_isa(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, parts: Collection[str]
) -> EngineConfig:
    """The options with the instruction set to use, whose kernels are registered: the best of those with one order.

    dtype: that the model computes in. parts: of the kernels that it needs. Raises ConfigError where the model or this
    machine has none.
    """
    if jax.default_backend() != "cpu":
        raise ConfigError("bits 'portable' is for CPUs. Use bits 'machine'")
    if dtype != jnp.bfloat16:
        raise ConfigError(
            f"bits 'portable' computes in bfloat16 or int8, not {dtype}: give dtype 'bfloat16', or use bits 'machine'"
        )
    asked = requested_isa(config.isa)
    if asked == "none":
        raise ConfigError("bits 'portable' needs the C++ kernels, and isa is 'none'. Use bits 'machine'")
    asked = _INSTEAD.get(asked, asked)
    names = [each.name for each in available() if each.name in ISAS]
    if not names or asked not in (AUTO, *names):
        here = f"; use one of {', '.join(('auto', *names))}" if names else ""
        raise ConfigError(
            f"bits 'portable' runs on {', '.join(ISAS)}, and this machine does not have "
            f"{'one of them' if asked == AUTO else repr(asked)}{here}"
        )
    stored = jnp.dtype(jnp.int8) if config.quantization == "int8" else dtype
    failed: Exception | None = None
    for name in names if asked == AUTO else [asked]:
        if not fits(model, stored, name):
            raise ConfigError(
                "bits 'portable' needs layer widths in multiples of 32, or of 64 in int8. Use bits 'machine'"
            )
        try:
            register(name, parts)
        except NativeBuildError as error:
            failed = failed or error
        else:
            check_kernels(name, config.quantization)
            return replace(config, isa=name, attention_backend="native", linear_backend="native")
    raise ConfigError(f"bits 'portable' needs the C++ kernels, which cannot be built: {failed}")


def audit(name: str, program: Jaxpr) -> None:
    """Raise ConfigError if a program may have other bits on another processor."""
    if found := refusals(program):
        raise ConfigError(
            f"bits 'portable' cannot run this model with these options: program {name} has {'; '.join(found)}. Use "
            "bits 'machine'"
        )


def check_kernels(isa: str, quantization: str | None) -> None:
    """Raise ConfigError if the kernels of an instruction set do not have the bits of the golden file."""
    found, expected = kernel_hashes(isa, quantization), golden()["kernels"]
    if wrong := [name for name in found if found[name] != expected[name]]:
        raise ConfigError(
            f"the C++ kernels for {isa} do not have the bits of {ARITHMETIC}: {', '.join(wrong)} (library "
            f"{library_digest(isa)[:16]}). Compile them with another compiler (CXX), or use bits 'machine'"
        )


@functools.cache
def golden() -> Mapping[str, Any]:
    """The golden file."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@functools.cache
def kernel_hashes(isa: str, quantization: str | None) -> dict[str, str]:
    """Hashes of what registered kernels make of fixed numbers, by name: those that a model needs, perhaps in int8."""
    made = {"attention": _attention(isa), "sampler": _sampler(isa)}
    if quantization is None:
        made["products bf16"] = _products(isa, lambda weight: weight)
        made["products of denormals"] = _products(isa, lambda weight: weight, 2.0**-120)
    else:
        made["products int8"] = _products(isa, quantize_weight)
    return {name: _hash(arrays) for name, arrays in made.items()}


_WIDTH, _ROWS, _HEADS, _KV_HEADS, _HEAD_DIM, _POSITIONS = 128, 5, 2, 1, 64, 256


def _fixed(seed: int, *shape: int) -> np.ndarray:
    """Multiples of 2^-15 in [-1, 1), by integers alone."""
    mixed = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
    return ((mixed >> np.uint32(16)).astype(np.float32) / np.float32(2**15) - 1).reshape(shape)


def _hash(arrays: Any) -> str:
    digest = hashlib.sha256()
    for each in jax.tree.leaves(arrays):
        digest.update(np.asarray(each).tobytes())
    return digest.hexdigest()[:16]


def _products(isa: str, form: Callable[[np.ndarray], Any], scale: float = 1.0) -> Any:
    """A product behind a norm, one with a residual, a gated one and a head, of several rows and of one."""
    products = NativeProducts(isa)

    def packed(seed: int, features: int) -> Weight:
        made = form(_fixed(seed, features, _WIDTH).astype(jnp.bfloat16))
        if isinstance(made, tuple):
            return Quantized(
                jnp.asarray(products.pack(made[0])), jnp.asarray(products.pack(made[1], "scale"))
            )
        return jnp.asarray(products.pack(made))

    weights = [packed(seed, features) for seed, features in ((1, 96), (2, _WIDTH), (3, 2 * _WIDTH), (4, 64))]
    norm = Norm(jnp.asarray(_fixed(5, _WIDTH)), 1e-5)

    @jax.jit
    def run(weights: list[Weight], x: jax.Array) -> Any:
        gated = products.gated(weights[2], x, norm=norm)
        added = products.linear(weights[1], gated, residual=x)
        return products.linear(weights[0], x), gated, added, products.head(weights[3], norm, added).values

    x = _fixed(6, _ROWS, _WIDTH) * np.float32(scale)
    return [run(weights, x[:count]) for count in (1, _ROWS)]


def _attention(isa: str) -> Any:
    """Two chunks of one prompt, then a token, of heads with and without norms."""
    attention, rope = NativeAttention(isa), jnp.asarray(_rope())
    model = ModelConfig(
        vocab_size=1,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=_POSITIONS,
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(has_norms: bool, chunks: jax.Array, token: jax.Array) -> Any:
        norms = jnp.asarray(_fixed(8, 2, _HEAD_DIM)) if has_norms else (None, None)
        turns = rope.reshape(2, 24, *rope.shape[1:])
        dtype = jnp.dtype(jnp.bfloat16)
        call = AttentionCall(model.attention(0), AttentionWeights(*norms), turns, _POSITIONS, dtype)
        layer = attention.make_store(model, [0], 2, _POSITIONS, dtype)
        slot, start, size = (jnp.asarray(each, jnp.int32) for each in ([1, 1], [0, 24], [24, 17]))
        layer, prompt = attention.attend_prefill(
            layer, chunks.reshape(-1, chunks.shape[2]), call, Extents(slot, start, size)
        )
        length, live = jnp.asarray([0, 41], jnp.int32), jnp.asarray([False, True])
        layer, out = attention.attend_decode(
            layer, token, call._replace(rope=rope[length]), length=length, live=live
        )
        return prompt[:41], out[1]  # what is behind them is padding

    features = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    given = _fixed(9, 2, 24, features) * np.float32(4), _fixed(10, 2, features) * np.float32(4)
    return [run(has_norms, *given) for has_norms in (False, True)]


def _rope() -> np.ndarray:
    """`[48, 2, 32]`."""
    angles = np.arange(48, dtype=np.float32)[:, None] * np.ldexp(np.float32(1), -np.arange(_HEAD_DIM // 2))
    return cosines_and_sines(angles)


def _sampler(isa: str) -> Any:
    """Rows of all kinds, raw and processed log-probabilities, and those of given tokens."""
    count, vocabulary = 16, 1000
    rows = make_sampling_rows(count)
    rows.temperature[:] = np.arange(count) % 4 * 0.5
    rows.top_k[:] = np.arange(count) % 3 * 20
    rows.top_p[:] = np.where(np.arange(count) % 5 < 2, 0.9, 1)
    rows.min_p[:] = np.where(np.arange(count) % 7 == 3, 0.05, 0)
    rows.seed[:] = np.arange(2 * count).reshape(count, 2)
    rows.num_logprobs[:] = np.where(np.arange(count) % 2, 20, 0)
    logits = jnp.asarray(_fixed(11, vocabulary, count) * np.float32(8))
    position = jnp.arange(count, dtype=jnp.int32)

    @jax.jit
    def run(logits: jax.Array, rows: Any) -> Any:
        found = [
            native_sample(form, rows, position, None, processed_logprobs=processed, isa=isa)
            for form in (logits, ByRow(logits.T))
            for processed in (False, True)
        ]
        return found, native_logprobs(logits, position, rows.num_logprobs, isa)

    return run(logits, jax.tree.map(jnp.asarray, rows))
