"""Fuzzed configurations, headers and JSON: each loads or is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.support.checkpoints import CONFIG, LLAMA3, tensors_of, write_file, write_shards
from tests.support.profiles import examples
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint

FUZZ = settings(
    max_examples=examples(40, 150),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 100)
    | st.floats()
    | st.sampled_from(["llama3", "default", "full_attention", "LlamaForCausalLM", "silu", ""])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*LLAMA3, "rope_theta", "x"]), inner)
    ),
    max_leaves=6,
)

FIELD_NAMES = st.sampled_from(
    [
        *CONFIG,
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "hidden_act",
        "auto_map",
    ]
)


def loads_or_refuses(directory: Path) -> None:
    try:
        checkpoint = load_checkpoint(directory)
    except CheckpointError:
        return
    assert {name: array.shape for name, array in checkpoint.weights.items()}


@FUZZ
@given(fields=st.dictionaries(FIELD_NAMES, JSON_VALUES, min_size=1, max_size=3), generation=st.booleans())
def test_fuzzed_config_fields(fields: dict[str, Any], generation: bool, tmp_path: Path) -> None:
    save_file(tensors_of(CONFIG), tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        changed = fields if generation == name.startswith("gen") else {}
        (tmp_path / name).write_text(json.dumps(CONFIG | changed))
    loads_or_refuses(tmp_path)


@st.composite
def mutations(draw: st.DrawFn, length: int) -> Callable[[bytes], bytes]:
    """Overwrite, insert or delete a few bytes somewhere in the first `length`."""
    edits = draw(
        st.lists(
            st.tuples(st.integers(0, length - 1), st.integers(0, 4), st.binary(max_size=4)),
            min_size=1,
            max_size=3,
        )
    )

    def apply(content: bytes) -> bytes:
        for start, deleted, inserted in edits:
            content = content[:start] + inserted + content[start + deleted :]
        return content

    return apply


@FUZZ
@given(mutate=mutations(300), length=st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 4000))
def test_fuzzed_header_bytes(mutate: Callable[[bytes], bytes], length: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "model.safetensors"
    save_file(tensors_of(CONFIG), file)
    content = file.read_bytes()
    (header_length,) = struct.unpack("<Q", content[:8])
    header = mutate(content[8 : 8 + header_length])
    write_file(file, header, content[8 + header_length :], length)
    loads_or_refuses(tmp_path)


@FUZZ
@given(
    name=st.sampled_from(sorted(tensors_of(CONFIG))),
    change=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(
                ["F32", "F16", "BF16", "I32", "F8_E4M3", "F4", "BOOL", "C64", "U8", 3, None]
            ),
            "shape": st.lists(st.integers(-1, 20) | st.integers(), max_size=3),
            "data_offsets": st.lists(st.integers(0, 400) | st.integers(), max_size=3),
            "extra": JSON_VALUES,
        },
    ),
)
def test_fuzzed_header_fields(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "model.safetensors"
    save_file(tensors_of(CONFIG), file)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[name] |= change
    write_file(file, json.dumps(header).encode(), content[8 + length :])
    loads_or_refuses(tmp_path)


@FUZZ
@given(mutate=mutations(400), name=st.sampled_from(["config.json", "model.safetensors.index.json"]))
def test_fuzzed_json_bytes(mutate: Callable[[bytes], bytes], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_shards(tmp_path, tensors_of(CONFIG), 2)
    (tmp_path / name).write_bytes(mutate((tmp_path / name).read_bytes()))
    loads_or_refuses(tmp_path)
