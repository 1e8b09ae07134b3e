"""`xla-engine inspect`: describes a model and the memory it needs on this machine, without loading its weights."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from math import prod
from pathlib import Path

from xla_engine.config import EngineConfig
from xla_engine.engine.inspection_report import Inspection
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.config_json import overridden, read_model, read_special_tokens
from xla_engine.model_loader.config_only import ConfigOnly, open_named
from xla_engine.model_loader.describe import ModelDescription, describe_decoder
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.model_loader.pooling import choose_runner, decoder_fields
from xla_engine.model_loader.quantised.methods import without_method
from xla_engine.model_loader.tensor_files import TensorInfo
from xla_engine.text.tokenizer import Tokenizer


def inspect_model(model: ModelFiles | Path | str, config: EngineConfig) -> Inspection:
    """Inspect a model without reading its weights; a config.json is enough, and `stored` is empty then.

    Imports jax only for a model whose configuration is supported. Raises CheckpointError if there is no model.
    """
    files = open_named(model) if isinstance(model, Path | str) else model
    report = Inspection(path=str(files.path))
    read: ModelConfig | None = None
    described: ModelDescription | None = None
    with report.noting():
        names = files.config_fields().values.get("architectures")
        report.architecture = ", ".join(map(str, names)) if isinstance(names, list) else None
    with report.noting():
        report.stored = {} if isinstance(files, ConfigOnly) else _stored(files.tensors().tensors.values())
    with report.noting():
        fields = overridden(files.config_fields(), config.hf_overrides or {})
        config = without_method(fields, choose_runner(files, fields, config))
        read, _ = read_model(files, decoder_fields(files, fields, config))
        report.shape = asdict(read)
        report.layers = dict(Counter(read.layer_type(index) for index in range(read.num_hidden_layers)))
        report.dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        report.eos_token_ids = read_special_tokens(files, read).eos_token_ids
    with report.noting():
        described = describe_decoder(files, config)
    with report.noting():
        tokenizer = Tokenizer.of_model(files)
        report.tokenizer = None if tokenizer is None else tokenizer.vocab_size
    with report.noting():
        report.chat_template = files.chat_template() is not None
    if read is not None:
        from xla_engine.engine.footprint import add_footprint

        add_footprint(report, read, config, described)
    return report


def _stored(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for info in tensors:
        sums = found.setdefault(info.dtype, {"tensors": 0, "parameters": 0, "bytes": 0})
        sums["tensors"] += 1
        sums["parameters"] += prod(info.shape)
        sums["bytes"] += info.size
    return found
