"""Load a model as named leaves in one dtype, read lazily from its files; or make random leaves.

Linear weights stay `[out, in]`; q/k/v and gate/up are stacked by rows; vectors (norms, biases) are always float32.
"""

import hashlib
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.config import AUTO, KEPT, EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.encoder_form import EncoderForm
from xla_engine.graphs.forms import RopeScaling, RoutedExperts
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.graphs.ops.coded import KINDS
from xla_engine.graphs.recurrent_forms import DeltaForm
from xla_engine.model_loader.describe import ModelDescription, describe_decoder
from xla_engine.model_loader.families import Source, tensor_sources
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.pooling import without_head
from xla_engine.model_loader.tensor_files import Array, GivenTensors, TensorFiles
from xla_engine.model_loader.weights import DTYPES, LARGEST, Sources, StoredWeights, is_below

_DTYPE_WORDS = {"auto": "auto", "bf16": "bfloat16", "f32": "float32"} | {name: name for name in DTYPES}
_FLOATS = (*DTYPES.values(), np.dtype(np.float16))
# Buffers of old checkpoints and of GGUF files, which repeat the configuration.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|rope_(freqs|factors_(long|short))\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model.

    path: the directory or file it came from.
    config: its shape.
    weights: leaf name (of `graphs.model.spec.parameter_shapes`) to array; matrices in `dtype`, vectors in float32.
        Each access to a loaded checkpoint reads the files again and caches nothing (`StoredWeights`).
    eos_token_ids: all ids that end a text; empty if the files name none.
    bos_token_id: the id that begins a text, or None.
    dtype: "bfloat16" or "float32".
    fingerprint: sha256 of config, special tokens, and the weight files' names, sizes, headers and contents
        (of files above 64 MiB, 256 blocks). The same wherever the directory lies.
    sources: those of its `ModelDescription`; empty if it has none.
    """

    path: Path
    config: ModelConfig
    weights: Mapping[str, Array]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    fingerprint: str
    sources: Sources = field(default_factory=dict)


def load_checkpoint(model: ModelFiles | Path | str, *, dtype: str = "auto") -> Checkpoint:
    """`load_weights` for a generative model: a directory, an id of the Hugging Face hub or a GGUF file (`open_model`).

    dtype: as in `EngineConfig`.
    """
    return load_weights(describe_decoder(open_model(model), EngineConfig(runner="generate", dtype=dtype)))


def load_weights(model: ModelDescription) -> Checkpoint:
    """Load the weights of a model described by `describe`, of one of `xla_engine.model_loader.families`.

    dtype of the options: "bfloat16" ("bf16"), "float32" ("f32"), or "auto": float32 if any matrix is stored so,
    otherwise bfloat16. A float16 checkpoint thus becomes bfloat16, because XLA:CPU has no fast float16 product; use
    float32 to keep every bit. It is also bfloat16 if quantised weights may stay packed, and for encoders, which are
    published in float32 and read at half the time in bfloat16.

    Names, shapes and dtypes are checked against the headers at once; weights are read lazily, one leaf at a time.
    `rotary_emb.inv_freq` buffers are ignored. If a tied model stores `lm_head.weight`, it must be a bitwise copy of
    the embedding. Raises CheckpointError naming file, tensor and remedy.
    """
    wanted, config, special = dtype_word(model.options.dtype), model.config, model.special_tokens
    sources = tensor_sources(config, model.family)
    files = model.files.tensors(source.name for stacked in sources.values() for source in stacked)
    files = without_head(files) if model.headless else files
    sources = _in_files(sources, files)
    check_tensors(files, sources, config, model.family.ignored(config))
    target = wanted
    if wanted == "auto":
        may_pack = model.options.quantization in (AUTO, *KEPT) and has_packed(files, sources)
        target = "bfloat16" if may_pack or config.encodes else stored_dtype(files, sources)
    identity = repr((_told(config), asdict(special), files.fingerprint()))
    return Checkpoint(
        path=model.files.path,
        config=config,
        weights=StoredWeights(files, sources, parameter_shapes(config), target),
        eos_token_ids=special.eos_token_ids,
        bos_token_id=special.bos_token_id,
        dtype=target,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        sources=model.sources,
    )


# From these fields on, a part of the shape leaves out those with their defaults, so that fingerprints of models that
# do not have them are those of earlier versions. New fields are appended with such a default.
_LATER = {
    ModelConfig: "encoder",
    RoutedExperts: "scoring_func",
    RopeScaling: "turning",
    EncoderForm: "pre_norm",
    DeltaForm: "rate_factor",
}


def _told(config: ModelConfig) -> dict[str, Any]:
    """The shape as fingerprints have it."""
    shape = asdict(config)
    parts = ((getattr(config, name), values) for name, values in shape.items() if isinstance(values, dict))
    for part, values in [*parts, (config, shape)]:
        names = [each.name for each in fields(part)]
        for each in fields(part)[names.index(_LATER[type(part)]) if type(part) in _LATER else len(names) :]:
            if values[each.name] == each.default:
                del values[each.name]
    return shape


def random_checkpoint(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    seed: int = 0,
    scale: float = 0.02,
    eos_token_ids: tuple[int, ...] = (),
    weights: Mapping[str, Array] | None = None,
) -> Checkpoint:
    """A model of `config`'s shape without files, for tests and benchmarks.

    weights: `random_weights` by default. dtype: as in `load_checkpoint`; auto is bfloat16.
    """
    target = dtype_word("bfloat16" if dtype == "auto" else dtype)
    if weights is None:
        weights = random_weights(config, dtype=target, seed=seed, scale=scale)
    return Checkpoint(
        path=Path("random"),
        config=config,
        weights=weights,
        eos_token_ids=eos_token_ids,
        bos_token_id=None,
        dtype=target,
        fingerprint="random",
    )


def random_weights(
    config: ModelConfig, *, dtype: str, seed: int = 0, scale: float = 0.02
) -> dict[str, Array]:
    """Random leaves of `config`'s shape, for tests and benchmarks. dtype: as in `load_checkpoint`; auto is bfloat16.

    Matrices and biases are normal with standard deviation `scale`; norms are 1 plus such noise. A leaf depends only
    on its name, its shape and the seed.
    """
    target = DTYPES[dtype_word("bfloat16" if dtype == "auto" else dtype)]
    weights = {}
    for leaf, shape in parameter_shapes(config).items():
        generator = np.random.default_rng([seed, zlib.crc32(leaf.encode())])
        draw = generator.standard_normal(shape, dtype=np.float32)
        draw *= np.float32(scale)
        if leaf.endswith("norm"):
            draw += np.float32(1)
        weights[leaf] = draw.astype(target if len(shape) > 1 else np.float32, copy=False)
    return weights


def given_weights(checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> tuple[StoredWeights, str]:
    """Leaves built from `tensors`, in the form of a checkpoint's, and a digest of them.

    tensors: arrays with transformers' names and shapes. Raises CheckpointError.
    """
    if not checkpoint.sources:
        raise CheckpointError(
            "tensors have no names because the model was not loaded from files. Load it from files"
        )
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    head, embedding = "lm_head.weight", arrays.get("model.embed_tokens.weight")
    tied = checkpoint.config.tie_word_embeddings and head in arrays
    if tied and (embedding is None or not np.array_equal(arrays.pop(head), embedding)):
        raise CheckpointError(f"{head} differs from the embedding, but the model ties the two. Leave it out")
    sources, used = {}, set[str]()
    for leaf, parts in checkpoint.sources.items():
        names = [part.name for part in parts]
        if arrays.keys().isdisjoint(names):
            continue
        if missing := [name for name in names if name not in arrays]:
            raise CheckpointError(
                f"{missing[0]} is missing: {' and '.join(names)} form one weight. Give all of them"
            )
        for part in parts:
            array = arrays[part.name]
            if array.dtype not in _FLOATS or array.shape != part.shape:
                raise CheckpointError(
                    f"{part.name} is {array.dtype}{list(array.shape)}; give {list(part.shape)} in float32, float16 or "
                    "bfloat16, as the checkpoint has it"
                )
        sources[leaf] = parts
        used.update(names)
    if unknown := sorted(arrays.keys() - used):
        raise CheckpointError(f"the checkpoint has no tensor {unknown[0]!r}. Use the names of transformers")
    given = GivenTensors(arrays)
    shapes = parameter_shapes(checkpoint.config)
    return StoredWeights(given, sources, shapes, checkpoint.dtype), given.fingerprint()


def check_leaves(checkpoint: Checkpoint, leaves: Mapping[str, Array]) -> None:
    """Raise CheckpointError unless `leaves` could be some of the checkpoint's, with its shapes and dtypes."""
    shapes = parameter_shapes(checkpoint.config)
    for name, array in leaves.items():
        if (shape := shapes.get(name)) is None:
            raise CheckpointError(f"the model has no leaf {name!r}. Use the names of checkpoint.weights")
        dtype = DTYPES[checkpoint.dtype if len(shape) > 1 else "float32"]
        if (array.shape, array.dtype) != (shape, dtype):
            raise CheckpointError(
                f"leaf {name} is {array.dtype}{list(array.shape)}; give {list(shape)} in {dtype}"
            )
        if not is_below(np.ascontiguousarray(array), LARGEST if array.ndim > 1 else math.inf):
            raise CheckpointError(
                f"leaf {name} holds values that are not finite, or too large. Give other values; nothing was changed"
            )


