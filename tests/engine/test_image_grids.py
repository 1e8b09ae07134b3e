"""Towers over patches in an engine: positions follow a picture's grid, taps are added to the first layers, bits as
ever."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.engine.test_images import FAMILIES, FULL, PARAMS, SMALL, answers, run, run_preempted
from tests.support.picture_prompts import assert_golden_tokens, picture_of
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError, TokenLimitError
from xla_engine.graphs.vision import layers
from xla_engine.images.processor import value_table
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.families import tensor_sources
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.vision import load_vision, read_vision, vision_sources
from xla_engine.prompts import PicturedPrompt
from xla_engine.runner import dispatch
from xla_engine.runner.row_settings import RowSettings, grid_positions
from xla_engine.runner.vision_tower import TowerSlices, VisionTower
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage, Request

MODEL = FAMILIES / "qwen3_vl"
TABLE = value_table(SimpleNamespace(rescale_factor=1 / 255, image_mean=(0.5,) * 3, image_std=(0.5,) * 3))
IMAGE, UNIT = 197, 8  # the id of <|image_pad|>; pixels of a token's side
GRIDS = (
    (3, 5),
    (1, 2),
    (4, 2),
    (9, 8),
)  # rows and columns of tokens; the last takes two places of the buffer


def engine_of(config: EngineConfig, model: Path = MODEL, limit: float | None = None) -> XlaBatchEngine:
    """limit: operations of a slice of the tower, see `TowerSlices`."""
    vision = load_vision(model, dtype=config.dtype)
    slices = TowerSlices(vision.config, 128, limit)
    tower = VisionTower(vision.config, vision.dtype, vision.weights, TABLE, slices=slices)
    return XlaBatchEngine(load_checkpoint(model, dtype=config.dtype), config=config, tower=tower)


def prompt_of(*numbers: int, salt: str | None = None) -> PicturedPrompt:
    """Text, and after each piece of it a picture, whose pixels and proportions the number sets."""
    ids, images = [5, 6, 7], []
    for number in numbers:
        rows, columns = GRIDS[number % len(GRIDS)]
        shape = (UNIT * rows, UNIT * columns, 3)
        tile = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        images.append(picture_of(tile, len(ids), UNIT))
        ids += [IMAGE] * (rows * columns) + [11, 12]
    return PicturedPrompt("", tuple(ids), tuple(images), salt)


PROMPTS = ((0,), (4,), (1, 2), (3,), (5, 0))  # (0,) and (4,) are equal but for the pixels


@pytest.fixture(scope="module")
def engine() -> Iterator[XlaBatchEngine]:
    engine = engine_of(SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine: XlaBatchEngine) -> list[object]:
    """The answers to the prompts, each by an engine without anything cached."""
    found = []
    for numbers in PROMPTS:
        engine.reset_prefix_cache()
        found += run(engine, prompt_of(*numbers))
    assert len(set(map(repr, found))) == len(PROMPTS), "the pictures make no difference"
    return found


@pytest.mark.full
def test_alone_and_among_peers(engine: XlaBatchEngine, alone: list[object]) -> None:
    """Also beside text, cached, cold and with a salt."""
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    assert run(engine, *prompts, [3, 1, 4, 1, 5])[: len(alone)] == alone
    assert run(engine, *reversed(prompts)) == alone[::-1]
    assert run(engine, prompt_of(*PROMPTS[2], salt="tenant")) == [alone[2]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 16, "block_size": 32}, id="blocks", marks=FULL),
        pytest.param({"chunk_size": 16, "enable_prefix_caching": False, "lag": 0}, id="chunks", marks=FULL),
        pytest.param({"image_cache_bytes": 1 << 16, "lag": 2}, id="two places", marks=pytest.mark.release),
        pytest.param(
            {"attention_backend": "xla", "linear_backend": "xla"}, id="xla", marks=pytest.mark.release
        ),
    ],
)
def test_in_every_kind_of_engine(options: dict[str, Any], alone: list[object]) -> None:
    engine = engine_of(replace(SMALL, **options))
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    found = run(engine, *prompts)
    assert run(engine, *reversed(prompts)) == found[::-1]
    engine.close()
    if "attention_backend" not in options:
        assert found == alone


@FULL
def test_slices_of_layers_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside text that decodes, and preempted; with one call a slice and with several."""
    monkeypatch.setattr(layers, "_SCORES", 256 * 1024)
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    found = []
    for limit in (None, 1e9):
        engine = engine_of(SMALL, limit=limit)
        assert engine.runner.features is not None
        assert engine.runner.features.tower.slices.parts == {256: 256, 1024: 256}
        found += [[run(engine, prompt)[0] for prompt in prompts], run_preempted(engine, 1, *prompts)]
        engine.reset_prefix_cache()
        found.append(run(engine, [3, 1, 4, 1, 5], *prompts)[1:])
        engine.close()
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("lag", [1, pytest.param(0, marks=FULL), pytest.param(2, marks=pytest.mark.release)])
def test_preempted_at_random_steps(engine: XlaBatchEngine, alone: list[object], lag: int) -> None:
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    assert run_preempted(engine, lag, *prompts) == alone


