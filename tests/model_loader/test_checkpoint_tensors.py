"""Tensors and their headers: missing, misshapen, malicious and truncated ones are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import CONFIG, MakeModel, assert_refused, tensors_of, write_file
from xla_engine.model_loader.checkpoint import load_checkpoint

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "families"


def stack_experts(source: Path, directory: Path, *, more: int = 0) -> Path:
    """A copy of a model whose experts are stacked, as Qwen3.5's are. more: experts that config.json does not have."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    for module in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        parts: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
        for part, experts in parts.items():
            while (name := f"{module}.experts.{len(experts)}.{part}_proj.weight") in tensors:
                experts.append(tensors.pop(name))
            experts += experts[:more]
        gates_and_ups = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{module}.experts.gate_up_proj"] = np.stack(gates_and_ups)
        tensors[f"{module}.experts.down_proj"] = np.stack(parts["down"])
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5_moe_vision", "qwen3_moe"])
def test_experts_may_be_stacked(name: str, tmp_path: Path) -> None:
    """As in the published files of Qwen3.5."""
    source, stacked = GOLDEN / name, stack_experts(GOLDEN / name, tmp_path / "stacked")
    wanted, found = (load_checkpoint(path).weights for path in (source, stacked))
    assert wanted.keys() == found.keys()
    for leaf in wanted:
        np.testing.assert_array_equal(found[leaf], wanted[leaf], err_msg=leaf)


def test_stacks_of_experts_may_be_transposed(tmp_path: Path) -> None:
    """As in the published files of Qwen3-VL; transformers saves them as it computes."""
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen3_vl_moe", directory)
    tensors = load_file(directory / "model.safetensors")
    stacks = [name for name in tensors if ".experts." in name]
    assert len(stacks) == 4
    tensors |= {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)) for name in stacks}
    save_file(tensors, directory / "model.safetensors")
    wanted, found = (load_checkpoint(path).weights for path in (GOLDEN / "qwen3_vl_moe", directory))
    for leaf in wanted:
        np.testing.assert_array_equal(found[leaf], wanted[leaf], err_msg=leaf)
    rows = np.asarray([3, 50, -1, 0])
    for leaf in ("layers.0.experts.gate_up", "layers.2.experts.down"):
        np.testing.assert_array_equal(found.rows(leaf, rows), wanted.rows(leaf, rows), err_msg=leaf)


def test_a_layer_that_predicts_further_tokens_is_left_alone(tmp_path: Path) -> None:
    """GLM-4.5 has it behind the last layer; one behind that is an error."""
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / "glm4_moe", directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((40, 80), np.float32)
    save_file(tensors, directory / "model.safetensors")
    assert dict(load_checkpoint(directory).weights)
    tensors["model.layers.4.eh_proj.weight"] = np.zeros((40, 80), np.float32)
    save_file(tensors, directory / "model.safetensors")
    assert_refused(directory, "model.layers.4.eh_proj.weight", "not part")


def test_a_stack_of_more_experts_is_named(tmp_path: Path) -> None:
    assert_refused(stack_experts(GOLDEN / "qwen3_5_moe", tmp_path / "more", more=1), "_proj' is not part")


