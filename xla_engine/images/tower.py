"""Load the vision tower of an engine's checkpoint."""

from __future__ import annotations

from xla_engine.config import EngineConfig
from xla_engine.images.processor import read_image_processor
from xla_engine.model_loader.describe import ModelDescription
from xla_engine.model_loader.vision import load_vision
from xla_engine.runner.vision_tower import VisionTower

NO_PICTURES = "this engine reads no pictures: its model has no vision tower that is supported; remove them"
_FILES = ("preprocessor_config.json", "processor_config.json")


def load_tower(model: ModelDescription) -> VisionTower | str:
    """The compiled tower of a described model; or why its engine takes no pictures, and what to do.

    Raises CheckpointError naming file, field or tensor and remedy.
    """
    options, directory = model.options, model.files.path
    if not model.family.vision or not directory.is_dir():
        return NO_PICTURES
    if (why := no_pictures_with(options)) is not None:
        return f"this engine reads no pictures: {why}"
    if not any((directory / name).is_file() for name in _FILES):
        return f"this engine reads no pictures: {directory} has no {_FILES[0]}; add the file"
    vision = load_vision(model.files, dtype=options.dtype)
    table = read_image_processor(directory).table()
    return VisionTower(vision.config, vision.dtype, vision.weights, table)


def no_pictures_with(options: EngineConfig) -> str | None:
    """The option that rules pictures out, and what to do; None if none does."""
    speculation = options.speculation
    if options.image_cache_bytes == 0:
        return "image_cache_bytes is 0; raise it"
    if options.tensor_parallel_size > 1:
        return "tensor_parallel_size above 1 does not support them; leave it out"
    if options.pools:
        return "runner 'pooling' does not support them; use 'generate'"
    if options.is_portable:
        return "bits 'portable' does not support them; use 'machine'"
    if speculation is not None and speculation.method not in ("ngram", "suffix"):
        return f"speculation by {speculation.method!r} does not support them; use 'ngram' or 'suffix'"
    if options.shadow_rate:
        return "shadow_rate does not support them; leave it out"
    if options.keep_finished:
        return "keep_finished does not support them; leave it out"
    return None
