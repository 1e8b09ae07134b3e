"""Compare two result files, with and without hashes; broken files are refused."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import commands_use
from xla_engine import cli
from xla_engine.batch.compare import compare_files
from xla_engine.batch.record_ids import record_id
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import logprob_bits_sha256, tokens_sha256
from xla_engine.errors import CompareError
from xla_engine.openai.requests import LineRequest, line_error
from xla_engine.openai.results import ResultHeader, error_line, result_line
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.comparison import logprob_bits, logprob_of

Tokens = tuple[int, ...]


def line(
    custom_id: str,
    tokens: Tokens = (1, 2),
    logprobs: tuple[float, ...] | None = (-0.5, -1.5),
    *,
    fingerprint: str | None = "f" * 16,
    text: str | None = None,
    number: int = 1,
) -> bytes:
    request = LineRequest(line=number, custom_id=custom_id, prompts=("p",), params=SamplingParams())
    choice = CompletionOutput(
        index=0,
        text=f"<{tokens}>" if text is None else text,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason="length",
    )
    output = RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=(1,), outputs=(choice,), finished=True
    )
    header = ResultHeader(
        created=number, model="m", system_fingerprint=fingerprint, hashes=fingerprint is not None
    )
    return result_line(request, [output], record_id(number, 0), header)


def failed(custom_id: str) -> bytes:
    return error_line(line_error(1, "invalid_request", "no", custom_id), record_id(1, 0))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def compared(files: tuple[Path, Path], a: list[bytes], b: list[bytes]) -> tuple[Result, dict[str, str]]:
    """The command's result, and its table by the first words of each row."""
    for path, lines in zip(files, (a, b), strict=True):
        path.write_bytes(b"".join(lines))
    result = CliRunner().invoke(cli.main, ["compare", *map(str, files)])
    rows = (row.split("  ", 1) for row in result.output.splitlines() if "  " in row.strip())
    return result, {name: value.strip() for name, value in rows if name}


SAME = line("x")
PLAIN: dict[str, Any] = {"fingerprint": None}


@pytest.mark.parametrize(
    ("a", "b", "status", "rows"),
    [
        # order and created do not matter
        (
            [SAME, line("y", (3,), (-1.0,))],
            [line("y", (3,), (-1.0,), number=7), SAME],
            0,
            {"same tokens": "2"},
        ),
        ([SAME], [line("x", (1, 3))], 1, {"differing tokens": "1", "same tokens": "0"}),
        ([SAME], [line("x", (1, 2, 3), (-0.5, -1.5, -1.0))], 1, {"differing tokens": "1"}),
        ([SAME], [line("x", logprobs=(-0.5, math.nextafter(-1.5, 0)))], 0, {"differing logprob bits": "0"}),
        (
            [SAME],
            [line("x", logprobs=(-0.5, float(np.nextafter(np.float32(-1.5), np.float32(0)))))],
            1,
            {"differing logprob bits": "1", "same tokens": "1"},
        ),
        ([SAME], [SAME, line("y")], 1, {"only in A": "0", "only in B": "1"}),
        ([SAME, line("y")], [SAME], 1, {"only in A": "1", "only in B": "0"}),
        ([SAME, failed("e")], [failed("e"), SAME], 0, {"errors in A, in B": "1, 1", "only in A": "0"}),
        ([failed("x")], [SAME], 1, {"errors in A, in B": "1, 0", "only in A": "0", "only in B": "1"}),
        ([SAME, failed("e")], [SAME], 1, {"only in A": "1"}),
        # a repeated id gets an error line of the same id
        ([SAME, failed("x")], [SAME, failed("x")], 0, {"errors in A, in B": "0, 0", "same tokens": "1"}),
        ([SAME], [SAME], 0, {"fingerprints": f"agree: {'f' * 16}"}),
        (
            [SAME],
            [line("x", fingerprint="e" * 16)],
            0,
            {"fingerprints": f"differ: {'f' * 16} and {'e' * 16}"},
        ),
        ([SAME], [line("x", **PLAIN)], 0, {"fingerprints": "none in B (run with --fingerprint)"}),
        # without hashes: token ids beside the logprobs, else the text
        ([line("x", **PLAIN)], [line("x", **PLAIN)], 0, {"same tokens": "1", "differing logprob bits": "0"}),
        ([line("x", **PLAIN)], [line("x", (1, 4), **PLAIN)], 1, {"differing tokens": "1"}),
        ([SAME], [line("x", (1, 4), **PLAIN)], 1, {"differing tokens": "1"}),
        ([SAME], [line("x", logprobs=(-0.5, -1.0), **PLAIN)], 1, {"differing logprob bits": "1"}),
        (
            [line("x", logprobs=None, **PLAIN)],
            [SAME],
            0,
            {
                "same tokens": "1  (1 of the requests compared by text: no token ids)",
                "differing logprob bits": "0  (not known for 1: no logprobs)",
            },
        ),
        ([line("x", logprobs=None, **PLAIN)], [line("x", text="z")], 1, {"differing tokens": "1"}),
        # a logprob that JSON cannot hold
        (
            [line("x", logprobs=(-0.5, -math.inf), **PLAIN)],
            [line("x", logprobs=(-0.5, -math.inf))],
            0,
            {"differing logprob bits": "0  (not known for 1: no logprobs)"},
        ),
        (
            [line("x", logprobs=(-0.5, -math.inf))],
            [line("x", logprobs=(-0.5, math.nan))],
            1,
            {"differing logprob bits": "1"},
        ),
    ],
)
def test_table(
    files: tuple[Path, Path], a: list[bytes], b: list[bytes], status: int, rows: dict[str, str]
) -> None:
    result, table = compared(files, a, b)
    assert result.exit_code == status, result.output
    assert {name: table[name] for name in rows} == rows
    assert result.output.splitlines()[-1] == ("NOT the same" if status else "same")