def test_planted_faults_are_found(
    engine: XlaBatchEngine, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that goes on a position too far, positions by place, taps that are not added, caches by token."""
    made = dispatch.make_lanes

    def lanes(change: Any) -> Any:
        return lambda *arguments, **named: change(made(*arguments, **named))

    def by_place(found: Any) -> Any:
        place = found.start[:, None] + np.arange(found.tokens.shape[1], dtype=np.int32)
        return replace(found, positions=np.stack([place] * 3, axis=2))

    def wrong(where: object, name: str, what: object, *prompts: int) -> list[object]:
        engine.reset_prefix_cache()
        with monkeypatch.context() as patched:
            patched.setattr(where, name, what)
            found = [answer for each in prompts for answer in run(engine, prompt_of(*PROMPTS[each]))]
        engine.reset_prefix_cache()
        return found

    assert wrong(dispatch, "make_lanes", lanes(lambda found: found), 2) == [alone[2]]
    late = lanes(lambda found: replace(found, rope_offset=found.rope_offset + 1))
    assert wrong(dispatch, "make_lanes", late, 2) != [alone[2]]
    assert wrong(dispatch, "make_lanes", lanes(by_place), 2) != [alone[2]]
    by_token = property(lambda self: self.prompt_token_ids)
    found = wrong(Request, "content", by_token, 0, 1)
    assert found[0] == alone[0] and found[1] != alone[1]


def test_taps_that_are_not_added_would_be_found(
    engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features are cached by salt, so that each tenant's are made anew."""
    right = run(engine, prompt_of(21, 22))
    assert run(engine, prompt_of(21, 22, salt="another")) == right
    advance = VisionTower.advance

    def tapless(tower: VisionTower, *arguments: Any) -> Any:
        found = advance(tower, *arguments)
        size = tower.config.text_size
        return found._replace(features=tuple(each.at[:, size:].set(0) for each in found.features))

    with monkeypatch.context() as patched:
        patched.setattr(VisionTower, "advance", tapless)
        assert run(engine, prompt_of(21, 22, salt="third")) != right


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        *(
            pytest.param(name, marks=FULL)
            for name in ("qwen3_vl_moe", "qwen3_5_vision", "paddleocr_vl", "glm_ocr")
        ),
    ],
)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    engine = engine_of(replace(SMALL, dtype="float32"), FAMILIES / name)
    assert_golden_tokens(engine, FAMILIES / name, UNIT)
    engine.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5_vision", "paddleocr_vl", "glm_ocr"])
def test_other_families_see_pictures(name: str) -> None:
    """Alone, among peers, with a cached prefix or a saved state of recurrent layers, and preempted."""
    config = replace(SMALL, mamba_cache_mode="align", mamba_block_size=16)
    engine = engine_of(config if name == "qwen3_5_vision" else SMALL, FAMILIES / name)
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    found = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        found += run(engine, prompt)
    assert len(set(map(repr, found))) == len(PROMPTS)
    engine.reset_prefix_cache()
    assert run(engine, *prompts) == found
    assert run(engine, *reversed(prompts)) == found[::-1]
    assert engine.stats().cached_tokens > 0
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, PARAMS, request_id=str(at))
    done, draw = [], random.Random(0)
    while engine.has_unfinished:
        done += [output for output in engine.step() if output.finished]
        if draw.random() < 0.3:
            engine.preempt(str(draw.randrange(len(prompts))))
    engine.close()
    assert [answers(done)[str(at)] for at in range(len(prompts))] == found


@pytest.mark.release
def test_text_has_the_bits_of_an_engine_without_a_tower() -> None:
    prompts = [[1, 2, 3, IMAGE, 5], list(range(30))]
    seeing, blind = engine_of(SMALL), XlaBatchEngine(load_checkpoint(MODEL), config=SMALL)
    assert run(seeing, *prompts) == run(blind, *prompts)
    with pytest.raises(InvalidRequestError, match="reads no pictures"):
        blind.submit(prompt_of(0), PARAMS)
    seeing.close()
    blind.close()


