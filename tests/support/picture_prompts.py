"""Pictures of one tile in prompts, and the tokens that transformers generates for the golden ones."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.prompts import PicturedPrompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage


def picture_of(tile: np.ndarray, start: int, unit: int) -> PromptImage:
    """tile: u8 `[height, width, 3]`. start: of its tokens in the prompt. unit: pixels of a token's side."""
    span = (start, tile.shape[0] // unit * (tile.shape[1] // unit))
    return PromptImage(digest=sha256(tile.tobytes()).hexdigest(), tiles=(tile,), spans=(span,))


def assert_golden_tokens(engine: XlaBatchEngine, directory: Path, unit: int) -> None:
    """Greedy tokens are those of transformers: of one picture, and of two of other proportions, in one batch.

    directory: the model's, in `golden/families`.
    """
    golden = json.loads((directory.parents[1] / "images" / "tokens.json").read_text())[directory.name]
    arrays = np.load(directory / "golden.npz")
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for at, case in enumerate(golden):
        pairs = zip(case["tiles"], case["starts"], strict=True)
        images = tuple(picture_of(arrays[f"tile{tile}"], start, unit) for tile, start in pairs)
        engine.submit(PicturedPrompt("", tuple(case["prompt"]), images), params, request_id=str(at))
    outputs = {output.request_id: output for output in engine.drain()}
    for at, case in enumerate(golden):
        assert list(outputs[str(at)].outputs[0].token_ids) == case["tokens"]
