"""The vision tower of an engine's checkpoint, and the reader of its pictures."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from xla_engine.config import IMAGE_CACHE_BYTES, EngineConfig
from xla_engine.errors import CheckpointError
from xla_engine.graphs.vision.config import DeepEncoderConfig, PatchConfig, TowerConfig, VisionConfig
from xla_engine.images import NO_PICTURES
from xla_engine.images.processor import (
    ImageProcessor,
    PatchProcessor,
    Processor,
    SoftTokenProcessor,
    most_tokens,
    read_image_processor,
    value_table,
)
from xla_engine.images.views import ViewProcessor
from xla_engine.model_loader.describe import ModelDescription
from xla_engine.model_loader.vision import VisionCheckpoint, load_vision
from xla_engine.runner.features import places_within
from xla_engine.runner.vision_tower import TowerSlices, VisionTower, slice_operations
from xla_engine.utils.cores import cores
from xla_engine.utils.extras import install

if TYPE_CHECKING:
    from xla_engine.images.pictures import PictureReader

_FILES = ("preprocessor_config.json", "processor_config.json")


def why_no_pictures(model: ModelDescription) -> str | None:
    """Why an engine of a described model takes no pictures, and what to do; None if it takes some."""
    options, directory = model.options, model.files.path
    if not model.family.vision or not directory.is_dir():
        return NO_PICTURES
    why = no_pictures_with(options)
    if why is None and not any((directory / name).is_file() for name in _FILES):
        why = f"{directory} has no {_FILES[0]}; add the file"
    if why is None and find_spec("PIL") is None:
        why = f"they need Pillow: {install('images')}"
    return None if why is None else f"this engine reads no pictures: {why}"


def load_tower(model: ModelDescription) -> VisionTower | str:
    """The compiled tower of a described model, or `why_no_pictures`.

    Raises CheckpointError naming file, field or tensor and remedy.
    """
    if (why := why_no_pictures(model)) is not None:
        return why
    vision = load_vision(model.files, dtype=model.options.dtype)
    processor = read_image_processor(model.files.path, model.options.mm_processor_kwargs)
    depends = (vision.fingerprint, vision.dtype, asdict(processor), _decoder_versions(), cores())
    fingerprint = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
    return tower_of(vision, processor, fingerprint, slices_of(vision.config, processor, model))


def slices_of(config: TowerConfig, processor: Processor, model: ModelDescription) -> TowerSlices:
    """How the tower of a described model runs beside its decoder."""
    options = model.options
    most = places_within(config, options.image_cache_bytes or IMAGE_CACHE_BYTES) * config.place_tokens
    most = min(most, options.max_model_len or most, most_tokens(processor) or most)
    return TowerSlices(config, most, slice_operations(model.config, options))


def check_processor(config: TowerConfig, processor: Processor) -> None:
    """Raise CheckpointError unless a processor makes what a tower reads."""
    if isinstance(config, DeepEncoderConfig) and isinstance(processor, ViewProcessor):
        made, size = (processor.tile, processor.view), config.patch_size
        read = (config.crop_side * size, config.view_side * size)
        if made != read:
            raise CheckpointError(
                f"the processor makes tiles of {made} pixels (tile_size, size), and the vision tower reads {read}. "
                "Download the files again"
            )
        return
    soft = isinstance(config, PatchConfig) and config.pooled is not None
    if (
        isinstance(config, PatchConfig)
        and isinstance(processor, PatchProcessor | SoftTokenProcessor)
        and isinstance(processor, SoftTokenProcessor) == soft
    ):
        made, read = (processor.patch_size, processor.merge_size), (config.patch_size, config.merge_size)
        if made != read:
            raise CheckpointError(
                f"the processor makes patches of {made} (patch_size, merge_size), and the vision tower reads {read}. "
                "Download the files again"
            )
    elif isinstance(config, VisionConfig) and isinstance(processor, ImageProcessor):
        if processor.tile != config.image_size:
            raise CheckpointError(
                f"the processor makes tiles of {processor.tile} pixels, and the vision tower reads "
                f"{config.image_size} (image_size). Download the files again"
            )
    else:
        raise CheckpointError(
            "image_processor_type of the processor is not that of the vision tower. Download the files again"
        )


def tower_of(
    vision: VisionCheckpoint,
    processor: Processor,
    fingerprint: str = "given",
    slices: TowerSlices | None = None,
) -> VisionTower:
    """The compiled tower of a loaded checkpoint. slices: as in `VisionTower`.

    Raises CheckpointError for a processor that does not fit.
    """
    check_processor(vision.config, processor)
    table = value_table(processor)
    parts = (vision.config, vision.dtype, vision.weights, table, fingerprint, slices)
    return VisionTower(*parts, most_tokens(processor))


def _decoder_versions() -> list[str | None]:
    """Of Pillow and of what it decodes with, on which pixels may depend."""
    from PIL import features  # late: engines without a tower work without Pillow

    return [version("pillow"), *map(features.version, ("libjpeg_turbo", "jpg", "zlib", "webp", "libtiff"))]


def load_reader(model: ModelDescription) -> PictureReader | None:
    """The reader of the pictures that requests for a described model name; None if its engine takes none.

    Raises CheckpointError, and ConfigError for a folder that does not exist or a host that cannot be one.
    """
    if why_no_pictures(model) is not None:
        return None
    from xla_engine.images.pictures import (
        PictureReader,
    )  # late: engines without a tower need not wait for these
    from xla_engine.images.sources import ImageAccess

    options = model.options
    access = ImageAccess(
        allowed_local_media_path=options.allowed_local_media_path,
        allowed_media_domains=options.allowed_media_domains,
    )
    return PictureReader.of_model(model.files, access=access, mm_processor_kwargs=options.mm_processor_kwargs)


def no_pictures_with(options: EngineConfig) -> str | None:
    """The option that rules pictures out, and what to do; None if none does."""
    method = "ngram" if options.speculation is None else options.speculation.method
    found = {
        "image_cache_bytes is 0; raise it": options.image_cache_bytes == 0,
        "tensor_parallel_size above 1 does not support them; leave it out": options.tensor_parallel_size > 1,
        "runner 'pooling' does not support them; use 'generate'": options.pools,
        "bits 'portable' does not support them; use 'machine'": options.is_portable,
        f"speculation by {method!r} does not support them; use 'ngram' or 'suffix'": (
            method not in ("ngram", "suffix")
        ),
        "shadow_rate does not support them; leave it out": bool(options.shadow_rate),
        "keep_finished does not support them; leave it out": bool(options.keep_finished),
    }
    return next((why for why, is_so in found.items() if is_so), None)
