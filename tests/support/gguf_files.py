"""GGUF files for the tests, written by the gguf library from Hugging Face directories, as llama.cpp does."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.families import tensor_sources
from xla_engine.model_loader.model_files import open_model

Kind = gguf.GGMLQuantizationType
INTERLEAVED = (
    "llama",
    "granite",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "smollm3",
    "mistral3",
)  # architectures whose rotary pairs llama.cpp puts side by side

# What llama.cpp writes of the golden models `gemma4` and `gemma4_keys`, beside the names of others.
GEMMA4 = {
    "attention.key_length": 24,
    "attention.key_length_swa": 16,
    "attention.value_length": 24,
    "attention.value_length_swa": 16,
    "attention.shared_kv_layers": 2,
    "attention.sliding_window_pattern": [True, False, True, False, False],
    "embedding_length_per_layer_input": 12,
    "feed_forward_length": [40, 40, 40, 80, 80],
    "rope.freq_base_swa": 1000.0,
}
# Of `gemma3n`: gates of its first two layers are cut off, by the numbers of shares of 0.8 and 0.6.
GEMMA3N = {
    "activation_sparsity_scale": [0.8416212, 0.2533471, -math.inf, -math.inf, -math.inf],
    "altup.active_idx": 0,
    "altup.num_inputs": 4,
    "attention.shared_kv_layers": 2,
    "attention.sliding_window_pattern": [True, False, True, False, False],
    "embedding_length_per_layer_input": 32,
    "feed_forward_length": [64] * 5,
    "rope.freq_base_swa": 1000.0,
}
GEMMA4_KEYS = {
    **GEMMA4,
    "attention.key_length": 16,
    "attention.key_length_swa": 10,
    "attention.value_length": 16,
    "attention.value_length_swa": 10,
    "attention.head_count_kv": [3, 2, 2],
    "attention.shared_kv_layers": 0,
    "attention.sliding_window_pattern": [True, False, False],
    "embedding_length_per_layer_input": 0,
    "feed_forward_length": 40,
}


def write_qwen3_moe(directory: Path, *, scale: float = 1, **fields: Any) -> Path:
    """A random float32 Qwen3-MoE with experts in every layer, as llama.cpp has it. fields: of config.json."""
    given = {"decoder_sparse_step": 1, "num_attention_heads": 4, **fields}
    return write_random(directory, "qwen3_moe", scale=scale, **given)


def write_random(directory: Path, golden: str, *, scale: float = 1, **fields: Any) -> Path:
    """Random float32 weights for the configuration of a golden model with other fields; numbers are bfloat16's."""
    file = Path(__file__).parents[1] / "golden" / "families" / golden / "config.json"
    fields = json.loads(file.read_text()) | fields
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    draw = np.random.default_rng(0)
    sources = tensor_sources(*read_model(open_model(directory)))
    tensors = {
        source.name: (draw.standard_normal(source.shape, np.float32) * np.float32(scale))
        .astype(ml_dtypes.bfloat16)
        .astype(np.float32)
        for stacked in sources.values()
        for source in stacked
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's words


def write_gguf(
    model: Path,
    path: Path,
    *,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    arch: str = "llama",
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `path` from the directory `model`: matrices in `kind`, which may depend on the file's name of
    the tensor, vectors in float32. Matrices in a kind that the library reads and does not write are random.

    extra: more metadata of the architecture, in place of the model's own."""
    kind_of = kind if callable(kind) else lambda _: kind
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_attention_heads", 0)
    keys = config.get("num_key_value_heads") or heads
    writer = gguf.GGUFWriter(str(path), arch)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.get("max_position_embeddings", 2048))
    writer.add_embedding_length(config["hidden_size"])
    predicts = (extra or {}).get("nextn_predict_layers", 0)
    if "layers_block_type" in config:
        config["num_hidden_layers"] = len(config["layers_block_type"])
    layers = config["num_hidden_layers"] + predicts
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.get("intermediate_size", 0))
    writer.add_head_count(heads)
    types = config.get("layers_block_type") or config.get("layer_types") or ()
    recurrent = config["model_type"] in _MAMBA
    keyless = [kind == "conv" or (recurrent and kind != "full_attention") for kind in types]
    writer.add_head_count_kv([0 if each else keys for each in keyless] if any(keyless) else keys)
    width = config.get("head_dim") or config["hidden_size"] // max(heads, 1)
    writer.add_key_length(width)
    writer.add_value_length(width)
    rotated = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    writer.add_rope_dimension_count(int(width * rotated))
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    writer.add_rope_freq_base(base)
    for name, add in {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_epsilon": writer.add_layer_norm_rms_eps,
        "conv_L_cache": writer.add_shortconv_l_cache,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }.items():
        in_weights = arch == "falcon-h1" and name == "embedding_multiplier"
        if config.get(name) is not None and not in_weights:
            add(config[name])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope and arch == "deepseek2":
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    for name, value in {
        **_recurrent(config),
        **(mamba_sizes(config) if config["model_type"] in _MAMBA else {}),
        **(extra or {}),
    }.items():
        adders = {float: writer.add_float32, list: writer.add_array, bool: writer.add_bool}
        add = adders.get(type(value), writer.add_uint32)
        add(f"{arch}.{name}", value)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        tokenizer(writer)
    if rope.get("rope_type") == "proportional":
        pairs = (extra or {})["attention.key_length"] // 2
        turning = np.arange(pairs) < int(rotated * pairs)
        writer.add_tensor("rope_freqs.weight", np.where(turning, 1, 1e30).astype(np.float32))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, base, width))
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], layers)
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    experts = 0 if arch == "nemotron_h" else experts  # its configuration has them without layers
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("top_k_experts") or config["num_experts_per_tok"])
        if "moe_intermediate_size" in config or arch == "gpt-oss":
            writer.add_expert_feed_forward_length(
                config.get("moe_intermediate_size") or config["intermediate_size"]
            )
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    tensors = {name: t for file in sorted(model.glob("*.safetensors")) for name, t in load_file(file).items()}
    tensors = {_predicting(name, config["num_hidden_layers"]): t for name, t in tensors.items()}
    tensors = {name.replace("correction_bias", "correction.bias"): t for name, t in tensors.items()}
    for name in [name for name in tensors if "altup" in name and name.endswith("projections.0.weight")]:
        count = sum(each.startswith(name.removesuffix("0.weight")) for each in tensors)
        stacked = [tensors.pop(name.replace(".0.", f".{at}.")) for at in range(count)]
        tensors[name.replace(".0.", ".")] = np.stack(stacked)
    for name in [name for name in tensors if ".experts.0." in name]:
        layer, part = name.split(".")[2], name.split(".")[-2]
        stacked = [tensors.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(experts)]
        tensors[f"model.layers.{layer}.mlp.experts.{_PARTS.get(part, part)}.weight"] = np.stack(stacked)
    for name in [name for name in tensors if arch == "gemma4" and ".experts.gate_proj." in name]:
        halves = [tensors.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        tensors[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(halves, axis=1)
    tensors = {
        name: each
        for stored, tensor in tensors.items()
        for name, each in _apart(
            stored, tensor, config, apart="attention.key_length_mla" in (extra or {})
        ).items()
    }
    for name, tensor in tensors.items():
        values = tensor.astype(np.float32)
        if arch in INTERLEAVED and name.endswith(
            tuple(f"{p}_proj.{kind}" for p in "qk" for kind in ("weight", "bias"))
        ):
            values = _side_by_side(values, heads if "q_proj" in name else keys)
        less_one = arch.startswith(("gemma", "qwen3next", "qwen35")) and "linear_attn" not in name
        less_one &= arch not in ("gemma3n", "gemma4")
        if less_one and name.endswith("norm.weight"):
            values = values + np.float32(1)
        target = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert target is not None, name
        target += ".weight" * target.endswith(("sinks", "layer_output_scale", "altup_correct_scale"))
        kind = kind_of(target)
        if values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(target, values)
        elif kind == Kind.BF16:
            writer.add_tensor(target, values.astype(ml_dtypes.bfloat16).view(np.uint8), raw_dtype=kind)
        elif kind == Kind.F16:
            writer.add_tensor(target, values.astype(np.float16))
        else:
            writer.add_tensor(target, _quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _recurrent(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of DeltaNet layers, or of Mamba-2 layers."""
    if config["model_type"] in _MAMBA:
        return mamba_sizes(config)
    if "linear_key_head_dim" not in config:
        return {}
    values = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _predicting(name: str, first: int) -> str:
    """The name of a tensor of multi-token prediction among those of the layers."""
    for ours, theirs in {
        "mtp.layers.0.": f"model.layers.{first}.",
        "mtp.fc.": f"blk.{first}.nextn.eh_proj.",
        "mtp.pre_fc_norm_embedding.": f"blk.{first}.nextn.enorm.",
        "mtp.pre_fc_norm_hidden.": f"blk.{first}.nextn.hnorm.",
        "mtp.norm.": f"blk.{first}.nextn.shared_head_norm.",
    }.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _dealt(rows: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of value heads `[key heads, each, width]` as `[each, key heads, width]`."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = rows.reshape(keys, values // keys, len(rows) // values, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def _delta(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A tensor of a DeltaNet layer as llama.cpp's converter writes it."""
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values, keys = config["linear_num_value_heads"], 2 * heads * width
    deals = config["model_type"].startswith("qwen3_5")
    stem, part = name.split(".linear_attn.")
    if part == "in_proj_qkvz.weight":
        inner = values // heads * config["linear_value_head_dim"]
        parts = np.split(
            tensor.reshape(heads, -1, tensor.shape[1]), [width, 2 * width, 2 * width + inner], axis=1
        )
        q, k, v, z = (each.reshape(-1, tensor.shape[1]) for each in parts)
        qkv = np.concatenate([q, k, v])
        return {f"{stem}.linear_attn.in_proj_qkv.weight": qkv, f"{stem}.linear_attn.in_proj_z.weight": z}
    if part == "A_log":
        tensor = -np.exp(tensor.astype(np.float32))
    if part == "conv1d.weight":
        tensor = tensor[:, 0]
    if deals and part in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = np.concatenate([tensor[:keys], _dealt(tensor[keys:], config)])
    elif deals and part == "out_proj.weight":
        tensor = np.ascontiguousarray(_dealt(tensor.T, config).T)
    elif deals and part != "norm.weight":
        tensor = _dealt(tensor, config)
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


_MAMBA = {  # the names of sizes, by type of model: heads, width, groups, state, kernel
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    **dict.fromkeys(
        ("granitemoehybrid", "falcon_h1"),
        tuple(f"mamba_{name}" for name in ("n_heads", "d_head", "n_groups", "d_state", "d_conv")),
    ),
}


def mamba_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The metadata of Mamba-2 layers."""
    heads, width, groups, state, kernel = (config[name] for name in _MAMBA[config["model_type"]])
    return {
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": heads * width,
        "ssm.time_step_rank": heads,
    }


def _mamba(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A tensor of a model with Mamba-2 layers as llama.cpp's converter writes it."""
    stem, part = name.rpartition(".")[::2]
    if part == "A_log":
        return {name: -np.exp(tensor.astype(np.float32))[:, None]}
    if part == "D":
        return {name: tensor[:, None]}
    if part == "dt_bias":
        return {f"{stem}.dt_proj.bias": tensor}
    if name.endswith("conv1d.weight"):
        return {name: tensor[:, 0]}
    if config["model_type"] == "falcon_h1":
        tensor = _multiplied(name, tensor.astype(np.float32), config)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = mamba_sizes(config)["ssm.group_count"]
        return {
            name: tensor.reshape(groups, -1) if groups > 1 else tensor
        }  # as llama.cpp's quantiser leaves it
    if ".shared_mlp." in name or ".block_sparse_moe." in name:
        return _granite(name, tensor, experts=bool(config["num_local_experts"]))
    return {name: tensor}


def _multiplied(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor of Falcon-H1 times its multipliers."""
    gate, down = config["mlp_multipliers"]
    before = config["attention_in_multiplier"]
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": before,
        "k_proj": before * config["key_multiplier"],
        "v_proj": before,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = name.split(".")[-2]
    tensor = tensor * np.float32(factors.get(part, 1))
    if part == "in_proj":
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = np.repeat(config["ssm_multipliers"], (inner, inner, keys, keys, config["mamba_n_heads"]))
        tensor = tensor * parts.astype(np.float32)[:, None]
    return tensor


def _granite(name: str, tensor: np.ndarray, *, experts: bool) -> dict[str, np.ndarray]:
    """A tensor of Granite's MLPs: gates and ups apart; in models without experts, the shared MLP is the only one."""
    stem = name.split(".shared_mlp.")[0].split(".block_sparse_moe.")[0]
    names = "mlp.experts" if ".block_sparse_moe." in name else "mlp.shared_experts" if experts else "mlp"
    if name.endswith("input_linear.weight"):
        halves = np.split(tensor, 2, axis=-2)
        return {
            f"{stem}.{names}.{part}_proj.weight": np.ascontiguousarray(each)
            for part, each in zip(("gate", "up"), halves, strict=True)
        }
    return {f"{stem}.{names}.down_proj.weight" if name.endswith("output_linear.weight") else name: tensor}


def _apart(name: str, tensor: np.ndarray, config: Mapping[str, Any], *, apart: bool) -> dict[str, np.ndarray]:
    """A tensor as llama.cpp has it; the gates and ups of gpt-oss' experts take turns."""
    if ".conv.conv.weight" in name:
        return {name: tensor[:, 0]}
    if name.endswith(".expert_bias"):
        return {f"{name}.bias": tensor}
    if ".kv_b_proj." in name and apart:
        nope, stem = config["qk_nope_head_dim"], name.replace("kv_b_proj", "{}_b_proj")
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        keys = np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2))
        return {stem.format("k"): keys, stem.format("v"): np.ascontiguousarray(heads[:, nope:])}
    if config["model_type"] in _MAMBA:
        return _mamba(name, tensor, config)
    if ".linear_attn." in name:
        return _delta(name, tensor, config)
    stem, _, part = name.rpartition(".")
    if config["model_type"] == "gemma4_text" and stem.endswith((".router", ".experts")):
        scales = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
        return {f"blk.{name.split('.')[2]}.{scales[part]}" if part in scales else f"{name}.weight": tensor}
    if not stem.endswith("experts") or not part.startswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    bias = part.endswith("_bias")
    rows, suffix = (tensor, "bias") if bias else (tensor.swapaxes(1, 2), "weight")
    if part.startswith("down"):
        return {f"{stem}.down_proj.{suffix}": np.ascontiguousarray(rows)}
    return {
        f"{stem}.{half}_proj.{suffix}": np.ascontiguousarray(rows[:, place::2])
        for place, half in enumerate(("gate", "up"))
    }


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int = 0) -> np.ndarray:
    """The bytes `[..., blocks * size]` of a quantised tensor of this shape: any bytes that mean finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = math.prod(shape) // block
    data = np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)
    with np.errstate(all="ignore"):
        data[~np.isfinite(gguf.quants.dequantize(data, kind)).all(1)] = 0
    return data.reshape(*shape[:-1], shape[-1] // block * size)


def _quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:  # the library only reads it
        return _like(values, kind)


# Where the half-precision scales of a block are, which all its values are multiples of.
_SCALES = {
    Kind.Q2_K: slice(-4, None),
    Kind.Q3_K: slice(-2, None),
    Kind.Q4_K: slice(0, 4),
    Kind.Q5_K: slice(0, 4),
    Kind.Q6_K: slice(-2, None),
}


def _like(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Random blocks of the shape and deviation of `values`; with scales of any size, logits would overflow."""
    data = random_blocks(values.shape, kind, values.size)
    if kind in _SCALES:
        blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
        scales = blocks[:, _SCALES[kind]]
        drawn = np.random.default_rng(values.size).uniform(-1, 1, (len(blocks), scales.shape[1] // 2))
        scales[...] = drawn.astype(np.float16).view(np.uint8)
        deviation = gguf.quants.dequantize(blocks, kind).std()
        scales[...] = (drawn * values.std() / deviation).astype(np.float16).view(np.uint8)
    return data


def rewrite_gguf(
    path: Path,
    change: Callable[[dict[str, Any]], None],
    tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write `path` anew with the metadata that `change` leaves; what it changes may have any type GGUF knows.

    tensors: more of them, in float32."""
    reader = gguf.GGUFReader(path)
    own = {field.name: field for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    before = {name: field.contents() for name, field in own.items()}
    fields = dict(before)
    change(fields)
    writer = gguf.GGUFWriter(str(path.with_suffix(".new")), str(fields.pop("general.architecture")))
    for name, value in fields.items():
        if name in before and value is before[name]:
            types = own[name].types
            writer.add_key_value(name, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
        else:
            listed = isinstance(value, list)
            kind = _type_of(value[0] if listed else value)
            writer.add_key_value(
                name, value, gguf.GGUFValueType.ARRAY if listed else kind, sub_type=kind if listed else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def add_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `path` anew with more tensors, in float32."""
    rewrite_gguf(path, lambda _: None, tensors)


def _type_of(value: Any) -> gguf.GGUFValueType:
    kinds = gguf.GGUFValueType
    if isinstance(value, int) and not isinstance(value, bool):
        return kinds.INT64 if value < 0 else kinds.UINT64
    return {bool: kinds.BOOL, float: kinds.FLOAT64}.get(type(value), kinds.STRING)


def _side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs (i, i + half) of every head as neighbours (2i, 2i + 1)."""
    pairs = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _divisors(rope: Mapping[str, Any], base: float, width: int) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by."""
    found = []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / width)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / (kept + (1 - kept) / rope["factor"]))
    return np.array(found, np.float32)


def split_gguf(
    path: Path, folder: Path, *ends: int, extra: Mapping[int, Mapping[str, Any]] | None = None
) -> list[Path]:
    """Write the parts of a GGUF file to a folder, as gguf-split does: all metadata are in the first part.

    ends: the index behind the last tensor of each part but the last. extra: values to replace, by part from 0.
    """
    reader = gguf.GGUFReader(path)
    bounds = [0, *ends, len(reader.tensors)]
    arch, files = reader.fields["general.architecture"].contents(), []
    folder.mkdir(exist_ok=True)
    for part, (begin, end) in enumerate(itertools.pairwise(bounds)):
        files.append(folder / f"{path.stem}-{part + 1:05d}-of-{len(bounds) - 1:05d}.gguf")
        writer = gguf.GGUFWriter(str(files[-1]), arch)
        for name, field in reader.fields.items() if part == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
        numbers = {
            "split.no": part,
            "split.count": len(bounds) - 1,
            "split.tensors.count": len(reader.tensors),
        }
        for name, number in (numbers | dict((extra or {}).get(part, {}))).items():
            (writer.add_int32 if name == "split.tensors.count" else writer.add_uint16)(name, number)
        for tensor in reader.tensors[begin:end]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files
