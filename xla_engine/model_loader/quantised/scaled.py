"""Matrices that are stored one code in a byte, int8 or float8, with scales by tensor, row, group or block.

FP8 checkpoints have weights in e4m3 and a scale for each tensor, row, or block, `weight_scale` or `weight_scale_inv`.
A scale of either name multiplies the weight. Scales of activations are not used: activations are not quantised.
Sources: `integrations/finegrained_fp8.py` and `fbgemm_fp8.py` of transformers.
"""

import functools
from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.matrix import (
    SCALE_TYPES,
    Indices,
    QuantisedMatrix,
    check_shape,
    checked,
    groups_of,
    packed_kind,
    stands_for,
)
from xla_engine.model_loader.tensor_files import Array, TensorFiles

_TYPES = ("F8_E4M3", "I8")


def read_fp8(fields: Fields, files: TensorFiles) -> dict[str, QuantisedMatrix]:
    """The matrices of an FP8 checkpoint by name. Raises CheckpointError."""
    form = fields.values.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        fields.fail("fmt", 'not supported, only "e4m3" is. Use another checkpoint')
    block = fields.values.get("weight_block_size")
    found = {}
    for name, info in files.tensors.items():
        if not name.endswith(".weight") or not info.dtype.startswith("F8"):
            continue
        scales = [each for each in (f"{name}_scale_inv", f"{name}_scale") if each in files.tensors]
        if len(scales) != 1:
            raise CheckpointError(
                f"{info.file}: tensor {name} is FP8 and has {'no scale' if not scales else 'two scales'} "
                f"({name}_scale_inv or {name}_scale). Download the weights again"
            )
        found[name] = scaled_matrix(fields, files, name, scales[0], block, "FP8")
    return found


def scaled_matrix(
    fields: Fields,
    files: TensorFiles,
    name: str,
    scales: str,
    block: Any,
    word: str,
    zeros: str | None = None,
    order: str | None = None,
) -> QuantisedMatrix:
    """A matrix of bytes. Raises CheckpointError.

    block: rows and columns that share a scale, if config.json names them. word: how the form is called.
    """
    info = checked(files, name, _TYPES)
    features, width = info.shape
    scale = files.tensors[scales]
    shape = scale.shape if len(scale.shape) == 2 else (int(np.prod(scale.shape)), 1)
    if len(scale.shape) > 2 or scale.dtype not in SCALE_TYPES:
        raise CheckpointError(
            f"{scale.file}: tensor {scales} is {scale.dtype}{list(scale.shape)}, which is no scale of {name}. "
            "Download the weights again"
        )
    if block is not None:
        if not isinstance(block, list) or [type(each) for each in block] != [int, int] or min(block) < 1:
            fields.fail("weight_block_size", "must be two sizes. Correct the file or download it again")
        check_shape(scale, scales, (-(-features // block[0]), -(-width // block[1])))
        rows, columns, shown = block[0], block[1], f"{block[0]}x{block[1]}"
    elif shape[0] in (1, features) and shape[1] and not width % shape[1]:
        rows, columns = features // shape[0], width // shape[1]
        by = "row" if shape[0] == features else "tensor"
        shown = f"g{columns}" if shape[1] > 1 else f"by {by}"
    else:
        raise CheckpointError(
            f"{scale.file}: tensor {scales} has shape {list(scale.shape)}, which does not fit {name} of shape "
            f"{list(info.shape)}: one scale, one for each row or for each group of a row. Download the weights again"
        )
    groups = np.arange(width) // columns
    if order is not None:
        groups = groups_of(files, order, width, -(-width // columns))
    if zeros is not None:
        check_shape(checked(files, zeros, ("I8",), len(scale.shape)), zeros, scale.shape)

    def by_row(name: str, index: Indices) -> Array:
        return files.read(name).reshape(shape)[index // rows]

    return QuantisedMatrix(
        info=stands_for(files, f"{word} {shown}", info.shape, (name, scales)),
        codes=lambda index: files.read(name)[index],
        zeros=None if zeros is None else functools.partial(by_row, zeros),
        scales=functools.partial(by_row, scales),
        groups=groups,
        scales_name=scales,
        kind=packed_kind(scale, groups, 8, symmetric=zeros is None) if info.dtype == "I8" else None,
    )
