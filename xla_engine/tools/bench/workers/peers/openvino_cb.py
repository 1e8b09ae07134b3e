"""OpenVINO GenAI's ContinuousBatchingPipeline, on a model converted once by optimum-intel."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

PROMPT_TOKENS = 2048  # prompt tokens of a step besides the decoding rows


class OpenVino:
    """OpenVINO's side of the protocol in `worker.py`."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._running: dict[int, Any] = {}  # handles of requests
        self._requests = 0

    def load(
        self, wanted: Any, *, cache_precision: str = "", weight_format: str = "", widening: int = 1
    ) -> dict[str, Any]:
        """cache_precision: of keys and values; that of the model by default. weight_format: as stored by default.

        widening: requests at once, for each slot; as far as the cache goes.
        """
        name = "-".join(filter(None, (Path(wanted.model).resolve().name, weight_format)))
        directory = Path(wanted.cache) / "openvino" / name
        if not directory.exists():
            convert(wanted.model, directory, weight_format)
        has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        # without such units it computes in float32 only
        short = "bf16" if wanted.dtype == "bfloat16" and has_bf16 else "f32"
        options = openvino_genai.SchedulerConfig()
        options.max_num_seqs = self.room = widening * wanted.max_num_seqs
        options.max_num_batched_tokens = self.room + PROMPT_TOKENS
        options.cache_size = cache_gib(wanted.model, wanted.max_num_seqs * wanted.max_model_len)
        options.enable_prefix_caching = False
        kept = cache_precision or short
        properties = {
            "INFERENCE_PRECISION_HINT": short,
            "INFERENCE_NUM_THREADS": self._threads,
            "KV_CACHE_PRECISION": kept,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), options, "CPU", properties)
        weights = weight_format or "as stored"
        return {
            "versions": f"openvino-genai {openvino_genai.__version__}",
            "notes": f"weights {weights}, computed in {short}, cache {kept}, {PROMPT_TOKENS} prompt tokens a step",
            "arrivals": True,
            "weight_bytes": (directory / "openvino_model.bin").stat().st_size,
        }

    # `room` counts, because its scheduler takes more than max_num_seqs when prompts are split (dynamic_split_fuse, the
    # default).

    def start(self, index: int, prompt: list[int], max_tokens: int) -> None:
        greedy = openvino_genai.GenerationConfig()
        greedy.max_new_tokens = greedy.min_new_tokens = max_tokens
        greedy.ignore_eos, greedy.do_sample = True, False
        greedy.set_eos_token_id(0)  # ignored, but the default for models without one, -1, is refused
        self._requests += 1
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._running[index] = self._pipeline.add_request(self._requests, ids, greedy)

    def step(self) -> Iterator[tuple[int, list[int]]]:
        self._pipeline.step()
        for index, handle in self._running.items():
            while handle.can_read():
                (output,) = handle.read().values()
                yield index, output.generated_ids

    def is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def end(self, index: int) -> None:
        del self._running[index]


def cache_gib(model: str, positions: int) -> int:
    """Whole GiB that hold keys and values of `positions` in float32, and some to spare."""
    config = json.loads((Path(model) / "config.json").read_text())
    width = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return math.ceil(1.1 * 4 * width * positions / 2**30)


def convert(model: str, directory: Path, weight_format: str) -> None:
    """Write OpenVINO's form of a Hugging Face directory, weights as they are stored, or in `weight_format`."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        whole = Path(folder, "ir")
        main_export(
            model,
            output=whole,
            task="text-generation-with-past",
            library_name="transformers",
            stateful=True,
            convert_tokenizer=False,
            ov_config=OVConfig(),  # with None, weights of large models would be int8
            local_files_only=True,
        )
        if weight_format:
            compress(whole / "openvino_model.xml", weight_format)
        os.replace(whole, directory)


def compress(path: Path, weight_format: str) -> None:
    """Quantise the weights of a model in place, and check it: `main_export` ignores that it is asked to."""
    import nncf

    before = path.with_suffix(".bin").stat().st_size
    # nncf's default leaves the embedding, and so a tied head, in eight bits
    groups = {"group_size": 64, "ratio": 1.0, "all_layers": True} if weight_format.startswith("int4") else {}
    mode = nncf.CompressWeightsMode(weight_format)
    small = nncf.compress_weights(openvino.Core().read_model(path), mode=mode, **groups)
    held = path.with_name("compressed.xml")
    openvino.save_model(small, held, compress_to_fp16=False)
    types = constant_bytes(held)
    kind, most = ("u4", 0.4) if groups else ("u8", 0.6)
    if (
        types.get(kind, 0) < 0.8 * sum(types.values())
        or held.with_suffix(".bin").stat().st_size > most * before
    ):
        raise RuntimeError(
            f"weights in {weight_format} were asked for, and the constants are {types} (bytes)"
        )
    for suffix in (".xml", ".bin"):
        os.replace(held.with_suffix(suffix), path.with_suffix(suffix))


def constant_bytes(path: Path) -> dict[str, int]:
    """Bytes of a model's constants by element type."""
    found: dict[str, int] = {}
    for node in openvino.Core().read_model(path).get_ops():
        if node.get_type_name() == "Constant":
            kind, count = node.get_element_type(), math.prod(node.get_output_shape(0))
            found[kind.get_type_name()] = found.get(kind.get_type_name(), 0) + count * kind.bitwidth // 8
    return found
