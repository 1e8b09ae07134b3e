"""Gemma 3 in an engine: the positions of a picture see each other, whatever runs beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from tests.engine.test_images import FAMILIES, FULL, IMAGE, SMALL, engine_of, picture, run, run_preempted
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.vision import load_vision
from xla_engine.prompts import PicturedPrompt
from xla_engine.runner.features import FeatureBuffer
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage

NAME = "gemma3_vision"
TOKENS = load_vision(FAMILIES / NAME).config.tokens  # of a picture; a window is shorter
LANES = replace(SMALL, prefill_lanes=(2, 4))
STARTS = (3, 7 + TOKENS)


def prompt_of(*numbers: int) -> PicturedPrompt:
    """The same tokens whatever the pictures: one or two."""
    images = tuple(picture(each, at, name=NAME) for each, at in zip(numbers, STARTS, strict=False))
    ids = [7 + at % 11 for at in range(STARTS[-1] + TOKENS + 5)]
    for start, length in (span for image in images for span in image.spans):
        ids[start : start + length] = [IMAGE] * length
    return PicturedPrompt("", tuple(ids), images, None)


PROMPTS = [prompt_of(0, 1), prompt_of(1), prompt_of(2, 2), prompt_of(0, 2)]


@pytest.fixture(scope="module")
def engine() -> Iterator[XlaBatchEngine]:
    engine = engine_of(LANES, NAME)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine: XlaBatchEngine) -> list[object]:
    found = []
    for prompt in PROMPTS:
        engine.reset_prefix_cache()
        found += run(engine, prompt)
    assert len(set(map(repr, found))) == len(found), "the pictures make no difference"
    return found


@pytest.mark.full
def test_alone_and_among_peers(engine: XlaBatchEngine, alone: list[object]) -> None:
    assert run(engine, *PROMPTS, [3, 1, 4, 1, 5])[:4] == alone
    assert run(engine, PROMPTS[3], PROMPTS[0], PROMPTS[3]) == [alone[at] for at in (3, 0, 3)]


@pytest.mark.parametrize("lag", [1, pytest.param(0, marks=FULL), pytest.param(2, marks=FULL)])
def test_preempted_at_random_steps(engine: XlaBatchEngine, alone: list[object], lag: int) -> None:

    assert run_preempted(engine, lag, *PROMPTS) == alone


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 12, "block_size": 32}, id="blocks"),
        pytest.param({"chunk_size": 32, "prefill_lanes": (1,), "lag": 0}, id="a picture a lane", marks=FULL),
        pytest.param({"prefill_lanes": (8,), "max_num_batched_tokens": 8}, id="budget", marks=FULL),
        pytest.param({"kv_cache_dtype": "int8"}, id="int8", marks=FULL),
        pytest.param(
            {"attention_backend": "xla", "linear_backend": "xla"}, id="xla", marks=pytest.mark.release
        ),
    ],
)
def test_forms_of_engines(options: dict[str, object], alone: list[object]) -> None:
    """Blocks keep prefixes: warm and cold are equal, and prompts that begin with the same picture share it."""
    engine = engine_of(replace(LANES, **options), NAME)  # type: ignore[arg-type]
    found = run(engine, *PROMPTS, PROMPTS[0])
    again, cached = run(engine, PROMPTS[3], PROMPTS[3]), engine.stats().cached_tokens
    assert cached >= TOKENS or "num_blocks" not in options
    engine.reset_prefix_cache()
    cold = run(engine, PROMPTS[3])
    engine.close()
    assert found[0] == found[4] and [*again, *cold] == [found[3]] * 3 and len(set(map(repr, found))) == 4
    if "attention_backend" not in options and "kv_cache_dtype" not in options:
        assert found[:4] == alone


@pytest.mark.full
@pytest.mark.parametrize("case", [NAME, f"{NAME}, one picture"])
def test_greedy_tokens_are_those_of_transformers(case: str, float32: XlaBatchEngine) -> None:
    golden = json.loads((FAMILIES.parent / "images" / "tokens.json").read_text())[case]
    tiles = np.load(FAMILIES / NAME / "golden.npz")["tiles"]
    images = tuple(
        PromptImage(
            digest=sha256(tile.tobytes()).hexdigest(), tiles=tile[None], spans=((start, golden["length"]),)
        )
        for start, tile in zip(golden["starts"], tiles, strict=False)
    )
    float32.submit(PicturedPrompt("", tuple(golden["prompt"]), images), GREEDY)
    (output,) = float32.drain()
    assert list(output.outputs[0].token_ids) == golden["tokens"]


GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def float32() -> Iterator[XlaBatchEngine]:
    engine = engine_of(replace(LANES, dtype="float32"), NAME)
    yield engine
    engine.close()


@FULL
def test_a_causal_decoder_would_be_found(alone: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeatureBuffer, "sees_ahead", False)
    engine = engine_of(LANES, NAME)
    assert all(found != wanted for found, wanted in zip(run(engine, *PROMPTS), alone, strict=True))
    engine.close()


def test_a_prefill_call_gets_lanes_for_a_picture(alone: list[object]) -> None:
    """Four of eight for 25 tokens, whatever the options say."""
    engine = engine_of(SMALL, NAME)
    assert SMALL.prefill_lanes[-1] < 4
    assert engine.config.prefill_lanes == (*SMALL.prefill_lanes[:-1], 4)
    assert run(engine, *PROMPTS) == alone
    engine.close()
