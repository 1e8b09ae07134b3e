"""Gemma 3 through the doors of an engine: text with marks, chats, dry runs, and what says why it takes no pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.images.conftest import GOLDEN
from tests.images.test_end_to_end import GREEDY, OPTIONS, widen
from tests.images.test_features import picture
from tests.images.test_tiles import GEMMA3
from tests.support.command_line import invoke
from xla_engine import LLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.errors import InvalidRequestError
from xla_engine.images.encoder import ImageEncoder

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<start_of_image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
ROOM = OPTIONS | {"prefill_lanes": (2,), "chunk_size": 16}  # one picture has 25 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma3") / "model"
    shutil.copytree(GOLDEN / "families" / "gemma3_vision", directory)
    shutil.copy(GOLDEN / "images" / "tokenizer.json", directory)
    widen(directory)
    processor = GEMMA3 | {"size": {"height": 40, "width": 40}, "image_seq_length": 25}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_length": 25}))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def test_texts_and_chats_about_pictures(model: Path) -> None:
    files = [picture(60, 30), picture(20, 20)]
    with XlaBatchEngine.from_pretrained(model, EngineConfig(**ROOM)) as engine:
        llm = LLM.from_engine(engine)
        prompts = [
            {"prompt": "What is <start_of_image>?", "multi_modal_data": {"image": file}} for file in files
        ]
        (alone,) = llm.generate([prompts[0]], GREEDY)
        first, second = llm.generate(prompts, GREEDY)
        assert first.outputs[0].token_ids == alone.outputs[0].token_ids
        assert first.outputs[0].logprobs != second.outputs[0].logprobs
        with ImageEncoder(model) as encoder:
            placed = encoder.prompt(prompts[0]["prompt"], [encoder.grid(files[0])])
            assert tuple(first.prompt_token_ids or ()) == placed.token_ids
            assert [(span.start, span.length) for span in placed.spans] == [(10, 25)]
        parts = [
            {"type": "text", "text": "What is "},
            {"type": "image", "image": files[0]},
            {"type": "text", "text": "?"},
        ]
        (answer,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
        assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="0 <start_of_image> and 1 pictures"):
            llm.generate([{"prompt": "<image>", "multi_modal_data": {"image": files[0]}}], GREEDY)


def test_tokens_are_counted_before_a_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(60, 30))
    source = tmp_path / "in.jsonl"
    source.write_text(
        json.dumps({"prompt": "<start_of_image><start_of_image>", "images": ["a.png"] * 2}) + "\n"
    )
    options = ("--max-tokens", "6", "--allowed-local-media-path", tmp_path)
    found = str(invoke("run", source, "--dry-run", "--model", model, *options).output)
    assert "tiles of pictures    2" in found and "1 ok" in found, found
    assert "prompt tokens        58" in found, (
        found
    )  # twice two line ends, a begin, 25 of the picture and an end, and two line ends


def test_inspect_says_why_an_engine_takes_no_pictures(model: Path, tmp_path: Path) -> None:
    seeing = inspect_model(model, EngineConfig(**ROOM)).vision
    assert seeing is not None and seeing["tokens"] >= 25 and not seeing["tokens"] % 25
    narrow = inspect_model(model, EngineConfig(**ROOM | {"chunk_size": 8})).vision
    assert narrow is not None and narrow["lanes"][-1] >= 4  # 25 tokens in one call
    text = tmp_path / "text"
    shutil.copytree(model, text)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (text / name).unlink()
    found = inspect_model(text, EngineConfig(**ROOM)).vision
    assert found is not None and "has no preprocessor_config.json" in found["refused"]
