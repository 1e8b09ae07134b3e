"""Gemma 4 in an engine: a picture's positions see each other in layers with a window, and their embeddings of each
layer are those of a blank token; bits as ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.test_images import FAMILIES, FULL, SMALL, run, run_preempted
from tests.support.picture_prompts import assert_golden_tokens, picture_of
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.images.processor import value_table
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.vision import load_vision
from xla_engine.prompts import PicturedPrompt
from xla_engine.runner.features import FeatureBuffer
from xla_engine.runner.vision_tower import TowerSlices, VisionTower

TABLE = value_table(SimpleNamespace(rescale_factor=1 / 255, image_mean=(0.5,) * 3, image_std=(0.5,) * 3))
IMAGE, UNIT, MOST = 197, 6, 48  # the id of <|image|>; pixels of a token's side; tokens of a picture
LAYERS, WINDOWS = "gemma4_vision", "gemma4_vision_windows"
LANES = replace(SMALL, prefill_lanes=(2, 6))
GRIDS = (
    (3, 5),
    (1, 2),
    (7, 6),
    (4, 2),
)  # rows and columns of tokens; the third takes two places of the buffer
PROMPTS = ((0,), (4,), (1, 2), (3, 0))  # (0,) and (4,) are equal but for the pixels


def engine_of(name: str, config: EngineConfig = LANES) -> XlaBatchEngine:
    vision = load_vision(FAMILIES / name, dtype=config.dtype)
    parts = (vision.config, vision.dtype, vision.weights, TABLE)
    tower = VisionTower(*parts, slices=TowerSlices(vision.config, MOST), most_tokens=MOST)
    return XlaBatchEngine(load_checkpoint(FAMILIES / name, dtype=config.dtype), config=config, tower=tower)


def prompt_of(*numbers: int) -> PicturedPrompt:
    """Text, and after each piece of it a picture, whose pixels and proportions the number sets."""
    ids, images = [5, 6, 7], []
    for number in numbers:
        rows, columns = GRIDS[number % len(GRIDS)]
        shape = (UNIT * rows, UNIT * columns, 3)
        tile = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        images.append(picture_of(tile, len(ids), UNIT))
        ids += [IMAGE] * (rows * columns) + [11, 12]
    return PicturedPrompt("", tuple(ids), tuple(images), None)


@pytest.fixture(scope="module", params=[LAYERS, WINDOWS])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, XlaBatchEngine]]:
    engine = engine_of(request.param)
    yield request.param, engine
    engine.close()


def alone(engine: XlaBatchEngine) -> list[object]:
    """The answers to the prompts, each by an engine without anything cached."""
    found = []
    for numbers in PROMPTS:
        engine.reset_prefix_cache()
        found += run(engine, prompt_of(*numbers))
    assert len(set(map(repr, found))) == len(PROMPTS), "the pictures make no difference"
    return found


def test_a_request_has_its_bits_whatever_runs_beside_it(engine: tuple[str, XlaBatchEngine]) -> None:
    """Alone, among peers, beside text, and preempted at random steps."""
    _, running = engine
    wanted, prompts = alone(running), [prompt_of(*numbers) for numbers in PROMPTS]
    assert run(running, *prompts, [3, 1, 4, 1, 5])[: len(wanted)] == wanted
    assert run(running, *reversed(prompts)) == wanted[::-1]
    assert run_preempted(running, 1, *prompts) == wanted


@FULL
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 12, "block_size": 32}, id="blocks"),
        pytest.param({"chunk_size": 48, "prefill_lanes": (1,), "lag": 0}, id="a picture a lane"),
        pytest.param({"attention_backend": "xla", "linear_backend": "xla"}, id="xla"),
    ],
)
def test_in_every_kind_of_engine(options: dict[str, Any], engine: tuple[str, Any]) -> None:
    name, _ = engine
    other = engine_of(name, replace(LANES, **options))
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    found = run(other, *prompts)
    assert run(other, *reversed(prompts)) == found[::-1]
    assert other.stats().cached_tokens > 0 or "num_blocks" not in options
    other.close()
    if "attention_backend" not in options:
        assert found == alone(engine[1])


@pytest.mark.parametrize("name", [LAYERS, WINDOWS])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    engine = engine_of(name, replace(LANES, dtype="float32"))
    assert_golden_tokens(engine, FAMILIES / name, UNIT)
    engine.close()


@FULL
@pytest.mark.parametrize(
    ("name", "change"),
    [(LAYERS, {"blank_token": None}), (WINDOWS, {"only_windows": False}), (WINDOWS, None)],
    ids=["embeddings of the mark", "both ways in all layers", "causal"],
)
def test_planted_faults_are_found(
    name: str, change: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = engine_of(name)
    wanted = alone(right)
    right.close()
    form = FeatureBuffer.prefill_form
    if change is None:
        monkeypatch.setattr(FeatureBuffer, "sees_ahead", False)
    else:
        faulty = property(lambda self: {**form.fget(self), **change})  # type: ignore[attr-defined]
        monkeypatch.setattr(FeatureBuffer, "prefill_form", faulty)
    wrong = engine_of(name)
    assert all(found != each for found, each in zip(alone(wrong), wanted, strict=True))
    wrong.close()


def test_a_prefill_call_has_room_for_a_picture_whose_tokens_see_each_other() -> None:
    """Six lanes of eight for 48 tokens; in decoders that read from left to right, any number will do."""
    engine = engine_of(WINDOWS, SMALL)
    assert SMALL.prefill_lanes[-1] < 6
    assert engine.config.prefill_lanes == (*SMALL.prefill_lanes[:-1], 6)
    engine.close()
