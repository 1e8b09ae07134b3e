"""Tiny quantised checkpoints of every method, packed by loops of Python, and the same weights dequantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.families import tensor_sources
from xla_engine.model_loader.model_files import open_model

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
Array = np.ndarray
Packed = tuple[
    dict[str, Array], Array
]  # tensors of a module, by the part of their name; and the float32 weight
BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


def packed_words(codes: Array, bits: int) -> Array:
    """int32 `[rows, ceil(K bits / 32)]` of unsigned codes `[rows, K]`, the first in the lowest bits."""
    rows, width = codes.shape
    each = 32 // bits
    words = np.zeros((rows, -(-width // each)), np.uint64)
    for place in range(width):
        words[:, place // each] |= codes[:, place].astype(np.uint64) << np.uint64(bits * (place % each))
    return words.astype(np.uint32).view(np.int32)


def scaled(generator: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return generator.uniform(0.001, 0.01, shape).astype(dtype)


def weight_of(codes: Array, scales: Array, zeros: Array | None, groups: Array) -> Array:
    """`(code - zero) * scale` by a loop over columns."""
    found = np.zeros(codes.shape, np.float32)
    for column, group in enumerate(groups):
        zero = 0 if zeros is None else zeros[:, group].astype(np.float32)
        found[:, column] = (codes[:, column].astype(np.float32) - zero) * scales[:, group].astype(np.float32)
    return found


def awq(generator: np.random.Generator, rows: int, width: int, size: int) -> Packed:
    """Columns 0 2 4 6 1 3 5 7 of each eight are in this order in a word."""
    count = width // size
    codes, zeros = generator.integers(0, 16, (rows, width)), generator.integers(0, 16, (rows, count))
    scales, groups = scaled(generator, (rows, count), np.float16), np.arange(width) // size
    order = np.concatenate([8 * first + np.array([0, 2, 4, 6, 1, 3, 5, 7]) for first in range(rows // 8)])
    tensors = {
        "qweight": packed_words(codes.T[:, order], 4),
        "qzeros": packed_words(zeros.T[:, order], 4),
        "scales": scales.T.copy(),
    }
    return tensors, weight_of(codes, scales, zeros, groups)


def gptq(
    generator: np.random.Generator,
    rows: int,
    width: int,
    size: int,
    *,
    bits: int = 4,
    middle: bool = True,
    less: int = 1,
    shuffled: bool = False,
    bias: bool = False,
) -> Packed:
    """less: what is taken off a zero point, with a borrow within its word. shuffled: groups in any order."""
    size = width if size == -1 else size
    count, most = width // size, 1 << bits
    codes = generator.integers(0, most, (rows, width))
    zeros = np.full((rows, count), most // 2) if middle else generator.integers(0, most, (rows, count))
    scales, groups = scaled(generator, (rows, count), np.float16), np.arange(width) // size
    if shuffled:
        groups = generator.permutation(groups)
    words = packed_words(zeros.T, bits).view(np.uint32)
    for place in range(32 // bits):
        words = words - np.uint32(less << (bits * place))
    tensors = {
        "qweight": packed_words(codes, bits).T.copy(),
        "qzeros": words.view(np.int32),
        "scales": scales.T.copy(),
        "g_idx": groups.astype(np.int32),
    }
    if bias:
        tensors["bias"] = np.zeros(rows, np.float16)
    return tensors, weight_of(codes, scales, zeros, groups)


def compressed(
    generator: np.random.Generator,
    rows: int,
    width: int,
    size: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    dtype: Any = BF16,
    shuffled: bool = False,
) -> Packed:
    size = width if size == -1 else size
    count, half = width // size, 1 << (bits - 1)
    codes = generator.integers(-half, half, (rows, width))
    zeros = None if symmetric else generator.integers(-half, half, (rows, count))
    scales, groups = scaled(generator, (rows, count), dtype), np.arange(width) // size
    tensors = {
        "weight_packed": packed_words(codes + half, bits),
        "weight_scale": scales,
        "weight_shape": np.array([rows, width], np.int64),
    }
    if shuffled:
        groups = generator.permutation(groups)
        tensors["weight_g_idx"] = groups.astype(np.int32)
    if zeros is not None:
        tensors["weight_zero_point"] = packed_words(zeros.T + half, bits).T.copy()
    return tensors, weight_of(codes, scales, zeros, groups)


def int8(
    generator: np.random.Generator, rows: int, width: int, size: int, *, symmetric: bool = True
) -> Packed:
    size = width if size == -1 else size
    count = width // size
    codes = generator.integers(-128, 128, (rows, width))
    zeros = None if symmetric else generator.integers(-128, 128, (rows, count))
    scales = scaled(generator, (rows, count), BF16) / np.float32(16)
    scales = scales.astype(BF16)
    tensors = {"weight": codes.astype(np.int8), "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    if zeros is not None:
        tensors["weight_zero_point"] = zeros.astype(np.int8)
    return tensors, weight_of(codes, scales, zeros, np.arange(width) // size)


def float8(
    generator: np.random.Generator,
    rows: int,
    width: int,
    block: tuple[int, int],
    *,
    name: str = "weight_scale",
    shape: tuple[int, ...] | None = None,
    dtype: Any = np.float32,
) -> Packed:
    """block: rows and columns that share a scale. shape: of the tensor of scales, if it is not by block."""
    codes = generator.standard_normal((rows, width)).astype(F8)
    scales = scaled(generator, (-(-rows // block[0]), -(-width // block[1])), dtype)
    by_row = scales[np.arange(rows) // block[0]]
    tensors = {"weight": codes, name: scales if shape is None else scales.reshape(shape)}
    return tensors, weight_of(codes, by_row, None, np.arange(width) // block[1])


def _groups(bits: int, kind: str = "int", **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, **others}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def _compressed(form: str, bits: int, kind: str = "int", **others: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, **_groups(bits, kind, **others)}


Pack = Callable[[np.random.Generator, int, int], Packed]
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_PACKED = "pack-quantized"
# By name: quantization_config, how a matrix is packed, and how `inspect` calls the form.
FORMS: Mapping[str, tuple[dict[str, Any], Pack, str]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda g, n, k: awq(g, n, k, 32),
        "AWQ 4-bit g32",
    ),
    "gptq": (_GPTQ, lambda g, n, k: gptq(g, n, k, 32, bias=True), "GPTQ 4-bit g32"),
    "gptq_one_group": (_GPTQ | {"group_size": -1}, lambda g, n, k: gptq(g, n, k, -1), "GPTQ 4-bit g-1"),
    "gptq_v2_zeros": (_GPTQ, lambda g, n, k: gptq(g, n, k, 32, less=0), "GPTQ 4-bit g32"),
    "gptq_order": (
        _GPTQ | {"desc_act": True},
        lambda g, n, k: gptq(g, n, k, 32, shuffled=True),
        "GPTQ 4-bit g32",
    ),
    "gptq_asymmetric": (
        _GPTQ | {"sym": False},
        lambda g, n, k: gptq(g, n, k, 32, middle=False),
        "GPTQ 4-bit g32 asymmetric",
    ),
    "gptq_v2_asymmetric": (
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        lambda g, n, k: gptq(g, n, k, 32, middle=False, less=0),
        "GPTQ 4-bit g32 asymmetric",
    ),
    "gptq_8": (_GPTQ | {"bits": 8}, lambda g, n, k: gptq(g, n, k, 32, bits=8), "GPTQ 8-bit g32"),
    "gptq_8_asymmetric": (
        _GPTQ | {"bits": 8, "sym": False},
        lambda g, n, k: gptq(g, n, k, 32, bits=8, middle=False),
        "GPTQ 8-bit g32 asymmetric",
    ),
    "compressed_4": (
        _compressed(_PACKED, 4),
        lambda g, n, k: compressed(g, n, k, 32),
        "compressed-tensors 4-bit g32",
    ),
    "compressed_4_float16": (
        _compressed(_PACKED, 4),
        lambda g, n, k: compressed(g, n, k, 16, dtype=np.float16),
        "compressed-tensors 4-bit g16",
    ),
    "compressed_4_asymmetric": (
        _compressed(_PACKED, 4, symmetric=False),
        lambda g, n, k: compressed(g, n, k, 32, symmetric=False),
        "compressed-tensors 4-bit g32 asymmetric",
    ),
    "compressed_order": (
        _compressed(_PACKED, 4, actorder="group"),
        lambda g, n, k: compressed(g, n, k, 32, shuffled=True),
        "compressed-tensors 4-bit g32",
    ),
    "compressed_8": (
        _compressed(_PACKED, 8),
        lambda g, n, k: compressed(g, n, k, -1, bits=8),
        "compressed-tensors 8-bit g-1",
    ),
    "int8": (
        _compressed("int-quantized", 8),
        lambda g, n, k: int8(g, n, k, -1),
        "compressed-tensors 8-bit by row",
    ),
    "int8_groups": (
        _compressed("int-quantized", 8, symmetric=False),
        lambda g, n, k: int8(g, n, k, 32, symmetric=False),
        "compressed-tensors 8-bit g32",
    ),
    "float8_by_row": (
        _compressed("float-quantized", 8, "float"),
        lambda g, n, k: float8(g, n, k, (1, k), dtype=BF16),
        "compressed-tensors FP8 by row",
    ),
    "float8_by_tensor": (
        _compressed("float-quantized", 8, "float"),
        lambda g, n, k: float8(g, n, k, (n, k), shape=(1,)),
        "compressed-tensors FP8 by tensor",
    ),
    "float8_blocks": (
        _compressed("float-quantized", 8, "float", block_structure=[32, 32]),
        lambda g, n, k: float8(g, n, k, (32, 32), dtype=BF16),
        "compressed-tensors FP8 32x32",
    ),
    "fp8_blocks": (
        _FP8 | {"weight_block_size": [48, 40]},
        lambda g, n, k: float8(g, n, k, (48, 40), name="weight_scale_inv"),
        "FP8 48x40",
    ),
    "fp8_by_tensor": (_FP8, lambda g, n, k: float8(g, n, k, (n, k), shape=()), "FP8 by tensor"),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, lambda g, n, k: float8(g, n, k, (1, k)), "FP8 by row"),
}
LINEAR = ("_proj.weight", "lm_head.weight")  # what is quantised, in most families
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_quantised(
    plain: Path,
    directory: Path,
    form: str,
    *,
    keep: tuple[str, ...] = (),
    edit: Callable[[dict[str, Array]], None] | None = None,
    **options: Any,
) -> tuple[Path, Path]:
    """A copy of the checkpoint `plain` with random quantised matrices, and one with the same dequantised to bf16.

    keep: ends of the names of matrices that stay as they are. edit: changes the quantised file's tensors.
    options: changes of quantization_config.
    """
    settings, pack, _ = FORMS[form]
    quantised, dequantised = directory / f"{form}_quantised", directory / f"{form}_plain"
    for target in (quantised, dequantised):
        shutil.copytree(plain, target)
    fields = json.loads((plain / "config.json").read_text())
    fields["quantization_config"] = settings | options
    (quantised / "config.json").write_text(json.dumps(fields))
    tensors: dict[str, Array] = {}
    for file in plain.glob("*.safetensors"):
        tensors |= load_file(file)
    packed, values = dict(tensors), dict(tensors)
    generator = np.random.default_rng(0)
    for name, tensor in sorted(tensors.items()):
        if tensor.ndim != 2 or not name.endswith(LINEAR) or name.endswith(keep or "\0"):
            continue
        parts, weight = pack(generator, *tensor.shape)
        del packed[name]
        stem = name.removesuffix("weight")
        packed |= {stem + part: np.ascontiguousarray(each) for part, each in parts.items()}
        values[name] = weight.astype(BF16)
    if edit is not None:
        edit(packed)
    save_file(packed, quantised / "model.safetensors")
    save_file(values, dequantised / "model.safetensors")
    return quantised, dequantised


def write_plain(directory: Path, tensors: Mapping[str, Array], config: Mapping[str, Any] = CONFIG) -> Path:
    """A plain checkpoint in bfloat16."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: each.astype(BF16) for name, each in tensors.items()}, directory / "model.safetensors")
    return directory


