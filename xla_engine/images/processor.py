"""How a checkpoint cuts a picture into tiles and scales its values, as its preprocessor_config.json says.

Idefics3 and SmolVLM make tiles of a grid, DeepSeek-OCR-2 too, with a larger view of the whole picture, Gemma 3 makes
one tile of each picture, and Qwen3-VL, PaddleOCR-VL, GLM-OCR and Gemma 4 one in its proportions. Sizes and values are
those of transformers' PIL backend
(`image_processing_pil_{idefics3,deepseek_ocr2,gemma3,qwen2_vl,paddleocr_vl,glm46v,gemma4}.py`). With torchvision
installed transformers prefers that, and then its pixels differ by up to two steps of 255.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from xla_engine.graphs.vision.config import SOFT_TOKENS
from xla_engine.images.grid import Grid
from xla_engine.images.views import ViewProcessor
from xla_engine.model_loader.json_fields import Fields, read_json

PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor", "Gemma3ImageProcessor")
_ONE_TILE = PROCESSORS[2:]  # of these, a picture is one tile
_SUFFIXES = ("", "Fast", "Pil")
_LONGEST = 4096  # pixels: the longest side that transformers makes
_MOST_TILES = 16  # in a row or a column
_OVERRIDES = ("size", "do_image_splitting")  # fields that a caller may replace
_PAN_AND_SCAN = "do_pan_and_scan"
_EDGE = "longest_edge"
_READ = (
    *("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample"),
    *("rescale_factor", "size", "image_processor_type"),
)
_READ_OF_TILES = ("do_image_splitting", "max_image_size")
# Fields of processors without tiles (Gemma 3). Only `do_pan_and_scan` is checked: it must be false. The other fields
# matter only if it is true.
_READ_OF_ONE = (
    *(_PAN_AND_SCAN, "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    *("pan_and_scan_min_ratio_to_activate", "image_seq_length"),
)
# Fields that do not change the tiles of a picture: names, the layout of the output, padding of batches, videos.
_IGNORED = (
    *("processor_class", "data_format", "do_pad", "return_row_col_info", "image_seq_len", "video_sampling"),
    *("return_tensors", "input_data_format", "_valid_processor_keys"),
)

_PATCH_READ = (*(set(_READ) - {"do_image_splitting", "max_image_size"}), "patch_size", "merge_size")
_PATCH_IGNORED = (*_IGNORED, "temporal_patch_size", "default_to_square", "auto_map")
_PATCH_DEFAULTS = {  # transformers' own
    "resample": 3,
    "rescale_factor": 1 / 255,
    "patch_size": 14,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_MOST_PIXELS = 2**26
_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # overrides of edges of `size`
Enlarged = Literal["never", "side by side", "at once"]


@dataclass(frozen=True, slots=True)
class _PatchKind:
    """model: whose processor it is. size: transformers' default. enlarged: see `PatchProcessor`.
    has_pixels: whether published files have `_PIXELS` themselves. counts_frames: whether `PatchProcessor.frames` is
    `temporal_patch_size`, and not 1."""

    model: str
    size: Mapping[str, int]
    enlarged: Enlarged = "never"
    has_pixels: bool = False
    counts_frames: bool = False


_PATCH_KINDS = {
    "Qwen2VLImageProcessor": _PatchKind(
        "Qwen3-VL", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    ),
    "PaddleOCRVLImageProcessor": _PatchKind(
        "PaddleOCR-VL", {"shortest_edge": 384**2, "longest_edge": 1536**2}, "side by side", has_pixels=True
    ),
    "Glm46VImageProcessor": _PatchKind(
        "GLM-OCR", {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000}, "at once", counts_frames=True
    ),
}


_SOFT_KIND = "Gemma4ImageProcessor"
_SOFT_IGNORED = (*_IGNORED, "default_to_square", "image_seq_length", "auto_map")
_SOFT = ("max_soft_tokens", "patch_size", "pooling_kernel_size")
_SOFT_DEFAULTS = {  # transformers' own
    "resample": 3,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3,
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
}


_VIEW_KIND = "DeepseekOcr2ImageProcessor"
# The processor_class of the published file, which has no image_processor_type.
_VIEW_PUBLISHED = "DeepseekVLV2Processor"
_VIEW_CROPS = ("min_patches", "max_patches")
_VIEW_READ = (*_READ, *_VIEW_CROPS, "tile_size", "crop_to_patches", "background_color")
# Beside `_IGNORED`, what only the published code reads: names of tokens, and sizes that its tower has anyway.
_VIEW_IGNORED = (
    *(*_IGNORED, "default_to_square", "auto_map", "patch_size", "downsample_ratio", "candidate_resolutions"),
    *("add_special_token", "ignore_id", "image_token", "mask_prompt", "normalize", "pad_token", "sft_format"),
)
_VIEW_DEFAULTS = {  # transformers' own
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"height": 1024, "width": 1024},
    "tile_size": 768,
    "min_patches": 2,
    "max_patches": 6,
    "background_color": [127] * 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """The processor of a checkpoint.

    longest_edge: of a picture after the first resize, pixels; None: the picture is resized to one tile at once.
    tile: side of a tile, pixels.
    do_image_splitting: cut a picture into several tiles; otherwise each picture is one tile.
    resample: Pillow's number of the filter.
    rescale_factor, image_mean, image_std: of `value_table`; None if the step is left out.
    """

    longest_edge: int | None
    tile: int
    do_image_splitting: bool
    resample: int
    rescale_factor: float | None
    image_mean: tuple[float, ...] | None
    image_std: tuple[float, ...] | None

    def grid(self, width: int, height: int) -> Grid:
        """How a picture of this upright size is cut. Depends on nothing else, so headers give token counts."""
        rows = columns = 0
        resized = whole = (self.tile, self.tile)
        if self.longest_edge is not None:
            resized = _to_longest_edge(width, height, self.longest_edge)
        if self.do_image_splitting:
            whole = _to_tiles(*resized, self.tile)
            if max(whole) > self.tile:
                rows, columns = whole[1] // self.tile, whole[0] // self.tile
        return Grid(picture=(width, height), resized=resized, whole=whole, rows=rows, columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchProcessor:
    """The processor of Qwen3-VL, PaddleOCR-VL or GLM-OCR: a picture keeps its proportions, and is one tile of whole
    squares of patches (transformers' `image_processing_pil_{qwen2_vl,paddleocr_vl,glm46v}.py`).

    shortest_edge, longest_edge: the fewest and the most pixels of a resized picture; the names are transformers'.
    patch_size: side of a patch, pixels. merge_size: this many patches in either direction become one token.
    resample: Pillow's number of the filter.
    rescale_factor, image_mean, image_std: of `value_table`; None if the step is left out.
    enlarged: whether a picture lower or narrower than a square is enlarged before all else: "side by side" makes first
        its height and then its width that of a square, and the other side follows, rounded; "at once" multiplies both
        sides by the least factor that is enough, rounded down.
    frames: how often the edges count each pixel.
    """

    shortest_edge: int
    longest_edge: int
    patch_size: int
    merge_size: int
    resample: int
    rescale_factor: float | None
    image_mean: tuple[float, ...] | None
    image_std: tuple[float, ...] | None
    enlarged: Enlarged = "never"
    frames: int = 1

    def grid(self, width: int, height: int) -> Grid:
        """The size of the only tile, which depends on the upright size alone."""
        size, unit = self._resized(width, height), self.patch_size * self.merge_size
        tokens = (size[0] // unit) * (size[1] // unit)
        return Grid(picture=(width, height), resized=size, whole=size, rows=0, columns=0, tokens=tokens)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Sides rounded to whole squares; if these are too many or too few pixels, scaled first, rounded inwards."""
        unit = self.patch_size * self.merge_size
        if self.enlarged == "side by side":
            if height < unit:
                width, height = round(width * unit / height), unit
            if width < unit:
                width, height = unit, round(height * unit / width)
        if self.enlarged == "at once" and min(width, height) < unit:
            factor = max(unit / height, unit / width)
            width, height = int(width * factor), int(height * factor)
        sides = round(width / unit) * unit, round(height / unit) * unit
        if self.frames * sides[0] * sides[1] > self.longest_edge:
            scale = math.sqrt(self.frames * height * width / self.longest_edge)
            width, height = (max(unit, math.floor(side / scale / unit) * unit) for side in (width, height))
            return width, height
        if self.frames * sides[0] * sides[1] < self.shortest_edge:
            scale = math.sqrt(self.shortest_edge / (self.frames * height * width))
            width, height = (math.ceil(side * scale / unit) * unit for side in (width, height))
            return width, height
        return sides


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftTokenProcessor:
    """The processor of Gemma 4: a picture keeps its proportions as far as whole squares of patches allow, and becomes
    as large as its budget of tokens allows (transformers' `image_processing_pil_gemma4.py`).

    max_soft_tokens: the most tokens of a picture. patch_size: side of a patch, pixels.
    merge_size: this many patches in either direction become one token; transformers' `pooling_kernel_size`.
    resample: Pillow's number of the filter.
    rescale_factor, image_mean, image_std: of `value_table`.
    """

    max_soft_tokens: int
    patch_size: int
    merge_size: int
    resample: int
    rescale_factor: float | None
    image_mean: tuple[float, ...] | None
    image_std: tuple[float, ...] | None

    def grid(self, width: int, height: int) -> Grid:
        """The size of the only tile, which depends on the upright size alone."""
        unit = self.patch_size * self.merge_size
        most = self.max_soft_tokens * self.merge_size**2 * self.patch_size**2  # pixels
        factor = math.sqrt(most / (height * width))
        columns, rows = (math.floor(factor * side / unit) for side in (width, height))
        if rows == 0:
            columns, rows = min(width // height, self.max_soft_tokens), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.max_soft_tokens)
        size = columns * unit, rows * unit
        return Grid(
            picture=(width, height), resized=size, whole=size, rows=0, columns=0, tokens=rows * columns
        )


Processor = ImageProcessor | PatchProcessor | SoftTokenProcessor | ViewProcessor


def most_tokens(processor: Processor) -> int | None:
    """The most tokens of a tile; None: as many as the tower makes of any, or reads."""
    return processor.max_soft_tokens if isinstance(processor, SoftTokenProcessor) else None


def value_table(processor: Processor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a tower sees for each value of a byte in each channel: float32 `[3, 256]`.

    Rounded in the processors' order: the product in float64, the rest in float32.
    """
    values = np.arange(256, dtype=np.float32)
    if processor.rescale_factor is not None:
        values = (np.arange(256, dtype=np.float64) * processor.rescale_factor).astype(np.float32)
    if processor.image_mean is None or processor.image_std is None:
        return np.tile(values, (3, 1))
    mean, deviation = (
        np.array(each, dtype=np.float32)[:, None] for each in (processor.image_mean, processor.image_std)
    )
    return (values - mean) / deviation


def read_image_processor(directory: Path, overrides: Mapping[str, Any] | None = None) -> Processor:
    """The processor of a Hugging Face directory: in preprocessor_config.json or processor_config.json.

    overrides: replaces fields, as vLLM's `mm_processor_kwargs` does: `size` and `do_image_splitting`; of Gemma 3
        `do_pan_and_scan`, which can only be false; with patches `size`, or `min_pixels` and `max_pixels`; of Gemma 4
        `max_soft_tokens`; of DeepSeek-OCR-2 `min_patches` and `max_patches`.

    Raises CheckpointError naming file, field and remedy; a field that is not known is an error too, because it might
    change the pixels.
    """
    fields = _fields(directory)
    kind = fields.values.get("image_processor_type")
    for name, patches in _PATCH_KINDS.items():
        if kind in [name + suffix for suffix in _SUFFIXES]:
            return _read_patch_processor(fields, patches, overrides)
    if kind in [_SOFT_KIND + suffix for suffix in _SUFFIXES]:
        return _read_soft_processor(fields, overrides)
    if kind in [_VIEW_KIND + suffix for suffix in _SUFFIXES]:
        return _read_view_processor(fields, overrides)
    fields = fields.with_defaults({"rescale_factor": 1 / 255})
    known = {name + suffix: name for name in PROCESSORS for suffix in _SUFFIXES}
    if kind not in {None, *known}:
        fields.fail(
            "image_processor_type", f"not supported. Use a checkpoint with one of: {', '.join(PROCESSORS)}"
        )
    one_tile = kind is not None and known[kind] in _ONE_TILE
    overrides = dict(overrides or {})
    allowed = (_PAN_AND_SCAN,) if one_tile else _OVERRIDES
    for name in sorted(overrides.keys() - set(allowed)):
        Fields(Path("mm_processor_kwargs"), overrides).fail(
            name, f"not supported. Use {' or '.join(allowed)}"
        )
    fields = Fields(fields.file, {**fields.values, **overrides}).with_defaults(
        {"resample": 2 if one_tile else 1}
    )
    read = (*_READ, *(_READ_OF_ONE if one_tile else _READ_OF_TILES), *_IGNORED)
    for name in fields.values:
        if name not in read and fields.given(name):
            fields.fail(name, "not supported by this processor. Use the checkpoint's own processor file")
    if fields.flag(_PAN_AND_SCAN, default=False):
        fields.fail(_PAN_AND_SCAN, "not supported (several crops of a picture). Set it to false")
    values, longest = _values(fields), None
    if one_tile:
        size = _size(fields, "size", "height", "width")
        tile = size.integer("height", high=_LONGEST)
        if size.integer("width", high=_LONGEST) != tile:
            size.fail("width", f"must be the height, {tile}: tiles are square. Use the checkpoint's own file")
    else:
        tile, longest = (
            _size(fields, name, _EDGE).integer(_EDGE, high=_LONGEST) for name in ("max_image_size", "size")
        )
        if longest > _MOST_TILES * tile:
            fields.fail(
                "size", f"at most {_MOST_TILES} tiles of {tile} pixels in a row. Use a smaller longest_edge"
            )
    return ImageProcessor(
        longest_edge=longest,
        tile=tile,
        do_image_splitting=not one_tile and fields.flag("do_image_splitting", default=True),
        **values,
    )


def _values(fields: Fields) -> dict[str, Any]:
    """The processor's fields about pixels: which filter resizes, and how their values are scaled."""
    for name in ("do_resize", "do_convert_rgb"):
        if not fields.flag(name, default=True):
            fields.fail(name, "not supported (pictures as they are). Set it to true")
    rescales = fields.flag("do_rescale", default=True)
    normalises = fields.flag("do_normalize", default=True)
    return {
        "resample": fields.integer("resample", low=0, high=5),
        "rescale_factor": fields.number("rescale_factor", high=1e6) if rescales else None,
        "image_mean": _channels(fields, "image_mean") if normalises else None,
        "image_std": _channels(fields, "image_std") if normalises else None,
    }


def _fields(directory: Path) -> Fields:
    own, shared = directory / "preprocessor_config.json", directory / "processor_config.json"
    if not own.is_file() and shared.is_file():
        whole = Fields(shared, read_json(shared))
        fields = whole.within("image_processor")
        if fields is not None:
            return fields
        if whole.values.get("processor_class") == _VIEW_PUBLISHED:
            return whole.with_defaults({"image_processor_type": _VIEW_KIND})
    return Fields.of_file(own)


def _size(fields: Fields, name: str, *sides: str) -> Fields:
    """The object `name`, which has no other fields than `sides`, of pixels."""
    size = fields.within(name)
    if size is None:
        form = ", ".join(f'"{side}": PIXELS' for side in sides)
        fields.fail(name, f"must be {{{form}}}. Correct the file or download it again")
    for other in sorted(size.values.keys() - set(sides)):
        if size.given(other):
            supported = f"only {sides[0]} is" if len(sides) == 1 else f"{' and '.join(sides)} are"
            size.fail(other, f"not supported; {supported}. Correct the file or download it again")
    return size


def _with_edges(fields: Fields) -> Fields:
    """PaddleOCR-VL's files have `min_pixels` and `max_pixels` beside `size` or within it: the edges of `size`."""
    pixels = {edge: fields.values[name] for name, edge in _PIXELS.items() if fields.given(name)}
    size = fields.within("size") or Fields(fields.file, {})
    within = {_PIXELS.get(name, name): each for name, each in size.values.items() if each is not None}
    edges = {**within, **pixels}
    rest = {name: each for name, each in fields.values.items() if name not in _PIXELS}
    return Fields(fields.file, {**rest, "size": edges} if edges else rest)


def _read_patch_processor(
    fields: Fields, kind: _PatchKind, overrides: Mapping[str, Any] | None
) -> PatchProcessor:
    """As `read_image_processor`, for processors that make patches; `size` can be overridden, also by `min_pixels` and
    `max_pixels`, which replace its edges."""
    given = Fields(Path("mm_processor_kwargs"), dict(overrides or {}))
    for name in sorted(given.values.keys() - {"size", *_PIXELS}):
        given.fail(name, f"not supported for {kind.model}. Use size, {' or '.join(_PIXELS)}")
    if kind.has_pixels:
        fields = _with_edges(fields)
    edges = {
        edge: given.integer(name, high=_MOST_PIXELS) for name, edge in _PIXELS.items() if given.given(name)
    }
    if edges and given.given("size"):
        given.fail("size", f"cannot be given with {' or '.join(_PIXELS)}. Leave these out")
    size = given.values.get("size")
    if edges:
        own = fields.with_defaults({"size": kind.size}).within("size")
        size = edges if own is None else {**own.values, **edges}
    if size is not None:
        fields = Fields(fields.file, {**fields.values, "size": size})
    for name in fields.values:
        if name not in (*_PATCH_READ, *_PATCH_IGNORED) and fields.given(name):
            fields.fail(name, f"not supported for {kind.model}. Use the checkpoint's own processor file")
    fields = fields.with_defaults({**_PATCH_DEFAULTS, "size": kind.size})
    values = _values(fields)
    size = _size(fields, "size", "shortest_edge", _EDGE)
    shortest = size.integer("shortest_edge", high=_MOST_PIXELS)
    return PatchProcessor(
        shortest_edge=shortest,
        longest_edge=size.integer(_EDGE, low=shortest, high=_MOST_PIXELS),
        patch_size=fields.integer("patch_size", high=2**10),
        merge_size=fields.integer("merge_size", high=2**6),
        enlarged=kind.enlarged,
        frames=fields.integer("temporal_patch_size", high=2**6, default=2) if kind.counts_frames else 1,
        **values,
    )


def _read_soft_processor(fields: Fields, overrides: Mapping[str, Any] | None) -> SoftTokenProcessor:
    """As `read_image_processor`, for Gemma 4."""
    given = Fields(Path("mm_processor_kwargs"), dict(overrides or {}))
    for name in sorted(given.values.keys() - {_SOFT[0]}):
        given.fail(name, f"not supported for Gemma 4. Use {_SOFT[0]}")
    own = given if given.given(_SOFT[0]) else fields
    for name in fields.values:
        if name not in (*_READ, *_SOFT, *_SOFT_IGNORED) and fields.given(name):
            fields.fail(name, "not supported for Gemma 4. Use the checkpoint's own processor file")
    if own.given(_SOFT[0]) and own.values[_SOFT[0]] not in SOFT_TOKENS:
        own.fail(_SOFT[0], f"must be one of {', '.join(map(str, SOFT_TOKENS))}")
    fields = Fields(fields.file, {**fields.values, **given.values}).with_defaults(_SOFT_DEFAULTS)
    values = _values(fields)
    if (values["image_mean"], values["image_std"]) not in ((None, None), ((0.0,) * 3, (1.0,) * 3)):
        fields.fail(
            "image_mean", "not supported for Gemma 4, whose tower reads values from 0 to 1. Use zeros"
        )
    # The tower itself makes values from -1 to 1 of them.
    values |= {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
    return SoftTokenProcessor(
        max_soft_tokens=fields.integer(_SOFT[0], high=SOFT_TOKENS[-1]),
        patch_size=fields.integer("patch_size", high=2**10),
        merge_size=fields.integer("pooling_kernel_size", high=2**6),
        **values,
    )


def _read_view_processor(fields: Fields, overrides: Mapping[str, Any] | None) -> ViewProcessor:
    """As `read_image_processor`, for DeepSeek-OCR-2."""
    given = Fields(Path("mm_processor_kwargs"), dict(overrides or {}))
    for name in sorted(given.values.keys() - set(_VIEW_CROPS)):
        given.fail(name, f"not supported for DeepSeek-OCR-2. Use {' or '.join(_VIEW_CROPS)}")
    for name in fields.values:
        if name not in (*_VIEW_READ, *_VIEW_IGNORED) and fields.given(name):
            fields.fail(name, "not supported for DeepSeek-OCR-2. Use the checkpoint's own processor file")
    if not fields.flag("crop_to_patches", default=True):
        fields.fail("crop_to_patches", "not supported (pictures without tiles). Set it to true")
    fields = Fields(fields.file, {**fields.values, **given.values}).with_defaults(_VIEW_DEFAULTS)
    size = _size(fields, "size", "height", "width")
    view = size.integer("height", high=_LONGEST)
    if size.integer("width", high=_LONGEST) != view:
        size.fail("width", f"must be the height, {view}: the view is square. Use the checkpoint's own file")
    colour = fields.values["background_color"]
    if not isinstance(colour, list) or len(colour) != 3 or any(each not in range(256) for each in colour):
        fields.fail("background_color", "must be three numbers from 0 to 255. Correct the file")
    most = fields.integer("max_patches", high=_MOST_TILES)
    return ViewProcessor(
        tile=fields.integer("tile_size", high=_LONGEST),
        view=view,
        min_patches=fields.integer("min_patches", high=most),
        max_patches=most,
        background_color=tuple(colour),
        **_values(fields),
    )


def _channels(fields: Fields, name: str) -> tuple[float, ...]:
    values = fields.values.get(name, [0.5, 0.5, 0.5])
    if (
        not isinstance(values, list)
        or len(values) != 3
        or any(type(each) not in (int, float) for each in values)
    ):
        fields.fail(name, "must be three numbers. Correct the file or download it again")
    if not all(math.isfinite(each) for each in values) or (name == "image_std" and not all(values)):
        fields.fail(name, "must be finite, and a deviation not 0. Correct the file or download it again")
    return tuple(map(float, values))


def _to_longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """The size with `edge` as the longer side; the other side is rounded down, then up to an even number."""
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return edge, max(other + other % 2, 1)
    other = int(edge * ratio)
    return max(other + other % 2, 1), edge


def _to_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """The size in whole tiles: the longer side is rounded up first, and the other one follows it."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, math.ceil(int(width / ratio) / tile) * tile
    height = math.ceil(height / tile) * tile
    return math.ceil(int(height * ratio) / tile) * tile, height
