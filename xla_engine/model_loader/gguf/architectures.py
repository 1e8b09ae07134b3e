"""llama.cpp's architectures, each translated to transformers: its class, the names of its fields, and how to tell what
the metadata do not say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import CLS, CONV, FULL, LAST, MAMBA, MEAN, SLIDING
from xla_engine.model_loader.families.encoders import BERT
from xla_engine.model_loader.families.latent import DEEPSEEK_V2, DEEPSEEK_V3
from xla_engine.model_loader.gguf.numbers import number, vector
from xla_engine.model_loader.gguf.reader import GgufReader

_QUERY_BIAS, _OUTPUT_BIAS = "blk.0.attn_q.bias", "blk.0.attn_output.bias"
_BIASES = {"attention_bias": _OUTPUT_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The translation of a llama.cpp architecture to transformers.

    name: llama.cpp's.
    architecture: transformers' name of the class.
    interleaved: its files store rotary pairs adjacently; transformers stores them half a head apart.
    fields: fields of config.json that the metadata lack.
    words: names of fields that differ from `_FIELDS`.
    experts: whether some layers have experts.
    recurrent: whether some layers are DeltaNet layers.
    keys: keys that only this architecture has, and their fields.
    keyless: the type of layers that have no key heads, if these are told by layer.
    biases: flags of config.json by the tensor that shows them.
    lacks: flags of config.json by the tensor that files without it have.
    handled: more keys that `finish` reads.
    only: keys that may have this value alone.
    uneven: keys whose values may differ between layers, which `finish` reads.
    finish: fills in the fields that have no key of their own.
    beside: pattern of tensors that are not the decoder's.
    rope, widths: whether rotary scaling and widths of heads are read as for most; otherwise `finish` reads them.
    """

    name: str
    architecture: str
    interleaved: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    experts: bool = False
    recurrent: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    keyless: str = ""
    biases: Mapping[str, str] = field(default_factory=lambda: _BIASES)
    lacks: Mapping[str, str] = field(default_factory=dict)
    handled: tuple[str, ...] = ()
    only: Mapping[str, int] = field(default_factory=dict)
    uneven: tuple[str, ...] = ()
    finish: Callable[[GgufReader, dict[str, Any]], None] | None = None
    beside: str = ""
    rope: bool = True
    widths: bool = True


_CUTOFFS = "{arch}.activation_sparsity_scale"
_BY_LAYER = ("{arch}.attention.head_count_kv", "{arch}.feed_forward_length")


def _gemma3n(file: GgufReader, values: dict[str, Any]) -> None:
    """Read what llama.cpp writes for Gemma 3n, and two sizes that only its tensors tell."""
    values["activation_sparsity_scale"] = file.get(_CUTOFFS)
    sizes = {
        "laurel_rank": "blk.0.laurel_l.weight",
        "vocab_size_per_layer_input": "per_layer_token_embd.weight",
    }
    for word, name in sizes.items():
        if name in file.tensors:
            values[word] = file.tensors[name].shape[0]


def _gemma4(file: GgufReader, values: dict[str, Any]) -> None:
    """Read what llama.cpp writes for Gemma 4: sizes of each layer, and divisors of frequencies, which are 1 or so
    large that a pair does not turn. That keys are the values as well is seen from the tensors."""
    types = values.get("layer_types") or []
    full = [index for index, kind in enumerate(types) if kind == FULL]
    heads, widths = (file.get(key) for key in _BY_LAYER)
    if isinstance(heads, list) and len(heads) == len(types) and full:
        slides = [index for index in range(len(types)) if index not in full]
        values["num_global_key_value_heads"] = heads[full[0]]
        values["num_key_value_heads"] = heads[slides[0] if slides else full[0]]
    if isinstance(widths, list) and widths:
        values["intermediate_size"] = widths[0]
        values["use_double_wide_mlp"] = widths[-1] == 2 * widths[0]
    names = file.tensors
    values["attention_k_eq_v"] = any(
        f"blk.{index}.attn_k.weight" in names and f"blk.{index}.attn_v.weight" not in names for index in full
    )
    if "per_layer_token_embd.weight" in names:
        values["vocab_size_per_layer_input"] = names["per_layer_token_embd.weight"].shape[0]
    else:
        values["hidden_size_per_layer_input"] = 0
    divisors = vector(file, "rope_freqs.weight") if "rope_freqs.weight" in names else [1.0]
    turning = sum(each == 1 for each in divisors) / max(1, len(divisors))
    local = values.pop("rope_local_base_freq", None)
    values["rope_parameters"] = {
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": turning,
            "rope_theta": values.pop("rope_theta", None),
        },
        SLIDING: {"rope_type": "default", "rope_theta": local},
    }


