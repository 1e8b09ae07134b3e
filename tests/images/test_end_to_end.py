"""A question about a picture through every door of an engine with a vision tower: one answer."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.images.test_doors import PARTS
from tests.images.test_features import model as small
from tests.images.test_features import picture
from tests.server.conftest import Running
from tests.support.command_line import ROOT, invoke
from xla_engine import LLM, SamplingParams
from xla_engine.async_llm import AsyncLLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.engine.inspection_report import report_lines
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.record import read_record, write_record
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import replay
from xla_engine.equivalence.schedule import draw_schedule, run_alone
from xla_engine.errors import (
    CheckpointError,
    ConfigError,
    ImageNotAllowedError,
    InvalidImageError,
    InvalidRequestError,
    RecordError,
)
from xla_engine.images.encoder import ImageEncoder
from xla_engine.images.pictures import tiles_sha256
from xla_engine.model_loader.vision import load_vision
from xla_engine.prompts import Picture, PicturedPrompt
from xla_engine.ray.results import result_of
from xla_engine.runner.self_check.check import run_self_check, tile_differences
from xla_engine.scheduler import PromptImage
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings
from xla_engine.vllm.outputs import vllm_output

__all__ = ["small"]

TEXT = "What is <image>?"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_model_len": 256,
    "chunk_size": 16,
    "prefill_lanes": (2,),
    "self_check": False,
}


@pytest.fixture(scope="module")
def model(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with an embedding for every token of its tokenizer."""
    directory = tmp_path_factory.mktemp("whole") / "idefics3"
    shutil.copytree(small, directory)
    widen(directory)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    return directory


def widen(directory: Path) -> None:
    """Make the vocabulary of a tiny checkpoint as large as its tokenizer's."""
    weights, size = load_file(directory / "model.safetensors"), 1024
    for name in [name for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        rows = np.random.default_rng(7).standard_normal((size, weights[name].shape[1])) * weights[name].std()
        weights[name] = rows.astype(weights[name].dtype)
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "a.png").write_bytes(picture(60, 30))
    (folder / "b.png").write_bytes(picture(20, 20))
    (folder / "broken.png").write_bytes(picture(60, 30)[:60])
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path) -> Iterator[XlaBatchEngine]:
    config = EngineConfig(allowed_local_media_path=str(folder), **OPTIONS)
    with XlaBatchEngine.from_pretrained(model, config) as engine:
        yield engine


def asked(llm: LLM, image: object, text: str = TEXT) -> tuple[tuple[int, ...], Any]:
    (output,) = llm.generate([{"prompt": text, "multi_modal_data": {"image": image}}], GREEDY)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_every_form_of_a_picture_has_one_answer(engine: XlaBatchEngine, model: Path, folder: Path) -> None:
    llm, file = LLM.from_engine(engine), (folder / "a.png").read_bytes()
    expected = asked(llm, file)
    with Image.open(BytesIO(file)) as opened:
        pixels = np.asarray(opened.convert("RGB"))
        forms = [opened.convert("RGB"), pixels, f"data:image/png;base64,{base64.b64encode(file).decode()}"]
    forms += ["a.png", str(folder / "a.png"), (folder / "a.png").as_uri(), {"bytes": file, "path": None}]
    assert [asked(llm, form) for form in forms] == [expected] * len(forms)
    assert asked(llm, (folder / "b.png").read_bytes()) != expected
    with ImageEncoder(model) as encoder:  # the library's prompt is the engine's
        ids = encoder.prompt(TEXT, [encoder.grid(file)]).token_ids
    (output,) = llm.generate([{"prompt": TEXT, "multi_modal_data": {"image": file}}], GREEDY)
    assert tuple(output.prompt_token_ids) == tuple(ids)
    reader = engine.validator.pictures
    assert reader is not None
    (placed,) = reader.prompt(TEXT, [Picture(source=file, name="image")]).pictures
    assert output.images_sha256 == (tiles_sha256(reader.tiles(placed)),)
    for record in (output.to_records()[0], asdict(vllm_output(output, engine.tokenizer)), result_of(output)):
        assert record["images_sha256"] == list(output.images_sha256)
    assert llm.generate(["no picture"], GREEDY)[0].images_sha256 == ()


def test_chats_and_pictures_among_each_other(engine: XlaBatchEngine, folder: Path) -> None:
    llm = LLM.from_engine(engine)

    def said(name: str) -> list[dict[str, Any]]:
        parts = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": "What?"}]
        return [{"role": "user", "content": parts}]

    alone = [llm.chat([said(name)], GREEDY)[0].outputs[0] for name in ("a.png", "b.png", "a.png")]
    assert alone[0] == alone[2] and alone[0].logprobs != alone[1].logprobs
    together = llm.chat([said(name) for name in ("a.png", "b.png", "a.png")], GREEDY)
    assert [each.outputs[0] for each in together] == alone
    assert asked(llm, "a.png", "user:<image>What?\n>")[0] == alone[0].token_ids


