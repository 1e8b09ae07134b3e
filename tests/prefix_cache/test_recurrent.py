"""Models with recurrent layers find blocks and saved states in files, and no bit depends on it."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.graphs.test_hybrid import CONVOLUTIONS, KIMI, MAMBAS, MODEL, OLMO
from tests.prefix_cache.test_engine import Answers, damage, run
from tests.prefix_cache.test_engine import patient as patient  # a fixture
from tests.support.batch_lines import HEADER
from tests.support.instruction_sets import NATIVE_ISAS
from tests.support.models import TINY, tiny_checkpoint
from tests.support.tiers import default
from xla_engine.batch.lines import read_lines
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.stored_blocks import check_stored
from xla_engine.errors import ConfigError
from xla_engine.observability.metrics import engine_metrics
from xla_engine.runner.prefix_files.files import entries, read_file
from xla_engine.runner.stored_blocks import BlockLayout

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=256,
    prefill_lanes=(4,),
    chunk_size=16,
    block_size=32,
    num_blocks=40,
    mamba_cache_mode="align",
    mamba_block_size=64,
    self_check=False,
)
MODELS = {"delta": MODEL, "conv": CONVOLUTIONS, "mamba": MAMBAS, "olmo": OLMO, "kimi": KIMI}
DRAW = random.Random(8)
STEMS = [[DRAW.randrange(TINY.vocab_size) for _ in range(140)] for _ in range(2)]
PROMPTS = [
    [*STEMS[index % 2], *(DRAW.randrange(TINY.vocab_size) for _ in range(index + 1))] for index in range(6)
]
FILES = 2 * (128 // 32 + 1)  # four blocks of each stem, and the state after them

pytestmark = pytest.mark.skipif(not NATIVE_ISAS, reason="no C++ kernels on this platform")


@contextmanager
def engine_at(directory: Path | None, model: Any = MODEL, **options: Any) -> Iterator[XlaBatchEngine]:
    config = replace(CONFIG, prefix_cache_dir=None if directory is None else str(directory), **options)
    with XlaBatchEngine(tiny_checkpoint(model=model), None, config) as engine:
        yield engine


def answers(engine: XlaBatchEngine) -> Answers:
    return run(engine, PROMPTS)


def states(directory: Path) -> list[Path]:
    return [path for path, _, _ in entries(directory) if not read_file(path).tokens]


@pytest.fixture(scope="module")
def expected() -> Answers:
    with engine_at(None, mamba_cache_mode="none", mamba_block_size=None, num_blocks=None) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, expected: Answers) -> Path:
    directory = tmp_path_factory.mktemp("prefixes")
    with engine_at(directory) as engine:
        assert answers(engine) == expected
        stats = engine.stats()
        assert (stats.stored_blocks, stats.loaded_blocks, stats.failed_blocks) == (FILES, 0, 0)
    assert len(states(directory)) == 2
    return directory


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", f"{filled}/.", tmp_path], check=True)
    return tmp_path


def test_a_restarted_engine_loads_blocks_and_states(filled: Path, expected: Answers) -> None:
    with engine_at(filled) as engine:
        assert answers(engine) == expected
        stats = engine.stats()
        assert (stats.loaded_blocks, stats.stored_blocks, stats.failed_blocks) == (FILES, 0, 0)
        assert stats.cached_tokens == len(PROMPTS) * 128, "every prompt begins after the state"
        metrics = engine_metrics(stats, engine.config, "m", max_model_len=engine.max_model_len)
        values = {family.name: family.samples[0].value for family in metrics if family.samples}
        assert values["vllm:prefix_cache_hits_total"] == stats.cached_tokens
        assert values["xla_engine_loaded_blocks_total"] == FILES
        assert stats.compiles_after_warmup == 0


def test_a_state_that_was_overwritten_comes_back_alone(filled: Path, expected: Answers) -> None:
    """There is one place, and two stems; the blocks of both stay in the pool."""
    with engine_at(filled, mamba_cache_states=1, max_num_seqs=1) as engine:
        for _ in range(2):
            assert [answer for each in PROMPTS for answer in run(engine, [each])] == expected
        stats = engine.stats()
        assert stats.loaded_blocks == FILES + 2 * len(PROMPTS) - 2, "two with their blocks, the others alone"
        assert stats.cached_tokens == 2 * len(PROMPTS) * 128


@pytest.mark.parametrize("kind", default(["flipped", "cut", "other"]))
def test_a_damaged_state_is_a_miss_and_is_written_again(copied: Path, expected: Answers, kind: str) -> None:
    for path in states(copied):
        damage(kind, path, random.Random(kind))
    with engine_at(copied) as engine:
        assert answers(engine) == expected
        stats = engine.stats()
        assert stats.failed_blocks >= 2 and stats.loaded_blocks == 0 and stats.stored_blocks == 2
        assert not stats.finished["error"]
    assert len(states(copied)) == 2
    with engine_at(copied) as engine:
        assert answers(engine) == expected and engine.stats().loaded_blocks == FILES


def test_a_damaged_block_leaves_the_rest_to_be_computed(copied: Path, expected: Answers) -> None:
    for path, _, _ in list(entries(copied)):
        if path not in states(copied) and DRAW.random() < 0.5:
            damage("flipped", path, DRAW)
            break
    with engine_at(copied) as engine:
        assert answers(engine) == expected and engine.stats().failed_blocks


def test_the_limit_counts_states(tmp_path: Path, expected: Answers) -> None:
    with engine_at(tmp_path, prefix_cache_bytes=100_000) as engine:
        assert answers(engine) == expected
    assert 0 < sum(size for _, size, _ in entries(tmp_path)) <= 100_000


def test_what_is_stored_is_what_an_engine_computes(filled: Path, copied: Path) -> None:
    def check(directory: Path) -> Any:
        return check_stored(
            directory,
            lambda config: XlaBatchEngine(tiny_checkpoint(model=MODEL), None, config),
            replace(CONFIG, prefix_cache_dir="x"),
            sample=FILES,
        )

    found = check(filled)
    assert found.ok and (found.same, found.left_out) == (FILES, 0)
    damage("flipped", states(copied)[0], DRAW)
    found = check(copied)
    assert not found.ok and len(found.damaged) == 1 and found.same == FILES - 1


@pytest.mark.full
@pytest.mark.parametrize(
    "isa", [*NATIVE_ISAS[:1], *(pytest.param(isa, marks=pytest.mark.release) for isa in NATIVE_ISAS[1:])]
)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_kind_of_layer_on_every_instruction_set(tmp_path: Path, name: str, isa: str) -> None:
    model = MODELS[name]
    plain = {"mamba_cache_mode": "none", "mamba_block_size": None, "num_blocks": None}
    with engine_at(None, model, isa=isa, **plain) as engine:
        whole = answers(engine)
    for loaded in (0, FILES):
        with engine_at(tmp_path, model, isa=isa) as engine:
            assert answers(engine) == whole
            stats = engine.stats()
            assert (stats.loaded_blocks, stats.failed_blocks) == (loaded, 0)


ANOTHER = """
import sys
from pathlib import Path
from unittest import mock
from tests.prefix_cache.test_recurrent import answers, engine_at
from xla_engine.runner.prefix_files import storage

