"""Read a LoRA adapter that PEFT saved, as matrices for the weights of a model.

PEFT's formula (Hu et al. 2021): a linear weight W becomes W + s B A, with s = lora_alpha / r, or lora_alpha / sqrt(r)
where `use_rslora` is set. s goes into B in float32 before B is rounded to the type of the model.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.lora.form import DOWN, RANKS, UP, LoraForm, part_ends, target_of
from xla_engine.model_loader.families.family import Source
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.safetensors_files import open_tensor_file
from xla_engine.model_loader.tensor_files import Array, TensorFiles
from xla_engine.model_loader.weights import Sources

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
# Unsupported fields of the configuration, and why.
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "lora_bias": "biases of adapters are not supported",
    "modules_to_save": "whole modules in an adapter are not supported; merge it into the checkpoint",
    "fan_in_fan_out": "weights must be [out, in]",
    "rank_pattern": "every weight must have the same rank",
    "alpha_pattern": "every weight must have the same scale",
    "layer_replication": "layers must be those of the checkpoint",
    "trainable_token_indices": "embeddings of adapters are not supported; merge it",
    "target_parameters": "adapters of experts are not supported; merge it",
}
_MODULES = "the linear modules of attention, MLPs and recurrent layers in"
_MOST_RANK = 4096
# The most that an adapter may add to an output for inputs of 1. With inputs up to float16's maximum, 2**16, the square
# of the output still fits into a float32, as the norms and gates after it need.
_LARGEST_CHANGE = 2.0**48


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """leaves: one adapter's matrices by the names of `Leaves.adapters`, in the device's layout. fingerprint: sha256
    of its files' contents."""

    leaves: Mapping[str, Array]
    fingerprint: str


