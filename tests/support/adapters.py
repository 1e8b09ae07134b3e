"""LoRA adapters on disk as PEFT saves them, and PEFT's formula in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.models import TINY, tiny_checkpoint
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.lora.form import target_of
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.model_loader.families.dense import LLAMA
from xla_engine.model_loader.families.family import Family, tensor_sources
from xla_engine.model_loader.peft.request import LoRARequest

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama_checkpoint(
    dtype: str = "bfloat16", model: ModelConfig = TINY, family: Family = LLAMA
) -> Checkpoint:
    """The random model of the other tests, as if it had been a Llama's files, or another family's."""
    return replace(tiny_checkpoint(dtype, model=model), sources=tensor_sources(model, family))


def modules_of(checkpoint: Checkpoint, modules: Sequence[str] = MODULES) -> dict[str, tuple[int, ...]]:
    """Linear modules of the layers that adapters can change, and the shapes of their weights."""
    return {
        source.name.removesuffix(".weight"): source.shape
        for leaf, parts in checkpoint.sources.items()
        for source in parts
        if target_of(leaf) is not None and source.name.split(".")[-2] in modules
    }


def write_adapter(
    path: Path,
    checkpoint: Checkpoint,
    *,
    seed: int = 0,
    rank: int = 8,
    alpha: float = 16,
    modules: Sequence[str] = MODULES,
    scales: tuple[float, float] = (0.2, 0.2),
    tensors: Mapping[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """A random adapter. scales: of A and B. `tensors` come on top, `fields` are those of its configuration."""
    draw = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for module, (rows, columns) in modules_of(checkpoint, modules).items():
        name = f"base_model.model.{module}.lora_"
        for which, shape, scale in zip("AB", ((rank, columns), (rows, rank)), scales, strict=True):
            values = draw.standard_normal(shape, np.float32)
            if scale > 1e30:
                values = np.sign(values)  # a larger one would be infinite
            found[f"{name}{which}.weight"] = values * np.float32(scale)
    path.mkdir(parents=True)
    save_file({**found, **dict(tensors or {})}, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules)}
    (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", **fields}))
    return path


def merged(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint with W + s B A in place of W, by PEFT's formula in float64."""
    from safetensors.numpy import load_file

    tensors = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (np.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    weights = {name: np.array(checkpoint.weights[name]) for name in checkpoint.weights}
    for leaf, parts in checkpoint.sources.items():
        first = 0
        for source in parts:
            name = f"base_model.model.{source.name.removesuffix('.weight')}.lora_"
            last = first + source.shape[0]
            if f"{name}A.weight" in tensors:
                a, b = (tensors[f"{name}{which}.weight"].astype(np.float64) for which in "AB")
                weights[leaf][first:last] += (scale * b @ a).astype(weights[leaf].dtype)
            first = last
    return replace(checkpoint, weights=weights)


def adapters(directory: Path, checkpoint: Checkpoint, count: int) -> list[LoRARequest]:
    """Different adapters of different ranks, not all of all modules."""
    return [
        LoRARequest(
            f"adapter-{number}",
            number,
            str(
                write_adapter(
                    directory / str(number),
                    checkpoint,
                    seed=number,
                    rank=(8, 3, 16)[number % 3],
                    modules=MODULES if number % 2 else ("q_proj", "v_proj", "up_proj"),
                )
            ),
        )
        for number in range(1, count + 1)
    ]