def test_bad_pictures_are_refused_by_name(engine: XlaBatchEngine, folder: Path, tmp_path: Path) -> None:
    llm = LLM.from_engine(engine)
    (tmp_path / "secret.png").write_bytes(picture(8, 8))
    for image, error in (
        ("broken.png", InvalidImageError),
        (str(tmp_path / "secret.png"), ImageNotAllowedError),
        ("http://example.com/a.png", ImageNotAllowedError),
    ):
        with pytest.raises(error, match="image"):
            asked(llm, image)
    with pytest.raises(InvalidRequestError, match="1 <image> and 2 pictures"):
        asked(llm, ["a.png", "b.png"])
    with pytest.raises(ConfigError, match="allowed_media_domains must be a list"):
        EngineConfig(allowed_media_domains="example.com")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "what", [None, *(pytest.param(each, marks=pytest.mark.full) for each in ("weights", "processor"))]
)
def test_tower_and_processor_are_part_of_the_fingerprint(
    engine: XlaBatchEngine, model: Path, tmp_path: Path, what: str | None
) -> None:
    """A tower of its own file counts, and so does a processor that changes no tensor."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    if what == "weights":
        weights = load_file(other / "model.safetensors")
        name = next(name for name in weights if "vision_model" in name)
        save_file(weights | {name: weights[name] * 2}, other / "model.safetensors")
    elif what == "processor":
        path = other / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"do_image_splitting": False}))
    with XlaBatchEngine.from_pretrained(other, engine.config) as made:
        differences = engine.identity().differences(made.identity())
    assert [line.partition(":")[0] for line in differences if "images" in line] == ["images"] * bool(what)
    assert bool(what) == (made.identity().digest() != engine.identity().digest())


def test_updates_of_weights_leave_the_tower(engine: XlaBatchEngine, model: Path) -> None:
    weights, before = load_file(model / "model.safetensors"), engine.identity()
    name = next(name for name in weights if "vision_model" in name)
    with pytest.raises(CheckpointError, match=re.escape(f"no tensor '{name}'")):
        engine.update_weights({name: weights[name]})
    assert engine.identity() == before


@pytest.mark.full
def test_a_batch_of_lines_and_its_errors(model: Path, folder: Path, tmp_path: Path) -> None:
    """Each line has its own answer or error, an interrupted run resumes to the same bytes, and an audit that reads the
    same pictures accepts its receipts."""
    folder = Path(shutil.copytree(folder, tmp_path / "pictures"))
    data = f"data:image/png;base64,{base64.b64encode((folder / 'a.png').read_bytes()).decode()}"
    lines = [
        {"prompt": TEXT, "images": ["a.png"]},
        {"prompt": TEXT, "images": [data]},
        {"prompt": TEXT, "images": ["b.png"]},
        {"prompt": TEXT, "images": ["broken.png"]},
        {"prompt": "no picture"},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", model, "--max-num-seqs", "2", "--max-model-len", "256", "--max-tokens", "6"]
    options += ["--temperature", "0", "--ordered", "--created", "1", "--allowed-local-media-path", folder]
    kept = tmp_path / "receipts.jsonl"
    options += ["--receipts", kept]
    result = invoke("run", source, "-o", out, *options)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    errors = [json.loads(line) for path in tmp_path.glob("*error*") for line in path.read_text().splitlines()]
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records if r["response"]}
    hashes = {r["custom_id"]: r["response"]["body"].get("images_sha256") for r in records if r["response"]}
    assert hashes["line-1"] == hashes["line-2"] != hashes["line-3"] and hashes["line-5"] is None
    assert texts["line-1"] == texts["line-2"] and set(texts) == {"line-1", "line-2", "line-3", "line-5"}
    found = [r for r in records + errors if r["custom_id"] == "line-4"]
    assert "invalid_image" in json.dumps(found) and "images[0]" in json.dumps(found), result.output
    whole = out.read_bytes()
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    invoke("run", source, "-o", out, "--resume", *options)
    assert out.read_bytes() == whole
    options = ["--receipts", kept, "--model", model, "--max-num-seqs", "3", "--json"]
    report = json.loads(invoke("audit", out, *options, "--allowed-local-media-path", folder).stdout)
    assert (report["verdict"], report["checked"], report["errors"]) == ("accepted", 4, 1), report
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(folder / "b.png")
    report = json.loads(invoke("audit", out, *options, "--allowed-local-media-path", folder).stdout)
    assert [each["custom_id"] for each in report["rejected"]] == ["line-3"], report


@pytest.mark.full
def test_a_killed_batch_of_pictures_goes_on(model: Path, tmp_path: Path) -> None:
    """Killed by SIGKILL in the middle, and resumed: the bytes of a run that was left alone.

    Above 10,000 pictures, each is one tile.
    """
    count = int(os.environ.get("XLA_ENGINE_KILLED_PICTURES", "200"))
    model = Path(shutil.copytree(model, tmp_path / "model"))
    if count > 10_000:
        path = model / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"do_image_splitting": False}))
    folder, draw = tmp_path / "pictures", np.random.default_rng(count)
    folder.mkdir()
    for number in range(count):
        width, height = draw.integers(4, 40, 2)
        Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).save(folder / f"{number}.png")
    (folder / "7.png").write_bytes(b"no picture")
    source, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    lines = [{"prompt": TEXT, "images": [f"{number}.png"]} for number in range(count)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: list[object] = [
        "--model",
        model,
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "256",
        "--max-tokens",
        "4",
    ]
    options += ["--ordered", "--created", "1", "--allowed-local-media-path", folder, "--no-progress"]

    def written() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    program = [sys.executable, "-m", "tests.support.stops_writing", count // 2, tmp_path / "never"]
    command = [*program, "run", source, "-o", out, *options]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.DEVNULL)
    while written() < count // 2 and process.poll() is None:
        time.sleep(0.01 + count / 1e5)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert count // 2 <= written() < count
    for path, resume in ((whole, []), (out, ["--resume"])):
        result = invoke("run", source, "-o", path, *resume, *options)  # type: ignore[arg-type]
        assert result.exit_code == 1, result.output  # one picture cannot be read
    assert out.read_bytes() == whole.read_bytes()
    records = [json.loads(line) for line in whole.read_bytes().splitlines()]
    hashes = {tuple(r["response"]["body"]["images_sha256"]) for r in records if r["response"]}
    assert len(hashes) == count - 1


def test_a_record_holds_tiles_and_replays_to_the_bit(
    engine: XlaBatchEngine, folder: Path, tmp_path: Path
) -> None:
    """Two questions about one picture and one about another, among each other; other pixels are a difference."""
    cases = []
    for number, name in enumerate(("a.png", "b.png", "a.png")):
        placed = engine.read_pictures({"prompt": TEXT, "multi_modal_data": {"image": name}})
        assert isinstance(placed, PicturedPrompt)
        images = tuple(each for each in placed.pictures if isinstance(each, PromptImage))
        cases.append(
            Case(request_id=f"r{number}", prompt_token_ids=placed.token_ids, params=GREEDY, images=images)
        )
    schedule = draw_schedule(cases, 5, lag=1)
    alone = {case.request_id: run_alone(engine, case) for case in cases}
    results, record = record_schedule(engine, schedule, alone=alone, blank=True)
    assert results.keys() >= alone.keys() and record.first_difference is None
    write_record(tmp_path / "record.json", record)
    read = read_record(tmp_path / "record.json")
    assert read == record
    assert [each.images[0].tiles.tobytes() for each in read.schedule.cases] == [
        np.asarray(each.images[0].tiles).tobytes() for each in cases
    ]
    report = replay(engine, read)
    assert report.ok and report.steps == len(record.steps), report.lines()
    tiles = 255 - np.asarray(cases[0].images[0].tiles)
    other = [replace(case, images=(replace(case.images[0], tiles=tiles),)) for case in (cases[0], cases[2])]
    changed = replace(schedule, cases=(other[0], cases[1], other[1]))
    found = replay(engine, replace(record, schedule=changed)).difference
    assert found is not None and found.request_id in ("r0", "r2") and found.what.startswith("results: ")
    text = (tmp_path / "record.json").read_text()
    (tmp_path / "record.json").write_text(text.replace('"tiles":"', '"tiles":"AAAA'))
    with pytest.raises(RecordError, match="damaged record: tiles"):
        read_record(tmp_path / "record.json")


@pytest.mark.full
def test_the_self_check_covers_the_tower(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower whose features depend on the tile before is found."""
    with XlaBatchEngine.from_pretrained(
        model, EngineConfig(**OPTIONS | {"self_check": True, "compile_cache": False})
    ) as engine:
        found, features = engine.self_check, engine.runner.features
        assert found is not None and found.ok and features is not None
        honest, before = features.tower.glance, 0.0

        def faulty(tile: Any) -> Any:
            nonlocal before
            drift, before = before * 1e-3, float(tile.mean())
            return tuple(part * (1 + drift) for part in honest(tile))

        assert not tile_differences(features.tower)
        monkeypatch.setattr(type(features.tower), "glance", lambda _, tile: faulty(tile))
        again = run_self_check(engine.runner, engine.checkpoint.config.vocab_size)
        assert again is not None and again.row_invariant and not again.tile_invariant and not again.ok
        assert "depend on other pictures" in again.promise and "a tile after another" in again.differences[-1]
        assert asked(LLM.from_engine(engine), picture(20, 20)) == asked(
            LLM.from_engine(engine), picture(20, 20)
        )


