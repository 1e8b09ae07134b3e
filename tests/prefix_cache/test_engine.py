"""`prefix_cache_dir` changes no bit, whatever the files contain, and saves prefill."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.adapters import adapters, llama_checkpoint
from tests.support.instruction_sets import NATIVE_ISAS
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine import stored_prefixes
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.runner.prefix_files import storage
from xla_engine.runner.prefix_files.files import BlockFiles, entries
from xla_engine.runner.prefix_files.storage import Rate
from xla_engine.runner.runner import Runner
from xla_engine.runner.stored_blocks import BlockLayout
from xla_engine.sampling_params import SamplingParams

BLOCKS = replace(
    TINY_ENGINE, prefill_lanes=(8,), block_size=32, num_blocks=40, max_num_seqs=8, max_model_len=400
)
DRAW = random.Random(3)
STEMS = [[DRAW.randrange(TINY.vocab_size) for _ in range(130)] for _ in range(3)]
PROMPTS = [
    [*STEMS[index % 3], *(DRAW.randrange(TINY.vocab_size) for _ in range(index + 1))] for index in range(9)
]
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=6, logprobs=2)
ADD = Rate.add
Answers = list[Any]  # tokens, log-probabilities and ends of `PROMPTS`

pytestmark = pytest.mark.skipif(not NATIVE_ISAS, reason="no C++ kernels on this platform")


@contextmanager
def engine_at(directory: Path | None, **options: Any) -> Iterator[XlaBatchEngine]:
    given = None if directory is None else str(directory)
    with XlaBatchEngine(
        tiny_checkpoint(), None, replace(BLOCKS, prefix_cache_dir=given, **options)
    ) as engine:
        yield engine


def run(engine: XlaBatchEngine, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> Answers:
    names = [engine.submit({"prompt_token_ids": each}, PARAMS, **options) for each in prompts]
    found = {output.request_id: output.outputs[0] for output in engine.drain()}
    if engine.state.prefixes is not None:
        engine.state.prefixes.storage.flush()
    return [(found[name].token_ids, found[name].logprobs, found[name].finish_reason) for name in names]


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Blocks that have files are read, however long a busy machine takes for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_ANSWER", 600.0)
        patch.setattr(storage, "_PATIENCE", 600.0)
        patch.setattr(Rate, "add", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def expected() -> Answers:
    with engine_at(None) as engine:
        return run(engine)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, expected: Answers) -> Path:
    """A directory with the full blocks of `STEMS`, written by an engine that found none."""
    directory = tmp_path_factory.mktemp("prefixes")
    with engine_at(directory) as engine:
        assert run(engine) == expected
        stats = engine.stats()
        assert stats.stored_blocks == 3 * 4 and not stats.loaded_blocks and not stats.failed_blocks
    return directory


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", f"{filled}/.", tmp_path], check=True)
    return tmp_path


def test_a_restarted_engine_loads_what_an_earlier_one_computed(filled: Path, expected: Answers) -> None:
    """Also one with another name for the same dtype."""
    assert BLOCKS.dtype == "auto"
    with engine_at(filled, dtype="bfloat16") as engine:
        assert run(engine) == expected
        stats = engine.stats()
        assert stats.loaded_blocks == 12 and not stats.failed_blocks
        assert stats.prompt_tokens < 9 * 40, "the stems were computed again"
        engine.reset_prefix_cache()
        assert run(engine) == expected and engine.stats().loaded_blocks == 24


def test_blocks_are_computed_if_reading_them_takes_longer(
    filled: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(filled) as engine:
        assert engine.state.prefixes is not None
        rates = engine.state.prefixes.storage
        rates._disk.seconds, rates.prefill.seconds = 1.0, 1e-6
        assert run(engine) == expected and not engine.stats().loaded_blocks and rates.counts.skipped >= 12
        rates._disk.seconds = rates.prefill.seconds = None
        monkeypatch.setattr(Rate, "add", ADD)
        assert run(engine, DISTINCT[:4]) and rates.prefill.seconds > 0


@pytest.mark.parametrize("lag", default([2, 0]))
def test_prefixes_that_are_evicted_come_back(filled: Path, expected: Answers, lag: int) -> None:
    with engine_at(filled, num_blocks=13, max_num_seqs=2, lag=lag) as engine:
        for _ in range(2):
            assert run(engine) == expected
        assert engine.stats().loaded_blocks > 12


def damage(kind: str, path: Path, draw: random.Random) -> None:
    whole = path.read_bytes()
    at = draw.randrange(len(whole))
    if kind == "flipped":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    elif kind == "cut":
        path.write_bytes(whole[:at])
    elif kind == "other":
        contents = [each.read_bytes() for each in sorted(path.parent.parent.glob("??/*"))]
        path.write_bytes(draw.choice([each for each in contents if each != whole]))
    elif kind == "link":
        path.unlink()
        path.symlink_to("/dev/zero")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("kind", ["flipped", "cut", "other", "link", "directory"])
def test_a_damaged_file_is_a_miss(copied: Path, expected: Answers, kind: str) -> None:
    draw = random.Random(kind)
    for path, _, _ in list(entries(copied)):
        if draw.random() < 0.5:
            damage(kind, path, draw)
    with engine_at(copied) as engine:
        assert run(engine) == expected
        stats = engine.stats()
        assert stats.failed_blocks and stats.loaded_blocks < 12
        assert not stats.finished["error"]


def test_files_that_vanish_while_the_engine_runs_are_misses(copied: Path, expected: Answers) -> None:
    with engine_at(copied) as engine:
        for path, _, _ in list(entries(copied)):
            path.unlink()
        assert run(engine) == expected and not engine.stats().loaded_blocks
        assert engine.stats().stored_blocks == 12


def test_blocks_of_other_options_or_models_are_never_found(copied: Path) -> None:
    with engine_at(copied, block_size=64) as engine:
        run(engine)
        assert not engine.stats().loaded_blocks
    other = tiny_checkpoint(model=replace(TINY, rope_theta=5e4))
    with XlaBatchEngine(other, None, replace(BLOCKS, prefix_cache_dir=str(copied))) as engine:
        run(engine)
        assert not engine.stats().loaded_blocks


def test_whatever_bytes_depend_on_is_in_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(
        isa="avx2",
        rope_digest="a",
        platform={"jax": "1"},
        block_layout=SimpleNamespace(digest="b", num_bytes=64),
        spec=SimpleNamespace(dtype=jnp.dtype(jnp.bfloat16)),
    )
    for name in ("library_digest", "code_digest", "processor"):
        monkeypatch.setattr(stored_prefixes, name, lambda *_: "here")

    def folder(config: EngineConfig = BLOCKS, model: str = "model", **changed: Any) -> Path:
        runner: Any = SimpleNamespace(**vars(made) | changed)
        return BlockFiles(tmp_path, stored_prefixes._about(config, runner, model), 10**6).folder

    found = {
        folder(),
        folder(model="other"),
        folder(isa="avx512"),
        folder(rope_digest="other"),
        folder(platform={"jax": "2"}),
        folder(block_layout=SimpleNamespace(digest="other", num_bytes=64)),
        folder(block_layout=SimpleNamespace(digest="b", num_bytes=128)),
        folder(spec=SimpleNamespace(dtype=jnp.dtype(jnp.float16))),
        folder(replace(BLOCKS, bits="portable")),
        folder(replace(BLOCKS, quantization="int8")),
        folder(replace(BLOCKS, kv_cache_dtype="int8")),
        folder(replace(BLOCKS, block_size=64)),
    }
    assert folder() in found and folder(replace(BLOCKS, dtype="bfloat16", max_num_seqs=4)) in found
    for name in ("library_digest", "code_digest", "processor"):
        monkeypatch.setattr(stored_prefixes, name, lambda *_: "there")
        found.add(folder())
    assert len(found) == 12 + 3


@pytest.mark.full
def test_an_adapter_finds_what_its_own_weights_computed(tmp_path: Path) -> None:
    """Whatever its name is, and whether an engine has files or not."""
    checkpoint = llama_checkpoint()
    first, second = adapters(tmp_path / "adapters", checkpoint, 2)
    swapped = [replace(first, lora_path=second.lora_path), replace(second, lora_path=first.lora_path)]
    config = replace(BLOCKS, enable_lora=True, max_loras=2, max_lora_rank=16)
    stored = replace(config, prefix_cache_dir=str(tmp_path / "prefixes"))
    seen = []
    for options, order in ((config, [first, second]), (stored, [first, second]), (stored, swapped)):
        with XlaBatchEngine(checkpoint, None, options) as engine:
            seen.append([run(engine, lora_request=each) for each in (None, *order)])
            stats = engine.stats()
            assert not stats.failed_blocks
    assert seen[0] == seen[1] == [seen[2][0], *seen[2][:0:-1]]
    assert seen[0][0] != seen[0][1] != seen[0][2]
    assert stats.loaded_blocks == 3 * 12 and not stats.stored_blocks


def test_tenants_do_not_share(copied: Path, expected: Answers) -> None:
    with engine_at(copied) as engine:
        assert run(engine, cache_salt="tenant") == expected and not engine.stats().loaded_blocks


def test_a_disk_that_is_full_costs_nothing_but_files(
    tmp_path: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", full)
    with engine_at(tmp_path) as engine:
        assert run(engine) == expected
        assert engine.stats().failed_blocks == 12 and not list(entries(tmp_path))


def test_a_disk_that_hangs_delays_a_request_by_no_more_than_its_prefill(
    filled: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    read = BlockFiles.read

    def hang(self: BlockFiles, key: bytes) -> Any:
        free.wait(600)
        return read(self, key)

    monkeypatch.setattr(BlockFiles, "read", hang)
    with engine_at(filled) as engine:
        assert engine.state.prefixes is not None
        engine.state.prefixes.storage.prefill.seconds = 1e-4  # 13 ms for a stem
        try:
            assert run(engine) == expected and not engine.stats().loaded_blocks
            assert not free.is_set()
        finally:
            free.set()


def test_a_disk_that_does_not_say_which_files_there_are_is_not_asked_again(
    filled: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, asked = threading.Event(), list[str]()
    has = BlockFiles.has

    def hang(self: BlockFiles, key: bytes) -> bool:
        asked.append(threading.current_thread().name)
        free.wait(600)
        return has(self, key)

    with engine_at(filled) as engine:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(BlockFiles, "has", hang)
                patch.setattr(storage, "_ANSWER", 0.2)
                answers = [
                    engine.submit({"prompt_token_ids": each}, PARAMS, request_id=str(at))
                    for at, each in enumerate(PROMPTS)
                ]
                found = {output.request_id: output.outputs[0] for output in engine.drain()}
                assert [found[name].token_ids for name in answers] == [each[0] for each in expected]
                assert asked.count("xla-engine-find-blocks") == 1 and not free.is_set()
                assert engine.stats().failed_blocks == 1
                assert not engine.stats().loaded_blocks
        finally:
            free.set()
        assert engine.state.prefixes is not None
        assert engine.state.prefixes.storage._look_up is not None
        engine.state.prefixes.storage._look_up.done.wait(600)
        engine.reset_prefix_cache()
        assert run(engine) == expected and engine.stats().loaded_blocks


def test_keys_and_values_in_eight_bits_are_loaded_as_they_were_computed(tmp_path: Path) -> None:
    from xla_engine.equivalence.stored_blocks import check_stored

    eights = {"kv_cache_dtype": "int8", "block_size": 64}
    with engine_at(None, **eights) as engine:
        answers = run(engine)
    for loaded in (0, 6):
        with engine_at(tmp_path, **eights) as engine:
            assert run(engine) == answers
            stats = engine.stats()
            assert (stats.loaded_blocks, stats.stored_blocks) == (loaded, 6 - loaded)
    with engine_at(tmp_path, block_size=64) as engine:
        run(engine)
        assert not engine.stats().loaded_blocks, "another kind of block"
    check = check_stored(
        tmp_path,
        lambda config: XlaBatchEngine(tiny_checkpoint(), None, config),
        replace(BLOCKS, prefix_cache_dir="x", **eights),
        sample=6,
    )
    assert check.ok and check.same == 6


@pytest.mark.parametrize("which", [0, 1])
def test_a_block_in_eight_bits_whose_scale_is_not_finite_is_not_stored(which: int) -> None:
    keys = np.ones((2, 1, 1, 4, 6, 16, 4), np.int8)  # two blocks of a layer with one head of 16 dimensions
    values = np.ones((2, 1, 1, 1, 1, 16, 16, 4), np.int8)
    group = ([LayerCache(keys, values)], np.zeros((2, 64), np.int32))  # type: ignore[arg-type]
    layout = BlockLayout.of(group)
    keys[..., -2:, :, :].view(np.float32)[1, 0, 0, 2, which, 5] = np.nan
    assert layout.to_bytes(group, 1) is None
    whole = layout.to_bytes(group, 0)
    assert whole is not None and len(whole) == layout.num_bytes


def test_requests_that_end_while_they_wait_and_failed_steps_leave_nothing(
    filled: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(filled) as engine:
        name = engine.submit({"prompt_token_ids": PROMPTS[0]}, PARAMS)
        engine.step()
        engine.abort(name)
        start, failures = Runner.start, iter([True])

        def fail_once(self: Runner, plan: Any, *rest: Any) -> Any:
            if plan.moves.loads and next(failures, False):
                raise RuntimeError("planted")
            return start(self, plan, *rest)

        monkeypatch.setattr(Runner, "start", fail_once)
        assert run(engine) == expected and engine.stats().recoveries == 1
        assert engine.state.prefixes is not None and not engine.state.prefixes.storage._content


def test_stored_bytes_are_those_of_the_pool(filled: Path) -> None:
    from xla_engine.equivalence.stored_blocks import check_stored

    def open_engine(config: EngineConfig) -> XlaBatchEngine:
        return XlaBatchEngine(tiny_checkpoint(), None, config)

    config = replace(BLOCKS, prefix_cache_dir="x")
    check = check_stored(filled, open_engine, config, sample=12)
    assert check.ok and check.same >= 12 and not check.left_out
    with pytest.raises(InvalidRequestError, match="cache list"):
        check_stored(filled, open_engine, replace(config, block_size=64), sample=1)


def test_a_wrong_byte_with_a_right_checksum_is_found_by_verify(copied: Path) -> None:
    from xla_engine.equivalence.stored_blocks import check_stored
    from xla_engine.runner.prefix_files.files import encoded, read_file

    path = next(path for path, _, _ in entries(copied))
    stored = read_file(path)
    wrong = bytes([stored.content[0] ^ 1]) + stored.content[1:]
    path.write_bytes(encoded(replace(stored, content=wrong)))
    check = check_stored(
        copied,
        lambda config: XlaBatchEngine(tiny_checkpoint(), None, config),
        replace(BLOCKS, prefix_cache_dir="x"),
        sample=100,
    )
    assert check.different == [path.name] and check.same == 11


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": None}, "kv_cache_memory_bytes 'auto'"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"prefix_cache_bytes": 0}, "prefix_cache_bytes"),
        ({"prefix_cache_dir": ""}, "must be a directory"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(BLOCKS, **{"prefix_cache_dir": "x"} | options)


def test_engines_that_cannot_have_it_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"C\+\+ kernels"), engine_at(tmp_path, isa="none"):
        pass
    with engine_at(tmp_path) as engine:
        with pytest.raises(InvalidRequestError, match="prefix_cache_dir"):
            engine.update_weights({})
        assert "prefix_cache_dir" not in engine.identity().config


DISTINCT = [[DRAW.randrange(TINY.vocab_size) for _ in range(130)] for _ in range(30)]


def compare_rounds(directory: Path, rounds: int, seed: int) -> None:
    """Rounds of nine requests, of which each three share one of `DISTINCT`, beside an engine that caches nothing.

    Prints a line after each round, and at last how many blocks were loaded, stored, and failed. The directory is too
    small for all blocks. Blocks are read even if computing them would be faster, as it is in such a small model.
    """
    draw = random.Random(seed)
    with (
        mock.patch.object(Rate, "add"),
        engine_at(None, enable_prefix_caching=False) as plain,
        engine_at(directory, prefix_cache_bytes=2 << 20) as stored,
    ):
        for _ in range(rounds):
            stems = draw.sample(DISTINCT, 3)
            prompts = [[*stems[at % 3], *draw.choices(range(TINY.vocab_size), k=at + 1)] for at in range(9)]
            stored.reset_prefix_cache()
            assert run(stored, prompts) == run(plain, prompts)
            print("compared", flush=True)
        stats = stored.stats()
        assert not stats.finished["error"]
        print(stats.loaded_blocks, stats.stored_blocks, stats.failed_blocks)


ROUNDS = """
import sys
from pathlib import Path
from tests.prefix_cache.test_engine import compare_rounds
compare_rounds(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    "requests", [pytest.param(360, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.release)]
)
def test_four_processes_share_files_while_two_are_killed_and_files_are_damaged(
    tmp_path: Path, requests: int
) -> None:
    """No answer differs, none fails, and what is left in the files is what an engine computes."""
    from xla_engine.equivalence.stored_blocks import check_stored

    directory, rounds, draw = tmp_path / "prefixes", -(-requests // (4 * 9)), random.Random(5)
    logs = [tmp_path / f"{number}.log" for number in range(4)]

    def done(number: int) -> int:
        return logs[number].read_text().count("compared\n")

    def start(number: int, rounds: int, seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ROUNDS, str(directory), str(rounds), str(seed)]
        with logs[number].open("ab") as log:
            return subprocess.Popen(command, stdout=log)

    to_kill, damaged = {0: rounds // 3, 1: rounds // 2}, 0
    processes = [start(number, 10**6 if number in to_kill else rounds, number) for number in range(4)]
    try:
        while any(each.poll() is None for each in processes):
            time.sleep(0.2)
            if found := list(entries(directory)) if directory.exists() else []:
                with suppress(FileNotFoundError, ValueError):  # deleted, or cut to nothing
                    damage(draw.choice(["flipped", "cut"]), draw.choice(found)[0], draw)
                    damaged += 1
            for number in [number for number, after in to_kill.items() if done(number) >= after]:
                processes[number].kill()
                assert processes[number].wait() == -signal.SIGKILL
                processes[number] = start(number, max(rounds - done(number), 1), 4 + number)
                del to_kill[number]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert [each.returncode for each in processes] == [0, 0, 0, 0] and not to_kill
    assert sum(map(done, range(4))) * 9 >= requests
    counts = [[int(each) for each in log.read_text().split()[-3:]] for log in logs]
    loaded, stored, failed = (sum(column) for column in zip(*counts, strict=True))
    assert loaded and stored and failed and damaged, (loaded, stored, failed, damaged)
    compare_rounds(directory, 6, seed=6)  # finds what is damaged, and writes it again
    check = check_stored(
        directory,
        lambda config: XlaBatchEngine(tiny_checkpoint(), None, config),
        replace(BLOCKS, prefix_cache_dir="x"),
        sample=200,
    )
    assert check.same and not check.different
    print(f"{sum(map(done, range(4))) * 9} requests; {loaded=} {stored=} {failed=} {damaged=}; {check.same=}")