def dtype_word(dtype: str) -> str:
    """The canonical name of a dtype option. Raises ConfigError."""
    if dtype not in _DTYPE_WORDS:
        raise ConfigError(f"dtype {dtype!r} is not supported. Use one of: {', '.join(_DTYPE_WORDS)}")
    return _DTYPE_WORDS[dtype]


def check_tensors(files: TensorFiles, sources: Sources, config: ModelConfig, ignores: str) -> None:
    """Raise CheckpointError unless exactly the expected tensors are there, with their shapes and float dtypes."""
    expected = {source.name: source.shape for stacked in sources.values() for source in stacked}
    for name, shape in expected.items():
        if name not in files.tensors:
            remedy = "Download the weights again or correct config.json"
            if name == "lm_head.weight":
                remedy = "Download them again, or set tie_word_embeddings if the embedding is the head"
            raise CheckpointError(f"{files.names}: tensor {name} is missing. {remedy}")
        info = files.tensors[name]
        if info.dtype not in files.dtypes:
            raise CheckpointError(
                f"{info.file}: tensor {name} is stored as {info.dtype}, not as one of "
                f"{', '.join(files.dtypes)}. Save an unquantised copy, in bfloat16 for example"
            )
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, but {list(shape)} by the configuration. "
                "Correct config.json, or download both again"
            )
    for name, info in files.tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            _check_tied_head(files, sources["embed"][0].name)
        elif name not in expected and not _IGNORED.fullmatch(name) and not re.fullmatch(ignores, name):
            raise CheckpointError(
                f"{info.file}: tensor {name!r} is not part of the model that the configuration describes. "
                "Correct config.json, or save the weights without it"
            )


