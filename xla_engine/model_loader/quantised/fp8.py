"""FP8 weights (e4m3) with a scale for each tensor, row, or block, `weight_scale` or `weight_scale_inv`.

A scale of either name multiplies the weight. Scales of activations are not used: activations are not quantised.
Sources: `integrations/finegrained_fp8.py` and `fbgemm_fp8.py` of transformers.
"""

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.matrix import QuantisedMatrix
from xla_engine.model_loader.quantised.scaled import scaled_matrix
from xla_engine.model_loader.tensor_files import TensorFiles

_SUFFIX = ".weight"


def read_fp8(fields: Fields, files: TensorFiles) -> dict[str, QuantisedMatrix]:
    """The matrices of an FP8 checkpoint by name. Raises CheckpointError."""
    form = fields.values.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        fields.fail("fmt", 'not supported, only "e4m3" is. Use another checkpoint')
    block = fields.values.get("weight_block_size")
    found = {}
    for name, info in files.tensors.items():
        if not name.endswith(_SUFFIX) or not info.dtype.startswith("F8"):
            continue
        scales = [each for each in (f"{name}_scale_inv", f"{name}_scale") if each in files.tensors]
        if len(scales) != 1:
            raise CheckpointError(
                f"{info.file}: tensor {name} is FP8 and has {'no scale' if not scales else 'two scales'} "
                f"({name}_scale_inv or {name}_scale). Download the weights again"
            )
        found[name] = scaled_matrix(fields, files, name, scales[0], block, "FP8")
    return found