# Fields beside those of config.json.
GGUF_POOLING = "gguf_pooling"
GGUF_DENSE = "gguf_dense"
_POOLING = {1: MEAN, 2: CLS, 3: LAST}
_RANK = 4  # a classifier over the first token


def read_pooling_type(file: GgufReader, values: dict[str, Any]) -> None:
    """Read how a model pools, as `gguf_pooling`: in transformers' layout, files of sentence-transformers say it."""
    kind = number(file, "{arch}.pooling_type") or 0
    if kind in _POOLING:
        values[GGUF_POOLING] = _POOLING[kind]
    elif kind == _RANK:
        if values["architectures"] != [BERT.architecture]:
            raise _unknown(file, "pooling_type", "a classifier of another model than BERT's and RoBERTa's")
        values["architectures"] = ["BertForSequenceClassification"]
        if {"cls.weight", "cls.output.weight"} - file.tensors.keys():
            raise CheckpointError(
                f"{file.path}: the classifier is not complete: llama.cpp's converter leaves out the first of "
                "its two layers (cls.weight, cls.output.weight). Use the model's safetensors files"
            )
        labels = file.get("{arch}.classifier.output_labels")
        if isinstance(labels, list):
            values["id2label"] = {str(number): label for number, label in enumerate(labels)}
    elif kind != 0:
        raise _unknown(file, "pooling_type", "another kind of pooling")


def _unknown(file: GgufReader, key: str, meaning: str) -> CheckpointError:
    value = file.get(f"{{arch}}.{key}")
    return CheckpointError(
        f"{file.path}: {key} = {value!r}: not supported ({meaning}). Use another file of the model"
    )


def _bert(file: GgufReader, values: dict[str, Any]) -> None:
    """Tables of positions begin at a text's first token, RoBERTa's too; the tensors tell their rows."""
    names = file.tensors
    if "position_embd.weight" in names:
        values["max_position_embeddings"] = names["position_embd.weight"].shape[0]
    values["type_vocab_size"] = names["token_types.weight"].shape[0] if "token_types.weight" in names else 0


_UNGROUPED = 64  # the most experts of a published model that does not choose them by group
_GROUPS = {160: (8, 3), 256: (8, 4)}  # of DeepSeek V2 and V3, by their experts; older files do not have them


def _gemma_embedding(file: GgufReader, values: dict[str, Any]) -> None:
    """Layers behind the pooling, which llama.cpp's converter writes if asked."""
    values[GGUF_DENSE] = [name for name in ("dense_2", "dense_3") if f"{name}.weight" in file.tensors]