def _check_tied_head(files: TensorFiles, embedding_name: str) -> None:
    names = ("lm_head.weight", embedding_name)
    head, embedding = (files.tensors[name] for name in names)
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        np.array_equal(one.view(np.uint8), other.view(np.uint8))
        for one, other in zip(*map(files.blocks, names), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{head.file}: tensor lm_head.weight differs from the embedding, but config.json ties the two. "
            "Set tie_word_embeddings to false if the model has its own head, else save without lm_head.weight"
        )


def _in_files(sources: Sources, files: TensorFiles) -> dict[str, tuple[Source, ...]]:
    """The sources as these files store them."""
    return {
        leaf: tuple(
            part.in_file(files.tensors[part.name].shape) if part.name in files.tensors else part
            for part in stacked
        )
        for leaf, stacked in sources.items()
    }


def has_packed(files: TensorFiles, sources: Sources) -> bool:
    """Whether any of the model's tensors is quantised in a type that can stay packed."""
    return any(files.kind(source.name) in KINDS for stacked in sources.values() for source in stacked)


def stored_dtype(files: TensorFiles, sources: Sources) -> str:
    """The dtype that "auto" means for these files. Convolutions and decays say nothing: files have them in float32."""
    matrices = (
        source.name
        for leaf, stacked in sources.items()
        for source in stacked
        if len(source.shape) > 1 and not leaf.endswith((".convolution", ".decay"))
    )
    return "float32" if any(files.tensors[name].dtype == "F32" for name in matrices) else "bfloat16"
