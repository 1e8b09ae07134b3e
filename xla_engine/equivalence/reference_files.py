"""Read a model's files for the reference, without the engine's loader: what config.json says, and float32 tensors.

A model is a directory with config.json and safetensors, or a GGUF file. Names of tensors are those of transformers
behind the prefix of the decoder, such as "layers.0.mlp.up_proj". Quantised weights are dequantised to float32: those
of GGUF files by the `gguf` package, others by `(code - zero) * scale`.
"""

import json
import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Stored = Mapping[str, Array]  # tensors as they are in the files, by their full names

_DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": np.uint8,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}
_EMBEDDING = "embed_tokens.weight"
_BACKBONE = "backbone.embeddings.weight"  # of Mamba-2 and Nemotron-H
_AWQ_COLUMNS = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # which of eight columns each part of an AWQ word holds, lowest bits first
_MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_EXPERT = re.compile(r"(layers\.\d+\.\w+\.experts\.)(\d+)\.(\w+)")
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")  # of a split file


class ReferenceFiles(Protocol):
    """A model's files.

    config: what config.json says, with the fields of its decoder (`text_config`) at the top.
    rotary_pairs_adjacent: dimensions 2i and 2i + 1 of a head rotate together, else i and i + half of the head.
    norms_whole: Gemma's and Qwen3-Next's norm weights are stored as they are, not less one.
    """

    config: dict[str, Any]
    rotary_pairs_adjacent: bool
    norms_whole: bool

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, with or without ".weight"."""

    def read(self, name: str) -> Array:
        """A tensor in float32, dequantised; `[out, in]` for a matrix. The name may lack ".weight"."""


def open_files(path: Path) -> ReferenceFiles:
    """The files of a model: a directory or a GGUF file."""
    return GgufFiles(path) if path.is_file() else SafetensorsFiles(path)


class SafetensorsFiles:
    """`ReferenceFiles` of a Hugging Face directory."""

    def __init__(self, folder: Path) -> None:
        outer = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config = {**outer, **(outer.get("text_config") or {})}
        self.config["quantization_config"] = outer.get("quantization_config") or {}
        if outer.get("tie_word_embeddings") is not None:
            self.config["tie_word_embeddings"] = outer["tie_word_embeddings"]
        kind = self.config["model_type"]
        self.config["model_type"] = "deepseek_v3" if kind == "kimi_k2" else kind
        self.rotary_pairs_adjacent = kind in ("cohere", "cohere2")
        self.norms_whole = False
        self._stored: dict[str, Array] = {}
        for file in _weight_files(folder):
            self._stored |= _mapped(file)
        (name,) = (name for name in self._stored if name.endswith((_EMBEDDING, _BACKBONE)))
        self._prefix = name.removesuffix(_EMBEDDING).removesuffix("embeddings.weight")

    def has(self, name: str) -> bool:
        return self._full(name) is not None

    def read(self, name: str) -> Array:
        full = self._full(name)
        if full is None:
            raise KeyError(f"the model has no tensor {name}")
        return np.asarray(dequantised(self._stored, full, self.config["quantization_config"]), np.float32)

    def _full(self, name: str) -> str | None:
        """The stored name, without the end that tells how a weight is quantised."""
        full = self._prefix + name
        if name == "embed_tokens" and self._prefix + _BACKBONE.partition(".")[2] in self._stored:
            full = self._prefix + "embeddings"
        if name.startswith("lm_head"):  # beside the decoder
            heads = (each for each in self._stored if "lm_head." in each)
            full = next((each.partition("lm_head")[0] + name for each in heads), full)
        ends = ("", ".weight", ".qweight", ".weight_packed", "_blocks")
        return full if any(full + end in self._stored for end in ends) else None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _mapped(file: Path) -> dict[str, Array]:
    """The tensors of a safetensors file: the length of a JSON header, the header, then the bytes."""
    with file.open("rb") as stream:
        data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(bytes(data[8:begin])).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        content = np.frombuffer(data[begin + first : begin + last], np.uint8)
        found[name] = content.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def dequantised(stored: Stored, name: str, settings: Mapping[str, Any]) -> Array:
    """The tensor `name`, which may lack ".weight". settings: config.json's `quantization_config`."""
    method = settings.get("quant_method")
    if f"{name}.qweight" in stored:
        return _awq(stored, name) if method == "awq" else _gptq(stored, name, settings)
    if f"{name}.weight_packed" in stored:
        return _packed(stored, name)
    if f"{name}_blocks" in stored:
        return _mxfp4(stored, name)
    weight = name if name in stored else f"{name}.weight"
    if stored[weight].dtype in (np.int8, ml_dtypes.float8_e4m3fn):
        return _scaled(stored, weight, settings)
    return stored[weight]


