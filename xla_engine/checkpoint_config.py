"""config.json and generation_config.json of a Hugging Face directory: a ModelConfig, or one clear error.

A field that would change the computation and is not built in is refused by name, never ignored. `auto_map` is
not followed: no code from a checkpoint is run, and beside a built-in architecture it is without effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphs.config import ModelConfig, RopeScaling
from xla_engine.checkpoint_json import Fields
from xla_engine.errors import CheckpointError

ARCHITECTURES = {"LlamaForCausalLM": "llama"}  # architecture -> its model_type

# Ceilings far above any real model: with them products of sizes stay below 2**63 and every table is small.
_CEILINGS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31 - 1,
}

# Fields that change what a Llama computes: the values, beside null, that leave it plain; what others mean.
_PLAIN: dict[str, tuple[tuple[object, ...], str]] = {
    "attention_bias": ((False,), "biases on the attention projections"),
    "mlp_bias": ((False,), "biases on the MLP projections"),
    "hidden_act": (("silu", "swish"), "another activation than silu"),
    "pretraining_tp": ((1,), "sliced projections; the weights are the same with 1, so set it to 1"),
    "quantization_config": ((), "quantised weights; an unquantised or dequantised copy is needed"),
    "compression_config": ((), "quantised weights; an unquantised or dequantised copy is needed"),
    "sliding_window": ((), "windowed attention"),
    "use_sliding_window": ((False,), "windowed attention"),
    "partial_rotary_factor": ((1,), "rotary embedding of a part of each head"),
    "rope_interleaved": ((False,), "interleaved rotary pairs"),
    "no_rope_layers": (([],), "layers without rotary embedding"),
    "clip_qkv": ((), "clipped projections"),
    "use_qk_norm": ((False,), "normalised queries and keys"),
    "attn_logit_softcapping": ((), "capped attention scores"),
    "final_logit_softcapping": ((), "capped logits"),
    "attention_multiplier": ((), "another attention scale"),
    "embedding_multiplier": ((1,), "scaled embeddings"),
    "residual_multiplier": ((1,), "scaled residuals"),
    "logits_scaling": ((1,), "scaled logits"),
}

_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids that end a text, in the file's order without repeats, and the id that begins one, if any."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def model_directory(path: Path | str) -> Path:
    """`path` as a directory that exists, or a CheckpointError."""
    try:
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        found = directory.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path!r} is not a usable path ({error}). Name a model directory") from error
    if found:
        raise CheckpointError(f"{directory}: not a directory. Name the directory that holds config.json")
    raise CheckpointError(
        f"{directory}: no such directory. Name a local model directory; nothing is downloaded"
    )


def read_config(path: Path | str) -> ModelConfig:
    """The ModelConfig of the model directory `path`; weights and tokenizer need not be there.

    Rope types "default" and "llama3", under `rope_scaling` (transformers 4) or `rope_parameters` (5). Fields
    that real files leave out take transformers' defaults: head_dim, num_key_value_heads, rms_norm_eps,
    max_position_embeddings, rope_theta, tie_word_embeddings. The others are required.
    Raises CheckpointError naming file, field and remedy.
    """
    fields = Fields.of_file(model_directory(path) / "config.json")
    _check_architecture(fields)
    _check_plain(fields)
    hidden_size = _size(fields, "hidden_size")
    heads = _size(fields, "num_attention_heads")
    if fields.values.get("head_dim") is None and hidden_size % heads:
        fields.fail(
            "hidden_size", f"no multiple of num_attention_heads = {heads}. Add head_dim or correct it"
        )
    rope_theta, rope_scaling = _read_rope(fields)
    sizes = {
        "vocab_size": _size(fields, "vocab_size"),
        "intermediate_size": _size(fields, "intermediate_size"),
        "num_hidden_layers": _size(fields, "num_hidden_layers"),
        "num_key_value_heads": _size(fields, "num_key_value_heads", default=heads),
        "head_dim": _size(fields, "head_dim", default=hidden_size // heads),
        "max_position_embeddings": _size(fields, "max_position_embeddings", default=2048),
    }
    rms_norm_eps = fields.number("rms_norm_eps", default=1e-6, high=1.0)
    tied = fields.flag("tie_word_embeddings", default=False)
    try:
        return ModelConfig(
            **sizes,
            hidden_size=hidden_size,
            num_attention_heads=heads,
            rms_norm_eps=rms_norm_eps,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=tied,
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.file}: {error}. Correct the file or download it again") from error


def read_special_tokens(path: Path | str, config: ModelConfig) -> SpecialTokens:
    """Ids that end and begin a text: generation_config.json where it names them, else config.json."""
    directory = model_directory(path)
    files = [directory / "generation_config.json", directory / "config.json"]
    eos: tuple[int, ...] = ()
    bos: tuple[int, ...] = ()
    for fields in (Fields.of_file(file) for file in files if file.exists()):
        eos = eos or fields.token_ids("eos_token_id", config.vocab_size)
        bos = bos or fields.token_ids("bos_token_id", config.vocab_size)
        if len(bos) > 1:
            fields.fail("bos_token_id", "more than one id. Keep the one that begins a text")
    return SpecialTokens(eos_token_ids=eos, bos_token_id=bos[0] if bos else None)


def _size(fields: Fields, name: str, default: int | None = None) -> int:
    return fields.integer(name, high=_CEILINGS[name], default=default)


def _check_architecture(fields: Fields) -> None:
    names = fields.values.get("architectures")
    remedy = f"Use a checkpoint of: {', '.join(ARCHITECTURES)}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        fields.fail("architectures", f"must be a list of one architecture name. {remedy}")
    if names[0] not in ARCHITECTURES:
        remote = "; the code that its auto_map points to is never run" if "auto_map" in fields.values else ""
        fields.fail("architectures", f"not supported{remote}. {remedy}")
    if fields.values.get("model_type") not in (None, ARCHITECTURES[names[0]]):
        fields.fail("model_type", f"contradicts the architecture {names[0]}. {remedy}")


def _check_plain(fields: Fields) -> None:
    for name, (plain, meaning) in _PLAIN.items():
        value = fields.values.get(name)
        if value is not None and value not in plain:
            fields.fail(name, f"not supported ({meaning}). Use a plain Llama checkpoint")
    layers = fields.values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(k != "full_attention" for k in layers)):
        fields.fail("layer_types", 'only "full_attention" is supported. Use a plain Llama checkpoint')


def _read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling. The object may stand under either key, and the base inside or beside it."""
    objects = [
        rope for key in ("rope_parameters", "rope_scaling") if (rope := fields.within(key)) is not None
    ]
    scalings = [_read_scaling(rope, fields) for rope in objects]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        fields.fail("rope_scaling", "contradicts rope_parameters. Keep the one that is right")
    thetas = {
        source.number("rope_theta", high=1e15)
        for source in (fields, *objects)
        if source.values.get("rope_theta") is not None
    }
    if len(thetas) > 1:
        fields.fail("rope_theta", f"given as {sorted(thetas)} in one file. Keep the one that is right")
    return thetas.pop() if thetas else 10000.0, scalings[0] if scalings else None