with mock.patch.object(storage.Rate, "add"), engine_at(Path(sys.argv[1])) as engine:
    print(answers(engine), engine.stats().loaded_blocks, sep="\\n")
"""


@pytest.mark.full
def test_another_process_finds_them(filled: Path, expected: Answers) -> None:
    command = [sys.executable, "-c", ANOTHER, str(filled)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    assert done.stdout.splitlines() == [str(expected), str(FILES)]


def test_a_resumed_run_finds_them(tmp_path: Path, filled: Path) -> None:
    data = b"".join(
        json.dumps({"prompt": each, "max_tokens": 5, "temperature": 0.9, "seed": at}).encode() + b"\n"
        for at, each in enumerate(PROMPTS)
    )

    def go(path: Path, mode: Mode, directory: Path | None) -> int:
        done = FinishedLines()
        with OutputFile(str(path), mode) as output, engine_at(directory) as engine:
            output.claim(done)
            sink = output.begin()
            BatchRun(engine, read_lines(io.BytesIO(data)), sink, header=HEADER, done=done, ordered=True).run()
            return engine.stats().loaded_blocks

    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert go(whole, Mode.NEW, None) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:9])
    assert go(path, Mode.RESUME, filled) == FILES

    def results(path: Path) -> list[Any]:
        found = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [each["response"]["body"]["choices"] for each in found]

    assert results(path) == results(whole)


def test_a_state_that_is_not_finite_is_not_stored() -> None:
    group = [np.ones((1, 3, 4), np.float32), np.ones((1, 2), np.float32)]
    layout = BlockLayout.of(group)
    assert layout.num_bytes == 4 * (12 + 2) and layout.to_bytes(group, 0) is not None
    group[1][0, 1] = np.inf
    assert layout.to_bytes(group, 0) is None


def test_files_need_saved_states(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="mamba_cache_mode 'align'"),
        engine_at(tmp_path, mamba_cache_mode="none", mamba_block_size=None),
    ):
        pass
