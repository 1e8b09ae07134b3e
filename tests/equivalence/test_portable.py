"""bits="portable": the golden file holds here, unsupported options are refused, and identities omit the machine."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from tests.support.models import TINY
from xla_engine.cli import main
from xla_engine.config import PORTABLE_OPTIONS, EngineConfig
from xla_engine.config_options import Option, option_of
from xla_engine.engine.identity import EngineIdentity
from xla_engine.environment import embedded_model_directory
from xla_engine.equivalence import portable as golden_runs
from xla_engine.errors import ConfigError
from xla_engine.graphs.portable import ARITHMETIC, ISAS
from xla_engine.runner import portable
from xla_engine.runner.native_library.instruction_sets import available

BF16 = jnp.dtype(jnp.bfloat16)
HERE = [each.name for each in available() if each.name in ISAS] if jax.default_backend() == "cpu" else []
needs_kernels = pytest.mark.skipif(not HERE, reason="needs a CPU with one of the instruction sets")


@needs_kernels
def test_this_machine_has_the_golden_bits_and_another_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    results = list(golden_runs.against_golden(HERE[0], ["bfloat16"], ["slots"]))
    assert [(each.compared, each.differing) for each in results] == [(4, ()), (64, ())]
    golden = dict(portable.golden())
    engine = SimpleNamespace(runner=SimpleNamespace(isa=HERE[0]))
    found = {**golden["requests"]["int8"], "07": "0"}
    monkeypatch.setattr(golden_runs, "hashes_of", lambda engine: found)
    monkeypatch.setattr(golden_runs, "kernel_hashes", lambda isa, quantization: {"attention": "0"})
    monkeypatch.setattr(golden_runs.XlaBatchEngine, "from_pretrained", lambda *_: nullcontext(engine))
    done = CliRunner().invoke(main, ["verify", "--against", "golden", "--quantization", "int8"])
    assert done.exit_code == 1 and done.stdout.count(": 07") == 2, done.output
    assert f"kernels for int8, {HERE[0]}: attention" in done.stdout
    assert done.stdout.endswith(f"NOT the bits of {ARITHMETIC}\n")
    refused = CliRunner().invoke(main, ["verify", "--against", "golden", "--max-num-seqs", "4"])
    assert refused.exit_code == 2 and "leave --max-num-seqs out" in refused.output
    monkeypatch.setattr(portable, "golden", lambda: {"kernels": {**golden["kernels"], "attention": "0"}})
    with pytest.raises(
        ConfigError, match=f"for {HERE[0]} do not have the bits of portable-1: attention .*CXX"
    ):
        portable.check_kernels(HERE[0], None)


# The largest instruction set of XLA on a lesser processor, and the loops of NumPy that it lacks.
LESSER = {"avx512": ("AVX512", r"AVX512_(?!SKX)"), "avx2": ("AVX2", r"AVX512|X86_V4")}
THREADS = (16, 1, 3)


@needs_kernels
@pytest.mark.full
@pytest.mark.parametrize("place", range(len(HERE)))
def test_lesser_processors_and_other_numbers_of_threads_have_the_golden_bits(place: int) -> None:
    isa, threads = HERE[place], THREADS[place % len(THREADS)]
    own = {**os.environ, "NPROC": str(threads)}
    if isa in LESSER:
        largest, missing = LESSER[isa]
        known = [name for name in __cpu_dispatch__ if __cpu_features__[name] and re.match(missing, name)]
        own |= {"XLA_FLAGS": f"--xla_cpu_max_isa={largest}", "NPY_DISABLE_CPU_FEATURES": " ".join(known)}
    words = ["verify", "--against", "golden", "--isa", isa]
    if place < len(HERE) - 1:  # the least processor computes both precisions
        words += ["--quantization", "int8"]
    done = subprocess.run(
        [sys.executable, "-m", "xla_engine", *words], env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.endswith(f"the bits of {ARITHMETIC}\n")


def test_the_golden_file_is_of_the_embedded_model_and_this_arithmetic() -> None:
    golden = portable.golden()
    assert golden["arithmetic"] == ARITHMETIC
    model = (embedded_model_directory() / "model.safetensors").read_bytes()
    assert golden["model_sha256"] == hashlib.sha256(model).hexdigest()
    for answers in golden["requests"].values():
        assert len(answers) == golden_runs.COUNT
        assert len({*answers.values()}) > 0.8 * golden_runs.COUNT, "requests that say little"
    bf16, int8 = (golden["requests"][name] for name in ("bfloat16", "int8"))
    assert sum(bf16[name] != int8[name] for name in bf16) > 0.8 * golden_runs.COUNT


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora": True},
        {"enable_dry": True},
        {"tensor_parallel_size": 2},
        {"quantization": "gguf"},
        {"attention_backend": "xla"},
        {"linear_backend": "xla"},
        {"isa": "none"},
        {"runner": "pooling"},
        {"hf_overrides": {"rope_theta": 5.0}},
    ],
)
def test_options_whose_bits_are_not_known_are_refused(options: dict[str, Any]) -> None:
    ((name, _),) = options.items()
    with pytest.raises(ConfigError, match=f"bits 'portable' has no {name}=.*Leave {name} out"):
        EngineConfig(bits="portable", **options)
    assert EngineConfig(**options).bits == "machine"


def test_an_option_that_nobody_vouched_for_is_refused() -> None:
    """A field that says nothing about its bits must have its default, and a new field says nothing."""
    assert Option().bits is None and not Option().portable
    for name, value in {"kv_cache_dtype": "int8", "enable_lora": True, "tensor_parallel_size": 2}.items():
        about = option_of(EngineConfig.__dataclass_fields__[name])
        assert about.bits is None and not about.portable
        assert EngineConfig(**{name: value}).bits == "machine"
        with pytest.raises(ConfigError, match=f"bits 'portable' has no {name}="):
            EngineConfig(bits="portable", **{name: value})
    assert {each.name for each in fields(EngineConfig)} >= PORTABLE_OPTIONS
    with pytest.raises(ConfigError, match="speculation by ngram and suffix, not by 'draft_model'"):
        EngineConfig(bits="portable", speculative_config={"method": "draft_model"})
    with pytest.raises(ConfigError, match="bits must be one of machine, portable"):
        EngineConfig(bits="same")


def sets(*names: str) -> Any:
    return lambda: tuple(SimpleNamespace(name=name) for name in names)


def test_the_best_instruction_set_with_the_one_order_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_ENGINE_ISA", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(portable, "register", lambda name, parts: name)
    monkeypatch.setattr(portable, "check_kernels", lambda name, quantization: None)
    config = EngineConfig(bits="portable")

    def chosen(isa: str = "auto", dtype: Any = BF16, **changes: Any) -> str:
        return portable.with_portable_isa(replace(config, isa=isa), replace(TINY, **changes), dtype, ()).isa

    monkeypatch.setattr(portable, "available", sets("amx", "avx512_bf16", "avx512", "avx2"))
    assert [chosen(), chosen("amx"), chosen("avx2")] == ["avx512_bf16", "avx512_bf16", "avx2"]
    monkeypatch.setenv("XLA_ENGINE_ISA", "amx")
    assert chosen() == "avx512_bf16"
    monkeypatch.setenv("XLA_ENGINE_ISA", "none")
    with pytest.raises(ConfigError, match="needs the C\\+\\+ kernels, and isa is 'none'"):
        chosen()
    monkeypatch.delenv("XLA_ENGINE_ISA")
    with pytest.raises(ConfigError, match="does not have 'neon'; use one of auto, avx512_bf16"):
        chosen("neon")
    with pytest.raises(ConfigError, match="bfloat16 or int8, not float32"):
        chosen(dtype=jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match="multiples of 32"):
        chosen(hidden_size=40)
    monkeypatch.setattr(portable, "available", sets("neon_bf16", "neon"))
    assert [chosen(), chosen("neon_bf16")] == ["neon", "neon"]
    monkeypatch.setattr(portable, "available", sets())
    with pytest.raises(ConfigError, match="does not have one of them"):
        chosen()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match="is for CPUs"):
        chosen()


def test_the_machine_and_the_sizes_are_no_part_of_the_identity() -> None:
    zen = EngineIdentity(
        model="m",
        dtype="bfloat16",
        config={"bits": "portable", "seed": 0, "max_num_seqs": 16, "isa": "auto"},
        platform={"arithmetic": ARITHMETIC},
        made_on={"jax": "0.12.0", "device": "cpu", "isa": "avx512_bf16"},
    )
    arm = replace(
        zen,
        config={**zen.config, "max_num_seqs": 64},
        made_on={"jax": "0.10.2", "device": "cpu", "isa": "neon"},
    )
    assert zen.digest() == arm.digest() and not zen.differences(arm)
    for other in (
        replace(zen, platform={"arithmetic": "portable-2"}),
        replace(zen, config={**zen.config, "seed": 1}),
        replace(zen, config={**zen.config, "quantization": "int8"}),
        replace(zen, model="n"),
    ):
        assert other.digest() != zen.digest() and len(zen.differences(other)) == 1
    machine = replace(zen, platform={"jax": "0.12.0"}, config={"max_num_seqs": 16})
    assert machine.digest() != replace(machine, config={"max_num_seqs": 64}).digest()
    assert machine.digest() == replace(machine, made_on={}).digest()
