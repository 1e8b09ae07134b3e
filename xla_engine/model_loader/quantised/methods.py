"""Choose what reads a quantised checkpoint, by `quant_method`, and give its weights their plain names."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from xla_engine.config import AUTO, STORED_AS, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.compressed_tensors import read_compressed_tensors
from xla_engine.model_loader.quantised.matrix import QuantisedMatrix
from xla_engine.model_loader.quantised.mxfp4 import read_mxfp4
from xla_engine.model_loader.quantised.packed import read_awq, read_gptq
from xla_engine.model_loader.quantised.scaled import read_fp8
from xla_engine.model_loader.tensor_files import TensorFiles

MXFP4 = "mxfp4"  # of gpt-oss, whose family reads it
METHODS: Mapping[str, Callable[[Fields, TensorFiles], dict[str, QuantisedMatrix]]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
}
_FIELDS = ("quantization_config", "compression_config")
# What stands beside the codes of a module, and scales of activations, keys and values.
_PARTS = re.compile(
    r"(qweight|qzeros|scales|g_idx|weight_(packed|scale|scale_inv|zero_point|shape|g_idx)"
    r"|(input|output)_(scale|zero_point)|(activation|input)_scale_ub)"
)
_OF_CACHE = re.compile(r".*\.[kqv]_(scale|zero_point)")


def quantisation_fields(fields: Fields) -> Fields | None:
    """The object of config.json that describes quantised weights; None if they are plain."""
    for each in (fields, *fields.objects("text_config")):
        for found in each.objects(*_FIELDS):
            if found.values:
                return found
    return None


def check_quantisation(fields: Fields) -> None:
    """Raise CheckpointError if config.json describes quantised weights that cannot be read."""
    if (found := quantisation_fields(fields)) is not None:
        _method(found)(found, TensorFiles({}, {}))


def without_method(fields: Fields, options: EngineConfig) -> EngineConfig:
    """The options without a `quantization` that only says how the checkpoint is stored. Raises ConfigError if it is
    not stored so."""
    named = options.quantization
    if named not in STORED_AS:
        return options
    found = quantisation_fields(fields)
    stored = None if found is None else found.values.get("quant_method")
    if stored != named:
        raise ConfigError(
            f"quantization {named!r} does not match the checkpoint, "
            + (f"whose quant_method is {stored!r}" if stored else "which names no quant_method")
            + f" ({fields.file}). Leave quantization out: the checkpoint says how it is stored"
        )
    return replace(options, quantization=AUTO)


def dequantised(files: TensorFiles, fields: Fields, names: Collection[str]) -> TensorFiles:
    """The tensors of a quantised checkpoint with plain names, dequantised when they are read.

    fields: `quantisation_fields`. names: the tensors that the model needs. Raises CheckpointError.
    """
    if fields.values.get("quant_method") == MXFP4:
        experts = read_mxfp4(files)
        scales = {each.scales for each in experts.values()}
        plain = {name: info for name, info in files.tensors.items() if name not in scales}
        return files.with_computed(plain, experts, "")
    matrices = _method(fields)(fields, files)
    modules = {name.removesuffix(".weight") for name in matrices}

    def is_part(name: str) -> bool:
        module, _, part = name.rpartition(".")
        if name in matrices or _OF_CACHE.fullmatch(name) or (module in modules and _PARTS.fullmatch(part)):
            return True
        # AutoGPTQ stores a bias of zeros where a layer has none.
        is_extra = part == "bias" and module in modules and name not in names
        return is_extra and files.tensors[name].dtype in files.dtypes and not files.read(name).any()

    tensors = {name: info for name, info in files.tensors.items() if not is_part(name)}
    return files.with_computed(tensors, matrices, json.dumps(fields.values, sort_keys=True))


def _method(fields: Fields) -> Callable[[Fields, TensorFiles], dict[str, QuantisedMatrix]]:
    method = fields.values.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        fields.fail(
            "quant_method",
            f"not supported for this model, only {', '.join(METHODS)} are. Use a checkpoint of one of these, or an "
            "unquantised copy",
        )
    return METHODS[method]
