"""AWQ and GPTQ: integers packed into int32 words, with scales and zero points for groups of columns.

AWQ, as AutoAWQ stores it (version "gemm"): `qweight` `[K, N / 8]`, `qzeros` `[G, N / 8]`, `scales` `[G, N]`. A word
holds the 4-bit codes of eight neighbouring columns in the order 0 2 4 6 1 3 5 7.
Source: `awq/utils/packing_utils.py` of AutoAWQ.

GPTQ, as AutoGPTQ and GPTQModel store it, in 4 or 8 bits: `qweight` `[K / (32 / bits), N]`, `qzeros`
`[G, N / (32 / bits)]`, `scales` `[G, N]`, and `g_idx` `[K]` names the group of each column, in any order. The lowest
bits come first. The format "gptq" stores zero points less one, borrowing within a word, "gptq_v2" as they are. Some
files of symmetric weights say one and do the other, but their zero point is known.
Source: `gptqmodel/utils/model.py` of GPTQModel.
"""

from functools import partial

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.matrix import (
    REMEDY,
    SCALE_TYPES,
    Indices,
    QuantisedMatrix,
    Rows,
    check_shape,
    checked,
    columns,
    groups_of,
    packed_kind,
    picked,
    stands_for,
    unpacked,
)
from xla_engine.model_loader.tensor_files import Array, TensorFiles, TensorInfo

_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in a word of AWQ, of each of eight columns
_SUFFIX = ".qweight"
_FORMATS = ("gptq", "gptq_v2")
_BITS = (4, 8)


def read_awq(fields: Fields, files: TensorFiles) -> dict[str, QuantisedMatrix]:
    """The matrices of an AWQ checkpoint by the name of the plain weight. Raises CheckpointError."""
    if fields.integer("bits" if fields.given("bits") else "w_bit", low=2, high=8, default=4) != 4:
        fields.fail("bits", "not supported for AWQ, only 4 is. Use another checkpoint")
    if str(fields.values.get("version") or "gemm").lower() != "gemm":
        fields.fail("version", 'not supported, only "gemm" is. Use another checkpoint')
    if not fields.flag("zero_point", default=True):
        fields.fail("zero_point", "not supported, only true is. Use another checkpoint")
    size = _group_size(fields, "group_size" if fields.given("group_size") else "q_group_size")

    def matrix(module: str) -> QuantisedMatrix:
        def rows(name: str, index: Indices) -> Array:
            return picked(files.read(name), index, 4, _PLACE).T

        info = checked(files, f"{module}.qweight", ("I32",))
        shape = info.shape[1] * 8, info.shape[0]
        codes, zeros = (partial(rows, f"{module}.{part}") for part in ("qweight", "qzeros"))
        return _matrix(files, module, shape, size, 4, f"AWQ 4-bit g{size}", codes, zeros)

    return {f"{module}.weight": matrix(module) for module in _modules(files)}


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
    size, symmetric = _group_size(fields, "group_size"), fields.flag("sym", default=True)

    def matrix(module: str) -> QuantisedMatrix:
        names = f"{module}.qweight", f"{module}.qzeros"
        info = checked(files, names[0], ("I32",))

        def codes(index: Indices) -> Array:
            return unpacked(columns(files.read(names[0]), index).T, bits)

        def zeros(index: Indices) -> Array:
            words = files.read(names[1]).view(np.uint32)
            if stored == "gptq" and not symmetric:
                words = words + np.uint32(0x11111111 if bits == 4 else 0x01010101)
            found = picked(words, index, bits).T
            return _middle(info, names[1], found, 1 << (bits - 1)) if symmetric else found

        shape, shown = (info.shape[1], info.shape[0] * 32 // bits), f"GPTQ {bits}-bit g{size}"
        shown += "" if symmetric else " asymmetric"
        return _matrix(files, module, shape, size, bits, shown, codes, zeros, "g_idx", symmetric=symmetric)

    return {f"{module}.weight": matrix(module) for module in _modules(files)}


def _middle(info: TensorInfo, name: str, zeros: Array, middle: int) -> Array:
    """The zero points of symmetric weights, stored as they are or less one. Raises CheckpointError for others."""
    if (zeros == middle).all():
        return zeros
    if not (zeros == middle - 1).all():
        raise CheckpointError(
            f"{info.file}: tensor {name} holds zero points other than {middle}, but config.json has sym = "
            f"true. {REMEDY}"
        )
    return zeros + np.uint8(1)


def _modules(files: TensorFiles) -> list[str]:
    return [name.removesuffix(_SUFFIX) for name in files.tensors if name.endswith(_SUFFIX)]


def _group_size(fields: Fields, name: str) -> int:
    """How many columns share a scale; -1: all of them. Raises CheckpointError."""
    size = fields.integer(name, low=-1, high=2**20, default=-1)
    if size == 0:
        fields.fail(name, "must be -1 or at least 1. Correct the file or download it again")
    return size


def _matrix(
    files: TensorFiles,
    module: str,
    shape: tuple[int, int],
    size: int,
    bits: int,
    form: str,
    codes_of: Rows,
    zeros_of: Rows,
    order: str = "",
    *,
    symmetric: bool = False,
) -> QuantisedMatrix:
    """shape: `[N, K]`. size: of groups. order: the name of the tensor of groups, if the method has one."""
    codes, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    features, width = shape
    if size != -1 and width % size:
        raise CheckpointError(
            f"{files.tensors[codes].file}: tensor {codes} has {width} columns, which groups of {size} do not divide. "
            "Correct group_size in config.json, or download both again"
        )
    count = 1 if size == -1 else width // size
    check_shape(checked(files, zeros, ("I32",)), zeros, (count, -(-features * bits // 32)))
    scale = checked(files, scales, SCALE_TYPES)
    check_shape(scale, scales, (count, features))
    groups = groups_of(files, f"{module}.{order}", width, count)
    return QuantisedMatrix(
        info=stands_for(files, form, shape, (codes, zeros, scales)),
        codes=codes_of,
        zeros=zeros_of,
        scales=lambda index: columns(files.read(scales), index).T,
        groups=groups,
        scales_name=scales,
        kind=packed_kind(scale, groups, bits, symmetric=symmetric),
    )
