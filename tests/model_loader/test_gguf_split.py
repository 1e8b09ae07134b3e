"""GGUF files in parts, and folders of GGUF files: each way to name a model loads it, or the error says which file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gguf_checks import GOLDEN, assert_refused, embedded_tokenizer
from tests.support.gguf_files import split_gguf, write_gguf
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.gguf.reader import GgufReader
from xla_engine.model_loader.model_files import open_model
from xla_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return write_gguf(GOLDEN / "gqa_tied", folder / "smol-Q8_0.gguf", tokenizer=embedded_tokenizer)


@settings(max_examples=8)
@given(data=st.data())
def test_a_split_file_is_the_unsplit_one_whatever_names_it(
    data: st.DataObject, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    count = len(GgufReader(whole).tensors)
    ends = sorted(data.draw(st.lists(st.integers(0, count), min_size=1, max_size=4)))  # parts may be empty
    parts = split_gguf(whole, tmp_path_factory.mktemp("split"), *ends)
    named = data.draw(st.sampled_from([*parts, parts[0].parent]))
    found, source = load_checkpoint(named), load_checkpoint(whole)
    assert found.config == source.config and found.path == parts[0]
    for leaf, array in source.weights.items():
        np.testing.assert_array_equal(found.weights[leaf], array)
    text = "def f(x):"
    ids = [Tokenizer.of_model(open_model(each)) for each in (named, whole)]
    assert ids[0] is not None and ids[1] is not None
    assert ids[0].encode(text) == ids[1].encode(text)
    assert open_model(named).chat_template() == open_model(whole).chat_template()
    assert load_checkpoint(parts[-1]).fingerprint == found.fingerprint


def test_parts_that_do_not_belong_together_are_named(whole: Path, tmp_path: Path) -> None:
    parts = split_gguf(whole, tmp_path / "a", 3, 9)
    parts[1].unlink()
    for named in (parts[0], parts[2], parts[0].parent):
        with pytest.raises(CheckpointError, match=r"smol-Q8_0-00002-of-00003\.gguf: part 2 of 3 is missing"):
            load_checkpoint(named)
    shutil.copy(parts[2], parts[1])
    assert_refused(parts[1], "says that it is part 2 (from 0) of 3", "Download all parts")
    lonely = parts[0].rename(tmp_path / "model.gguf")
    assert_refused(lonely, "one of 3 parts", "gguf-split --merge", "NAME-00001-of-00003.gguf")
    total = split_gguf(whole, tmp_path / "b", 3, extra={0: {"split.tensors.count": 4}})
    assert_refused(total[0], "tensors, not 4")


def test_a_name_that_looks_like_a_part_may_be_a_whole_file(whole: Path, tmp_path: Path) -> None:
    path = shutil.copy(whole, tmp_path / "m-00001-of-00001.gguf")
    assert load_checkpoint(path).config == load_checkpoint(whole).config


def test_a_folder_of_gguf_files_is_one_model_or_says_which_there_are(whole: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "mmproj-a.gguf"):
        shutil.copy(whole, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")  # repositories of GGUF files often have one
    assert open_model(tmp_path).path == tmp_path / "a.gguf"
    split_gguf(whole, tmp_path, 5)
    with pytest.raises(
        CheckpointError, match=r"several .gguf files. Name one: \S*a.gguf, \S*00001-of-00002.gguf$"
    ):
        open_model(tmp_path)
    shutil.copytree(GOLDEN / "gqa_tied", tmp_path, dirs_exist_ok=True)
    assert open_model(tmp_path).path == tmp_path  # safetensors are the model


def test_a_folder_of_folders_of_gguf_files_names_them(whole: Path, tmp_path: Path) -> None:
    split_gguf(whole, tmp_path / "Q8_0", 5)
    with pytest.raises(
        CheckpointError, match=r"no model here.*Name one: \S*Q8_0/smol-Q8_0-00001-of-00002.gguf$"
    ):
        open_model(tmp_path)


def test_a_missing_file_is_called_a_file_and_what_is_there_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole, tmp_path / "smol-Q8_0.gguf")
    with pytest.raises(
        CheckpointError, match=r"smol-Q8_O\.gguf: no such file; did you mean 'smol-Q8_0\.gguf'"
    ):
        open_model(tmp_path / "smol-Q8_O.gguf")
    with pytest.raises(CheckpointError, match=r"x\.gguf: no such file; \S+ has smol-Q8_0\.gguf"):
        open_model(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"x\.gguf: no such file, nor a folder \S+absent"):
        open_model(tmp_path / "absent" / "x.gguf")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 84125\n"
PAGE = "\n<!DOCTYPE html><html><body>Sign in</body></html>"


@pytest.mark.parametrize(("content", "words"), [(POINTER, "git lfs pull"), (PAGE, "is a web page")])
@pytest.mark.parametrize("name", ["m.gguf", "model.safetensors", "tokenizer.json", "config.json"])
def test_what_stands_in_for_a_file_is_named_for_what_it_is(
    name: str, content: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if name == "m.gguf":
        folder.mkdir()
    else:
        shutil.copytree(GOLDEN / "gqa_tied", folder)
    (folder / name).write_text(content)
    load = (lambda model: open_model(model).tokenizer()) if name == "tokenizer.json" else load_checkpoint
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder / name) in str(caught.value) and words in str(caught.value)


def test_shards_without_an_index_are_no_reason_to_save_the_model_again(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "untied_odd_heads", tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    assert_refused(folder, "model.safetensors.index.json: no such file", "00001-of-00003", "Download it")