def _codes(words: Array, bits: int) -> Array:
    """The codes in int32 words `[R, W]`, the lowest bits first: `[R, W * 32 / bits]`."""
    places = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> places) & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1).astype(np.float32)


def _by_group(codes: Array, zeros: Array | float, scales: Array, groups: Array) -> Array:
    """`(code - zero) * scale` of codes `[N, K]`; zeros and scales are `[N, G]`, `groups [K]` names each column's."""
    zeros = zeros[:, groups] if isinstance(zeros, np.ndarray) else zeros
    found: Array = (codes - zeros) * scales.astype(np.float32)[:, groups]
    return found


def _groups(stored: Stored, name: str, width: int, count: int) -> Array:
    given = stored.get(name)
    return np.arange(width) // math.ceil(width / count) if given is None or not given.size else given


def _awq(stored: Stored, name: str) -> Array:
    """AutoAWQ: `qweight [K, N / 8]`, `qzeros [G, N / 8]`, `scales [G, N]`."""

    def columns(part: str) -> Array:
        codes = _codes(stored[f"{name}.{part}"], 4)
        codes = codes.reshape(len(codes), -1, 8)
        found = np.empty_like(codes)
        found[..., list(_AWQ_COLUMNS)] = codes
        return found.reshape(len(codes), -1).T

    codes, scales = columns("qweight"), stored[f"{name}.scales"].T
    return _by_group(codes, columns("qzeros"), scales, _groups(stored, "", codes.shape[1], scales.shape[1]))


def _gptq(stored: Stored, name: str, settings: Mapping[str, Any]) -> Array:
    """AutoGPTQ: `qweight [K bits / 32, N]`, `qzeros [G, N bits / 32]`, `scales [G, N]`, `g_idx [K]`.

    Zero points of symmetric weights are the middle. The format "gptq" stores others less one.
    """
    bits, words = settings["bits"], stored[f"{name}.qzeros"].view(np.uint32)
    if settings.get("checkpoint_format", "gptq") == "gptq":
        words = words + np.uint32(sum(1 << place for place in range(0, 32, bits)))
    codes = _codes(np.ascontiguousarray(stored[f"{name}.qweight"].T), bits)
    symmetric, scales = settings.get("sym", True), stored[f"{name}.scales"].T
    zeros = float(1 << (bits - 1)) if symmetric else _codes(words, bits).T
    return _by_group(codes, zeros, scales, _groups(stored, f"{name}.g_idx", codes.shape[1], scales.shape[1]))


def _packed(stored: Stored, name: str) -> Array:
    """compressed-tensors: signed codes plus half of their range, packed along K; zero points packed along N."""
    scales, (features, width) = stored[f"{name}.weight_scale"], stored[f"{name}.weight_shape"]
    words = stored[f"{name}.weight_packed"]
    bits = 4 if words.shape[1] == math.ceil(width / 8) else 8
    zeros: Array | float = float(1 << (bits - 1))
    if (given := stored.get(f"{name}.weight_zero_point")) is not None:
        zeros = _codes(np.ascontiguousarray(given.T), bits).T[:features]
    groups = _groups(stored, f"{name}.weight_g_idx", int(width), scales.shape[1])
    return _by_group(_codes(words, bits)[:, :width], zeros, scales, groups)


def _scaled(stored: Stored, weight: str, settings: Mapping[str, Any]) -> Array:
    """int8 or FP8 with a scale for the tensor, each row, each group of a row, or each block."""
    values = stored[weight].astype(np.float32)
    name = next(each for each in (f"{weight}_scale_inv", f"{weight}_scale") if each in stored)
    scales = stored[name].astype(np.float32)
    zeros = stored.get(f"{weight}_zero_point")
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    rows, columns = (math.ceil(size / count) for size, count in zip(values.shape, scales.shape, strict=True))
    if values.dtype != np.int8 and (block := _block(settings)):
        rows, columns = block
    at = np.arange(values.shape[0]) // rows
    groups = _groups(stored, f"{weight}_g_idx", values.shape[1], scales.shape[1])
    if columns * scales.shape[1] != values.shape[1]:
        groups = np.arange(values.shape[1]) // columns
    offset = 0.0 if zeros is None else zeros.astype(np.float32).reshape(scales.shape)[at]
    return _by_group(values, offset, scales[at], groups)