def read_adapter(path: str | Path, sources: Sources, config: ModelConfig, form: LoraForm) -> Adapter:
    """Read the adapter in the directory `path` for a model with this configuration and these `sources` of leaves.

    Raises CheckpointError, naming file, field or tensor and the remedy, if it cannot be loaded.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: no such directory. Name the one that PEFT's save_pretrained() wrote"
        )
    fields = Fields.of_file(directory / CONFIG)
    scale = _scale(fields, form)
    files = open_tensor_file(directory / WEIGHTS)
    pairs = _pairs(files)
    leaves, changed = dict[str, Array](), set[str]()
    for leaf, parts in sources.items():
        if (target := target_of(leaf)) is None:
            continue
        ends = part_ends(config.layer(int(leaf.split(".")[1])), target)
        shapes = form.shapes(parts[0].shape[1], ends)
        leaves |= {leaf + part: np.zeros(shape[1:], form.dtype_of(part)) for part, shape in shapes.items()}
        down, up = leaves[leaf + DOWN], leaves[leaf + UP]
        begin = 0
        for source in parts:  # one tensor may be several parts
            end = begin + (source.shape[0] if source.order is None else len(source.order))
            module = source.name.removesuffix(".weight")
            if (pair := pairs.get(module)) is not None:
                a, b = _matrices(files, pair, source, fields, scale)
                up[: len(b), begin:end] = b
                for part in _parts(ends, begin, end):
                    down[part, : len(a)], leaves[leaf + RANKS][part] = a, len(a)
                changed.add(module)
            begin = end
    pairs = {module: pair for module, pair in pairs.items() if module not in changed}
    if pairs:
        raise CheckpointError(
            f"{files.names}: the adapter changes {min(pairs)}, and here it can only change {_MODULES} this model's "
            f"{config.num_hidden_layers} layers{'' if config.experts is None else ', without experts'}. Use an "
            f"adapter that was trained for this model, or merge it into the checkpoint "
            "with PEFT's merge_and_unload()"
        )
    digest = hashlib.sha256(repr((scale, files.fingerprint())).encode())
    stored = {name: form.stored(each) if name.endswith(UP) else each for name, each in leaves.items()}
    return Adapter(leaves=stored, fingerprint=digest.hexdigest())


def _scale(fields: Fields, form: LoraForm) -> float:
    """The scale of B. Raises CheckpointError for an unsupported kind of adapter."""
    if fields.values.get("peft_type") != "LORA":
        fields.fail("peft_type", "only LORA adapters can be loaded. Merge it into the checkpoint")
    for name, why in _REFUSED.items():
        if fields.values.get(name):
            fields.fail(name, f"is not possible here: {why}")
    if fields.values.get("bias", "none") != "none":
        fields.fail("bias", "biases of adapters are not supported. Merge it into the checkpoint")
    rank = fields.integer("r", high=_MOST_RANK)
    if rank > form.rank:
        fields.fail(
            "r", f"is more than max_lora_rank {form.rank}. Start the engine with max_lora_rank={rank}"
        )
    alpha = fields.number("lora_alpha", high=1e6)
    return alpha / (math.sqrt(rank) if fields.flag("use_rslora", default=False) else rank)


def _pairs(files: TensorFiles) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in files.tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{files.names}: tensor {name!r} does not belong to a LoRA adapter of linear layers. Merge the "
                f"adapter "
                "into the checkpoint with PEFT's merge_and_unload()"
            )
        found.setdefault(match["module"], {})[match["which"]] = name
    if not found:
        raise CheckpointError(
            f"{files.names}: has no tensors, so the adapter would change nothing. Save it again with PEFT's "
            "save_pretrained()"
        )
    for module, pair in found.items():
        if len(pair) < 2:
            raise CheckpointError(f"{files.names}: {module} has only one of A and B. Save the adapter again")
    return found


def _matrices(
    files: TensorFiles, pair: Mapping[str, str], source: Source, fields: Fields, scale: float
) -> tuple[Array, Array]:
    """A `[r, K]` and scaled B `[r, rows]` for a tensor of the model, in float32, with rows in the leaf's order."""
    if source.convert is not None:
        raise CheckpointError(
            f"{files.names}: adapters for {source.name} are not supported, because this family stores it in its own "
            f"form. "
            "Merge the adapter into the checkpoint with PEFT's merge_and_unload()"
        )
    rank = fields.values["r"]
    shapes = {"A": (rank, source.shape[1]), "B": (source.shape[0], rank)}
    arrays = {}
    for which, shape in shapes.items():
        info = files.tensors[pair[which]]
        if info.shape != shape or info.dtype not in files.dtypes:
            raise CheckpointError(
                f"{info.file}: tensor {pair[which]} is {info.dtype}{list(info.shape)}, not a float {list(shape)}, "
                f"which the model and r = {rank} ask for. Use an adapter that was trained for this model"
            )
        arrays[which] = files.read(pair[which]).astype(np.float32)
        if not np.isfinite(arrays[which]).all():
            raise CheckpointError(
                f"{info.file}: tensor {pair[which]} holds NaN or infinite values. Download the file again"
            )
    most = {which: float(np.abs(array).max()) for which, array in arrays.items()}
    if not max(1, most["A"] * source.shape[1]) * max(1, most["B"] * rank * scale) < _LARGEST_CHANGE:
        raise CheckpointError(
            f"{files.names}: {pair['A']} and {pair['B']} contain values as large as {most['A']:.2g} and "
            f"{most['B']:.2g}, "
            f"which are scaled by {scale:.3g}: their products overflow. Save the "
            "adapter again"
        )
    rows = arrays["B"] if source.order is None else arrays["B"][source.order]
    return arrays["A"], source.in_engine_order(rows).T * np.float32(scale)


def _parts(ends: tuple[int, ...], begin: int, end: int) -> list[int]:
    """The parts of a leaf that contain the features `begin .. end`; a fused tensor has one A for several parts."""
    begins = (0, *ends)
    return [part for part, last in enumerate(ends) if begins[part] < end and begin < last]
