"""A start loads the programs of an earlier one without tracing them, if nothing they depend on has changed."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY_ENGINE, tiny_checkpoint
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.graphs.inventory import COMPILING, LOADING, GraphReport, Inventory, Program, _named
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.runner import program_key
from xla_engine.runner.program_key import NoKeyError, code_key, platform_key
from xla_engine.runner.program_store import ProgramStore, program_store
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.startup import StartTimes, silent

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="only programs of CPUs are stored")

WIDTH = 8
ROWS = jax.ShapeDtypeStruct((3, WIDTH), jnp.float32)


def norm(epsilon: float = 1e-5, rows: Any = ROWS, donate: tuple[int, ...] = ()) -> Program:
    weight = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    function = functools.partial(rms_norm, eps=epsilon)
    return Program(name="norm", function=function, arguments=(rows, weight), donate=donate)


def compiled(directory: Path, program: Program) -> tuple[Inventory, GraphReport]:
    inventory = Inventory(store=ProgramStore(directory))
    inventory.compile([program])
    return inventory, next(iter(inventory))


def was_loaded(report: GraphReport) -> bool:
    return report.lower_seconds == 0


def result(inventory: Inventory) -> bytes:
    rows = np.linspace(-3, 5, 3 * WIDTH, dtype=np.float32).reshape(ROWS.shape)
    return np.asarray(inventory("norm", jnp.asarray(rows), jnp.ones(WIDTH))).tobytes()


def test_a_second_engine_loads_every_program_and_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("xla_engine.runner.runner.program_store", lambda *_: ProgramStore(tmp_path))

    def run() -> tuple[list[bool], list[Any], set[str]]:
        times = StartTimes(0.0)
        progress = times.following(silent)
        with XlaBatchEngine(tiny_checkpoint(), None, TINY_ENGINE, progress=progress) as engine:
            for seed in range(5):
                params = SamplingParams(temperature=seed / 2, seed=seed, max_tokens=7, logprobs=2)
                engine.submit([*range(1, 4 + 9 * seed)], params)
            found = {output.request_id: output.outputs[0] for output in engine.drain()}
            assert engine.stats().compiles_warmup >= len(engine.inventory_report())
            answers = [(found[name].token_ids, repr(found[name].logprobs)) for name in sorted(found)]
            parts = {LOADING, COMPILING} & times.parts.keys()
            return [was_loaded(each) for each in engine.inventory_report()], answers, parts

    (first, expected, cold), (second, answers, warm) = run(), run()
    assert not any(first) and all(second) and len(second) > 3
    assert cold == {LOADING, COMPILING} and warm == {LOADING}  # what the summary of a start tells
    assert answers == expected


@pytest.mark.full
@pytest.mark.parametrize("change", [{"max_num_seqs": 16}, {"max_model_len": 40}], ids=str)
def test_another_size_compiles_only_programs_whose_arguments_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, int]
) -> None:
    monkeypatch.setattr("xla_engine.runner.runner.program_store", lambda *_: ProgramStore(tmp_path))

    def reports(**options: Any) -> list[GraphReport]:
        config = replace(TINY_ENGINE, self_check=False, **options)
        with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
            return engine.inventory_report()

    before = {(each.name, each.argument_bytes) for each in reports()}
    after = reports(**change)
    unchanged = {each.name for each in after if (each.name, each.argument_bytes) in before}
    assert {each.name for each in after if was_loaded(each)} == unchanged
    assert 0 < len(unchanged) < len(after)


@pytest.mark.parametrize("damage", ["torn", "other bytes", "not ours", "a link", "of another XLA"])
def test_a_damaged_or_foreign_file_is_compiled_again(tmp_path: Path, damage: str) -> None:
    inventory, report = compiled(tmp_path, norm())
    assert not was_loaded(report)
    files = list(tmp_path.glob("*.program"))
    assert len(files) == 1
    for path in files:
        content = path.read_bytes()
        if damage == "not ours":
            path.chmod(0o666)
        elif damage == "a link":
            path.rename(moved := path.with_suffix(".moved"))
            path.symlink_to(moved)
        elif damage == "of another XLA":
            path.write_bytes(hashlib.sha256(b"executable").digest() + b"executable")
        else:
            path.write_bytes(content[:-9] if damage == "torn" else content[:-9] + bytes(9))
    again, second = compiled(tmp_path, norm())
    third = compiled(tmp_path, norm())[1]
    assert (was_loaded(second), was_loaded(third)) == (False, True)
    assert result(again) == result(inventory)


def test_programs_that_differ_in_unused_arguments_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowered text has no unused arguments, so theirs is equal; but a compiled program takes all arguments."""
    monkeypatch.setattr(program_key, "_is_ours", lambda _: True)

    def function(rows: jax.Array, _: Any) -> jax.Array:
        return rows + 1

    rows, reports = jnp.ones(ROWS.shape), []
    for size in (2, 3, 2, 3):
        arguments = (rows, jnp.zeros(size))
        program = Program(
            name="norm", function=function, arguments=jax.eval_shape(lambda *each: each, *arguments)
        )
        inventory, report = compiled(tmp_path, program)
        assert np.array_equal(inventory("norm", *arguments), rows + 1)
        reports.append(report)
    assert len({each.digest for each in reports}) == 1
    assert [was_loaded(each) for each in reports] == [False, False, True, True]


