"""llama.cpp through the C interface of llama-cpp-python, on a GGUF file written once from the checkpoint.

The loop does what llama.cpp's server does: one batch per step with the next token of every decoding sequence and as
many prompt tokens as fit; when a sequence ends, the next request takes its place.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

NOT_REPACKED = ("Q4_1", "Q5_0", "Q5_1")  # by llama.cpp for CPUs, whose products of them are slow
BATCH = 2048  # tokens per call, the server's default


@dataclass(slots=True)
class Sequence:
    """A request in a slot. `todo` holds tokens the model has not seen; `seen` counts those it has."""

    slot: int
    todo: list[int]
    seen: int = 0


class LlamaCpp:
    """llama.cpp's side of the protocol in `worker.py`."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._live: dict[int, Sequence] = {}  # by index

    def load(self, wanted: Any, *, quantized: str = "", as_given: bool = False) -> dict[str, Any]:
        """quantized: type of the weights, as llama-quantize makes them; as in the checkpoint by default.

        as_given: take the GGUF file that the model was given as.
        """
        llama_cpp.llama_backend_init()
        if as_given and wanted.file is None:
            raise ValueError("--model is not a GGUF file")
        if as_given and wanted.file is not None:
            path, kind = Path(wanted.file), Path(wanted.file).stem
        else:
            path, kind = written(Path(wanted.model), wanted.dtype, quantized, Path(wanted.cache) / "gguf")
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = wanted.max_num_seqs * -(-wanted.max_model_len // 256) * 256
        options.n_seq_max = self.room = wanted.max_num_seqs
        options.n_batch = BATCH
        options.n_threads = options.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        system = llama_cpp.llama_print_system_info().decode()
        units = [word for word in ("AVX512_BF16", "AMX_INT8") if f"{word} = 1" in system]
        return {
            "versions": f"llama-cpp-python {llama_cpp.__version__} ({', '.join(units)})",
            "notes": f"{kind}, cache f16, flash attention auto{plain_kinds(path)}",
            "arrivals": True,
            "weight_bytes": path.stat().st_size,
        }

    def start(self, index: int, prompt: list[int], max_tokens: int) -> None:
        taken = {each.slot for each in self._live.values()}
        self._live[index] = Sequence(next(slot for slot in range(self.room) if slot not in taken), prompt)

    def is_busy(self) -> bool:
        return bool(self._live)

    def end(self, index: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, self._live.pop(index).slot, -1, -1)

    def step(self) -> list[tuple[int, list[int]]]:
        """One call for all slots, decoding ones first; the greedy tokens of those whose prompt is complete."""
        batch, count = self._batch, 0
        asked = []
        for index, sequence in sorted(self._live.items(), key=lambda item: len(item[1].todo)):
            part, sequence.todo = sequence.todo[: BATCH - count], sequence.todo[BATCH - count :]
            for token in part:
                batch.token[count], batch.pos[count] = token, sequence.seen
                batch.n_seq_id[count], batch.seq_id[count][0], batch.logits[count] = 1, sequence.slot, 0
                sequence.seen += 1
                count += 1
            if part and not sequence.todo:
                batch.logits[count - 1] = 1
                asked.append(index)
        batch.n_tokens = count
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        if not asked:
            return []
        # Rows of logits are in the order of the requests for them.
        logits = np.ctypeslib.as_array(
            ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float)),
            (len(asked), self._vocab_size),
        )
        found = [(index, [int(token)]) for index, token in zip(asked, logits.argmax(1), strict=True)]
        for index, tokens in found:
            self._live[index].todo = list(tokens)
        return found


def written(model: Path, dtype: str, quantized: str, folder: Path) -> tuple[Path, str]:
    """The GGUF file of a checkpoint, written unless it exists, and the type of its weights."""
    kind = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    path = folder / f"{model.resolve().name}-{kind}.gguf"
    if not path.exists():
        convert(model, path, gguf.GGMLQuantizationType[kind])
    if not quantized:
        return path, kind
    small = folder / f"{model.resolve().name}-{quantized}.gguf"
    if not small.exists():
        quantize(path, small, quantized)
    return small, quantized


def quantize(path: Path, small: Path, kind: str) -> None:
    """What llama-quantize does: write `path` with weights of `kind`."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    unfinished = small.with_suffix(f".{os.getpid()}")
    if status := llama_cpp.llama_model_quantize(str(path).encode(), str(unfinished).encode(), options):
        raise RuntimeError(f"llama.cpp does not write {path} as {kind}: status {status}")
    os.replace(unfinished, small)


def convert(model: Path, path: Path, kind: Any) -> None:
    """Write a Llama, Qwen2 or Qwen3 checkpoint as GGUF without a vocabulary.

    kind: of matrices, F32 or BF16; vectors are in F32.
    """
    config = json.loads((model / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    llama = config["model_type"] == "llama"
    writer = gguf.GGUFWriter(str(unfinished), config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", stretched(config))
    arch = gguf.MODEL_ARCH[config["model_type"].upper()]
    names: Any = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.astype(np.float32)
            if llama and name.endswith("q_proj.weight"):
                values = interleaved(values, heads)
            elif llama and name.endswith("k_proj.weight"):
                values = interleaved(values, key_heads)
            target = names.get_name(name, (".weight", ".bias"))
            if target is None:
                raise ValueError(f"GGUF has no name for the tensor {name}")
            add_matrix(writer, target, values, kind) if values.ndim > 1 else writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, path)


def plain_kinds(path: Path) -> str:
    """How many tensors llama.cpp multiplies as they are stored, because it repacks rows of other types only."""
    kinds = [each.tensor_type.name for each in gguf.GGUFReader(path).tensors if len(each.shape) > 1]
    counts = {kind: kinds.count(kind) for kind in NOT_REPACKED if kind in kinds}
    return "".join(f", {count} tensors in {kind} not repacked" for kind, count in counts.items())


def add_matrix(writer: Any, name: str, values: Any, kind: Any) -> None:
    """Add `values` [rows, columns] stored as `kind`."""
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, values.astype(ml_dtypes.bfloat16).view(np.uint8), raw_dtype=kind)


def interleaved(weight: Any, heads: int) -> Any:
    """Rows in llama.cpp's order of rotary pairs (2i, 2i + 1) instead of (i, i + half), head by head."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def stretched(config: dict[str, Any]) -> Any:
    """llama.cpp's divisors of the rotary frequencies for Llama 3's scaling, [head_dim / 2] float32."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1: the frequency stays
        divisors.append(1 / (kept + (1 - kept) / factor))
    return np.array(divisors, np.float32)
