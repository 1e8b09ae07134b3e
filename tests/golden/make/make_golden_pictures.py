"""Greedy tokens of prompts with pictures: `python make_golden_pictures.py`, with torch and transformers.

Writes ../images/tokens.json: for each family the prompt's token ids, the positions where features of the two tiles (or
of the first) of golden.npz go, the 48 likeliest tokens one after the other, in float32, and the smallest gap between
the two likeliest.
For towers over patches, two prompts: with its first picture, and with its second and third. For DeepSeek-OCR-2, a
picture that is its view alone, and one that has a part, too.
With names of families, only these are written anew.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FAMILIES = {
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "gemma3_vision": "Gemma3ForConditionalGeneration",
}
PATCHES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_vision": "Qwen3_5ForConditionalGeneration",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "gemma4_vision": "Gemma4ForConditionalGeneration",
    "gemma4_vision_windows": "Gemma4ForConditionalGeneration",
}
IMAGE = 197  # the id of <|image|>, if that of the configuration is none of the vocabulary
GOLDEN = Path(__file__).parents[1]
NEW_TOKENS = 48


@torch.no_grad()
def tokens_of(name: str, count: int) -> dict[str, object]:
    directory = GOLDEN / "families" / name
    kind = getattr(transformers, FAMILIES[name])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tiles = np.load(directory / "golden.npz")["tiles"][:count]
    pixels = torch.from_numpy(tiles.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)
    config, gemma = model.config, name.startswith("gemma3")
    side = config.vision_config.image_size // config.vision_config.patch_size
    length = config.mm_tokens_per_image if gemma else (side // config.scale_factor) ** 2
    image, starts = config.image_token_id, [3, 3 + length + 4][:count]
    ids = [7 + at % 11 for at in range(starts[-1] + length + 6)]
    for start in starts:
        ids[start : start + length] = [image] * length
    sequence, gaps = torch.tensor([ids]), []
    for _ in range(NEW_TOKENS):
        # A generated <image> has no picture, so features go in before the text model and not by token id.
        embedded = model.get_input_embeddings()(sequence)
        found = model.model.get_image_features(pixel_values=pixels if gemma else pixels[None])
        features = torch.cat(list(found.pooler_output)).reshape(count, length, -1)
        for start, each in zip(starts, features, strict=True):
            embedded[0, start : start + length] = each
        text = model.model.language_model if gemma else model.model.text_model
        masks = {"attention_mask": both_ways(config, embedded, starts, length)} if gemma else {}
        states = text(inputs_embeds=embedded, use_cache=False, **masks).last_hidden_state
        if gemma and not gaps:  # as the whole model reads them
            types = torch.tensor(
                [[any(0 <= at - start < length for start in starts) for at in range(len(ids))]]
            )
            whole = model(
                input_ids=sequence, pixel_values=pixels, token_type_ids=types.long(), use_cache=False
            )
            assert torch.allclose(whole.logits[0, -1], model.lm_head(states[0, -1]), atol=1e-4)
        best = model.lm_head(states[0, -1]).topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        sequence = torch.cat([sequence, best.indices[None, :1]], 1)
    tokens = sequence[0, len(ids) :].tolist()
    return {"prompt": ids, "starts": starts, "length": length, "tokens": tokens, "smallest_gap": min(gaps)}


def both_ways(config: Any, embedded: torch.Tensor, starts: list[int], length: int) -> Any:
    """The masks with which the tokens of a picture see each other, by position."""
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    blocks = torch.full(embedded.shape[:2], -1)
    for number, start in enumerate(starts):
        blocks[0, start : start + length] = number
    return create_masks_for_vision_model(config.text_config, embedded, None, None, None, blocks)


@torch.no_grad()
def tokens_of_patches(name: str) -> list[dict[str, object]]:
    families = runpy.run_path(str(Path(__file__).with_name("make_golden_families.py")))
    directory = GOLDEN / "families" / name
    kind = getattr(transformers, PATCHES[name])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    arrays, config = np.load(directory / "golden.npz"), model.config
    soft = config.model_type == "gemma4"
    if soft:
        config.image_token_id = IMAGE
    processor = families["soft_processor" if soft else "patch_processor"](config)
    image = config.image_token_id
    found = []
    for tiles in ((0,), (1, 2)):
        pictures = [arrays[f"tile{at}"] for at in tiles]
        given = processor(pictures, do_resize=False, return_tensors="pt")
        if soft:
            counts = list(map(int, given.pop("num_soft_tokens_per_image")))
            features = type(model.model).get_image_features(model.model, *given.values(), return_dict=True)
            model.model.get_image_features = lambda *_, made=features, **__: made  # once for all tokens
        else:
            counts = (given["image_grid_thw"].prod(1) // 4).tolist()
        for seed in range(1000):
            draw = np.random.default_rng(seed)
            ids, starts = draw.integers(0, 190, 5).tolist(), []
            for count in counts:
                starts.append(len(ids))
                ids += [image] * count + draw.integers(0, 190, 4).tolist()
            sequence, gaps = torch.tensor([ids]), []
            for _ in range(NEW_TOKENS):
                logits = model(
                    input_ids=sequence, mm_token_type_ids=(sequence == image).int(), use_cache=False, **given
                ).logits
                best = logits[0, -1].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                sequence = torch.cat([sequence, best.indices[None, :1]], 1)
                if (
                    best.indices[0] >= image or gaps[-1] < 0.004
                ):  # a generated <|image_pad|> would need a picture
                    break
            else:
                break
        tokens = sequence[0, len(ids) :].tolist()
        found.append(
            {"prompt": ids, "tiles": tiles, "starts": starts, "tokens": tokens, "smallest_gap": min(gaps)}
        )
    return found


@torch.inference_mode()
def tokens_of_crops(name: str) -> list[dict[str, object]]:
    directory = GOLDEN / "families" / name
    kind = transformers.DeepseekOcr2ForConditionalGeneration
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    arrays, image = np.load(directory / "golden.npz"), model.config.image_token_id
    crop, view = (
        torch.from_numpy(arrays[key].transpose(2, 0, 1).astype(np.float32) / 127.5 - 1)[None]
        for key in ("tile0", "tile1")
    )
    found = []
    for tiles, given in (((1,), (view,)), ((0, 1), (view, crop, [1]))):
        (features,) = model.model.get_image_features(*given).pooler_output
        counts = [len(arrays[f"features{at}"]) for at in tiles]
        for seed in range(1000):
            draw = np.random.default_rng(seed)
            ids = draw.integers(0, 190, 5).tolist()
            starts = np.cumsum([len(ids), *counts[:-1]]).tolist()
            ids += [image] * len(features) + draw.integers(0, 190, 4).tolist()
            sequence, gaps = torch.tensor([ids]), []
            for _ in range(NEW_TOKENS):
                embedded = model.get_input_embeddings()(sequence)
                embedded[0, starts[0] : starts[0] + len(features)] = features
                states = model.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
                best = model.lm_head(states[0, -1]).topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                sequence = torch.cat([sequence, best.indices[None, :1]], 1)
                if gaps[-1] < 0.004:
                    break
            else:
                break
        tokens = sequence[0, len(ids) :].tolist()
        found.append(
            {"prompt": ids, "tiles": tiles, "starts": starts, "tokens": tokens, "smallest_gap": min(gaps)}
        )
    return found


def makers() -> dict[str, Any]:
    """By family, what makes its entry."""
    made: dict[str, Any] = {name: lambda name=name: tokens_of(name, 2) for name in FAMILIES}
    made["gemma3_vision, one picture"] = lambda: tokens_of("gemma3_vision", 1)
    made |= {name: lambda name=name: tokens_of_patches(name) for name in PATCHES}
    return made | {"deepseek_ocr2": lambda: tokens_of_crops("deepseek_ocr2")}


if __name__ == "__main__":
    file, all_makers = GOLDEN / "images" / "tokens.json", makers()
    made: dict[str, Any] = {name: all_makers[name]() for name in sys.argv[1:] or all_makers}
    if sys.argv[1:]:
        made = json.loads(file.read_text()) | made
    file.write_text(json.dumps(made) + "\n")
    for name, each in made.items():
        for one in each if isinstance(each, list) else [each]:
            print(name, one["smallest_gap"], len(set(one["tokens"])), "distinct tokens")  # type: ignore[arg-type]