def test_first_differing_ids_are_named(files: tuple[Path, Path]) -> None:
    a = [line(f"id-{index}") for index in range(9)]
    b = [line(f"id-{index}", (index, 5)) for index in range(9)]
    result, _ = compared(files, a, b)
    assert "  tokens: id-0, id-1, id-2, id-3, id-4 and 4 more" in result.output
    result, _ = compared(files, [SAME], [SAME, line("bell\a"), line("\ud800")])
    assert r"  only in B: 'bell\x07', '\ud800'" in result.output


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "holds no result line"),
        (b"\n\n", "holds no result line"),
        (SAME + line("y")[:90], "line 2: not JSON .* truncated"),
        (b"{]\n", "line 1: not JSON"),
        (b"\xff\n", "line 1: not JSON"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b"[]\n", "line 1: not a result line: no custom_id"),
        (b'{"prompt": "a request"}\n', "line 1: not a result line: no custom_id"),
        (b'{"custom_id": "x", "prompt": "a request"}\n', "line 1: neither a result nor an error"),
        (b'{"custom_id": "x", "response": {"body": {"choices": []}}, "error": null}\n', "line 1: neither"),
        (SAME.replace(b'"ffffffffffffffff"', b"[1]"), "line 1: neither .*a hash must be a string"),
        (SAME + SAME, "line 2: a second result for custom_id 'x'"),
        (line("x", **PLAIN).replace(b"[1, 2]", b'["1", 2]'), "line 1: neither"),
        (line("x", **PLAIN).replace(b"[-0.5, -1.5]", b"[1e99, 0]"), "line 1: neither"),
    ],
)
def test_a_broken_file_is_named(files: tuple[Path, Path], raw: bytes, message: str) -> None:
    good, bad = files
    good.write_bytes(SAME)
    bad.write_bytes(raw)
    with pytest.raises(CompareError, match=message) as caught:
        compare_files(good, bad)
    assert str(caught.value).startswith(str(bad))
    result = CliRunner().invoke(cli.main, ["compare", str(bad), str(good)])
    assert result.exit_code == 2 and str(bad) in result.output


def test_a_missing_file_is_2(files: tuple[Path, Path]) -> None:
    files[0].write_bytes(SAME)
    assert CliRunner().invoke(cli.main, ["compare", *map(str, files)]).exit_code == 2


@given(st.integers(0, 2**32 - 1))
def test_bits_and_value_are_one(bits: int) -> None:
    value = logprob_of(bits)
    if not math.isnan(value):
        assert logprob_bits(value) == bits
        assert np.float32(value).view(np.uint32) == bits


def test_hashes_are_of_the_documented_bytes() -> None:
    import hashlib

    assert tokens_sha256([1, 300]) == hashlib.sha256(np.array([1, 300], "<i4").tobytes()).hexdigest()
    assert logprob_bits_sha256([-0.5]) == hashlib.sha256(struct.pack("<f", -0.5)).hexdigest()
    assert logprob_bits_sha256(None) is None
    assert tokens_sha256([]) == hashlib.sha256(b"").hexdigest()


def test_two_runs_of_one_file_compare_equal(
    tmp_path: Path, tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other order, other batch: the lines of `run --fingerprint` say the same. Another seed shows."""

    commands_use(monkeypatch, lambda _: tiny)
    requests = [
        {"custom_id": f"id-{index}", "prompt": [index + 1, 7, 9], "max_tokens": 6, "seed": index}
        for index in range(12)
    ]
    for request in requests[::2]:
        request["logprobs"] = 0
    paths = [tmp_path / name for name in ("forward.jsonl", "backward.jsonl", "other.jsonl")]
    other = [{**request, "seed": 99} for request in requests]
    for path, rows, options in zip(
        paths, (requests, requests[::-1], other), (["--ordered"], [], []), strict=True
    ):
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(json.dumps(row) for row in rows))
        result = CliRunner().invoke(
            cli.main, ["run", str(source), "-o", str(path), "--fingerprint", *options]
        )
        assert result.exit_code == 0, result.output
    bodies = [json.loads(row)["response"]["body"] for row in paths[0].read_text().splitlines()]
    assert {body["xla_engine"]["fingerprint"] for body in bodies} == {tiny.identity().digest()}
    assert [body["xla_engine"]["logprob_bits_sha256"] is not None for body in bodies] == [True, False] * 6
    listed = bodies[0]["choices"][0]["logprobs"]["token_ids"]
    assert bodies[0]["xla_engine"]["tokens_sha256"] == tokens_sha256(listed)

    same = compare_files(paths[0], paths[1])
    assert same.ok and same.same == 12 and same.bits_unknown == 6 and same.by_text == 0
    assert not compare_files(paths[0], paths[2]).ok


def test_identity_tells_what_differs(tiny: XlaBatchEngine) -> None:
    from dataclasses import replace

    identity = tiny.identity()
    assert identity.differences(tiny.identity()) == []
    other = replace(identity, platform={**identity.platform, "jax": "0.1"}, config={"lag": 1})
    assert other.digest() != identity.digest()
    differences = other.differences(identity)
    assert f"jax: 0.1 and {identity.platform['jax']}" in differences
    assert "engine option max_num_seqs: absent and 8" in differences