def write_gpt_oss(directory: Path, *, experts: int = 3, width: int = 64) -> tuple[Path, Path]:
    """A random gpt-oss with MXFP4 experts, and one with the same in bfloat16, as transformers stores either."""
    fields = json.loads((FAMILIES / "gpt_oss" / "config.json").read_text())
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), width) | {"num_local_experts": experts}
    fields |= sizes | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "swiglu_limit": 7.0,
        "dtype": "bfloat16",
    }
    generator = np.random.default_rng(0)
    quantised, plain = directory / "mxfp4", directory / "plain"
    plain.mkdir(parents=True), quantised.mkdir()
    (plain / "config.json").write_text(json.dumps(fields))
    sources = tensor_sources(*read_model(open_model(plain)))
    values: dict[str, Array] = {}
    packed: dict[str, Array] = {}
    for source in (each for stacked in sources.values() for each in stacked):
        tensor = (generator.standard_normal(source.shape, np.float32) * np.float32(0.3)).astype(BF16)
        if not source.name.endswith(("gate_up_proj", "down_proj")):
            packed[source.name] = values[source.name] = tensor
            continue
        count, inputs, outputs = source.shape
        blocks = generator.integers(0, 256, (count, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = generator.integers(122, 126, blocks.shape[:3]).astype(np.uint8)
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
        numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        rows = (numbers * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(count, outputs, inputs)
        values[source.name] = np.ascontiguousarray(rows.swapaxes(1, 2)).astype(BF16)
        packed |= {f"{source.name}_blocks": blocks, f"{source.name}_scales": scales}
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (quantised / "config.json").write_text(json.dumps(fields))
    save_file(values, plain / "model.safetensors")
    save_file(packed, quantised / "model.safetensors")
    return quantised, plain
