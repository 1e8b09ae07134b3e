"""Merged shards equal the whole run, byte for byte; an incomplete or mixed set is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import engine
from tests.support.command_line import ROOT, invoke, records_of
from tests.support.fake_engine import FakeEngine
from tests.support.tiers import default
from xla_engine.batch.shards import Shard, read_state, state_path
from xla_engine.engine.identity import EngineIdentity
from xla_engine.errors import ConfigError
from xla_engine.openai.requests import LineError, custom_id_of, parse_line

__all__ = ["engine"]

LINES = [
    b'{"prompt": "a"}',
    b'{"prompt": "b", "custom_id": "b"}',
    b'{"prompt": "broken',
    b'{"prompt": "c", "id": "c"}',
    b"",
    b'{"prompt": "again", "custom_id": "b"}',
    b'{"prompt": "no!", "custom_id": "refused"}',
    b'{"prompt": "d", "custom_id": 7}',
    b'{"prompt": "line-1 has no id", "custom_id": "line-1"}',
    *(b'{"prompt": "p%d", "custom_id": "p%d"}' % (number, number) for number in range(20)),
]
CREATED = ("--created", "17", "--no-progress")


def parts_of(folder: Path, count: int, *options: str, suffix: str = ".jsonl") -> list[Path]:
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join(LINES) + b"\n")
    paths = [folder / f"part-{index}{suffix}" for index in range(count)]
    for index, path in enumerate(paths):
        done = invoke("run", source, "-o", path, "--shard", f"{index}/{count}", *CREATED, *options)
        assert done.exit_code in (0, 1), done.output
    return paths


def whole(folder: Path, suffix: str = ".jsonl", *options: str) -> bytes:
    source, path = folder / "in.jsonl", folder / f"whole{suffix}"
    source.write_bytes(b"\n".join(LINES) + b"\n")
    done = invoke("run", source, "-o", path, "--ordered", *CREATED, *options)
    assert done.exit_code == 1, done.output
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("count", "ordered"), default([(3, True), (1, True), (3, False), (64, True)]))
def test_merged_shards_are_the_bytes_of_one_run(
    tmp_path: Path, engine: FakeEngine, count: int, ordered: bool, suffix: str
) -> None:
    """With errors, repeated ids and lines without an id; with 64 shards of 28 lines, some are empty."""
    expected = whole(tmp_path, suffix)
    parts = parts_of(tmp_path, count, *(["--ordered"] if ordered else []), suffix=suffix)
    done = invoke("merge", *reversed(parts), "-o", tmp_path / f"out{suffix}")
    assert done.exit_code == 0, done.output
    assert (tmp_path / f"out{suffix}").read_bytes() == expected
    assert f"28 lines of {count} shards, 5 of them errors" in done.stderr
    assert len(records_of(tmp_path / "out.jsonl")) == 28 if suffix == ".jsonl" else True


def test_error_files_are_merged_by_themselves(tmp_path: Path, engine: FakeEngine) -> None:
    whole(tmp_path, ".jsonl", "--errors", str(tmp_path / "errors.jsonl"))
    source = tmp_path / "in.jsonl"
    for index in range(2):
        options = ("--errors", tmp_path / f"errors-{index}.jsonl", "--shard", f"{index}/2", *CREATED)
        assert invoke("run", source, "-o", tmp_path / f"part-{index}.jsonl", *options).exit_code == 1
    for name, expected in (("part", "whole.jsonl"), ("errors", "errors.jsonl")):
        parts = [tmp_path / f"{name}-{index}.jsonl" for index in range(2)]
        assert invoke("merge", *parts, "-o", tmp_path / f"all-{name}.jsonl").exit_code == 0
        assert (tmp_path / f"all-{name}.jsonl").read_bytes() == (tmp_path / expected).read_bytes()
    mixed = invoke(
        "merge", tmp_path / "part-0.jsonl", tmp_path / "errors-1.jsonl", "-o", tmp_path / "x.jsonl"
    )
    assert mixed.exit_code == 2 and "holds results" in mixed.stderr


def test_what_is_no_whole_set_of_shards_is_refused(tmp_path: Path, engine: FakeEngine) -> None:
    parts = parts_of(tmp_path, 3)
    (tmp_path / "other").mkdir()
    elsewhere = parts_of(tmp_path / "other", 3, "--temperature", "0.5")
    fewer = parts_of(tmp_path / "other", 2, "--overwrite")

    def refused(*paths: Path) -> str:
        done = invoke("merge", *paths, "-o", tmp_path / "out.jsonl")
        assert done.exit_code == 2 and not (tmp_path / "out.jsonl").exists(), done.output
        return done.stderr

    assert "missing: shard 1/3; a merge needs all 3" in refused(parts[0], parts[2])
    assert "shard 1/3 is given twice" in refused(*parts, parts[1])
    assert "one of 3 shards" in refused(parts[0], fewer[1])
    assert "part-2.jsonl is a shard of another job" in refused(*parts[:2], elsewhere[2])
    assert "is no shard" in refused(*parts[:2], tmp_path / "in.jsonl")
    text = parts[1].read_bytes()
    parts[1].write_bytes(text[:-5])
    assert "not a complete result line" in refused(*parts)
    parts[1].write_bytes(text[: text.rindex(b"\n", 0, -1) + 1])
    assert "was it copied completely?" in refused(*parts)
    parts[1].write_bytes(parts[0].read_bytes())
    assert "which does not belong to shard 1/3" in refused(*parts)
    parts[1].write_bytes(text + text[text.rindex(b"\n", 0, -1) + 1 :])
    assert "was it copied completely?" in refused(*parts)


def test_shards_of_different_engines_are_merged_only_when_asked(tmp_path: Path, engine: FakeEngine) -> None:
    parts = parts_of(tmp_path, 2)
    state = json.loads(state_path(parts[1]).read_bytes())
    state_path(parts[1]).write_text(json.dumps(state | {"system_fingerprint": "0123456789abcdef"}))
    done = invoke("merge", *parts, "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 2 and "--any-engine" in done.stderr
    assert invoke("merge", *parts, "-o", tmp_path / "out.jsonl", "--any-engine").exit_code == 0


def test_shards_of_other_numbers_of_devices_are_merged_where_no_bit_depends_on_it(
    tmp_path: Path, engine: FakeEngine
) -> None:
    expected = whole(tmp_path)
    for products, status in (("native", 0), ("xla", 2)):
        platform = {"linear": products, "attention": "native"}
        parts = []
        for index, devices in enumerate([{}, {"tensor_parallel_size": 2}]):
            one = EngineIdentity(model="fake", dtype="none", config=devices, platform=platform)
            engine.made_as = one
            parts.append(tmp_path / f"{products}-{index}.jsonl")
            options = ("--shard", f"{index}/2", *CREATED)
            assert invoke("run", tmp_path / "in.jsonl", "-o", parts[-1], *options).exit_code in (0, 1)
        done = invoke("merge", *parts, "-o", tmp_path / f"{products}.jsonl")
        assert done.exit_code == status, done.output
        assert status or len(records_of(tmp_path / f"{products}.jsonl")) == len(expected.splitlines())


def test_shards_of_two_kinds_of_machine_are_one_job_with_portable_bits(
    tmp_path: Path, engine: FakeEngine
) -> None:
    """They merge to what one machine writes, each is resumed on the other, and a comparison names the arithmetic."""
    kinds = [({"jax": "0.12.0", "isa": "avx2"}, 8), ({"jax": "0.10.2", "isa": "neon"}, 64)]
    zen, arm = (
        EngineIdentity(
            model="fake",
            dtype="none",
            config={"bits": "portable", "max_num_seqs": slots},
            platform={"arithmetic": "portable-1"},
            made_on=made_on,
        )
        for made_on, slots in kinds
    )
    engine.made_as = zen
    whole(tmp_path)
    options = ("--fingerprint", *CREATED)
    expected = tmp_path / "expected.jsonl"
    assert invoke("run", tmp_path / "in.jsonl", "-o", expected, "--ordered", *options).exit_code in (0, 1)
    parts = []
    for index, one in enumerate((zen, arm)):
        engine.made_as = one
        parts.append(tmp_path / f"mixed-{index}.jsonl")
        own = ("--shard", f"{index}/2", *options)
        assert invoke("run", tmp_path / "in.jsonl", "-o", parts[-1], *own).exit_code in (0, 1)
    merged = tmp_path / "merged.jsonl"
    assert invoke("merge", *parts, "-o", merged).exit_code == 0
    assert merged.read_bytes() == expected.read_bytes()
    compared = invoke("compare", expected, merged)
    assert "portable-1: a difference is a bug" in compared.output, compared.output
    lines = expected.read_bytes().splitlines(keepends=True)
    merged.write_bytes(b"".join(lines[:5]))  # begun on one machine, ended on the other
    assert invoke("run", tmp_path / "in.jsonl", "-o", merged, "--resume", *options).exit_code in (0, 1)
    assert sorted(merged.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_a_run_on_several_devices_goes_on_whose_file_names_them(tmp_path: Path, engine: FakeEngine) -> None:
    platform = {"linear": "native", "attention": "native"}
    one = EngineIdentity(model="fake", dtype="none", config={"tensor_parallel_size": 2}, platform=platform)
    older = one.digest(with_devices=True)
    assert older != one.digest() == replace(one, config={}).digest()
    assert not one.differences(replace(one, config={}))
    engine.made_as = one
    expected = whole(tmp_path).replace(one.digest().encode(), older.encode())
    lines = expected.splitlines(keepends=True)
    (tmp_path / "whole.jsonl").write_bytes(b"".join(lines[:10]))
    done = invoke("run", tmp_path / "in.jsonl", "-o", tmp_path / "whole.jsonl", "--resume", "--no-progress")
    assert done.exit_code == 1, done.output  # lines failed before
    assert sorted((tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_a_merge_replaces_nothing_unasked(tmp_path: Path, engine: FakeEngine) -> None:
    parts = parts_of(tmp_path, 2)
    (tmp_path / "out.jsonl").write_text("mine")
    done = invoke("merge", *parts, "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 2 and (tmp_path / "out.jsonl").read_text() == "mine"
    assert invoke("merge", *parts, "-o", tmp_path / "out.jsonl", "--overwrite").exit_code == 0


def test_an_output_goes_on_as_the_shard_it_was_begun_as(tmp_path: Path, engine: FakeEngine) -> None:
    parts = parts_of(tmp_path, 3)
    assert read_state(parts[1]) is not None
    for options in (("--shard", "0/3"), ("--shard", "1/2"), ()):
        done = invoke("run", tmp_path / "in.jsonl", "-o", parts[1], "--resume", *options, *CREATED)
        assert done.exit_code == 2 and "was begun as shard 1/3" in done.stderr, done.output
    whole(tmp_path)
    done = invoke("run", tmp_path / "in.jsonl", "-o", tmp_path / "whole.jsonl", "--resume", "--shard", "1/3")
    assert done.exit_code == 2 and "was not written as a shard" in done.stderr
    done = invoke("run", tmp_path / "in.jsonl", "-o", parts[1], "--overwrite", *CREATED)
    assert done.exit_code == 1 and read_state(parts[1]) is None  # it is no shard any more


def test_a_shard_of_an_interrupted_run_is_not_finished(tmp_path: Path, engine: FakeEngine) -> None:
    def stop(step: int) -> None:
        raise KeyboardInterrupt

    parts = parts_of(tmp_path, 2)
    before = [path.read_bytes() for path in parts]
    engine.on_step = stop
    again = ("run", tmp_path / "in.jsonl", "-o", parts[0], "--shard", "0/2", *CREATED)
    assert invoke(*again, "--overwrite").exit_code == 130
    done = invoke("merge", *parts, "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 2 and "shard 0/2" in done.stderr and "not finished" in done.stderr
    engine.on_step = None
    assert invoke(*again, "--resume").exit_code in (0, 1)
    assert sorted(parts[0].read_bytes().splitlines()) == sorted(before[0].splitlines())


@pytest.mark.full
def test_shards_killed_at_random_moments_merge_to_the_undisturbed_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.shard_kills", str(tmp_path), "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and "DIFFERENT" not in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 12


@pytest.mark.full
def test_the_kill_test_can_fail(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.shard_kills", str(tmp_path), "2", "--plant"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert "DIFFERENT" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "2/2", "0/0", "-1/2", "a/b", "1/2/3", "0/10000000"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="from 0 to N - 1"):
        Shard.parse(text)
    assert invoke("run", "in.jsonl", "-o", "out.jsonl", "--shard", text).exit_code == 2


def test_a_shard_needs_a_file(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINES[0])
    done = invoke("run", tmp_path / "in.jsonl", "-o", "-", "--shard", "0/2")
    assert done.exit_code == 2 and "writes its results to a file" in done.stderr


@given(custom_id=st.text(min_size=1), count=st.integers(1, 50))
def test_every_line_is_in_one_shard(custom_id: str, count: int) -> None:
    custom_id = custom_id.encode("utf-8", "replace").decode()
    assert sum(Shard(index, count).owns(custom_id) for index in range(count)) == 1


@given(raw=st.binary() | st.sampled_from(LINES))
def test_the_shard_of_a_line_is_by_the_id_of_its_output(raw: bytes) -> None:
    read = parse_line(raw, 5)
    assert isinstance(read, LineError) or read.custom_id
    assert custom_id_of(raw, 5) == read.custom_id
