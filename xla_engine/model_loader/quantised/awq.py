"""AWQ, as AutoAWQ stores it (version "gemm"): `qweight` int32 `[K, N / 8]`, `qzeros` `[G, N / 8]`, `scales` `[G, N]`.

A word holds the 4-bit codes of eight neighbouring columns in the order 0 2 4 6 1 3 5 7.
Source: `awq/utils/packing_utils.py` of AutoAWQ.
"""

import functools

import numpy as np

from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.matrix import (
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
    stands_for,
)
from xla_engine.model_loader.tensor_files import Array, TensorFiles

_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in a word, of each of eight columns
_SUFFIX = ".qweight"


def read_awq(fields: Fields, files: TensorFiles) -> dict[str, QuantisedMatrix]:
    """The matrices of an AWQ checkpoint by the name of the plain weight. Raises CheckpointError."""
    if fields.integer("bits" if fields.given("bits") else "w_bit", low=2, high=8, default=4) != 4:
        fields.fail("bits", "not supported for AWQ, only 4 is. Use another checkpoint")
    if str(fields.values.get("version") or "gemm").lower() != "gemm":
        fields.fail("version", 'not supported, only "gemm" is. Use another checkpoint')
    if not fields.flag("zero_point", default=True):
        fields.fail("zero_point", "not supported, only true is. Use another checkpoint")
    size = group_size(fields, "group_size" if fields.given("group_size") else "q_group_size")
    modules = [name.removesuffix(_SUFFIX) for name in files.tensors if name.endswith(_SUFFIX)]
    return {f"{module}.weight": _matrix(files, module, size) for module in modules}


def _matrix(files: TensorFiles, module: str, size: int) -> QuantisedMatrix:
    codes, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    info = checked(files, codes, ("I32",))
    width, features = info.shape[0], info.shape[1] * 8
    groups = group_count(info, codes, width, size)
    check_shape(checked(files, zeros, ("I32",)), zeros, (groups, features // 8))
    scale = checked(files, scales, ("F16", "BF16", "F32"))
    check_shape(scale, scales, (groups, features))
    of_columns = even_groups(width, groups)
    return QuantisedMatrix(
        info=stands_for(files, f"AWQ 4-bit g{size}", (features, width), (codes, zeros, scales)),
        codes=functools.partial(_columns, files, codes),
        zeros=functools.partial(_columns, files, zeros),
        scales=lambda index: columns(files.read(scales), index).T,
        groups=of_columns,
        scales_name=scales,
        kind=packed_kind(scale, of_columns, 4, symmetric=False),
    )


def _columns(files: TensorFiles, name: str, index: Indices) -> Array:
    """The codes of columns of a tensor, as rows."""
    return picked(files.read(name), index, 4, _PLACE).T