def test_programs_that_were_not_audited_are_not_loaded_in_place_of_audited_ones(tmp_path: Path) -> None:
    plain = Inventory(store=ProgramStore(tmp_path))
    plain.compile([norm()])

    def refuse(name: str, _: Any) -> None:
        raise ConfigError(name)

    for _ in range(2):
        with pytest.raises(ConfigError, match="norm"):
            Inventory(refuse, ProgramStore(tmp_path, "audited")).compile([norm()])


@pytest.mark.parametrize("name", ["package_digest", "xla_flags", "processor", "cores"])
def test_the_machine_and_the_code_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    compiled(tmp_path, norm())
    monkeypatch.setattr(program_key, name, lambda *_: "others")
    assert not was_loaded(compiled(tmp_path, norm())[1])


def test_options_of_jax_are_part_of_the_key() -> None:
    usual = platform_key()
    with jax.default_matmul_precision("highest"):
        assert platform_key() != usual
    assert platform_key() == usual


def key(program: Program) -> str:
    return program_key.program_key(program, "code", "platform")


def closing_over(value: Any) -> Callable[..., Any]:
    return lambda: value


ARRAY = np.arange(4)
VALUES: list[Any] = [
    *(1, 1.0, True, "1", b"1", None, np.float32(1), np.dtype(np.int8), int),
    *((1,), [1], {1}, {1: 2}, {2: 1}, (1, 2, 3), (1, (2, 3)), ((1, 2), 3)),
    *(ARRAY, ARRAY[::-1], ARRAY.astype(np.int8), ARRAY.reshape(2, 2)),
]


def test_programs_that_differ_in_anything_have_other_keys() -> None:
    def programs() -> list[Program]:
        return [
            norm(),
            norm(donate=(0,)),
            norm(rows=jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)),
            norm(rows=jax.ShapeDtypeStruct((3, WIDTH), jnp.bfloat16)),
            replace(norm(), name="other"),
            replace(norm(), arguments=(list(norm().arguments),)),
            *(replace(norm(), function=functools.partial(rms_norm, eps=value)) for value in VALUES),
            *(
                replace(norm(), function=_named(functools.partial(rms_norm, value), "run"))
                for value in (1, 2)
            ),
        ]

    keys = [key(program) for program in programs()]
    assert len(set(keys)) == len(keys)
    assert keys == [key(program) for program in programs()]


@pytest.mark.parametrize(
    "value", [object(), closing_over(1), np.array([{}])], ids=["object", "code", "array"]
)
def test_a_value_of_an_unknown_kind_gives_no_key(value: Any) -> None:
    with pytest.raises(NoKeyError):
        key(replace(norm(), function=functools.partial(rms_norm, eps=value)))


def test_a_program_without_a_key_is_compiled_again(tmp_path: Path) -> None:
    def function(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(rows, weight, 1e-5)

    first, second = (compiled(tmp_path, replace(norm(), function=function)) for _ in range(2))
    assert second[1].lower_seconds > 0 and not list(tmp_path.glob("*.program"))
    assert result(first[0]) == result(second[0])


def test_replaced_code_is_never_stored_under_the_key_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a start without the replacement would run it."""
    usual = code_key()
    monkeypatch.setattr("xla_engine.graphs.steps.decode.sample", closing_over(1))
    with pytest.raises(NoKeyError, match=r"sample was replaced by code of tests"):
        ProgramStore(tmp_path)
    assert program_store("") is None
    monkeypatch.undo()
    monkeypatch.setattr("xla_engine.graphs.attention.xla.XlaAttention.attend_prefill", closing_over(1))
    with pytest.raises(NoKeyError):
        code_key()
    monkeypatch.undo()
    monkeypatch.setattr("xla_engine.graphs.attention.backend.KEY_SPAN", 77)
    assert code_key() != usual
    monkeypatch.undo()
    assert code_key() == usual


def test_the_files_that_were_not_read_for_longest_are_deleted(tmp_path: Path) -> None:
    epsilons = (1e-5, 1e-6, 1e-7)
    for epsilon in epsilons:
        compiled(tmp_path, norm(epsilon))
    for path in tmp_path.glob("*.program"):
        os.utime(path, (1, 1))
    assert was_loaded(compiled(tmp_path, norm(epsilons[1]))[1])  # read last
    ProgramStore(tmp_path).tidy(most_bytes=max(path.stat().st_size for path in tmp_path.glob("*.program")))
    assert [was_loaded(compiled(tmp_path, norm(epsilon))[1]) for epsilon in epsilons] == [False, True, False]
