"""The pictures of a prompt: their files, their places among its tokens, and their tiles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError, InvalidImageError, InvalidRequestError
from xla_engine.images.decoder import ImageDecoder, ImageLimits, Tiles
from xla_engine.images.processor import read_image_processor
from xla_engine.images.prompt import PlacedPicture, PromptForm, image_prompt, prompt_form
from xla_engine.images.sources import ImageAccess, ImageSources
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.model_loader.vision import read_vision
from xla_engine.prompts import Picture, PicturedPrompt
from xla_engine.text.tokenizer import Tokenizer

MAX_PICTURES = 16  # of a prompt


class PictureReader:
    """Reads the pictures of requests for one checkpoint. Thread-safe.

    Sizes come from headers, so `prompt` decodes no pixel. `tiles` does, for one picture at a time.
    """

    def __init__(
        self,
        decoder: ImageDecoder,
        image_seq_len: int,
        tokenizer: Tokenizer,
        form: PromptForm,
        sources: ImageSources,
    ) -> None:
        """image_seq_len: tokens of a tile, where `Grid.tokens` is None."""
        self.decoder, self.form = decoder, form
        self.image_seq_len = image_seq_len
        self._tokenizer = tokenizer
        self._sources = sources
        self._salt = json.dumps(asdict(decoder.processor)).encode()

    @classmethod
    def of_model(
        cls,
        files: ModelFiles,
        *,
        access: ImageAccess | None = None,
        limits: ImageLimits | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> PictureReader | None:
        """The reader of a checkpoint; None for a model without a vision tower. Reads no weights.

        Raises CheckpointError, and ConfigError without Pillow or for an `access` that is impossible.
        """
        fields = files.config_fields()
        text, family = transformers_model(fields)
        if not family.vision:
            return None
        if (tokenizer := Tokenizer.of_model(files)) is None:
            raise CheckpointError(
                f"{files.path}: no tokenizer.json, so text cannot be tokenised. Add the file"
            )
        vision = read_vision(fields, family, text)
        limits = limits or ImageLimits()
        # `ImageSources` checks the bytes of files; images and arrays of the caller become PNGs, which may be larger.
        unpacked = replace(limits, max_image_bytes=max(limits.max_image_bytes, 8 * limits.max_image_pixels))
        decoder = ImageDecoder(read_image_processor(files.path, mm_processor_kwargs), unpacked)
        form = prompt_form(family.model_type)
        return cls(decoder, vision.place_tokens, tokenizer, form, ImageSources(access, limits))

    def marks(self, text: str) -> bool:
        """Whether a text has places for pictures, which a text without pictures must not have."""
        return self.form.mark in text

    def start(self, pictures: Sequence[Picture]) -> list[bytes | Future[bytes]]:
        """The files of pictures; those of hosts are futures, so that this does not wait.

        Raises InvalidRequestError for too many, and what `ImageSources.start` raises.
        """
        if len(pictures) > MAX_PICTURES:
            raise InvalidRequestError(f"the prompt has {len(pictures)} pictures; at most {MAX_PICTURES}")
        return [_named(each.name, self._sources.start, each.source) for each in pictures]

    @staticmethod
    def file_of(picture: Picture, found: bytes | Future[bytes]) -> bytes:
        """What `start` found of a picture; waits for it. Raises InvalidImageError, which names the picture."""
        return found if isinstance(found, bytes) else _named(picture.name, found.result)

    def prompt(
        self,
        text: str,
        pictures: Sequence[Picture],
        *,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
    ) -> PicturedPrompt:
        """Tokenise a text with one mark for each picture, as `<image>`. Waits for hosts, for a limited time.

        Raises InvalidRequestError if they are not as many, and what `ImageSources.start` and `ImageDecoder.grid`
        raise; these errors name the picture.
        """
        begun = self.start(pictures)
        files = [self.file_of(each, found) for each, found in zip(pictures, begun, strict=True)]
        grids = [
            _named(each.name, self.decoder.grid, file) for each, file in zip(pictures, files, strict=True)
        ]
        placed = image_prompt(
            text, grids, self.image_seq_len, self._tokenizer, self.form, add_special_tokens=add_special_tokens
        )
        return PicturedPrompt(
            text,
            placed.token_ids,
            tuple(
                PlacedPicture(
                    file=file,
                    grid=grid,
                    digest=hashlib.sha256(hashlib.sha256(file).digest() + self._salt).hexdigest(),
                    starts=tuple(span.start for span in placed.spans if span.image == index),
                    name=each.name,
                )
                for index, (each, file, grid) in enumerate(zip(pictures, files, grids, strict=True))
            ),
            cache_salt,
        )

    def tiles(self, picture: PlacedPicture) -> Tiles:
        """A picture's tiles, see `Tiles`. Raises InvalidImageError, which names the picture."""
        return _named(picture.name, self.decoder.tiles, picture.file, picture.grid)

    def close(self) -> None:
        """End the decoder's process, and stop fetching."""
        self._sources.close()
        self.decoder.close()


def tiles_sha256(tiles: Tiles) -> str:
    """The hash of a picture's tiles that results show: another one means other pixels, not another model."""
    found = hashlib.sha256()
    for tile in tiles:
        found.update(np.ascontiguousarray(tile).tobytes())
    return found.hexdigest()


def _named(name: str, call: Any, *arguments: Any) -> Any:
    """What a call returns; its error names the picture."""
    try:
        return call(*arguments)
    except InvalidImageError as error:
        raise type(error)(f"{name}: {error}") from error
