"""Programs for TPUs that are not here: what the compiler says is read right, and every program compiles."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import invoke
from tests.support.models import TINY
from xla_engine.config import EngineConfig
from xla_engine.graphs import target
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.runner.chips import CHIPS
from xla_engine.runner.estimates import read_costs
from xla_engine.runner.roofline import step_work

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, the compiler for TPUs: pip install 'xla-engine[tpu]'",
)

# A tree of computations: cycles of an operation, a conditional of branches, or a loop of some trips, which the loop or
# its condition tells.
_Cost = st.recursive(
    st.integers(0, 10**6),
    lambda inner: st.one_of(
        st.tuples(st.just("cond"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["loop", "counted"]), st.integers(1, 40), inner),
        st.tuples(st.just("call"), st.lists(inner, max_size=3)),
    ),
    max_leaves=12,
)


def expected(tree: Any, choose: Any) -> int:
    match tree:
        case int(cycles):
            return cycles
        case "cond", branches:
            return int(choose(expected(each, choose) for each in branches))
        case "loop" | "counted", trips, body:
            return int(trips) * expected(body, choose)
        case _, parts:
            return sum(expected(each, choose) for each in parts)


class Written:
    """The text of a compiled program, as XLA writes it, with operations of a tree."""

    HEAD = (
        'HloModule jit_run, is_scheduled=true\n\nFileNames\n1 "/home/me/xla_engine/graphs/ops/norms.py"\n'
        '2 "/home/me/other.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=1 function_name_id=1 line=41 end_line=41}\n"
        "2 {file_name_id=2 function_name_id=1 line=7 end_line=7}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=1}\n\n\n"
    )

    def __init__(self, tree: Any) -> None:
        self.parts: list[str] = []
        entry = self._operation(tree)
        own = '"estimated_cycles":"0"'
        first = f"  %start = f32[8]{{0}} fusion(%p), calls=%fused, backend_config={{{own}}}\n"
        self.text = (
            f"{self.HEAD}{''.join(self.parts)}ENTRY %main.9 (p: f32[8]) -> f32[8] {{\n{first}{entry}}}\n"
        )

    def _computation(self, *trees: Any) -> str:
        body = "".join(map(self._operation, trees))
        name = f"region_{len(self.parts)}.1"
        self.parts.append(f"%{name} (p: (f32[8], s32[])) -> f32[8] {{\n{body}}}\n\n")
        return name

    def _operation(self, tree: Any) -> str:
        match tree:
            case int(cycles):
                return (
                    "  ROOT %add.1 = (f32[8]{0:T(128)S(1)}, s32[]) fusion(%p), kind=kLoop, calls=%fused, "
                    'metadata={op_name="jit(run)/while(x)/add" stack_frame_id=2}, '
                    f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}\n'
                )
            case "cond", branches:
                names = ", ".join(f"%{self._computation(each)}" for each in branches)
                return f"  %c = f32[8]{{0}} conditional(%i, %p), branch_computations={{{names}}}\n"
            case "loop", trips, body:
                names = f"condition=%{self._computation()}, body=%{self._computation(body)}"
                count = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
                return f"  %w = (f32[8], s32[]) while(%p), {names}, {count}\n"
            case "counted", trips, body:
                name = f"region_{len(self.parts)}.2"
                self.parts.append(
                    f"%{name} (p: (f32[8], s32[])) -> pred[] {{\n  %n.1 = s32[]{{:T(128)}} constant({trips})\n"
                    "  %i.1 = s32[]{:T(128)} get-tuple-element(%p), index=1\n"
                    "  ROOT %lt.2 = pred[]{:T(512)} compare(%i.1, %n.1), direction=LT\n}\n\n"
                )
                return (
                    f"  %w = (f32[8], s32[]) while(%p), condition=%{name}, body=%{self._computation(body)}\n"
                )
            case _, parts:
                return f"  %k = f32[8]{{0}} call(%p), to_apply=%{self._computation(*parts)}\n"


@given(tree=_Cost)
def test_cycles_are_summed_over_calls_and_loops_and_one_branch_of_each_conditional(tree: Any) -> None:
    costs = read_costs(Written(tree).text)
    assert costs is not None
    assert costs.least.cycles == expected(tree, min) and costs.most.cycles == expected(tree, max)
    for cost in costs:  # all operations lie in a line of another file, called from ours
        assert sum(cost.lines.values()) == cost.cycles
        assert set(cost.lines) <= {"graphs/ops/norms.py:41", "elsewhere"}
        assert cost.lines["elsewhere"] == 0


def test_a_program_without_estimates_has_no_costs() -> None:
    assert read_costs(jax.jit(lambda x: x + 1).lower(1.0).compile().as_text() or "") is None


def test_the_roofline_of_a_dense_model_is_its_weights_and_keys() -> None:
    config = EngineConfig(max_num_seqs=8, prefill_lanes=(8,))
    spec = ModelSpec(TINY, jnp.dtype(jnp.bfloat16))
    work = step_work(spec, config, 256)
    weights = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in spec.leaves.values())
    if not TINY.tie_word_embeddings:
        weights -= 2 * prod(spec.leaves["embed"].shape)
    kv = 2 * TINY.num_key_value_heads * TINY.head_dim * TINY.num_hidden_layers
    decode, prefill = work["decode[keys=256]"], work["prefill[lanes=8,keys=256]"]
    assert decode.bytes == weights + 8 * 256 * kv * 2 == prefill.bytes
    head = 2 * 8 * TINY.vocab_size * TINY.hidden_size  # of eight rows in either
    assert prefill.ops - head == config.chunk_size * (decode.ops - head)
    chip = CHIPS["TPU v5 lite"]
    assert decode.seconds(chip, int8=False) == decode.bytes / chip.bandwidth


def test_what_is_traced_for_a_topology_is_not_reused_for_this_machine() -> None:
    traced = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        traced.append(target.platform())
        return x

    class Device:
        platform = "tpu"

    here = target.platform()
    step(1.0)
    with target.made_for([Device()]):
        assert target.is_ahead()
        jax.make_jaxpr(step)(1.0)
    step(2.0)
    assert traced == [here, "tpu"] and not target.is_ahead()


def test_without_libtpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    monkeypatch.setattr("xla_engine.environment._AHEAD_OF_TIME", {})
    result = invoke("graphs", "--topology", "v5e:2x2")
    assert result.exit_code == 2 and "pip install 'xla-engine[tpu]'" in result.stderr


def test_an_unknown_topology_lists_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("INVALID_ARGUMENT: Invalid TPU external name: TPU v9\nmore\n")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", unknown)
    monkeypatch.setattr("xla_engine.environment._AHEAD_OF_TIME", {})
    result = invoke("graphs", "--topology", "v9:2x2")
    assert result.exit_code == 2 and "use v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1" in result.stderr
    assert "more\n" not in result.stderr


def graphs(*options: str, code: int = 0) -> dict[str, Any]:
    """The report of `xla-engine graphs --json`, in a process of its own: it sets what libtpu reads."""
    command = [sys.executable, "-m", "xla_engine", "graphs", "--json", *options]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=environment)
    assert result.returncode == code, result.stderr
    (line,) = result.stdout.splitlines()
    report: dict[str, Any] = json.loads(line)
    return report


def check(report: dict[str, Any]) -> None:
    """Every program compiles and fits; a step updates the cache in place."""
    assert not [each for each in report["programs"] if "error" in each]
    assert all(each["fits"] and each["estimated_seconds"] > 0 for each in report["programs"])
    kinds = Counter(each["name"].partition("[")[0] for each in report["programs"])
    assert {"decode", "prefill", "prompt_logprobs", "read_span", "write_span"} <= kinds.keys()
    for each in report["programs"]:
        if each["name"].startswith(("decode", "prefill", "write_span")):
            assert each["alias_bytes"] >= report["cache_bytes"] > 0
        if each["name"].startswith(("decode", "prefill")):
            assert 0 < each["roofline_share"] <= 1 and each["most_seconds"] >= each["estimated_seconds"]
            assert 0 < len(each["lines"]) <= 5
            assert any(line.startswith("graphs/") for line, _ in each["lines"])


@needs_libtpu
@pytest.mark.full
@pytest.mark.parametrize(("topology", "chips"), [("v5e:2x2", 1), ("v6e:2x2", 4)])
def test_every_program_of_a_model_without_weights_compiles(tmp_path: Path, topology: str, chips: int) -> None:
    """On each of four chips lies a quarter of the cache."""
    model = replace(TINY, num_attention_heads=4, num_key_value_heads=4)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        **{
            name: getattr(model, name)
            for name in (
                *(
                    "hidden_size",
                    "intermediate_size",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                ),
                *("num_hidden_layers", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
            )
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = ("--model", str(tmp_path / "config.json"), "--max-num-seqs", "8", "--max-model-len", "64")
    report = graphs("--topology", topology, "--tensor-parallel-size", str(chips), *options)
    check(report)
    heads, positions = 4 // chips, 8 * 256
    assert report["devices"] == chips
    assert report["cache_bytes"] == positions * heads * 2 * 2 * model.head_dim * model.num_hidden_layers


@needs_libtpu
@pytest.mark.full
def test_a_model_that_is_too_large_for_a_chip_is_refused_with_its_arithmetic(tmp_path: Path) -> None:
    fields = json.loads((Path("xla_engine/embedded") / "config.json").read_text())
    fields |= {"hidden_size": 8192, "num_hidden_layers": 64, "intermediate_size": 28672}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    command = [
        sys.executable,
        "-m",
        "xla_engine",
        "graphs",
        "--topology",
        "v5e:2x2",
        "--model",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2 and "the engine does not fit: weights" in result.stderr
