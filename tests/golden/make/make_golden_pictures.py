"""Greedy tokens of prompts with pictures: `python make_golden_pictures.py`, with torch and transformers.

Writes ../images/tokens.json: for each family the prompt's token ids, the positions where features of the two tiles of
golden.npz go, the 48 likeliest tokens one after the other, in float32, and the smallest gap between the two likeliest.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

FAMILIES = {"idefics3": "Idefics3ForConditionalGeneration", "smolvlm": "SmolVLMForConditionalGeneration"}
GOLDEN = Path(__file__).parents[1]
NEW_TOKENS = 48


@torch.no_grad()
def tokens_of(name: str) -> dict[str, object]:
    directory = GOLDEN / "families" / name
    kind = getattr(transformers, FAMILIES[name])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tiles = np.load(directory / "golden.npz")["tiles"]
    pixels = torch.from_numpy(tiles.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)[None]
    config = model.config
    length = (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2
    image, starts = config.image_token_id, [3, 3 + length + 4]
    ids = [7 + at % 11 for at in range(starts[1] + length + 6)]
    for start in starts:
        ids[start : start + length] = [image] * length
    sequence, gaps = torch.tensor([ids]), []
    for _ in range(NEW_TOKENS):
        # A generated <image> has no picture, so features go in before the text model and not by token id.
        embedded = model.get_input_embeddings()(sequence)
        found = model.model.get_image_features(pixel_values=pixels)
        features = torch.cat(list(found.pooler_output)).reshape(2, length, -1)
        for start, each in zip(starts, features, strict=True):
            embedded[0, start : start + length] = each
        states = model.model.text_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        best = model.lm_head(states[0, -1]).topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        sequence = torch.cat([sequence, best.indices[None, :1]], 1)
    tokens = sequence[0, len(ids) :].tolist()
    return {"prompt": ids, "starts": starts, "length": length, "tokens": tokens, "smallest_gap": min(gaps)}


if __name__ == "__main__":
    made = {name: tokens_of(name) for name in FAMILIES}
    (GOLDEN / "images" / "tokens.json").write_text(json.dumps(made) + "\n")
    for name, each in made.items():
        print(name, each["smallest_gap"], len(set(each["tokens"])), "distinct tokens")  # type: ignore[arg-type]
