"""Make `tests/golden/images/patches.json`: what transformers' PIL backends with patches make of generated pictures.

    python tests/golden/make/make_golden_patches.py

Run with the `oracle` extra and Pillow installed. The pictures are those of make_golden_images.py; the file has each
STEPth of them by Qwen3-VL's backend: its rows and columns of patches, and a digest of the float32 `pixel_values`. Then
for each of `PROMPTS` the text after expansion, as `Qwen3VLProcessor.replace_image_token` writes it. Then the pictures
by each of `OTHERS` and by Gemma 4. By DeepSeek-OCR-2, the number of tiles beside the view, and a digest of all.
"""

from __future__ import annotations

import importlib
import json
import runpy
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image, ImageOps

MAKE = Path(__file__).parent
BASE = SimpleNamespace(**runpy.run_path(str(MAKE / "make_golden_images.py")))
STEP = 8
# By the names of that script's processors.
PROCESSORS: dict[str, dict[str, Any]] = {
    "small": {
        "size": {"shortest_edge": 1024, "longest_edge": 16384},
        "patch_size": 8,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "whole": {"size": {"shortest_edge": 3136, "longest_edge": 20000}},
    "bicubic": {
        "size": {"shortest_edge": 1, "longest_edge": 4000},
        "patch_size": 4,
        "merge_size": 1,
        "resample": 1,
    },
}
PROMPTS: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("<|image_pad|>", ((64, 64),)),
    ("User: <|vision_start|><|image_pad|><|vision_end|>What is this?\n", ((100, 75),)),
    ("a\n<|image_pad|>\n\nb<|image_pad|><|image_pad|> c", ((10, 40), (1, 1), (160, 90))),
)


OTHERS = ("paddleocr_vl", "glm46v")  # transformers' modules
SOFT_PROCESSORS: dict[str, dict[str, Any]] = {  # of Gemma 4
    "small": {"max_soft_tokens": 70, "patch_size": 4},
    "whole": {"max_soft_tokens": 140, "patch_size": 3, "pooling_kernel_size": 2},
    "bicubic": {"max_soft_tokens": 70, "patch_size": 5, "pooling_kernel_size": 1, "resample": 1},
}
VIEW_PROCESSORS: dict[str, dict[str, Any]] = {  # of DeepSeek-OCR-2
    "small": {"size": {"height": 32, "width": 32}, "tile_size": 24},
    "whole": {"size": {"height": 50, "width": 50}, "tile_size": 40, "min_patches": 1, "max_patches": 4},
    "bicubic": {"size": {"height": 21, "width": 21}, "tile_size": 16, "min_patches": 3, "resample": 1}
    | {"background_color": [250, 3, 77]},
}


def backend(module: str) -> Any:
    """The PIL backend of a module of transformers."""
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return next(getattr(found, name) for name in found.__all__)


def seen(module: str, step: int) -> list[list[Any]]:
    """Of each picture its rows and columns of patches, and the digest of these."""
    processors = {name: backend(module)(**fields) for name, fields in PROCESSORS.items()}
    found = []
    for name, kind, data in BASE.pictures(0, step):
        made = processors[kind](ImageOps.exif_transpose(Image.open(BytesIO(data))), return_tensors="np")
        ((_, rows, columns),) = made["image_grid_thw"].tolist()
        found.append([name, rows, columns, BASE.digest(made["pixel_values"])])
    return found


def seen_softly(step: int) -> list[list[Any]]:
    """The same by Gemma 4's backend, without padding, and with values from -1 to 1 as its tower makes them."""
    processors = {name: backend("gemma4")(**fields) for name, fields in SOFT_PROCESSORS.items()}
    found = []
    for name, kind, data in BASE.pictures(0, step):
        made = processors[kind](ImageOps.exif_transpose(Image.open(BytesIO(data))), return_tensors="np")
        places, merge = made["image_position_ids"][0], processors[kind].pooling_kernel_size
        used = places[:, 0] >= 0
        columns, rows = (places[used].max(0) + 1).tolist()
        assert made["num_soft_tokens_per_image"] == [rows * columns // merge**2]
        values = 2 * (made["pixel_values"][0][used] - 0.5)
        found.append([name, rows, columns, BASE.digest(values.astype(np.float32))])
    return found


def seen_in_views(step: int) -> list[list[Any]]:
    """Of each picture the number of tiles beside the view, and the digest of all, by DeepSeek-OCR-2's backend."""
    processors = {name: backend("deepseek_ocr2")(**fields) for name, fields in VIEW_PROCESSORS.items()}
    found = []
    for name, kind, data in BASE.pictures(0, step):
        picture = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        if 2 * processors[kind].size["height"] * min(picture.size) <= max(picture.size):
            continue  # whose view would have no pixels: transformers raises an error
        made = processors[kind](picture, return_tensors="np")
        (count,) = made["num_local_patches"]
        tiles = [*made.get("pixel_values_local", ()), *made["pixel_values"]]
        assert len(tiles) == count + 1
        values = np.concatenate([np.asarray(tile, np.float32).reshape(-1) for tile in tiles])
        found.append([name, int(count), BASE.digest(values)])
    return found


def golden(step: int = STEP) -> dict[str, Any]:
    """step: 1 for all pictures."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    processors = {name: backend("qwen2_vl")(**fields) for name, fields in PROCESSORS.items()}
    writer = SimpleNamespace(image_processor=processors["small"], image_token="<|image_pad|>")
    prompts = []
    for text, sizes in PROMPTS:
        made = writer.image_processor([Image.new("RGB", size) for size in sizes], return_tensors="np")
        parts = text.split(writer.image_token)
        runs = [
            Qwen3VLProcessor.replace_image_token(writer, {"image_grid_thw": made["image_grid_thw"]}, at)
            for at in range(len(sizes))
        ]
        prompts.append("".join(map("".join, zip(parts, [*runs, ""], strict=True))))
    others = {module: seen(module, step) for module in OTHERS} | {"gemma4": seen_softly(step)}
    others["deepseek_ocr2"] = seen_in_views(step)
    return {"pictures": seen("qwen2_vl", step), "prompts": prompts, **others}


if __name__ == "__main__":
    made = golden()
    lines = {name: ",\n".join(json.dumps(each) for each in rows) for name, rows in made.items()}
    file = BASE.GOLDEN / "patches.json"
    file.write_text("{" + ",\n".join(f'"{name}": [\n{rows}\n]' for name, rows in lines.items()) + "}\n")
    print(len(made["pictures"]), file.stat().st_size)