def _read_scaling(rope: Fields, config: Fields) -> RopeScaling | None:
    """None for type "default". Llama 3's four numbers are required, where transformers would guess one."""
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
    kind = rope.values.get(name)
    if kind not in (None, "default", "llama3"):
        rope.fail(name, 'not supported. Supported rope types: "default", "llama3"')
    known = _ROPE_KEYS | _LLAMA3_KEYS if kind == "llama3" else _ROPE_KEYS
    for key, value in rope.values.items():
        if key not in known and value is not None:
            rope.fail(key, f"no parameter of rope type {kind or 'default'}. Remove it or correct the type")
    if rope.values.get("partial_rotary_factor") not in (None, 1):
        rope.fail("partial_rotary_factor", "not supported (rotary embedding of a part of each head). Use 1")
    if kind != "llama3":
        return None
    original = rope.integer("original_max_position_embeddings", high=2**31 - 1)
    if config.values.get("original_max_position_embeddings") not in (None, original):
        config.fail("original_max_position_embeddings", "contradicts the rope object. Keep the right one")
    low = rope.number("low_freq_factor", high=1e6)
    high = rope.number("high_freq_factor", high=1e6)
    if high <= low:
        rope.fail("high_freq_factor", f"must be above low_freq_factor = {low:g}. Correct the file")
    factor = rope.number("factor", high=1e6)
    return RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