def test_what_does_not_fit_is_refused(engine: XlaBatchEngine) -> None:
    torn = np.zeros((UNIT, UNIT + 4, 3), np.uint8)
    wrong = PromptImage(digest="0" * 64, tiles=(torn,), spans=((0, 1),))
    with pytest.raises(InvalidRequestError, match=r"tile of uint8 \[8, 12, 3\], which the vision tower"):
        engine.submit(PicturedPrompt("", (IMAGE, 5), (wrong,)), PARAMS)
    wide = PromptImage(digest="0" * 64, tiles=(np.zeros((8, 16, 3), np.uint8),), spans=((0, 1),))
    with pytest.raises(InvalidRequestError, match="a span of 1 positions, and a tile has 2 tokens"):
        engine.submit(PicturedPrompt("", (IMAGE, 5), (wide,)), PARAMS)
    assert not isinstance(engine.validator.images, str)
    small = replace(engine.validator, images=engine.validator.images._replace(places=1))
    with pytest.raises(TokenLimitError, match="128 tokens; the engine has room for 64: raise image_cache"):
        small.checked(prompt_of(3), PARAMS, {}, add_special_tokens=True)


def test_positions_of_a_prompt_by_hand() -> None:
    """One token, two pictures side by side, one token."""
    found = grid_positions(10, [(1, 2, 2), (5, 1, 3), (9, 1, 1)])
    assert found.tolist() == [
        [0, 0, 0],
        *([1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2]),
        *([3, 3, 3], [3, 3, 4], [3, 3, 5]),
        [6, 6, 6],
        [7, 7, 7],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 5)), max_size=4),
    st.integers(0, 3),
)
def test_text_goes_on_behind_the_longer_side(parts: list[tuple[int, int, int]], rest: int) -> None:
    grids, length, position = [], 0, 0
    for text, rows, columns in parts:
        grids.append((length + text, rows, columns))
        length += text + rows * columns
        position += text + max(rows, columns)
    found = grid_positions(length + rest, grids)
    settings = RowSettings(
        max_tokens=1,
        stop_token_ids=(),
        params=SamplingParams(),
        seed=0,
        positions=found if length + rest else None,
    )
    assert settings.rope_offset == position - length <= 0
    text = np.ones(length + rest, bool)
    for start, rows, columns in grids:
        text[start : start + rows * columns] = False
        assert (found[start : start + rows * columns] <= found[start] + max(rows, columns) - 1).all()
    assert (found[text][:, 0] == found[text][:, 1]).all() and (np.diff(found[text][:, 0]) > 0).all()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose sizes the C++ kernels take, so that verify steps and programs of few rows run."""
    directory = tmp_path_factory.mktemp("wide")
    config = json.loads((MODEL / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    config["vision_config"]["out_hidden_size"] = 64
    (directory / "config.json").write_text(json.dumps(config))
    files = open_model(directory)
    text, family = transformers_model(files.config_fields())
    vision = read_vision(files.config_fields(), family, text)
    draw, tensors = np.random.default_rng(0), {}
    for sources in (*tensor_sources(text, family).values(), *vision_sources(vision, family).values()):
        for source in sources:
            noise = draw.standard_normal(source.shape).astype(np.float32) * 0.3
            tensors[source.name] = (noise + ("norm" in source.name)).astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.full
def test_drafts_and_few_rows_change_no_bit(wide: Path) -> None:
    """Verify steps turn by the same positions as decode steps do."""
    config = replace(SMALL, max_num_seqs=6, max_model_len=128)
    prompts = [prompt_of(*numbers) for numbers in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)

    def answered(engine: XlaBatchEngine, *asked: PicturedPrompt) -> list[object]:
        for at, prompt in enumerate(asked):
            engine.submit(prompt, params, request_id=str(at))
        found = answers(engine.drain())
        return [found[str(at)] for at in range(len(asked))]

    engine = engine_of(config, wide)
    if not engine.runner.has_one_row_code:
        engine.close()
        pytest.skip("needs the C++ kernels")
    together = answered(engine, *prompts)
    alone = [answer for prompt in prompts for answer in answered(engine, prompt)]
    engine.close()
    assert alone == together
    drafting = engine_of(
        replace(
            config,
            self_check=True,
            compile_cache=False,
            speculative_config={"method": "suffix", "num_speculative_tokens": 3},
        ),
        wide,
    )
    assert answered(drafting, *prompts) == together
    assert drafting.stats().drafted_tokens > 0
    drafting.close()