def _block(settings: Mapping[str, Any]) -> list[int] | None:
    """Rows and columns that share a scale, if the configuration names them."""
    groups = (settings.get("config_groups") or {}).values()
    found = [(group.get("weights") or {}).get("block_structure") for group in groups]
    return settings.get("weight_block_size") or next(filter(None, found), None)


def _mxfp4(stored: Stored, name: str) -> Array:
    """gpt-oss's experts: bytes of two numbers `[E, rows, K / 32, 16]` and powers of two `[E, rows, K / 32]`.

    As transformers has the plain tensor: `[E, K, rows]`.
    """
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    values = _MXFP4[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, 32)
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


# For each architecture of GGUF files: transformers' model_type.
_MODEL_TYPES = {
    "llama": "llama",
    "smollm3": "smollm3",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "command-r": "cohere",
    "gpt-oss": "gpt_oss",
}
# Keys of the metadata behind the architecture, and fields of config.json.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


_PLAIN = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
GgufTensor = tuple[int, tuple[int, ...], Array]  # type, shape with the rows first, bytes


def _gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata and the tensors of a GGUF file, as ggml's `docs/gguf.md` describes it."""
    import gguf

    with path.open("rb") as stream:
        data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    at = 8  # behind the magic word and the version

    def scalar(kind: str) -> Any:
        nonlocal at
        dtype = np.dtype(kind)
        value = np.frombuffer(data, dtype, 1, at)[0]
        at += dtype.itemsize
        return float(str(value)) if kind == "<f4" else value.item()  # 1e-05, not 9.999999747e-06

    def string() -> str:
        nonlocal at
        begin = at + 8
        at = begin + int.from_bytes(data[at:begin], "little")
        return bytes(data[begin:at]).decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return string()
        if kind == _ARRAY:
            inner, count = scalar("<u4"), scalar("<u8")
            return [value(inner) for _ in range(count)]
        return scalar(_SCALARS[kind])

    count, pairs = scalar("<u8"), scalar("<u8")
    fields = {string(): value(scalar("<u4")) for _ in range(pairs)}
    entries = {}
    for _ in range(count):
        name = string()
        shape = tuple(scalar("<u8") for _ in range(scalar("<u4")))[::-1]
        entries[name] = shape, scalar("<u4"), scalar("<u8")
    alignment = fields.get("general.alignment", 32)
    begin = -(-at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in entries.items():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        length = math.prod(shape) // block * size
        tensors[name] = kind, shape, np.frombuffer(data, np.uint8, length, begin + offset)
    return fields, tensors


class GgufFiles:
    """`ReferenceFiles` of a GGUF file, or of all parts of a split one."""

    norms_whole = True

    def __init__(self, path: Path) -> None:
        import gguf

        self._gguf = gguf
        part = _PART.fullmatch(path.name)
        paths = sorted(path.parent.glob(f"{part[1]}-?????-of-{part[2]}.gguf")) if part else [path]
        parts = [_gguf_header(each) for each in paths]
        self._fields = parts[0][0]
        self._tensors = {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
        self._kind = self._fields["general.architecture"]
        if self._kind not in _MODEL_TYPES:
            raise ValueError(f"the reference does not know {self._kind}, only {', '.join(_MODEL_TYPES)}")
        self.rotary_pairs_adjacent = self._kind in ("llama", "smollm3", "granite", "command-r")
        kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self.config = self._config()
        self._names = gguf.get_tensor_name_map(kinds[self._kind], self.config["num_hidden_layers"])

    def has(self, name: str) -> bool:
        return self._stored(name) is not None

    def read(self, name: str) -> Array:
        expert = _EXPERT.match(name)
        stored = self._stored(name)
        if stored is None:
            raise KeyError(f"the model has no tensor {name}")
        kind, shape, content = self._tensors[stored]
        if kind in _PLAIN:
            data = content.view(_PLAIN[kind]).reshape(shape)
            return np.asarray(data if expert is None else data[int(expert[2])], np.float32)
        data = content.reshape(*shape[:-1], -1)
        data = data if expert is None else data[int(expert[2])]
        found: Array = self._gguf.quants.dequantize(data, self._gguf.GGMLQuantizationType(kind))
        return found

    def _stored(self, name: str) -> str | None:
        """The file's name of a tensor; that of all experts for one of an expert."""
        known = _EXPERT.sub(r"\1\3", name)
        known = known.replace("block_sparse_moe.experts.w1", "mlp.experts.gate_proj")
        known = known.replace("block_sparse_moe.experts.w2", "mlp.experts.down_proj")
        known = known.replace("block_sparse_moe.experts.w3", "mlp.experts.up_proj")
        full = known if known.startswith("lm_head") else f"model.{known}"
        theirs = self._names.get_name(full, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            return None
        return next((each for each in (theirs, f"{theirs}.weight") if each in self._tensors), None)

    def _config(self) -> dict[str, Any]:
        """The metadata as config.json has it."""
        values: dict[str, Any] = {
            name: self._get(key) for key, name in _KEYS.items() if self._get(key) is not None
        }
        kind = _MODEL_TYPES[self._kind]
        if kind == "llama" and values.get("num_experts"):
            kind = "mixtral"
        values["model_type"] = kind
        values["tie_word_embeddings"] = "output.weight" not in self._tensors
        values["use_sliding_window"] = kind not in ("qwen2", "qwen3")
        if not values.get("sliding_window"):
            values["sliding_window"] = None
        if kind == "cohere":
            values["logit_scale"] = values.pop("logits_scaling")
        if kind == "qwen3_moe":
            values["norm_topk_prob"] = True
        width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        values["partial_rotary_factor"] = (self._get("rope.dimension_count") or width) / width
        if kind in ("gemma2", "gemma3_text"):  # as llama.cpp: the largest models scale by another width
            largest = values["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[kind]
            even = values["hidden_size"] // values["num_attention_heads"]
            values["query_pre_attn_scalar"] = even if largest else width
        if kind == "gemma3n_text":
            return values | self._gemma3n()
        if kind == "gemma4_text":
            return values | self._gemma4(values)
        values["rope_scaling"] = self._scaling(kind, values)
        return values

    def _gemma3n(self) -> dict[str, Any]:
        """What Gemma 3n's metadata say of its layers and streams."""
        slides = self._fields[f"{self._kind}.attention.sliding_window_pattern"]
        return {
            "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
            "activation_sparsity_scale": self._fields[f"{self._kind}.activation_sparsity_scale"],
            "altup_num_inputs": self._get("altup.num_inputs"),
            "num_kv_shared_layers": self._get("attention.shared_kv_layers"),
            "hidden_size_per_layer_input": self._get("embedding_length_per_layer_input"),
        }

    def _gemma4(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What Gemma 4's metadata say of two kinds of layers."""
        slides = self._fields[f"{self._kind}.attention.sliding_window_pattern"]
        divisors = self.divisors("rope_freqs.weight")  # 1, or so large that a pair does not turn
        full = {"rope_type": "proportional", "rope_theta": values["rope_theta"]}
        full["partial_rotary_factor"] = divisors.count(1.0) / len(divisors)
        return {
            "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
            "global_head_dim": values["head_dim"],
            "head_dim": self._get("attention.key_length_swa"),
            "num_kv_shared_layers": self._get("attention.shared_kv_layers"),
            "hidden_size_per_layer_input": self._get("embedding_length_per_layer_input"),
            "partial_rotary_factor": None,
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_theta": values["rope_local_base_freq"]},
            },
        }

    def _scaling(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:  # divisors of the frequencies, which Llama 3 has
            divisors = self.divisors("rope_freqs.weight")
            return {"rope_type": "divisors", "short_factor": divisors, "long_factor": divisors}
        if "rope_factors_short.weight" in self._tensors:
            factors = {
                f"{each}_factor": self.divisors(f"rope_factors_{each}.weight") for each in ("short", "long")
            }
            return {
                "rope_type": "longrope",
                "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
                "attention_factor": self._get("rope.scaling.attn_factor"),
                **factors,
            }
        rope_type = self._get("rope.scaling.type")
        if rope_type in (None, "none"):
            return None
        scaling = {name: self._get(f"rope.scaling.{key}") for key, name in _YARN.items()}
        return {"rope_type": rope_type, **scaling, "truncate": kind != "gpt_oss"}

    def divisors(self, name: str) -> list[float]:
        found: list[float] = self._tensors[name][2].view(np.float32).tolist()
        return found

    def _get(self, key: str) -> Any:
        """A value of the metadata; of a list with a value for each layer, the first."""
        value = self._fields.get(f"{self._kind}.{key}")
        return value[0] if isinstance(value, list) else value
