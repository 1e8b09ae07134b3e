"""GPTQ, as AutoGPTQ and GPTQModel store it, in 4 or 8 bits.

`qweight` is int32 `[K / (32 / bits), N]`, `qzeros` `[G, N / (32 / bits)]`, `scales` `[G, N]`, and `g_idx` `[K]` names
the group of each column, in any order. The lowest bits come first. The format "gptq" stores zero points less one,
borrowing within a word, "gptq_v2" as they are. Some files of symmetric weights say one and do the other, but their
zero point is known.
Source: `gptqmodel/utils/model.py` of GPTQModel.
"""

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.matrix import (
    REMEDY,
    Indices,
    QuantisedMatrix,
    check_shape,
    checked,
    columns,
    even_groups,
    group_count,
    group_size,
    packed_kind,
    picked,
    read_groups,
    stands_for,
    unpacked,
)
from xla_engine.model_loader.tensor_files import Array, TensorFiles

_SUFFIX = ".qweight"
_FORMATS = ("gptq", "gptq_v2")
_BITS = (4, 8)


def read_gptq(fields: Fields, files: TensorFiles) -> dict[str, QuantisedMatrix]:
    """The matrices of a GPTQ checkpoint by the name of the plain weight. Raises CheckpointError."""
    bits = fields.integer("bits", low=2, high=8)
    if bits not in _BITS:
        fields.fail("bits", "not supported for GPTQ, only 4 and 8 are. Use another checkpoint")
    stored = fields.values.get("checkpoint_format") or "gptq"
    if stored not in _FORMATS or fields.flag("is_marlin_format", default=False):
        fields.fail(
            "checkpoint_format", f"not supported, only {' and '.join(_FORMATS)} are. Use another checkpoint"
        )
    dynamic = fields.values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(rule).startswith("-:") for rule in dynamic):
        fields.fail(
            "dynamic", "not supported, unless its rules only leave modules out. Use another checkpoint"
        )
    size, symmetric = group_size(fields), fields.flag("sym", default=True)
    modules = [name.removesuffix(_SUFFIX) for name in files.tensors if name.endswith(_SUFFIX)]
    return {
        f"{module}.weight": _matrix(files, module, bits, size, symmetric, stored == "gptq")
        for module in modules
    }


def _matrix(
    files: TensorFiles, module: str, bits: int, size: int, symmetric: bool, less_one: bool
) -> QuantisedMatrix:
    codes, zeros, scales, order = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    info, each = checked(files, codes, ("I32",)), 32 // bits
    width, features = info.shape[0] * each, info.shape[1]
    count = group_count(info, codes, width, size)
    check_shape(checked(files, zeros, ("I32",)), zeros, (count, -(-features // each)))
    scale = checked(files, scales, ("F16", "BF16", "F32"))
    check_shape(scale, scales, (count, features))
    groups = even_groups(width, count)
    if order in files.tensors:
        groups = read_groups(files, order, width, count)

    def codes_of(index: Indices) -> Array:
        return unpacked(columns(files.read(codes), index).T, bits)

    def zeros_of(index: Indices) -> Array:
        words = files.read(zeros).view(np.uint32)
        if less_one and not symmetric:
            words = words + np.uint32(0x11111111 if bits == 4 else 0x01010101)
        found, middle = picked(words, index, bits).T, 1 << (bits - 1)
        if not symmetric or (found == middle).all():
            return found
        if not (found == middle - 1).all():
            raise CheckpointError(
                f"{info.file}: tensor {zeros} holds zero points other than {middle}, but config.json has sym = "
                f"true. {REMEDY}"
            )
        return found + np.uint8(1)

    shown = f"GPTQ {bits}-bit g{size}" + ("" if symmetric else " asymmetric")
    return QuantisedMatrix(
        info=stands_for(files, shown, (features, width), (codes, zeros, scales)),
        codes=codes_of,
        zeros=zeros_of,
        scales=lambda index: columns(files.read(scales), index).T,
        groups=groups,
        scales_name=scales,
        kind=packed_kind(scale, groups, bits, symmetric=symmetric),
    )
