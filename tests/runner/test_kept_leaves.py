"""Leaves that an earlier start kept are those that flax's modules have, and a damaged file counts as none."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.lora.form import LoraForm
from xla_engine.graphs.model.leaves import Leaf
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.runner.kept_leaves import LeavesOnDisk, keeping_leaves
from xla_engine.runner.program_key import NoKeyError

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
STORED = {"layers.0.down": (("Q4_0", TINY.hidden_size),)}
SPECS = {
    "bf16": functools.partial(ModelSpec, TINY, BF16),
    "f32": functools.partial(ModelSpec, TINY, F32),
    "int8": functools.partial(ModelSpec, TINY, BF16, quantized=True),
    "adapters": functools.partial(
        ModelSpec, TINY, F32, lora=LoraForm(2, 4, np.dtype(np.float32), packed=False)
    ),
    "packed": functools.partial(ModelSpec, TINY, BF16, stored=STORED, order="fours"),
}


def needed_no_flax(spec: ModelSpec) -> bool:
    return "_modules" not in vars(spec)


def test_the_next_start_has_the_same_leaves_and_makes_no_modules(tmp_path: Path) -> None:
    with keeping_leaves(LeavesOnDisk(tmp_path)):
        first = {name: make() for name, make in SPECS.items()}
    with keeping_leaves(LeavesOnDisk(tmp_path)):
        second = {name: make() for name, make in SPECS.items()}
    assert len(list(tmp_path.glob("*.json"))) == len(SPECS)
    assert first["packed"].leaves["layers.0.down"].form is not None
    for name, made in first.items():
        kept = second[name]
        assert not needed_no_flax(made) and needed_no_flax(kept)
        assert list(made.leaves) == list(kept.leaves) and made.leaves.paths == kept.leaves.paths
        assert dict(made.leaves) == dict(kept.leaves)
        assert made.leaves.on_device() == kept.leaves.on_device()


def test_a_graph_is_the_same_with_kept_leaves(tmp_path: Path) -> None:
    """The modules that are made when a graph is traced take the leaves by the kept paths."""

    def text() -> str:
        spec = ModelSpec(TINY, F32)
        leaves = spec.leaves.on_device()
        graph = jax.jit(lambda leaves: [*jax.tree.leaves(spec.merge(leaves))]).lower(leaves)
        assert not needed_no_flax(spec)
        return graph.as_text()

    usual = text()
    for _ in range(2):
        with keeping_leaves(LeavesOnDisk(tmp_path)):
            assert text() == usual


def test_specs_of_one_form_share_its_modules() -> None:
    """What differs in the backends alone has the same leaves, which are then made once: on a mesh they differ."""

    def leaves(devices: int | None, **options: Any) -> list[Leaf]:
        products = NativeProducts("avx2")
        return [
            leaf
            for each in (None, products)
            for leaf in ModelSpec(TINY, BF16, products=each, devices=devices, **options).leaves.values()
        ]

    def shared(found: list[Leaf]) -> bool:
        half = len(found) // 2
        return all(one is other for one, other in zip(found[:half], found[half:], strict=True))

    assert shared(leaves(None)) and shared(leaves(None, quantized=True))
    assert not shared(leaves(2))
    first, packed = (ModelSpec(TINY, BF16, stored=STORED, order=order).leaves for order in ("pairs", "fours"))
    assert first["layers.0.down"] != packed["layers.0.down"]


def test_leaves_of_several_devices_are_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        with keeping_leaves(LeavesOnDisk(tmp_path)):
            assert not needed_no_flax(ModelSpec(TINY, F32, devices=2))


@pytest.mark.parametrize("damage", ["torn", "other bytes", "not ours"])
def test_a_damaged_or_foreign_file_counts_as_none(tmp_path: Path, damage: str) -> None:
    with keeping_leaves(LeavesOnDisk(tmp_path)):
        made = SPECS["bf16"]()
        [path] = tmp_path.glob("*.json")
        content = path.read_bytes()
        if damage == "not ours":
            path.chmod(0o666)
        else:
            path.write_bytes(content[:-9] if damage == "torn" else content[:-9] + bytes(9))
        again, third = SPECS["bf16"](), SPECS["bf16"]()
    assert (needed_no_flax(again), needed_no_flax(third)) == (False, True)
    assert dict(made.leaves) == dict(again.leaves) == dict(third.leaves)


def test_replaced_code_keeps_no_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_engine.graphs.model.spec.LEAST", 1)
    with keeping_leaves(LeavesOnDisk(tmp_path)):
        SPECS["bf16"]()
    monkeypatch.undo()
    with keeping_leaves(LeavesOnDisk(tmp_path)):
        assert not needed_no_flax(SPECS["bf16"]())
    monkeypatch.setattr("xla_engine.graphs.model.spec.leaf_name", test_replaced_code_keeps_no_leaves)
    with pytest.raises(NoKeyError):
        LeavesOnDisk(tmp_path)


def test_the_engine_imports_no_flax_and_its_modules_change_no_key() -> None:
    """A key is made before or after flax's modules are imported, so they have no constants."""
    code = (
        "import sys, xla_engine.engine.batch_engine; from xla_engine.runner.program_key import code_key; "
        "before = code_key(); assert 'flax' not in sys.modules; import xla_engine.graphs.model.decoder, "
        "xla_engine.graphs.model.encoder; assert 'flax' in sys.modules and code_key() == before"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