def test_a_dry_run_counts_tiles_and_their_tokens(model: Path, folder: Path, tmp_path: Path) -> None:
    """By the headers of files: damaged pixels show when they are decoded."""
    source, images = tmp_path / "in.jsonl", ("a.png", "b.png", "broken.png", "data:image/png;base64,AAAA")
    lines = [{"prompt": TEXT, "images": [name]} for name in images]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "no picture"}]))
    allowed = ["--allowed-local-media-path", folder]

    def checked(*options: object) -> str:
        return str(invoke("run", source, "--dry-run", "--model", model, "--max-tokens", "6", *options).output)

    found = checked(*allowed)
    assert "tiles of pictures    24" in found and "5: 4 ok, 1 would fail" in found
    assert "line 4: invalid_image: images[0]: " in found
    assert "image_not_allowed 3, invalid_image 1" in checked()
    assert "image_cache_bytes is 0; raise it" in checked(*allowed, "--image-cache-bytes", "0")


def test_inspect_counts_the_tower(model: Path, engine: XlaBatchEngine) -> None:
    """As many bytes as the engine has of them; without room for features there is no tower."""
    assert engine.runner.features is not None
    with_tower = inspect_model(model, EngineConfig(**OPTIONS))
    blind = inspect_model(model, EngineConfig(**OPTIONS, image_cache_bytes=0))
    assert with_tower.vision is not None and with_tower.memory is not None and blind.memory is not None
    assert with_tower.vision["features"] == engine.runner.features.rows.nbytes
    tower = load_vision(model, dtype=engine.config.dtype).weights
    assert with_tower.vision["weights"] == sum(leaf.nbytes for leaf in tower.values())
    more = with_tower.vision["weights"] + with_tower.vision["features"]
    assert with_tower.memory["needed"] == blind.memory["needed"] + more
    lines = "\n".join(report_lines(with_tower))
    slices = engine.runner.features.tower.slices.by_tokens
    assert with_tower.vision["slices"] == slices and f"in up to {slices[-1][1]} slices" in lines
    assert f"{with_tower.vision['tokens']} tokens" in lines
    assert "image_cache_bytes is 0; raise it" in "\n".join(report_lines(blind))


