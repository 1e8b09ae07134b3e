"""Makes the proposer on the device from the options."""

from collections.abc import Callable
from pathlib import Path

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.eagle3 import load_eagle3
from xla_engine.model_loader.model_files import open_model
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.drafting.draft_model import DraftModel
from xla_engine.runner.drafting.eagle3 import Eagle3
from xla_engine.runner.drafting.mtp import Mtp, load_mtp
from xla_engine.speculative_config import ON_DEVICE
from xla_engine.text.tokenizer import Tokenizer

MakeProposer = Callable[[EngineConfig, ModelConfig, int], DeviceProposer]


def device_proposer_of(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None, draft: Checkpoint | None
) -> MakeProposer | None:
    """The function with which a runner makes its device proposer; None if drafting does not run on the device.

    draft: a loaded draft model or MTP layer; None loads the one that the options name, or the model's own.

    Raises ConfigError if a draft model has another tokenizer, and CheckpointError.
    """
    options = config.speculation
    if options is None or options.method not in ON_DEVICE:
        return None
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative_config method {options.method!r} runs on one device; use tensor_parallel_size 1"
        )
    if options.method == "mtp":
        layer = load_mtp(checkpoint) if draft is None else draft
        return lambda config, model, context_length: Mtp(layer, config, context_length)
    if options.method == "eagle3":
        assert options.model is not None
        head, dtype = load_eagle3(options.model, checkpoint), checkpoint.dtype
        return lambda config, model, context_length: Eagle3(head, model, dtype, config, context_length)
    if draft is None:
        named = checkpoint.path / "draft" if options.model is None else options.model
        if isinstance(named, Path) and not named.is_dir():
            raise ConfigError(
                f"{checkpoint.path} has no draft model (a directory draft); "
                'name one with the same tokenizer as "model" in speculative_config'
            )
        files = open_model(named)
        own = Tokenizer.of_model(files)
        if tokenizer is not None and own is not None and not tokenizer.has_tokens_of(own):
            raise ConfigError(
                f"the draft model {str(named)!r} has another tokenizer than the model; use one of the same family"
            )
        draft = load_checkpoint(files, dtype=config.dtype)
    found = draft
    return lambda config, model, context_length: DraftModel(found, config, model, context_length)
