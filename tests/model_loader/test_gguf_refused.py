"""GGUF files that are refused, with one clear error each."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gguf_checks import GOLDEN, assert_refused, embedded_tokenizer
from tests.support.gguf_files import rewrite_gguf, write_gguf
from tests.support.tiers import default
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.model_files import open_model
from xla_engine.text.tokenizer import Tokenizer


def test_a_stack_of_other_length_is_refused(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "families" / "mixtral", tmp_path / "m.gguf")
    content = path.read_bytes()
    key = b"llama.expert_count" + struct.pack("<I", 4)
    assert content.count(key) == 1
    at = content.index(key) + len(key)
    path.write_bytes(content[:at] + struct.pack("<I", 4) + content[at + 4 :])  # of five
    assert_refused(path, "experts.0.w2.weight is missing")


def test_paths_that_are_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf: no such file"):
        load_checkpoint(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    assert_refused(tmp_path / "empty.gguf", "not readable")
    (tmp_path / "text.gguf").write_text("a text that is no GGUF file")
    assert_refused(tmp_path / "text.gguf", "magic")


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"expert_shared_count": 4}, "llama.expert_shared_count = 4"),
        ({"attention.max_alibi_bias": 8.0}, "max_alibi_bias"),
        ({"attention.sliding_window": 16}, "sliding_window"),
    ],
)
def test_what_is_not_built_in_is_refused_by_name(extra: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf", extra=extra)
    assert_refused(path, word, "not supported")


@pytest.mark.parametrize("value", ["many", True, ["a"], [2, 3], -1, 2**63, float("nan")], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        *("llama.block_count", "llama.embedding_length", "llama.attention.head_count"),
        *("llama.rope.freq_base", "llama.attention.key_length", "llama.rope.dimension_count"),
    ],
)
def test_metadata_of_other_types_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    rewrite_gguf(path, lambda fields: fields.update({key: value}))
    assert_refused(path, key.split(".")[-1] if isinstance(value, str | bool | list) else "")


@pytest.mark.parametrize("value", default([3, 0.5, "text", [1, 2], [""]], 2), ids=str)
def test_tokens_of_other_types_are_refused_or_left_out(value: Any, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf", tokenizer=embedded_tokenizer)
    rewrite_gguf(path, lambda fields: fields.update({"tokenizer.ggml.tokens": value}))
    files = open_model(path)
    files.chat_template()
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        files.tokenizer()


def test_a_key_that_repeats_is_refused(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    content = path.read_bytes()
    (count,) = struct.unpack("<Q", content[16:24])
    key = b"llama.attention.value_length"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 8)
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + pair + content[24:])
    assert_refused(path, "llama.attention.value_length", "twice")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    length = struct.pack("<Q", 5)
    path.write_bytes(path.read_bytes().replace(length + b"llama", length + b"mamba"))
    assert_refused(path, "general.architecture", "mamba", "qwen2")


@pytest.mark.parametrize(
    ("at", "value", "word"),
    [
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "byte order"),
        (8, struct.pack("<Q", 2**63), "tensor"),
        (16, struct.pack("<Q", 2**63), ""),
        (24, struct.pack("<Q", 2**40), "ends within its header"),
    ],
)
def test_impossible_headers_are_refused(at: int, value: bytes, word: str, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:at] + value + content[at + len(value) :])
    assert_refused(path, word)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    content = path.read_bytes()
    for length in [*range(1, 64), *range(64, 2000, 97), len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        assert_refused(path)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 4), st.binary(max_size=8)), min_size=1, max_size=4
    )
)
def test_fuzzed_headers_load_or_are_refused(edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if not (tmp_path / "whole").exists():
        write_gguf(GOLDEN / "gqa_tied", tmp_path / "whole", tokenizer=embedded_tokenizer)
    content = (tmp_path / "whole").read_bytes()
    for at, deleted, inserted in edits:
        content = content[:at] + inserted + content[at + deleted :]
    path.write_bytes(content)
    try:
        files = open_model(path)
        checkpoint = load_checkpoint(files)
        Tokenizer.of_model(files)
        files.chat_template()
    except CheckpointError:
        return
    assert checkpoint.weights.keys()
