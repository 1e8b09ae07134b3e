"""Pictures in an engine: features by span, caches by content, and answers that are functions of the request alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.support.pixel_values import UNIT_TABLE
from tests.support.requests import answers
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.vision import load_vision
from xla_engine.prompts import PicturedPrompt
from xla_engine.runner.features import FeatureBuffer
from xla_engine.runner.vision_tower import VisionTower
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import FeatureSpan, PromptImage, Request

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
IMAGE = 198  # the id of <image>
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=8, logprobs=0, ignore_eos=True)
SMALL = EngineConfig(
    max_num_seqs=2,
    max_model_len=128,
    chunk_size=8,
    prefill_lanes=(2,),
    block_size=16,
    self_check=False,
)
FULL = pytest.mark.full


def engine_of(config: EngineConfig, name: str = "idefics3") -> XlaBatchEngine:
    checkpoint = load_checkpoint(FAMILIES / name, dtype=config.dtype)
    vision = load_vision(FAMILIES / name, dtype=config.dtype)
    tower = VisionTower(vision.config, vision.dtype, vision.weights, UNIT_TABLE)
    return XlaBatchEngine(checkpoint, config=config, tower=tower)


def picture(number: int, *starts: int, name: str = "idefics3") -> PromptImage:
    config = load_vision(FAMILIES / name).config
    shape = (len(starts), config.image_size, config.image_size, 3)
    tiles = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    spans = tuple((start, config.tokens) for start in starts)
    return PromptImage(digest=sha256(tiles.tobytes()).hexdigest(), tiles=tiles, spans=spans)


TOKENS = load_vision(FAMILIES / "idefics3").config.tokens  # of a tile
SECOND = 5 + TOKENS


def prompt_of(*numbers: int, salt: str | None = None) -> PicturedPrompt:
    """The same tokens whatever the pictures: one of two tiles, and if there are more, others of one tile."""
    starts = [(3, SECOND), *((SECOND + TOKENS + 2 + at * (TOKENS + 1),) for at in range(len(numbers) - 1))]
    images = tuple(picture(number, *each) for number, each in zip(numbers, starts, strict=True))
    ids = [7 + at % 11 for at in range(images[-1].spans[-1][0] + TOKENS + 5)]
    for start, length in (span for image in images for span in image.spans):
        ids[start : start + length] = [IMAGE] * length
    return PicturedPrompt("", tuple(ids), images, salt)


def run(engine: XlaBatchEngine, *prompts: PicturedPrompt | list[int]) -> list[object]:
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, PARAMS, request_id=str(at))
    found = answers(engine.drain())
    return [found[str(at)] for at in range(len(prompts))]


def run_preempted(engine: XlaBatchEngine, lag: int, *prompts: PicturedPrompt | list[int]) -> list[object]:
    """As `run`, from an empty cache; requests are preempted at random steps, each step with the same chance."""
    engine.reset_prefix_cache()
    engine.lag, draw = lag, random.Random(lag)
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, PARAMS, request_id=str(at))
    done, before = [], engine.stats().preemptions
    while engine.has_unfinished:
        done += [output for output in engine.step() if output.finished]
        for name in map(str, range(len(prompts))):
            if draw.random() < 0.1:
                engine.preempt(name, how=draw.choice((None, *engine.ways_to_preempt)))
        engine.scheduler.check()
    assert engine.stats().preemptions > before
    engine.lag = 1
    found = answers(done)
    return [found[str(at)] for at in range(len(prompts))]


@pytest.fixture(scope="module")
def engine() -> Iterator[XlaBatchEngine]:
    engine = engine_of(SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine: XlaBatchEngine) -> list[object]:
    """The answers about pictures 0 to 3, each to an engine without anything cached."""
    found = []
    for number in range(4):
        engine.reset_prefix_cache()
        found += run(engine, prompt_of(number))
    assert len(set(map(repr, found))) == 4, "the pictures make no difference"
    return found


def test_alone_and_among_peers_of_equal_text(engine: XlaBatchEngine, alone: list[object]) -> None:
    """Also cached, cold and with a salt: equal tokens with another picture are another prompt."""
    assert run(engine, *map(prompt_of, range(4)), [3, 1, 4, 1, 5])[:4] == alone
    assert run(engine, *map(prompt_of, (2, 2, 0, 3))) == [alone[at] for at in (2, 2, 0, 3)]
    assert run(engine, prompt_of(1, salt="tenant")) == [alone[1]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 12, "block_size": 32}, id="blocks"),
        pytest.param({"chunk_size": 16, "enable_prefix_caching": False, "lag": 0}, id="chunks", marks=FULL),
        pytest.param({"image_cache_bytes": 1, "lag": 2}, id="one place for features", marks=FULL),
        pytest.param({"attention_backend": "xla", "linear_backend": "xla"}, id="xla", marks=FULL),
    ],
)
def test_forms_of_engines(options: dict[str, object], alone: list[object]) -> None:
    if options.pop("image_cache_bytes", None):
        tokens = load_vision(FAMILIES / "idefics3").config
        options["image_cache_bytes"] = 2 * 4 * tokens.tokens * tokens.text_size  # the tiles of one prompt
    engine = engine_of(replace(SMALL, **options))  # type: ignore[arg-type]
    found = run(engine, *map(prompt_of, (0, 1, 2, 3, 0)))
    again = run(engine, *map(prompt_of, (3, 3)))
    engine.close()
    assert found[0] == found[4] and again == [found[3]] * 2 and len(set(map(repr, found))) == 4
    if "attention_backend" not in options:
        assert found[:4] == alone


@pytest.mark.parametrize("lag", [0, 1, pytest.param(2, marks=FULL)])
def test_preempted_at_random_steps(engine: XlaBatchEngine, alone: list[object], lag: int) -> None:
    """While it waits, is prefilled or decodes, in every way."""
    assert run_preempted(engine, lag, *map(prompt_of, range(4))) == alone


def test_a_lost_buffer_is_made_anew(engine: XlaBatchEngine, alone: list[object]) -> None:
    engine.reset_prefix_cache()
    assert engine.runner.features is not None
    engine.runner.features.rows.delete()
    assert run(engine, *map(prompt_of, (1, 0))) == [alone[1], alone[0]]


def test_planted_faults_are_found(
    engine: XlaBatchEngine, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FeatureBuffer.of_chunks

    def wrong(move: object) -> list[object]:
        def moved(self: FeatureBuffer, chunks: object, lanes: int, width: int) -> object:
            edited = [
                chunk._replace(features=tuple(move(span) for span in chunk.features))  # type: ignore[operator]
                for chunk in chunks  # type: ignore[attr-defined]
            ]
            return right(self, edited, lanes, width)

        engine.reset_prefix_cache()
        with monkeypatch.context() as patched:
            patched.setattr(FeatureBuffer, "of_chunks", moved)
            found = run(engine, prompt_of(0))
        engine.reset_prefix_cache()
        return found

    def off_by_one(span: FeatureSpan) -> FeatureSpan:
        return span._replace(row=max(span.row - 1, 0))

    def swapped(span: FeatureSpan) -> FeatureSpan:
        return span._replace(place=span.place ^ 1)

    assert wrong(lambda span: span) == alone[:1]
    assert wrong(off_by_one) != alone[:1]
    assert wrong(swapped) != alone[:1]


def test_caches_by_token_would_be_found(
    engine: XlaBatchEngine, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset_prefix_cache()
    with monkeypatch.context() as patched:
        patched.setattr(Request, "content", property(lambda self: self.prompt_token_ids))
        found = [*run(engine, prompt_of(0)), *run(engine, prompt_of(1))]
    engine.reset_prefix_cache()
    assert found[0] == alone[0] and found[1] != alone[1]


@pytest.mark.parametrize("name", default(["smolvlm", "idefics3"]))
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    golden = json.loads((FAMILIES.parent / "images" / "tokens.json").read_text())[name]
    tiles = np.load(FAMILIES / name / "golden.npz")["tiles"]
    spans = tuple((start, golden["length"]) for start in golden["starts"])
    image = PromptImage(digest=sha256(tiles.tobytes()).hexdigest(), tiles=tiles, spans=spans)
    engine = engine_of(replace(SMALL, dtype="float32"), name)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    engine.submit(PicturedPrompt("", tuple(golden["prompt"]), (image,)), params)
    (output,) = engine.drain()
    engine.close()
    assert list(output.outputs[0].token_ids) == golden["tokens"]


@pytest.mark.parametrize("name", ["idefics3", pytest.param("smolvlm", marks=FULL)])
def test_a_prompt_without_pictures_is_plain_text(name: str) -> None:
    """The tower's engine gives text the bits of an engine without one, and `<image>` without a picture is a token."""
    prompts = [[1, 2, 3, IMAGE, 5], list(range(30))]
    seeing, blind = engine_of(SMALL, name), XlaBatchEngine(load_checkpoint(FAMILIES / name), config=SMALL)
    assert run(seeing, *prompts) == run(blind, *prompts)
    with pytest.raises(InvalidRequestError, match="reads no pictures"):
        blind.submit(prompt_of(0), PARAMS)
    seeing.close()
    blind.close()
