"""Receipts of a run whose output is a table: written, resumed and in shards; whatever is changed in it is found."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import engine
from tests.support.batch_lines import interrupt_at
from tests.support.command_line import invoke
from tests.support.fake_engine import FakeEngine
from tests.support.tiers import default
from xla_engine.batch.receipts import MerkleTree, footer_line
from xla_engine.errors import ReceiptError
from xla_engine.receipts import verify
from xla_engine.receipts.report import AuditReport
from xla_engine.utils.json_line import dump_line

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

__all__ = ["engine"]

NAMES = ["red", "green", "blue", None, "no!"]  # the last two are errors
COLUMNS = ("--prompt-column", "name", "--id-column", "key")
ASKED = {"prompt": "name", "id": "key"}
KINDS = ["out.csv", "out.parquet", "out.tsv", "out.csv.gz"]


def a_table(path: Path, rows: int = len(NAMES)) -> Path:
    names = [NAMES[row % len(NAMES)] for row in range(rows)]
    table = {
        "key": [10 * row for row in range(rows)],
        "name": names,
        "score": [row / 4 for row in range(rows)],
    }
    pq.write_table(pa.table(table), path)
    return path


def run(source: Path, target: Path, *options: str) -> Any:
    receipts = ("--receipts", str(receipts_of(target)))
    return invoke(
        "run", source, "-o", target, *COLUMNS, *receipts, "--created", "17", "--no-progress", *options
    )


def receipts_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.receipts.jsonl")


def verified(target: Path, **options: Any) -> AuditReport:
    return verify(target, receipts_of(target), **options)


def names(target: Path, **options: Any) -> set[str | None]:
    return {each.custom_id for each in verified(target, **options).rejected}


@pytest.mark.parametrize("name", KINDS)
def test_a_table_has_a_receipt_of_each_row(tmp_path: Path, engine: FakeEngine, name: str) -> None:
    source, target = a_table(tmp_path / "in.parquet"), tmp_path / name
    assert run(source, target, "--ordered").exit_code == 1  # two rows have errors
    report = verified(target, requests=source, columns=ASKED)
    assert report.ok, report.lines()
    assert (report.answers, report.errors) == (5, 2)
    written = receipts_of(target).read_bytes()
    done = run(source, target, "--retry-failed")
    assert done.exit_code == 1 and verified(target).ok, done.output
    assert run(source, target, "--ordered", "--overwrite").exit_code == 1
    assert receipts_of(target).read_bytes() == written


@pytest.mark.parametrize("name", default(KINDS))
def test_an_interrupted_run_is_resumed_to_the_same_receipts(
    tmp_path: Path, engine: FakeEngine, name: str
) -> None:
    source, target = a_table(tmp_path / "in.parquet", 60), tmp_path / name
    assert run(source, target, "--ordered").exit_code == 1
    table, whole = target.read_bytes(), receipts_of(target).read_bytes()
    for path in (target, receipts_of(target), Path(f"{target}.journal.jsonl")):
        path.unlink()
    engine.on_step, engine.steps = interrupt_at(4), 0
    assert run(source, target, "--ordered").exit_code == 130
    assert not target.exists()
    engine.on_step = None
    assert run(source, target, "--ordered", "--resume").exit_code == 1
    assert (target.read_bytes(), receipts_of(target).read_bytes()) == (table, whole)
    assert verified(target).ok


def test_a_finished_table_has_finished_receipts(tmp_path: Path, engine: FakeEngine) -> None:
    source, target = a_table(tmp_path / "in.parquet", 3), tmp_path / "out.csv"
    assert run(source, target).exit_code == 0
    assert "nothing to do" in run(source, target, "--resume").stderr
    receipts_of(target).unlink()
    done = run(source, target, "--resume")
    assert done.exit_code == 2 and "was written without" in done.stderr
    assert run(source, target, "--overwrite").exit_code == 0
    assert verified(target).ok


def test_shards_of_a_table_have_receipts_of_their_own(tmp_path: Path, engine: FakeEngine) -> None:
    source = a_table(tmp_path / "in.parquet", 30)
    answers = 0
    for index in range(2):
        target = tmp_path / f"part-{index}.parquet"
        assert run(source, target, "--shard", f"{index}/2").exit_code == 1
        report = verified(target, requests=source, columns=ASKED, shard=f"{index}/2")
        assert report.ok, report.lines()
        answers += report.answers
        other = verified(target, requests=source, columns=ASKED, shard=f"{1 - index}/2")
        assert other.exit_status == 1
    assert answers == 30


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
@pytest.mark.parametrize("step", default([53, 3]))
def test_every_flipped_byte_of_a_table_is_found(
    tmp_path: Path, engine: FakeEngine, name: str, step: int
) -> None:
    target = tmp_path / name
    run(a_table(tmp_path / "in.parquet"), target)
    draw = random.Random(0)
    for path in (target, receipts_of(target)):
        whole = path.read_bytes()
        for place in range(0, len(whole), step):
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            with contextlib.suppress(ReceiptError):  # the header cannot be read
                assert names(target), f"byte {place} of {path.name}"
        path.write_bytes(whole)
    assert not names(target)


Rows = list[dict[str, Any]]


def rewrite(target: Path, change: Callable[[Rows], None], *, digest: bool) -> None:
    """Change the rows of a table; `digest` also writes its new digest and a root that fits, as a cheater can."""
    if target.suffix == ".parquet":
        table = pq.read_table(target)
        rows = table.to_pylist()
        change(rows)
        pq.write_table(pa.Table.from_pylist(rows, table.schema), target)
    else:
        with open(target, newline="") as file:
            rows = list(csv.DictReader(file))
        fields = list(rows[0])
        change(rows)
        with open(target, "w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if digest:
        tree, lines = MerkleTree(), receipts_of(target).read_bytes().splitlines()[:-2]
        lines.append(
            dump_line({"table_sha256": hashlib.sha256(target.read_bytes()).hexdigest()}).removesuffix(b"\n")
        )
        for line in lines:
            tree.add(line)
        lines.append(dump_line(footer_line(tree)))
        receipts_of(target).write_bytes(b"\n".join(lines))


def _text(rows: Rows) -> None:
    rows[1]["generated_text"] = "better"


def _response(rows: Rows) -> None:
    rows[1]["response"] = rows[1]["response"].replace("green", "Green")


def _swapped(rows: Rows) -> None:
    for name in ("response", "generated_text"):
        rows[1][name], rows[2][name] = rows[2][name], rows[1][name]


def _reason(rows: Rows) -> None:
    rows[1]["finish_reason"] = "stop"


def _error(rows: Rows) -> None:
    rows[3]["error"] = "invalid_row: the prompt is too hard"


def _failed(rows: Rows) -> None:
    """An answer is called an error."""
    rows[1] |= dict.fromkeys(["response", "generated_text", "finish_reason"]) | {"error": "aborted: sorry"}
    rows[1] |= dict.fromkeys(["num_input_tokens", "num_generated_tokens"])


def _left_out(rows: Rows) -> None:
    del rows[1]


def _twice(rows: Rows) -> None:
    rows.append({**rows[1]})


def _id(rows: Rows) -> None:
    rows[1]["custom_id"] = "77"


def _copied(rows: Rows) -> None:
    """A column that is copied from the input."""
    rows[1]["score"], rows[2]["score"] = rows[2]["score"], rows[1]["score"]


CHANGES = [_text, _response, _swapped, _reason, _error, _failed, _left_out, _twice, _id, _copied]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_row_is_named(tmp_path: Path, engine: FakeEngine, name: str, change: Any) -> None:
    """Also if the digest of the table and the root fit; of copied columns only the input can tell then."""
    source, target = a_table(tmp_path / "in.parquet"), tmp_path / name
    run(source, target)
    rewrite(target, lambda rows: None, digest=True)
    assert verified(target, requests=source, columns=ASKED).ok
    table, whole = target.read_bytes(), receipts_of(target).read_bytes()
    rewrite(target, change, digest=False)
    assert None in names(target)  # the digest of the table
    target.write_bytes(table)
    receipts_of(target).write_bytes(whole)
    rewrite(target, change, digest=True)
    assert None not in names(target)
    found = names(target, requests=source, columns=ASKED)
    assert "30" in found if change is _error else found & {"10", "77"}, found
    assert not found & {"0", "40"}


def test_the_digest_of_an_answer_is_that_of_its_cell(tmp_path: Path, engine: FakeEngine) -> None:
    """As docs/receipts.md says."""
    target = tmp_path / "out.parquet"
    run(a_table(tmp_path / "in.parquet"), target)
    header, *receipts, digest, footer = map(json.loads, receipts_of(target).read_bytes().splitlines())
    assert header["results"] == "table"
    assert digest == {"table_sha256": hashlib.sha256(target.read_bytes()).hexdigest()}
    assert footer["lines"] == len(receipts) + 1 == 6
    rows = {row["custom_id"]: row for row in pq.read_table(target).to_pylist()}
    for receipt in receipts:
        row = rows[receipt["custom_id"]]
        cell = row["response"] or row["error"]
        assert receipt["answer_sha256"] == hashlib.sha256(cell.encode()).hexdigest()


def test_a_file_of_lines_is_no_table(tmp_path: Path, engine: FakeEngine) -> None:
    target = tmp_path / "out.parquet"
    run(a_table(tmp_path / "in.parquet"), target)
    with pytest.raises(ReceiptError, match="name the table"):
        verify(tmp_path / "out.jsonl", receipts_of(target))
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "none.parquet", receipts_of(target))