def _deepseek2(file: GgufReader, values: dict[str, Any]) -> None:
    """Widths of heads: newer files describe one key head for all queries, as llama.cpp computes latent attention, and
    give the widths of the model's own heads beside it. Experts are chosen by sigmoids if they have corrections."""
    rotary = number(file, "{arch}.rope.dimension_count") or 0
    width, valued = (
        number(file, f"{{arch}}.attention.{each}_length_mla")
        or number(file, f"{{arch}}.attention.{each}_length")
        for each in ("key", "value")
    )
    values.pop("head_dim", None)
    values |= {"qk_rope_head_dim": rotary, "qk_nope_head_dim": (width or 0) - rotary, "v_head_dim": valued}
    values["q_lora_rank"] = number(file, "{arch}.attention.q_lora_rank") or None
    experts = number(file, "{arch}.expert_count") or 0
    if experts > _UNGROUPED and experts not in _GROUPS and "n_group" not in values:
        raise _unknown(file, "expert_group_count", f"{experts} experts without their groups")
    values |= dict(zip(("n_group", "topk_group"), _GROUPS.get(experts, (1, 1)), strict=True)) | values
    values["topk_method"] = "greedy" if values["n_group"] == 1 else "group_limited_greedy"
    if any(name.endswith(".exp_probs_b.bias") for name in file.tensors):
        values |= {"architectures": [DEEPSEEK_V3.architecture], "model_type": DEEPSEEK_V3.model_type}
        values["topk_method"] = "noaux_tc"
    elif file.get("{arch}.expert_weights_norm") or file.get("{arch}.expert_gating_func") not in (None, 0, 1):
        raise _unknown(file, "expert_gating_func", "experts chosen otherwise than by DeepSeek V2 and V3")


