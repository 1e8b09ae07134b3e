"""Decode pictures in a worker process, under limits: sizes from headers, tiles from pixels."""

import base64
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.errors import ConfigError, ImageTooLargeError, InvalidImageError
from xla_engine.graphs.vision.config import BUCKETS
from xla_engine.images.grid import Grid
from xla_engine.images.processor import PatchProcessor, Processor
from xla_engine.text.worker_process import WorkerEndedError, WorkerProcess
from xla_engine.utils.extras import install

# uint8 `[tiles, height, width, 3]`; or one `[height, width, 3]` for each, if they differ in size.
Tiles = np.ndarray[Any, np.dtype[np.uint8]] | tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]
CPU_LIMIT_S = 30.0  # processor time of one picture


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on one picture. Everything is checked before a pixel is decoded.

    max_image_bytes: of its file. max_image_pixels: by its header. max_image_ratio: of the longer side to the shorter.
    """

    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 89_478_485  # Pillow's own limit
    max_image_ratio: int = 200


class ImageDecoder:
    """Pictures of one processor to grids and tiles. Thread-safe; its process starts with the first picture."""

    def __init__(self, processor: Processor, limits: ImageLimits | None = None) -> None:
        """Raises ConfigError without Pillow."""
        if find_spec("PIL") is None:
            raise ConfigError(f"pictures need Pillow: {install('images')}")
        self.processor = processor
        self.limits = limits or ImageLimits()
        self._process = WorkerProcess(str(Path(__file__).with_name("decode_worker.py")))

    def grid(self, data: bytes) -> Grid:
        """How the picture in the file `data` is cut, from its header alone.

        Raises InvalidImageError or ImageTooLargeError, which say why.
        """
        width, height = self._ask(data)["size"]
        grid = self.processor.grid(width, height)
        if isinstance(self.processor, PatchProcessor) and grid.tokens is not None:
            most = BUCKETS[-1] // self.processor.merge_size**2
            if grid.tokens > most:
                raise ImageTooLargeError(
                    f"the picture has {grid.tokens} tokens; the vision tower reads at most {most}. Make it smaller, "
                    "or set max_pixels in mm_processor_kwargs"
                )
        return grid

    def tiles(self, data: bytes, grid: Grid | None = None) -> Tiles:
        """The picture's tiles. grid: from `grid`, if the caller has it.

        Raises InvalidImageError or ImageTooLargeError, which say why.
        """
        grid = self.grid(data) if grid is None else grid
        view = grid.view
        found = self._ask(
            data,
            size=grid.picture,
            resizes=[grid.resized, grid.whole] if view is None else [grid.whole] * (grid.rows > 0),
            tile=grid.tile,
            resample=self.processor.resample,
            **({} if view is None else {"view": [view.side, view.copy, view.colour]}),
        )
        pixels = np.frombuffer(base64.b64decode(found["tiles"]), np.uint8)
        if view is None:
            width, height = grid.tile
            return pixels.reshape(grid.tiles, height, width, 3)
        ends = np.cumsum([3 * width * height for width, height in grid.sizes])[:-1]
        parts = zip(np.split(pixels, ends), grid.sizes, strict=True)
        return tuple(part.reshape(height, width, 3) for part, (width, height) in parts)

    def close(self) -> None:
        self._process.stop()

    def _ask(self, data: bytes, **more: Any) -> dict[str, Any]:
        limits = self.limits
        if len(data) > limits.max_image_bytes:
            raise ImageTooLargeError(
                f"the picture has {len(data)} bytes; at most {limits.max_image_bytes} (max_image_bytes)"
            )
        request = {
            "data": base64.b64encode(data).decode("ascii"),
            "max_pixels": limits.max_image_pixels,
            "max_ratio": limits.max_image_ratio,
            **more,
        }
        try:
            found = self._process.ask(CPU_LIMIT_S, json.dumps(request))
        except WorkerEndedError as error:
            raise InvalidImageError(
                f"decoding the picture {error}. Save it again with another program"
            ) from error
        if "error" in found:
            kind = ImageTooLargeError if found["large"] else InvalidImageError
            raise kind(f"the picture cannot be used: {found['error']}")
        return found
