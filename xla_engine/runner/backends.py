"""Choice of the attention and linear backends: the one a configuration names, or the fastest on this platform."""

import importlib.metadata
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from xla_engine.config import AUTO, GGUF_INT8, KEPT, EngineConfig
from xla_engine.environment import requested_isa
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import Attention
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.native import NativeProducts, fits
from xla_engine.graphs.linear.products import Products
from xla_engine.graphs.model.leaves import Leaf
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.coded import KINDS, StoredKinds
from xla_engine.graphs.ops.int8 import GROUP
from xla_engine.graphs.target import devices, platform
from xla_engine.runner.adapters import lora_form
from xla_engine.runner.jax_settings import check_platform
from xla_engine.runner.native_library import widening
from xla_engine.runner.native_library.build import ATTENTION, origin, register
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.runner.native_library.needed import PLAIN, native_parts
from xla_engine.runner.native_library.recipe import NativeBuildError
from xla_engine.runner.portable import with_portable_isa

_log = logging.getLogger("xla_engine")
PACKED_NEEDS = "the C++ products in bfloat16: a CPU, dtype bfloat16, and layer widths in multiples of 32"


def serving_device() -> Any:
    """The jax device that an engine here would use."""
    check_platform()
    return devices()[0]


def serving_isa(asked: str, parts: Collection[str]) -> str | None:
    """The instruction set of the C++ kernels to use on this CPU, `parts` of them built if necessary; None: pure JAX.

    asked: as in `EngineConfig.isa`. Raises NativeBuildError if none can be built, and ConfigError if this machine does
    not have the one that was asked for.
    """
    asked = requested_isa(asked)
    if asked == "none":
        return None
    if asked == AUTO:
        return register(None, parts)
    names = [each.name for each in available()]
    if asked not in names:
        raise ConfigError(
            f"isa {asked!r} is not supported on this machine; use one of {', '.join(('auto', *names, 'none'))}"
        )
    try:
        return register(asked, parts)
    except NativeBuildError as error:
        raise ConfigError(f"isa {asked!r} cannot be built: {error}; use 'none' for pure JAX") from error


def choose_attention(
    name: str, call_positions: int | None = None, isa: str = AUTO, parts: Collection[str] = ATTENTION
) -> Attention:
    """The attention backend for `EngineConfig.attention_backend` on this platform. Raises ConfigError.

    call_positions: the most positions of a call, so that layers with a sliding window can discard older positions
        (`graphs.attention.backend.kept_positions`); None: they keep all. parts: of the C++ kernels, that are built.
    """
    if name == "gpu" or (name == "auto" and "NVIDIA" in devices()[0].device_kind):
        # Imported late, because Pallas imports slowly.
        from xla_engine.graphs.attention.gpu import GpuAttention

        return GpuAttention(interpret=platform() != "gpu")
    if name == "tpu" or (name == "auto" and platform() == "tpu"):
        from xla_engine.graphs.attention.tpu import TpuAttention

        return TpuAttention(interpret=platform() != "tpu")
    if name == "native" and platform() != "cpu":
        raise ConfigError(f"attention_backend 'native' is for the CPU, not {platform()}; use 'auto'")
    if name == "native" or (name == "auto" and platform() == "cpu"):
        try:
            serving = serving_isa(isa, parts)
        except NativeBuildError as error:
            if name == "native":
                raise ConfigError(
                    f"attention_backend 'native' cannot be built: {error}; use 'xla'"
                ) from error
            _log.warning(
                "falling back to pure-JAX attention, because the faster C++ attention cannot be built: %s",
                error,
            )
            serving = None
        if serving is not None:
            return NativeAttention(serving, call_positions=call_positions)
        if name == "native" and requested_isa(isa) == "none":
            raise ConfigError(
                "attention_backend 'native' needs an instruction set, and isa is 'none'; use 'auto'"
            )
    # Older XLA:CPU copies a bf16 cache at every write.
    old = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
    stored = jnp.dtype(jnp.float32) if old and platform() == "cpu" else None
    return XlaAttention(cache_dtype=stored, call_positions=call_positions)