def test_sizes_that_the_files_do_not_hold_are_never_allocated(make_model: MakeModel) -> None:
    directory = make_model(
        config={"vocab_size": 2**24, "hidden_size": 2**20, "head_dim": 2}, tensors=tensors_of(CONFIG)
    )
    tracemalloc.start()
    try:
        assert_refused(directory, "model.embed_tokens.weight", "[11, 8]", "[16777216, 1048576]")
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_too_little_memory_is_said_with_the_size(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    directory = make_model()
    monkeypatch.setattr(np, "empty", refuse)
    assert_refused(directory, "no memory for embed", "GB that the model needs as float32")


def test_a_missing_tensor_is_named(make_model: MakeModel) -> None:
    for number, name in enumerate(["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]):
        tensors = tensors_of(CONFIG)
        del tensors[name]
        assert_refused(make_model(f"{number}", tensors=tensors), "model.safetensors", name, "missing")
    assert_refused(make_model("none", tensors={}), "model.embed_tokens.weight", "missing")


def test_an_unexpected_tensor_is_named(make_model: MakeModel) -> None:
    for number, name in enumerate(
        ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
    ):
        tensors = tensors_of(CONFIG) | {name: np.zeros((6, 8), np.float32)}
        assert_refused(make_model(f"{number}", tensors=tensors), "model.safetensors", name, "not part")


@pytest.mark.parametrize("shape", [(6, 8, 1), (48,), (8, 6), (5, 8), (0, 8)])
def test_a_wrong_shape_is_named(make_model: MakeModel, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of(CONFIG) | {name: np.zeros(shape, np.float32)}
    assert_refused(make_model(tensors=tensors), "model.safetensors", name, str(list(shape)), "[6, 8]")


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (np.int8, "I8"),
        (np.int32, "I32"),
        (np.float64, "F64"),
        (bool, "BOOL"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_a_wrong_dtype_is_named(make_model: MakeModel, dtype: Any, word: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    directory = make_model()
    raw = {n: (t.dtype.name, t) for n, t in tensors_of(CONFIG).items()}
    raw[name] = (word, np.zeros((6, 8), dtype))
    words = {"float32": "F32"}
    write_raw(directory / "model.safetensors", {n: (words.get(d, d), t) for n, (d, t) in raw.items()})
    assert_refused(directory, "model.safetensors", name, word)


def write_raw(file: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (word, array) in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {"dtype": word, "shape": list(array.shape), "data_offsets": [start, len(data)]}
    write_file(file, json.dumps(header).encode(), data)


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"{", b""),
        (b"[" * 100_000, b""),
        (b"\xff\xff", b""),
        ({"x": entry([2], [0, 8])}, b"1234"),  # truncated
        ({"x": entry([2], [0, 8])}, b"12345678tail"),
        ({"x": entry([3], [0, 8])}, b"12345678"),
        ({"x": entry([2], [0, 8]), "y": entry([2], [4, 12])}, b"123456789012"),  # overlapping
        ({"x": entry([2], [0, 8]), "y": entry([2], [0, 8])}, b"12345678"),
        ({"x": entry([2], [0, 8]), "y": entry([2], [12, 20])}, b"1" * 20),  # a hole
        ({"x": entry([2], [8, 0])}, b"12345678"),
        ({"x": entry([-2], [0, 8])}, b"12345678"),
        ({"x": entry([2], [-8, 0])}, b"12345678"),
        ({"x": entry([2**62, 4], [0, 8])}, b"12345678"),  # overflows
        ({"x": entry([2**40], [0, 2**42])}, b"12345678"),
        ({"x": entry([2], [0, 8], "Q9")}, b"12345678"),
        ({"x": {"dtype": "F32"}}, b""),
        ({"x": 3}, b""),
        (b'{"x": %s, "x": %s}' % ((json.dumps(entry([1], [0, 4])).encode(),) * 2), b"1234"),  # repeated
    ],
)
def test_malicious_headers_are_refused(make_model: MakeModel, header: Any, data: bytes) -> None:
    directory = make_model()
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_file(directory / "model.safetensors", content, data)
    assert_refused(directory, "model.safetensors")


@pytest.mark.parametrize("length", [0, 10**6, 2**40, 2**63, 2**64 - 1])
def test_header_lengths_beyond_the_file_are_refused_without_allocation(
    make_model: MakeModel, length: int
) -> None:
    directory = make_model()
    write_file(directory / "model.safetensors", b"{}", length=length)
    tracemalloc.start()
    try:
        assert_refused(directory, "model.safetensors", "header")
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


CUT_WHILE_READ = """
import os, sys
from pathlib import Path
from xla_engine.errors import CheckpointError
from xla_engine.model_loader import tensor_files
from xla_engine.model_loader.safetensors_files import open_tensor_file

tensor_files._BLOCK = 1 << 16
read = {
    "read": lambda files: files.read("x").sum(),
    "rows": lambda files: files.rows("x", [4000]),
    "fingerprint": lambda files: files.fingerprint(),
    "blocks": lambda files: [(block.sum(), os.truncate(file, 5000)) for block in files.blocks("x")],
}[sys.argv[2]]
file = Path(sys.argv[1])
files = open_tensor_file(file)
if sys.argv[2] != "blocks":
    os.truncate(file, 5000)
try:
    read(files)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("how", ["read", "rows", "fingerprint", "blocks"])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, how: str) -> None:
    """Once, the process died with SIGBUS and without an error message."""
    file = tmp_path / "model.safetensors"
    save_file({"x": np.ones((5000, 64), np.float32)}, file)
    command = [sys.executable, "-c", CUT_WHILE_READ, str(file), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert f"{file}: was cut from" in done.stdout and "to 5000 bytes" in done.stdout


def test_truncated_files_are_refused_at_every_length(make_model: MakeModel) -> None:
    directory = make_model()
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for length in [*range(64), *range(64, len(content), 211), len(content) - 1]:
        file.write_bytes(content[:length])
        assert_refused(directory, "model.safetensors")
