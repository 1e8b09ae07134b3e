"""The files of a model directory: broken JSON, wrong indexes, pickles, and directories in place of files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.support.bomb import Bomb
from tests.support.checkpoints import CONFIG, MakeModel, assert_refused, edit_index, tensors_of
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"vocab_size": 11, "vocab_size": 12}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json_is_refused(make_model: MakeModel, name: str, content: bytes) -> None:
    directory = make_model(shards=2)
    (directory / name).write_bytes(content)
    assert_refused(directory, name)


def test_oversized_json_is_refused_unread(make_model: MakeModel) -> None:
    directory = make_model()
    with (directory / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert_refused(directory, "config.json", "MiB")


def test_paths_that_are_no_model_directory(make_model: MakeModel, tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "no such directory")
    directory = make_model()
    assert_refused(directory / "config.json", "not a directory")
    (directory / "config.json").unlink()
    assert_refused(directory, "config.json", "no such file")
    (directory / "config.json").mkdir()
    assert_refused(directory, "config.json")
    for path in ("a\0b", "x" * 5000, "~no-such-user-here/model"):
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_weights_that_are_no_regular_file(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")  # reading it would wait for ever
    assert_refused(directory, "model.safetensors", "regular")


def test_duplicate_tensors_over_shards_are_named(make_model: MakeModel) -> None:
    directory = make_model(shards=2)
    file = directory / "model-00002-of-00002.safetensors"
    name = "model.embed_tokens.weight"
    save_file(tensors_of(CONFIG), file)
    assert_refused(
        directory, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "also in"
    )
    edit_index(directory, lambda weight_map: weight_map.update(dict.fromkeys(weight_map, file.name)))
    assert load_checkpoint(directory).weights["embed"].shape == tensors_of(CONFIG)[name].shape


@pytest.mark.parametrize(
    "shard",
    [
        "../other/model.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..safetensors",
        ".safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
        "pytorch_model.bin",
        "",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_cannot_point_outside_the_directory(make_model: MakeModel, shard: Any) -> None:
    make_model("other")
    directory = make_model(shards=2)
    edit_index(directory, lambda weight_map: weight_map.update({"lm_head.weight": shard}))
    assert_refused(directory, "model.safetensors.index.json", "lm_head.weight", repr(shard))


def test_an_index_that_disagrees_with_the_shards_is_refused(make_model: MakeModel) -> None:
    absent = make_model("absent", shards=2)
    (absent / "model-00002-of-00002.safetensors").unlink()
    assert_refused(absent, "model-00002-of-00002.safetensors", "no such file")

    swapped = make_model("swapped", shards=2)
    other = "model-00001-of-00002.safetensors"
    moved = json.loads((swapped / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, shard in moved.items() if shard != other)
    edit_index(swapped, lambda weight_map: weight_map.update({name: other}))
    assert_refused(swapped, "model.safetensors.index.json", name, other)

    unlisted = make_model("unlisted", shards=2)
    edit_index(unlisted, lambda weight_map: weight_map.pop("lm_head.weight"))
    assert_refused(unlisted, "lm_head.weight", "model.safetensors.index.json")

    for number, index in enumerate([{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}]):
        directory = make_model(f"{number}", shards=2)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_refused(directory, "model.safetensors.index.json", "weight_map")


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt", "last.ckpt"],
)
def test_pickled_weights_are_named_and_never_opened(make_model: MakeModel, tmp_path: Path, name: str) -> None:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert_refused(directory, name, "pickle", "save_pretrained", "safetensors.torch.save_file")
    assert not (tmp_path / "exploded").exists()


def test_a_directory_without_weights_says_what_it_looked_for(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    assert_refused(directory, "model.safetensors", "index.json", "consolidated.safetensors")