def make_spec(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, stored: StoredKinds | None = None
) -> ModelSpec:
    """The spec of `model` in `dtype` with the backends and quantisation of `config`. Raises ConfigError.

    stored: how the model's file stores its matrices (`xla_engine.model_loader.weights.stored_kinds`).
    """
    quantized, kept = config.quantization == "int8", config.quantization in KEPT
    matrices = jnp.dtype(jnp.int8) if quantized else dtype
    parts = native_parts(config, model, dtype.name)
    if config.is_portable:
        config = with_portable_isa(config, model, dtype, parts)
    isa = isa_of_model(config, model, matrices, parts)
    attention = choose_attention(config.attention_backend, config.call_positions, isa, parts)
    if model.latent is not None and not isinstance(attention, NativeAttention):
        attention = choose_attention("xla", config.call_positions)  # the Pallas kernels' heads are narrower
    if config.kv_cache_dtype == "int8":
        if not isinstance(attention, NativeAttention) or dtype != jnp.bfloat16:
            raise ConfigError(
                "kv_cache_dtype 'int8' needs the C++ attention in bfloat16: a CPU, an instruction set, and dtype "
                "bfloat16. Leave it out: keys and values then have the model's dtype"
            )
        attention = replace(attention, cache_dtype=jnp.dtype(jnp.int8))
    products = choose_products(
        config.linear_backend, model, matrices, isa, parts=parts, adapters=config.enable_lora
    )
    lora = lora_form(config, model, dtype, products)
    if kept and (not isinstance(products, NativeProducts) or dtype != jnp.bfloat16):
        raise ConfigError(
            f"quantization {config.quantization!r} needs {PACKED_NEEDS}. Use 'none': the file is then dequantised"
            + ("" if config.quantization == GGUF_INT8 else ", with the same results")
        )
    spec = ModelSpec(
        model,
        dtype,
        attention,
        products,
        quantized=quantized,
        devices=None if config.tensor_parallel_size == 1 else config.tensor_parallel_size,
        lora=lora,
        stored=stored if kept else None,
        order="fours" if config.quantization == GGUF_INT8 else "pairs",
    )
    if kept and all(leaf.form is None for leaf in spec.leaves.values()):
        ggml = (name for name, kind in KINDS.items() if kind.number < 100)
        raise ConfigError(
            f"quantization {config.quantization!r} is for GGUF files with weights of the types {', '.join(ggml)}, "
            "for AWQ, GPTQ and compressed-tensors with integers in groups of 32 columns or a multiple, and for "
            "experts in MXFP4. This model has none. Leave quantization out"
        )
    if kept and spec.isa is not None and any(_is_plain_matrix(leaf) for leaf in spec.leaves.values()):
        serving_isa(spec.isa, {PLAIN})
    return spec


def _is_plain_matrix(leaf: Leaf) -> bool:
    """Whether a leaf is a matrix that does not keep the encoding of its file."""
    return leaf.form is None and len(leaf.shape) > 1


def isa_of_model(config: EngineConfig, model: ModelConfig, stored: jnp.dtype, parts: Collection[str]) -> str:
    """The instruction set for a model: by default the best one whose weight blocks match the model's widths.

    AMX tiles need rows that are multiples of 64 bytes. Other models use a vector instruction set of the same machine
    instead of XLA's products, whose prefill and decode are not the same code.
    """
    if requested_isa(config.isa) != AUTO or config.linear_backend in ("xla", "gpu") or platform() != "cpu":
        return config.isa
    names = [each.name for each in available()]
    fitting = next((name for name in names if fits(model, stored, name)), None)
    if fitting in (None, names[0]):
        return AUTO
    try:
        return register(fitting, parts)
    except NativeBuildError:
        return AUTO  # the caller reports the compiler's message


def library_of(spec: ModelSpec) -> str | None:
    """Where the library of the model's C++ kernels came from; None without C++ kernels."""
    return None if spec.isa is None else origin(spec.isa)


def bf16_products_of(spec: ModelSpec) -> dict[str, str]:
    """How the model's products in bf16 multiply, by kind of weights; empty where there is no choice."""
    if spec.products is None or spec.isa != widening.ISA:
        return {}
    packed = any(leaf.form is not None and leaf.form.order == "pairs" for leaf in spec.leaves.values())
    return {kind: how for kind, how in widening.words().items() if kind == "bf16" or packed}


def platform_words(spec: ModelSpec) -> dict[str, str]:
    """Versions, device and backends, on which the bits of a run may depend."""
    words = {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": platform(),
        "device": devices()[0].device_kind,
        "attention": spec.attention.name,
        "linear": "xla" if spec.products is None else spec.products.name,
    }
    if spec.quantized:  # earlier forms of int8 have other bits
        words["int8"] = f"groups of {GROUP}, rotated whole"
    # Old files without "isa" were written with AMX or without C++ kernels.
    return words if spec.isa in (None, "amx") else {**words, "isa": spec.isa}


def choose_products(
    name: str,
    model: ModelConfig,
    dtype: jnp.dtype,
    isa: str = AUTO,
    *,
    parts: Collection[str],
    adapters: bool = False,
) -> Products | None:
    """The products for `EngineConfig.linear_backend`; None: XLA's. Raises ConfigError.

    dtype: of the weights, int8 if they are quantised. parts: of the C++ kernels, that are built. adapters: rows may
    have LoRA adapters.
    """
    on_gpu = dtype == jnp.bfloat16 and not adapters
    if name == "gpu" or (name == "auto" and on_gpu and "NVIDIA" in devices()[0].device_kind):
        if not on_gpu:
            raise ConfigError(
                "linear_backend 'gpu' needs bfloat16, without quantization or enable_lora; use 'auto'"
            )
        from xla_engine.graphs.linear.gpu import GpuProducts  # imported late, because Pallas imports slowly

        return GpuProducts(interpret=platform() != "gpu")
    if name == "xla" or (name == "auto" and platform() != "cpu"):
        return None
    missing = "a CPU"
    if platform() == "cpu":
        try:
            serving = serving_isa(isa, parts)
        except NativeBuildError as error:
            missing = f"a C++ compiler: {error}"
        else:
            if serving is not None and fits(model, dtype, serving):
                return NativeProducts(serving)
            missing = "an instruction set, and isa is 'none'"
            if serving is not None:
                missing = "bfloat16 and layer widths in multiples of 32, or int8 and multiples of 64"
    if name == "native":
        raise ConfigError(f"linear_backend 'native' needs {missing}; use 'auto'")
    return None
