"""The compressed-tensors format of llm-compressor: packed integers of 4 or 8 bits, int8, and FP8.

`weight_packed` is int32 `[N, K / (32 / bits)]`, the lowest bits first, of signed codes plus half of their range.
`weight_zero_point`, if any, is packed the same way along N. `weight_scale` is `[N, G]`, and `weight_g_idx` names the
group of each column, in any order. Int8 and FP8 weights are `weight` with the same other tensors, unpacked.
What the configuration says of activations, keys and values is ignored: here they keep their precision.
Source: `compressors/pack_quantized` and `compressors/naive_quantized` of compressed-tensors.
"""

from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.matrix import (
    REMEDY,
    SCALE_TYPES,
    Indices,
    QuantisedMatrix,
    check_shape,
    checked,
    groups_of,
    packed_kind,
    picked,
    stands_for,
    unpacked,
)
from xla_engine.model_loader.quantised.scaled import scaled_matrix
from xla_engine.model_loader.tensor_files import Array, TensorFiles

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_PACKED, _PLAIN = ".weight_packed", ".weight"
_BITS = (4, 8)


def read_compressed_tensors(fields: Fields, files: TensorFiles) -> dict[str, QuantisedMatrix]:
    """The matrices of a compressed-tensors checkpoint by the name of the plain weight. Raises CheckpointError."""
    _check(fields)
    blocks = {tuple(block) for each in _weights(fields) if (block := each.values.get("block_structure"))}
    if len(blocks) > 1:
        fields.fail("config_groups", "not supported (blocks of several sizes). Use another checkpoint")
    block = list(blocks.pop()) if blocks else None
    found = {}
    for name, info in files.tensors.items():
        if name.endswith(_PACKED):
            module = name.removesuffix(_PACKED)
            found[module + _PLAIN] = _packed(files, module)
        elif name.endswith(_PLAIN) and info.dtype in ("I8", "F8_E4M3"):
            found[name] = _bytes(fields, files, name, block if info.dtype != "I8" else None)
    return found


def _check(fields: Fields) -> None:
    groups = fields.within("config_groups")
    formats = {fields.values.get("format")} | {
        group.get("format") for group in (groups.values.values() if groups else ()) if isinstance(group, dict)
    }
    for each in formats - {None, "mixed-precision"}:
        if each not in _FORMATS:
            Fields(fields.file, {"format": each}, "quantization_config.").fail(
                "format", f"not supported, only {', '.join(_FORMATS)} are. Use another checkpoint"
            )
    sparsity = fields.within("sparsity_config")
    if sparsity is not None and sparsity.values.get("format") not in (None, "dense"):
        sparsity.fail("format", 'not supported, only "dense" is. Use another checkpoint')
    transform = fields.within("transform_config")
    if transform is not None and transform.values.get("config_groups"):
        fields.fail("transform_config", "not supported (transformed weights). Use another checkpoint")
    for weights in _weights(fields):
        kind, bits = weights.values.get("type") or "int", weights.integer("num_bits", high=32, default=8)
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            weights.fail(
                "num_bits",
                f'of type {kind!r} is not supported: "int" of 4 and 8 and "float" of 8 are. Use another checkpoint',
            )


def _weights(fields: Fields) -> list[Fields]:
    """The objects of `config_groups` that describe weights."""
    return [
        weights
        for groups in fields.objects("config_groups")
        for group in groups.objects(*groups.values)
        for weights in group.objects("weights")
    ]


def _packed(files: TensorFiles, module: str) -> QuantisedMatrix:
    packed, scales, zeros, shape, order = (
        f"{module}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
    )
    info = checked(files, packed, ("I32",))
    size = checked(files, shape, ("I64", "I32"), 1)
    check_shape(size, shape, (2,))
    features, width = (int(each) for each in files.read(shape))
    bits = next((bits for bits in _BITS if info.shape == (features, -(-width * bits // 32))), None)
    if bits is None or features < 1:
        raise CheckpointError(
            f"{info.file}: tensor {packed} has shape {list(info.shape)}, which holds {[features, width]} numbers "
            f"({shape}) neither in 4 nor in 8 bits. {REMEDY}"
        )
    scale = checked(files, scales, SCALE_TYPES)
    count = scale.shape[1]
    check_shape(scale, scales, (features, count))
    if not count or width % count:
        raise CheckpointError(
            f"{info.file}: tensor {scales} has {count} groups, which do not divide the {width} columns. {REMEDY}"
        )
    if order in files.tensors and files.tensors[order].shape == (0,):
        order = ""  # none
    groups = groups_of(files, order, width, count)
    if zeros in files.tensors:
        check_shape(checked(files, zeros, ("I32",)), zeros, (-(-features * bits // 32), count))

    def zeros_of(index: Indices) -> Array:
        if zeros not in files.tensors:  # symmetric
            return np.full((len(index), count), 1 << (bits - 1), np.uint8)
        return picked(files.read(zeros).T, index, bits).T

    shown = f"compressed-tensors {bits}-bit g{width // count if count > 1 else -1}"
    shown += " asymmetric" if zeros in files.tensors else ""
    return QuantisedMatrix(
        info=stands_for(files, shown, (features, width), (packed, scales)),
        codes=lambda index: unpacked(files.read(packed)[index], bits)[:, :width],
        zeros=zeros_of,
        scales=lambda index: files.read(scales)[index],
        groups=groups,
        scales_name=scales,
        kind=packed_kind(scale, groups, bits, symmetric=zeros not in files.tensors),
    )


def _bytes(fields: Fields, files: TensorFiles, name: str, block: Any) -> QuantisedMatrix:
    info, scales = files.tensors[name], f"{name}_scale"
    if scales not in files.tensors:
        raise CheckpointError(
            f"{info.file}: tensor {name} is {info.dtype} and has no {scales}. Download the weights again"
        )
    zeros, order = f"{name}_zero_point", f"{name}_g_idx"
    return scaled_matrix(
        fields,
        files,
        name,
        scales,
        block,
        "compressed-tensors " + ("8-bit" if info.dtype == "I8" else "FP8"),
        zeros if info.dtype == "I8" and zeros in files.tensors else None,
        order if order in files.tensors else None,
    )