def _mamba(file: GgufReader, heads: str, width: str) -> dict[str, Any]:
    """Sizes of Mamba heads. heads, width: the fields for their number and the features of each."""
    count, inner = number(file, "{arch}.ssm.time_step_rank"), number(file, "{arch}.ssm.inner_size")
    return {heads: count, width: inner // count if count and inner else None}


def _has(file: GgufReader, ending: str) -> bool:
    """Whether any layer has this tensor."""
    return any(name.endswith(ending) for name in file.tensors)


def _jamba(file: GgufReader, values: dict[str, Any]) -> None:
    """Mamba layers with the words of Granite and Falcon-H1."""
    values |= _mamba(file, "mamba_n_heads", "mamba_d_head")
    values["mamba_conv_bias"] = _has(file, ".ssm_conv1d.bias")
    values["mamba_proj_bias"] = _has(file, ".ssm_in.bias")


def _granite(file: GgufReader, values: dict[str, Any]) -> None:
    if file.get("{arch}.rope.scaling.finetuned", True) is not True:
        raise _unknown(file, "rope.scaling.finetuned", "Granite without rotary embedding")


def _granite_hybrid(file: GgufReader, values: dict[str, Any]) -> None:
    """Whether the model rotates is told by a flag for something else, which llama.cpp takes to be set."""
    _jamba(file, values)
    values["position_embedding_type"] = "rope" if file.get("{arch}.rope.scaling.finetuned", True) else "nope"


def _falcon_h1(file: GgufReader, values: dict[str, Any]) -> None:
    """Its multipliers are in the weights. A norm stands behind the gate, as llama.cpp computes it."""
    _jamba(file, values)
    values["mamba_d_ssm"] = number(file, "{arch}.ssm.inner_size")
    values |= {"mamba_rms_norm": _has(file, ".ssm_norm.weight"), "mamba_norm_before_gate": False}


def _fed(file: GgufReader, layer: int) -> str:
    return "moe" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "mlp"


def _nemotron_h(file: GgufReader, values: dict[str, Any]) -> None:
    """A layer is attention if it has key heads, an MLP or experts if it has features of one, else Mamba."""
    values |= _mamba(file, "mamba_num_heads", "mamba_head_dim")
    keys, features = (file.get(key) for key in _BY_LAYER)
    told = isinstance(keys, list) and isinstance(features, list) and len(keys) == len(features)
    if told and all(isinstance(each, int) for each in (*keys, *features)):
        count = values.get("num_hidden_layers")  # those that predict further tokens follow
        values["layers_block_type"] = [
            "attention" if heads else _fed(file, layer) if width else "mamba"
            for layer, (heads, width) in enumerate(zip(keys[:count], features[:count], strict=True))
        ]
        values["intermediate_size"] = max(features, default=0) or 1
    values |= {
        "attention_bias": _has(file, ".attn_q.bias"),
        "mlp_bias": _has(file, ".ffn_up.bias"),
        "mamba_proj_bias": _has(file, ".ssm_in.bias"),
        "use_conv_bias": _has(file, ".ssm_conv1d.bias"),
    }


def _mamba2(file: GgufReader, values: dict[str, Any]) -> None:
    """Heads of attention and MLPs, of which there are none, have the size 0."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        values.pop(name, None)
    values |= _mamba(file, "num_heads", "head_dim")
    values |= {"use_bias": _has(file, ".ssm_in.bias"), "use_conv_bias": _has(file, ".ssm_conv1d.bias")}


_JAMBA = {
    "{arch}.ssm.conv_kernel": "mamba_d_conv",
    "{arch}.ssm.state_size": "mamba_d_state",
    "{arch}.ssm.group_count": "mamba_n_groups",
}
_SIZES = ("{arch}.ssm.inner_size", "{arch}.ssm.time_step_rank")
_GEMMA4 = Architecture(
    name="gemma4",
    architecture="Gemma4ForCausalLM",
    keys={
        "{arch}.attention.key_length": "global_head_dim",
        "{arch}.attention.key_length_swa": "head_dim",
        "{arch}.attention.shared_kv_layers": "num_kv_shared_layers",
        "{arch}.embedding_length_per_layer_input": "hidden_size_per_layer_input",
    },
    uneven=_BY_LAYER,
    finish=_gemma4,
    rope=False,
    widths=False,
)
_NEMOTRON_H = Architecture(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    interleaved=True,
    words={"rms_norm_eps": "layer_norm_epsilon"},
    keys={
        "{arch}.ssm.conv_kernel": "conv_kernel",
        "{arch}.ssm.state_size": "ssm_state_size",
        "{arch}.ssm.group_count": "n_groups",
    },
    biases={},
    handled=_SIZES,
    uneven=_BY_LAYER[1:],
    finish=_nemotron_h,
    widths=False,
)
_GRANITE_HYBRID = Architecture(
    name="granitehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    interleaved=True,
    fields={"num_local_experts": 0},
    keys={**_JAMBA, "{arch}.expert_shared_feed_forward_length": "shared_intermediate_size"},
    keyless=MAMBA,
    handled=(*_SIZES, "{arch}.expert_used_count"),
    finish=_granite_hybrid,
)
_LFM2 = Architecture(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    fields={"block_auto_adjust_ff_dim": False},
    words={"rms_norm_eps": "norm_eps"},
    keys={"{arch}.shortconv.l_cache": "conv_L_cache"},
    keyless=CONV,
    biases={"conv_bias": "blk.0.shortconv.conv.bias"},
)
_KINDS = (
    Architecture(name="bert", architecture="BertModel", biases={}, finish=_bert),
    Architecture(name="nomic-bert", architecture="NomicBertModel", biases={}, finish=_bert),
    Architecture(
        name="modern-bert",
        architecture="ModernBertModel",
        words={
            "rms_norm_eps": "layer_norm_eps",
            "sliding_window": "local_attention",
            "sliding_window_pattern": "global_attn_every_n_layers",
        },
        keys={"{arch}.hidden_act": "hidden_act", "{arch}.hidden_activation": "hidden_act"},
        biases={
            "attention_bias": "blk.0.attn_qkv.bias",
            "mlp_bias": "blk.0.ffn_up.bias",
            "norm_bias": "output_norm.bias",
        },
        finish=_bert,
    ),
    Architecture(name="llama", architecture="LlamaForCausalLM", interleaved=True),
    Architecture(name="smollm3", architecture="SmolLM3ForCausalLM", interleaved=True),
    Architecture(name="granite", architecture="GraniteForCausalLM", interleaved=True, finish=_granite),
    Architecture(name="qwen2", architecture="Qwen2ForCausalLM"),
    Architecture(name="qwen3", architecture="Qwen3ForCausalLM"),
    Architecture(name="phi3", architecture="Phi3ForCausalLM"),
    Architecture(name="olmo2", architecture="Olmo2ForCausalLM"),
    Architecture(name="gemma", architecture="GemmaForCausalLM"),
    Architecture(name="gemma2", architecture="Gemma2ForCausalLM"),
    Architecture(name="gemma3", architecture="Gemma3ForCausalLM"),
    Architecture(
        name="gemma-embedding",
        architecture="Gemma3TextModel",
        fields={"use_bidirectional_attention": True},
        handled=tuple(f"{{arch}}.dense_{number}_feat_{end}" for number in (2, 3) for end in ("in", "out")),
        finish=_gemma_embedding,
        beside=r"dense_[23]\.weight",
    ),
    Architecture(
        name="gemma3n",
        architecture="Gemma3nForCausalLM",
        keys={
            "{arch}.attention.shared_kv_layers": "num_kv_shared_layers",
            "{arch}.embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "{arch}.altup.num_inputs": "altup_num_inputs",
            "{arch}.altup.active_idx": "altup_active_idx",
        },
        handled=(_CUTOFFS,),
        finish=_gemma3n,
    ),
    _GEMMA4,
    replace(
        _GEMMA4,
        fields={"enable_moe_block": True},
        words={"num_experts_per_tok": "top_k_experts"},
        experts=True,
    ),
    Architecture(name="command-r", architecture="CohereForCausalLM", words={"logits_scaling": "logit_scale"}),
    Architecture(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        biases={**_BIASES, "attention_bias": _QUERY_BIAS, "attention_out_bias": _OUTPUT_BIAS},
    ),
    Architecture(name="ernie4_5", architecture="Ernie4_5ForCausalLM", biases={"use_bias": _QUERY_BIAS}),
    Architecture(name="exaone4", architecture="Exaone4ForCausalLM", fields={"sliding_window": None}),
    Architecture(name="glm4", architecture="Glm4ForCausalLM", biases={"attention_bias": _QUERY_BIAS}),
    Architecture(name="cohere2", architecture="Cohere2ForCausalLM", words={"logits_scaling": "logit_scale"}),
    Architecture(name="hunyuan-dense", architecture="HunYuanDenseV1ForCausalLM"),
    Architecture(
        name="mistral3",
        architecture="Ministral3ForCausalLM",
        interleaved=True,
        fields={"sliding_window": None},
    ),
    Architecture(
        name="stablelm",
        architecture="StableLmForCausalLM",
        biases={"use_qkv_bias": _QUERY_BIAS, "qk_layernorm": "blk.0.attn_q_norm.weight"},
        lacks={"use_parallel_residual": "blk.0.ffn_norm.weight"},  # which the metadata do not always say
    ),
    Architecture(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        words={"layer_norm_eps": "norm_epsilon"},
        biases={"use_bias": _QUERY_BIAS},
    ),
    Architecture(
        name="phi2", architecture="PhiForCausalLM", biases={"qk_layernorm": "blk.0.attn_q_norm.weight"}
    ),
    Architecture(
        name="glm4moe",
        architecture="Glm4MoeForCausalLM",
        words={"num_experts": "n_routed_experts"},
        experts=True,
        biases={"attention_bias": _QUERY_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        keys={
            "{arch}.expert_shared_count": "n_shared_experts",
            "{arch}.leading_dense_block_count": "first_k_dense_replace",
            "{arch}.expert_weights_scale": "routed_scaling_factor",
        },
        only={"{arch}.expert_gating_func": 2, "{arch}.expert_group_count": 1}  # sigmoids, in one group
        | {"{arch}.expert_group_used_count": 1},
    ),
    Architecture(
        name="deepseek2",  # V3's, Moonlight's and GLM-4.7-Flash's, too
        architecture=DEEPSEEK_V2.architecture,
        words={"num_experts": "n_routed_experts"},
        experts=True,
        biases={"attention_bias": "blk.0.attn_kv_a_mqa.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        keys={
            "{arch}.attention.kv_lora_rank": "kv_lora_rank",
            "{arch}.expert_shared_count": "n_shared_experts",
            "{arch}.leading_dense_block_count": "first_k_dense_replace",
            "{arch}.expert_weights_scale": "routed_scaling_factor",
            "{arch}.expert_group_count": "n_group",
            "{arch}.expert_group_used_count": "topk_group",
        },
        handled=(
            "{arch}.attention.q_lora_rank",
            "{arch}.attention.key_length_mla",
            "{arch}.attention.value_length_mla",
            "{arch}.expert_gating_func",
        ),
        finish=_deepseek2,
        widths=False,
    ),
    Architecture(name="qwen3vl", architecture="Qwen3ForCausalLM"),  # pictures are in a file of their own
    Architecture(name="qwen35", architecture="Qwen3_5ForCausalLM", recurrent=True),
    Architecture(name="qwen3next", architecture="Qwen3NextForCausalLM", experts=True, recurrent=True),
    Architecture(name="qwen35moe", architecture="Qwen3_5MoeForCausalLM", experts=True, recurrent=True),
    Architecture(
        name="qwen3vlmoe", architecture="Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}, experts=True
    ),
    Architecture(
        name="llama",  # in GGUF, Mixtral is a llama with experts
        architecture="MixtralForCausalLM",
        interleaved=True,
        words={"num_experts": "num_local_experts"},
        experts=True,
    ),
    Architecture(
        name="qwen3moe", architecture="Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}, experts=True
    ),
    Architecture(
        name="falcon-h1",
        architecture="FalconH1ForCausalLM",
        keys=_JAMBA,
        handled=_SIZES,
        finish=_falcon_h1,
    ),
    _NEMOTRON_H,
    replace(
        _NEMOTRON_H,
        name="nemotron_h_moe",  # Nemotron 3
        words={
            **_NEMOTRON_H.words,
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        keys={
            **_NEMOTRON_H.keys,
            "{arch}.expert_shared_count": "n_shared_experts",
            "{arch}.expert_weights_scale": "routed_scaling_factor",
            "{arch}.expert_group_count": "n_group",
            "{arch}.expert_group_used_count": "topk_group",
            "{arch}.moe_latent_size": "moe_latent_size",
        },
        experts=True,
        only={"{arch}.expert_gating_func": 2},
    ),
    Architecture(
        name="mamba2",
        architecture="Mamba2ForCausalLM",
        words={"rms_norm_eps": "layer_norm_epsilon"},
        keys={
            "{arch}.ssm.conv_kernel": "conv_kernel",
            "{arch}.ssm.state_size": "state_size",
            "{arch}.ssm.group_count": "n_groups",
        },
        biases={},
        handled=_SIZES,
        finish=_mamba2,
        widths=False,
    ),
    _GRANITE_HYBRID,
    replace(_GRANITE_HYBRID, experts=True, words={"num_experts": "num_local_experts"}),
    _LFM2,
    replace(
        _LFM2,
        name="lfm2moe",
        architecture="Lfm2MoeForCausalLM",
        experts=True,
        keys={
            **_LFM2.keys,
            "{arch}.leading_dense_block_count": "num_dense_layers",
            "{arch}.expert_gating_func": "expert_gating_func",
        },
    ),
    Architecture(
        name="gpt-oss",
        architecture="GptOssForCausalLM",
        words={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        experts=True,
    ),
)
_ARCHITECTURES = {(kind.name, kind.experts): kind for kind in _KINDS}


def architecture(file: GgufReader) -> Architecture:
    """The architecture of a file. Raises CheckpointError for unsupported ones."""
    name, experts = str(file.get("general.architecture")), bool(file.get("{arch}.expert_count"))
    for known in ((name, experts), (name, False)):
        if known in _ARCHITECTURES:
            return _ARCHITECTURES[known]
    names = ", ".join(dict.fromkeys(name for name, _ in _ARCHITECTURES))
    raise CheckpointError(
        f"{file.path}: general.architecture = {name!r}: not supported. Use a file of: {names}"
    )
