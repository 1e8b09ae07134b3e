"""A checkpoint's reader of pictures: files to token counts, prompts, tiles and features."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.images.decoder import ImageDecoder, ImageLimits
from xla_engine.images.grid import Grid
from xla_engine.images.processor import read_image_processor
from xla_engine.images.prompt import ImagePrompt, image_prompt, prompt_form
from xla_engine.images.tower import check_processor, tower_of
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.vision import load_vision
from xla_engine.text.tokenizer import Tokenizer


class ImageEncoder:
    """Pictures for the decoder of a checkpoint with a vision tower.

        with ImageEncoder("path/to/SmolVLM-256M-Instruct") as encoder:
            prompt = encoder.prompt("User:<image>What is this?", [encoder.grid(file)])
            features = encoder.encode(file)  # one row for each position of the prompt's spans

    A picture's features are the same bits whatever pictures were encoded before, on one machine and number of threads.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        dtype: str = "auto",
        limits: ImageLimits | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """model: a Hugging Face directory or hub id. dtype: as in `EngineConfig`. mm_processor_kwargs: `size` and
        `do_image_splitting`, instead of the checkpoint's (Idefics3 and SmolVLM).

        Raises CheckpointError naming file, field or tensor and remedy; ConfigError without Pillow.
        """
        files = open_model(model)
        vision = load_vision(files, dtype=dtype)
        processor = read_image_processor(files.path, mm_processor_kwargs)
        self.config = vision.config
        check_processor(self.config, processor)
        if isinstance(self.config, VisionConfig):
            _check_tokens(files.path, self.config.tokens)
        self.decoder, self._form = ImageDecoder(processor, limits), prompt_form(vision.model_type)
        self.tokenizer = Tokenizer.of_model(files)
        self._tower = tower_of(vision, processor)

    def grid(self, data: bytes) -> Grid:
        """How the picture in the file `data` is cut, from its header alone. Raises InvalidImageError."""
        return self.decoder.grid(data)

    def tokens(self, grid: Grid) -> int:
        """Rows of features of a picture: its tokens in a prompt."""
        return sum(grid.tile_tokens(self.config.place_tokens))

    def prompt(self, text: str, grids: Sequence[Grid]) -> ImagePrompt:
        """The token ids of a text with one mark for each picture, as `<image>`, and where their features go.

        Raises InvalidRequestError if they are not equally many, and CheckpointError without a tokenizer.
        """
        if self.tokenizer is None:
            raise CheckpointError(
                "the model has no tokenizer.json, so text cannot be tokenised. Add the file"
            )
        return image_prompt(text, grids, self.config.place_tokens, self.tokenizer, self._form)

    def encode(self, data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The features of the picture in the file `data`: float32 `[tokens, text_size]`. Raises InvalidImageError."""
        return np.concatenate([self._tower(tile) for tile in self.decoder.tiles(data)])

    def close(self) -> None:
        """End the decoder's process and drop the programs."""
        self.decoder.close()
        self._tower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_tokens(directory: Path, tokens: int) -> None:
    """Raise CheckpointError if processor_config.json counts a tile's tokens otherwise than the tower does."""
    file = directory / "processor_config.json"
    fields = Fields.of_file(file) if file.is_file() else Fields(file, {})
    for name in ("image_seq_len", "image_seq_length"):
        if fields.given(name) and fields.values[name] != tokens:
            fields.fail(name, f"the tower makes {tokens} tokens of a tile. Download the files again")
