"""How DeepSeek-OCR-2 cuts a picture: tiles with parts of a large one, and a view of the whole."""

import math
from dataclasses import dataclass

from xla_engine.graphs.vision.config import DeepEncoderConfig
from xla_engine.images.grid import Grid, View


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewProcessor:
    """The processor of DeepSeek-OCR-2: a large picture is cut into tiles, and each picture has a view of the whole
    (transformers' `image_processing_pil_deepseek_ocr2.py`).

    tile: side of a tile, pixels; a picture that is not larger is not cut. view: side of the view.
    min_patches, max_patches: the fewest and the most tiles of a picture that is cut.
    background_color: of the view's margins.
    resample: Pillow's number of the filter.
    rescale_factor, image_mean, image_std: of `value_table`; None if the step is left out.
    """

    tile: int
    view: int
    min_patches: int
    max_patches: int
    background_color: tuple[int, ...]
    resample: int
    rescale_factor: float | None
    image_mean: tuple[float, ...] | None
    image_std: tuple[float, ...] | None

    def grid(self, width: int, height: int) -> Grid:
        """How a picture of this upright size is cut. Depends on nothing else, so headers give token counts."""
        columns = rows = 0
        scale = self.view / max(width, height)
        if max(width, height) > self.tile:
            columns, rows = self._arranged(width, height)
        whole = max(columns, 1) * self.tile, max(rows, 1) * self.tile
        view = View(
            side=self.view,
            copy=(max(round(width * scale), 1), max(round(height * scale), 1)),
            colour=self.background_color,
            tokens=DeepEncoderConfig.view_tokens + 1,
        )
        return Grid(
            picture=(width, height),
            resized=whole,
            whole=whole,
            rows=rows,
            columns=columns,
            tokens=DeepEncoderConfig.crop_tokens,
            view=view,
        )

    def _arranged(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles in the proportions nearest to the picture's. Of equal ones, more tiles if the
        picture has more than half of their pixels."""
        most, best, least = self.max_patches, (1, 1), math.inf
        choices = [
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if self.min_patches <= columns * rows <= most
        ]
        for columns, rows in sorted(choices, key=math.prod):
            difference = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile * self.tile * columns * rows
            if difference < least or (difference == least and fills):
                best, least = (columns, rows), difference
        return best
