"""Which parts of the C++ kernels a model needs. Does not import jax, so that a first start can compile them before."""

from collections.abc import Collection
from dataclasses import replace

from xla_engine.config import AUTO, GGUF, GGUF_INT8, KEPT, EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.tensor_files import TensorFiles, TensorInfo

PLAIN = "linear_bf16"


def native_parts(config: EngineConfig, model: ModelConfig, dtype: str) -> frozenset[str]:
    """The parts (`native_library.build`) that a model needs, which are compiled together.

    config: with a resolved `quantization`. dtype: of the engine. If weights keep the encoding of their file, `PLAIN`
    is left out where only other matrices could need it, which `make_spec` knows.
    """
    stores = "bf16" if dtype == "bfloat16" else "f32"
    parts = {"sampler", "attention_int8" if config.kv_cache_dtype == "int8" else f"attention_{stores}"}
    if model.recurrent is not None and model.convolution is None:
        parts.add("recurrent")
    if model.encoder is not None or not model.gated_mlp or model.hidden_size_per_layer_input:
        parts.add("encoder")  # activations beside products
    kinds = {"int8"} if config.quantization == "int8" else {"bf16"} if dtype == "bfloat16" else set()
    if not kinds or config.linear_backend in ("xla", "gpu"):
        return frozenset(parts)
    kept = config.quantization in KEPT
    own = "fours" if config.quantization == GGUF_INT8 else "coded"
    if model.experts is not None:
        parts |= {f"experts_{kind}" for kind in kinds}
        kinds.add("bf16")  # routers
        if kept and own == "fours":
            parts.add("experts_fours")
    if model.alternating is not None or model.latent is not None:
        kinds.add("bf16")  # routers; products by head
    if kept:
        kinds.add(own)
        parts.add(f"pack_{own}")
    products = ("linear",) if config.enable_lora is False else ("linear", "lora")
    parts |= {f"{each}_{kind}" for each in products for kind in kinds}
    only_packed = model.experts is None and model.recurrent is None and model.latent is None
    if kept and only_packed and "lora" not in products:
        parts.remove(PLAIN)
    return frozenset(parts)


def expected_parts(
    config: EngineConfig, model: ModelConfig, tensors: Collection[TensorInfo]
) -> frozenset[str]:
    """The parts that a model will probably need, from its file: another form of its weights may be chosen later.

    tensors: of a GGUF file; their types tell whether `quantization` "auto" keeps them packed.
    """
    dtype = "bfloat16" if config.dtype == AUTO else config.dtype
    packed = {each.dtype for each in tensors}.difference(TensorFiles.dtypes)
    if config.quantization == AUTO:
        keeps = bool(packed) and not config.is_portable and dtype == "bfloat16"
        config = replace(config, quantization=packed_form(config, model) if keeps else None)
    return native_parts(config, model, dtype)


def packed_form(config: EngineConfig, model: ModelConfig) -> str:
    """The packed form for a model: activations in eight bits, where their loss was measured (docs/models.md)."""
    is_measured = model.experts is None and model.recurrent is None and not config.pools
    return GGUF_INT8 if is_measured else GGUF