def test_a_server_answers_as_the_library_does(engine: XlaBatchEngine, folder: Path) -> None:
    """Pictures in messages; an error names the part, and others are served."""
    server = Running(Service(AsyncLLM.from_engine(engine), ServerSettings(model_names=("tiny",))))
    try:
        data = f"data:image/png;base64,{base64.b64encode((folder / 'a.png').read_bytes()).decode()}"

        def post(url: str, **more: Any) -> httpx.Response:
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "temperature": 0}
            body |= {"max_tokens": 6, **more}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=1800)

        texts = [
            post(url).json()["choices"][0]["message"]["content"]
            for url in (data, (folder / "b.png").as_uri(), data)
        ]
        assert texts[0] == texts[2]
        hashes = post(data).json()["images_sha256"]
        assert len(hashes) == 1
        two = {"n": 2, "temperature": 1.0, "seed": 1}
        for more in ({}, two, {"stream_options": {"include_usage": True}}):  # once, when all choices end
            answer = post(data, stream=True, **more)
            assert answer.status_code == 200, answer.text
            lines = answer.text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            ended = [each for each in chunks if any(choice["finish_reason"] for choice in each["choices"])]
            assert [each["images_sha256"] for each in chunks if "images_sha256" in each] == [hashes]
            assert ended[-1]["images_sha256"] == hashes and len(ended) == more.get("n", 1)
        broken = post("data:image/png;base64,AAAA")
        assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_image"
        assert "messages[0].content[0]" in broken.json()["error"]["message"]
        assert post("http://10.0.0.1/a.png").json()["error"]["code"] == "image_not_allowed"
    finally:
        server.stop()
