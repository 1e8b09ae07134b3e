"""Tables in and out of a run: every row gives one row, with its columns and its result or its error."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import engine
from tests.support.batch_lines import interrupt_at
from tests.support.command_line import invoke, records_of
from tests.support.fake_engine import FakeEngine
from tests.support.tiers import default
from xla_engine.batch.datasets import files
from xla_engine.batch.datasets.answers import AnswerColumns
from xla_engine.batch.datasets.output import kept_columns, publish
from xla_engine.batch.datasets.rows import RowColumns, row_lines, template_columns
from xla_engine.batch.datasets.tables import Table
from xla_engine.batch.lines import LineReader
from xla_engine.errors import ConfigError
from xla_engine.openai.requests import LineError
from xla_engine.utils.json_line import dump_line

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

__all__ = ["engine"]

QUIET = ("--created", "17", "--no-progress")
NAMES = ["red", "green", "blue", None, "no!", "x" * 200]
RESULTS = [
    "custom_id",
    "generated_text",
    "finish_reason",
    "num_input_tokens",
    "num_generated_tokens",
    "error",
    "response",
]


def a_table(rows: int = len(NAMES)) -> Any:
    return pa.table(
        {
            "key": [10 * row for row in range(rows)],
            "name": [NAMES[row % len(NAMES)] for row in range(rows)],
            "tags": [["a", "b"][: row % 3] for row in range(rows)],
            "score": [row / 4 for row in range(rows)],
        }
    )


def run(source: Path | str, target: Path | str, *options: str) -> Any:
    return invoke("run", source, "-o", target, *QUIET, *options)


def test_parquet_in_and_out(tmp_path: Path, engine: FakeEngine) -> None:
    pq.write_table(a_table(), tmp_path / "in.parquet")
    target = tmp_path / "out.parquet"
    done = run(tmp_path / "in.parquet", target, "--prompt-column", "name", "--id-column", "key")
    assert done.exit_code == 1, done.output  # three rows have errors
    found = pq.read_table(target)
    assert found.column_names == [*a_table().column_names, *RESULTS]
    assert found.select(a_table().column_names) == a_table()
    rows = found.to_pylist()
    assert [row["custom_id"] for row in rows] == ["0", "10", "20", "30", "40", "50"]
    assert [row["generated_text"] for row in rows] == ["<red>", "<green>", "<blue>", None, None, None]
    assert rows[0] | {"num_input_tokens": 3, "num_generated_tokens": 2, "finish_reason": "length"} == rows[0]
    assert json.loads(rows[0]["response"])["choices"][0]["text"] == "<red>"
    assert rows[3]["error"] == "invalid_row: column 'name' is empty in this row"
    assert rows[4]["error"] == "invalid_request: not this one" and rows[4]["response"] is None
    assert rows[5]["error"].startswith("token_limit_exceeded: ")
    assert (tmp_path / "out.parquet.journal.jsonl").exists()  # for --retry-failed


@pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out.csv.gz", "out.jsonl"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, engine: FakeEngine, name: str) -> None:
    pq.write_table(a_table(60), tmp_path / "in.parquet", row_group_size=7)
    options = ("--prompt-template", "{name}/{key}", "--id-column", "key", "--ordered")
    whole, target = tmp_path / f"whole-{name}", tmp_path / name
    assert run(tmp_path / "in.parquet", whole, *options).exit_code == 1
    engine.on_step, engine.steps = interrupt_at(4), 0
    engine.submitted.clear()
    assert run(tmp_path / "in.parquet", target, *options).exit_code == 130
    assert not target.exists() or name.endswith(".jsonl")
    begun = len(engine.submitted)
    engine.on_step = None
    assert run(tmp_path / "in.parquet", target, *options, "--resume").exit_code in (0, 1)
    assert target.read_bytes() == whole.read_bytes() and begun < 40
    before = len(engine.submitted)
    assert run(tmp_path / "in.parquet", target, *options, "--resume").exit_code in (0, 1)
    assert len(engine.submitted) == before  # nothing is run twice
    assert target.read_bytes() == whole.read_bytes()


OUTPUTS = ["out.parquet", "out.csv", "out.csv.gz", "out.tsv", "memory://foreign/out.parquet"]
LINES = ["out.jsonl", "out.jsonl.gz", "out.json", "out.ndjson", "out.arrow", "out.feather", "out.txt"]


def written(target: str, data: bytes | None = None) -> bytes:
    """The bytes of a file or URL, which it is given first."""
    if data is not None:
        with (
            files.file_system(target)[0].open(target, "wb")
            if files.is_url(target)
            else open(target, "wb") as out
        ):
            out.write(data)
    with files.opened(target) as file:
        return file.read()


@pytest.mark.parametrize("flag", default(["--resume", "--retry-failed", ""]))
@pytest.mark.parametrize("name", OUTPUTS + LINES)
def test_a_file_that_no_run_wrote_is_no_output(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, flag: str
) -> None:
    """Somebody's older file of the same name is neither called whole nor changed, and the error says what to do."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    for data in (b"id,generated_text\n1,x\n", b'{"custom_id": "1"}\n', b"PAR1....PAR1", b"\0" * 40):
        written(name, data)
        done = run("in.jsonl", name, *([flag] if flag else []))
        assert done.exit_code == 2 and not engine.submitted, done.output
        assert written(name) == data and ("-o" in done.stderr or "--overwrite" in done.stderr)
    assert not list(tmp_path.glob("*journal*"))


@pytest.mark.parametrize("flag", ["--resume", "--retry-failed", ""])
@pytest.mark.parametrize("names", [("out.jsonl", "--errors"), ("out.csv", "--journal")])
def test_a_file_that_no_run_wrote_is_no_output_beside_another(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], flag: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(b'{"prompt": "a"}\n')
    for data in (b"id,generated_text\n1,x\n", b'{"custom_id": "1"}\n', b"\0" * 40):
        written("foreign", data)
        done = run("in.jsonl", names[0], names[1], "foreign", *([flag] if flag else []))
        assert done.exit_code == 2 and not engine.submitted and "foreign" in done.stderr, done.output
        assert written("foreign") == data


def test_a_folder_is_no_output(tmp_path: Path, engine: FakeEngine) -> None:
    """Also where it would be replaced, before hours of work and not after them."""
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n')
    (tmp_path / "out.parquet").mkdir()
    for flag in ((), ("--overwrite",), ("--resume",)):
        done = run(tmp_path / "in.jsonl", tmp_path / "out.parquet", *flag)
        assert done.exit_code == 2 and "is a folder; name a file" in done.stderr and not engine.submitted


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_finished_table_is_whole_for_its_input_alone(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    Path("other.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "c"}\n')
    assert run("in.jsonl", name, "--overwrite").exit_code == 0
    before, asked = written(name), len(engine.submitted)
    done = run("in.jsonl", name, "--resume")
    assert done.exit_code == 0 and "is complete; there is nothing to do" in done.stderr
    for other in (("other.jsonl",), ("in.jsonl", "--max-tokens", "3"), ("in.jsonl", "--shard", "0/2")):
        done = run(other[0], name, *other[1:], "--resume")
        assert done.exit_code == 2 and "another input" in done.stderr, done.output
    written(name, before[:-1] + b"?")
    done = run("in.jsonl", name, "--resume")
    assert done.exit_code == 2 and "no record that a run finished it" in done.stderr, done.output
    assert len(engine.submitted) == asked


def test_failed_rows_run_again(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(a_table(), tmp_path / "in.parquet")
    target = tmp_path / "out.parquet"
    options = ("--prompt-column", "name")
    run(tmp_path / "in.parquet", target, *options)
    monkeypatch.setattr("tests.support.fake_engine.LONGEST", 1000)
    assert run(tmp_path / "in.parquet", target, *options).exit_code == 2  # results are never replaced unasked
    assert run(tmp_path / "in.parquet", target, *options, "--retry-failed").exit_code == 1
    rows = pq.read_table(target).to_pylist()
    assert [row["error"] is None for row in rows] == [True, True, True, False, False, True]


def test_csv_rows_that_cannot_be_read_are_errors_of_their_own(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "in.csv").write_text(
        'id,text\na,"one, two"\nb\nc,"three\nlines"\n\nd,four,five\na,twice\n,none\n'
    )
    target = tmp_path / "out.csv"
    done = run(tmp_path / "in.csv", target, "--prompt-column", "text", "--id-column", "id")
    assert done.exit_code == 1
    with open(target, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["generated_text"] for row in rows] == ["<one, two>", "", "<three\nlines>", "", "", ""]
    assert [row["error"].partition(":")[0] for row in rows] == [
        "",
        "invalid_row",
        "",
        "invalid_row",
        "duplicate_custom_id",
        "invalid_row",
    ]
    assert "1 fields, not the 2" in rows[1]["error"] and "no id for this row" in rows[5]["error"]


def test_two_columns_of_a_name_are_refused(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "in.csv").write_text("prompt,a,a\nx,1,2\n")
    done = run(tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert done.exit_code == 2 and "two columns 'a'" in done.stderr


def test_json_lines_and_arrays(tmp_path: Path, engine: FakeEngine) -> None:
    rows = [{"q": "one", "n": 1}, {"q": "two", "n": 2.5, "more": [1]}, {"n": 3}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    (tmp_path / "array.json").write_text(json.dumps(rows))
    for name, count in (("lines.jsonl", 4), ("array.json", 3)):
        target = tmp_path / f"{name}.parquet"
        assert run(tmp_path / name, target, "--prompt-column", "q").exit_code == 1
        found = pq.read_table(target).to_pylist()
        assert [row["generated_text"] for row in found[:2]] == ["<one>", "<two>"] and len(found) == count
        assert found[1]["n"] == 2.5 and found[1]["more"] == "[1]"
        assert all(row["error"].startswith("invalid_row") for row in found[2:])


def test_a_folder_a_saved_dataset_and_a_pattern(tmp_path: Path, engine: FakeEngine) -> None:
    """Files in order of their names; what `datasets` saves has a list of its own."""
    folder, saved = tmp_path / "folder", tmp_path / "saved"
    for place in (folder, saved):
        place.mkdir()
    for index in range(3):
        part = pa.table({"prompt": [f"p{index}-{row}" for row in range(4)]})
        pq.write_table(part, folder / f"{index}.parquet")
        with (
            pa.OSFile(str(saved / f"data-{index}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, part.schema) as out,
        ):
            out.write_table(part)
    files = [{"filename": f"data-{index}.arrow"} for index in range(3)]
    (saved / "state.json").write_text(json.dumps({"_data_files": files}))
    expected = [f"<p{index}-{row}>" for index in range(3) for row in range(4)]
    for number, source in enumerate((folder, saved, f"{folder}/*.parquet")):
        target = tmp_path / f"out-{number}.parquet"
        assert run(source, target).exit_code == 0
        assert pq.read_table(target).column("generated_text").to_pylist() == expected
        assert not list(tmp_path.glob("*.journal.jsonl"))


def test_chats_and_sampling_params_of_columns(tmp_path: Path, engine: FakeEngine) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi", "name": None}], "sampling_params": {"max_tokens": 5}},
        {"messages": [{"role": "user", "content": "ho", "name": "x"}], "sampling_params": None},
        {"messages": [{"role": "user", "content": "no"}], "sampling_params": {"max_tokens": -5}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.parquet").exit_code == 1
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["generated_text"] for row in found] == ["<hi>", "<ho>", None]
    assert "max_tokens" in found[2]["error"]


def test_a_table_of_questions_with_columns_of_sampling_fields(tmp_path: Path, engine: FakeEngine) -> None:
    """Columns that are not used are named in a warning, and with `--chat` its questions become chats."""
    (tmp_path / "in.csv").write_text("question,max_tokens,seed\nhi,5,1\nho,,2\nno,-5,3\n")
    asked = (tmp_path / "in.csv", tmp_path / "out.csv", "--prompt-column", "question")
    done = run(*asked)
    assert (
        done.exit_code == 0
        and "not used: max_tokens, seed; --sampling-columns max_tokens,seed" in done.stderr
    )
    done = run(*asked, "--sampling-columns", "max_tokens,seed", "--system", "be", "--overwrite")
    assert done.exit_code == 1 and "not used" not in done.stderr
    texts = [row["generated_text"] for row in csv.DictReader((tmp_path / "out.csv").read_text().splitlines())]
    assert texts == ["<be|hi>", "<be|ho>", ""] and "max_tokens" in done.stderr
    assert "did you mean 'seed'" in run(*asked, "--sampling-columns", "sede", "--overwrite").stderr


def test_urls(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    with memory.open("/bucket/in.parquet", "wb") as file:
        pq.write_table(a_table(3), file)
    with memory.open("/bucket/in.jsonl.gz", "wb") as file:
        file.write(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    assert (
        run(
            "memory://bucket/in.parquet", "memory://bucket/deep/out.parquet", "--prompt-column", "name"
        ).exit_code
        == 0
    )
    with memory.open("/bucket/deep/out.parquet", "rb") as file:
        assert pq.read_table(file).column("generated_text").to_pylist() == ["<red>", "<green>", "<blue>"]
    assert run("memory://bucket/in.jsonl.gz", "memory://bucket/out.jsonl", "--ordered").exit_code == 0
    assert memory.cat("/bucket/out.jsonl").count(b"\n") == 2 and not list(tmp_path.iterdir())
    done = run("memory://bucket/in.jsonl.gz", "memory://bucket/out.jsonl", "--resume")
    assert done.exit_code == 0 and "there is nothing to do" in done.stderr
    done = run("nothing://bucket/in.parquet", "out.jsonl")
    assert done.exit_code == 2 and "Traceback" not in done.output


def test_request_lines_to_a_table(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a", "custom_id": "x"}\n{"prompt": "no!"}\n')
    assert run(tmp_path / "in.jsonl", tmp_path / "out.parquet").exit_code == 1
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.column_names == RESULTS and found.column("custom_id").to_pylist() == ["x", "line-2"]


def test_shards_of_a_table(tmp_path: Path, engine: FakeEngine) -> None:
    pq.write_table(a_table(30), tmp_path / "in.parquet")
    options = ("--prompt-template", "{key}", "--id-column", "key")
    assert run(tmp_path / "in.parquet", tmp_path / "whole.parquet", *options).exit_code == 0
    parts = []
    for index in range(4):
        target = tmp_path / f"part-{index}.parquet"
        assert run(tmp_path / "in.parquet", target, *options, "--shard", f"{index}/4").exit_code == 0
        parts.append(pq.read_table(target))
    assert pa.concat_tables(parts).sort_by("key") == pq.read_table(tmp_path / "whole.parquet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no column is called prompt or messages; name one of key, name, tags, score"),
        (("--prompt-column", "nam"), "did you mean 'name'"),
        (("--prompt-column", "name", "--prompt-template", "{name}"), "give one"),
        (("--prompt-template", "{name!r}"), "name of a column in braces"),
        (("--prompt-template", "{"), "for a brace"),
        (("--prompt-column", "name", "--keep-columns", "names"), "no column 'names' to keep"),
        (("--prompt-column", "name", "--errors", "e.jsonl"), "has a column for errors"),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine_starts(
    tmp_path: Path, engine: FakeEngine, options: tuple[str, ...], message: str
) -> None:
    pq.write_table(a_table(), tmp_path / "in.parquet")
    done = run(tmp_path / "in.parquet", tmp_path / "out.parquet", *options)
    assert done.exit_code == 2 and message in done.stderr, done.output
    assert not hasattr(engine, "options")


def test_options_without_an_effect_are_refused(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n')
    for options in (("--keep-columns", "a"), ("--journal", "j.jsonl")):
        done = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", *options)
        assert done.exit_code == 2 and "for a table" in done.stderr
    assert invoke("run", tmp_path / "in.jsonl", "--stream", "--prompt-column", "prompt").exit_code == 2
    assert invoke("run", "--prompt", "x", "--shard", "0/2").exit_code == 2


def test_an_output_of_a_run_is_input_of_the_next_without_its_columns(
    tmp_path: Path, engine: FakeEngine
) -> None:
    pq.write_table(a_table(3), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "one.parquet", "--prompt-column", "name")
    again = ("--prompt-column", "generated_text")
    done = run(tmp_path / "one.parquet", tmp_path / "two.parquet", *again)
    assert done.exit_code == 2 and "--keep-columns" in done.stderr
    assert (
        run(tmp_path / "one.parquet", tmp_path / "two.parquet", *again, "--keep-columns", "key").exit_code
        == 0
    )
    assert pq.read_table(tmp_path / "two.parquet").column_names == ["key", *RESULTS]


def test_a_dry_run_reads_tables(tmp_path: Path) -> None:
    pq.write_table(a_table(3), tmp_path / "in.parquet")
    done = invoke(
        "run", tmp_path / "in.parquet", "--dry-run", "--prompt-column", "name", "--max-model-len", "64"
    )
    assert done.exit_code == 0 and "3: 3 ok" in done.stdout


def test_braces_of_a_template() -> None:
    assert template_columns("{{}} {a}{b} {a}") == ["a", "b", "a"]
    columns = RowColumns(template='{{"x": {a}}}').of(["a"])
    (line,) = row_lines([{"a": 5}], columns)
    assert json.loads(line.raw or b"") == {"prompt": '{"x": 5}'}
    with pytest.raises(ConfigError, match="no column 'b'"):
        RowColumns(template="{b}").of(["a"])


def test_values_that_are_no_json_are_errors_of_their_row() -> None:
    rows: list[Any] = [{"prompt": b"bytes"}, {"prompt": float("nan")}, {"prompt": "good"}, "torn"]
    lines = list(row_lines(rows, RowColumns(prompt="prompt")))
    read = [LineReader().read(line) for line in lines]
    assert [isinstance(each, LineError) for each in read] == [True, True, False, True]
    assert isinstance(read[3], LineError) and read[3].message == "torn" and read[3].line == 4


def test_the_journal_has_the_same_lines_as_a_run_to_lines(tmp_path: Path, engine: FakeEngine) -> None:
    """A table is another form of the same results."""
    pq.write_table(a_table(), tmp_path / "in.parquet")
    options = ("--prompt-column", "name", "--ordered")
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl", *options)
    run(
        tmp_path / "in.parquet", tmp_path / "out.parquet", *options, "--journal", str(tmp_path / "kept.jsonl")
    )
    assert records_of(tmp_path / "kept.jsonl") == records_of(tmp_path / "out.jsonl")


CELLS = st.sampled_from(
    [
        "",
        "0",
        "7",
        "-12",
        "007",
        "+1",
        "1.5",
        "-0.25",
        "1e3",
        "9" * 19,
        "9" * 30,
        "true",
        "False",
        "nan",
        "x",
        "1_0",
        "٣",
    ]
)


@given(cells=st.lists(CELLS, min_size=1, max_size=5))
def test_columns_of_csv_files_become_numbers_if_all_their_cells_are(
    cells: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is read back is what pandas reads from the CSV file, and names such as 007 stay text."""
    path = tmp_path_factory.getbasetemp() / "typed.csv"
    path.write_text("prompt,cell\n" + "".join(f"p,{cell}\n" for cell in cells), encoding="utf-8")
    found = [
        value
        for batch in Table(str(path)).batches(["cell"], typed=True)
        for value in batch.column(0).to_pylist()
    ]
    given_cells = [cell for cell in cells if cell]

    def is_integer(cell: str) -> bool:
        return cell in ("0", "7", "-12")

    if all(map(is_integer, given_cells)):
        wanted: list[Any] = [int(cell) if cell else None for cell in cells]
    elif all(is_integer(cell) or cell in ("1.5", "-0.25", "1e3") for cell in given_cells):
        wanted = [float(cell) if cell else None for cell in cells]
    elif all(cell in ("true", "False") for cell in given_cells):
        wanted = [cell == "true" if cell else None for cell in cells]
    else:
        wanted = [cell or None for cell in cells]
    assert found == wanted and list(map(type, found)) == list(map(type, wanted))
    (untyped,) = [batch.column(0).to_pylist() for batch in Table(str(path)).batches(["cell"])]
    assert untyped == [cell or None for cell in cells]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_integer_id_comes_back_as_an_integer(kind: str, tmp_path: Path) -> None:
    source = tmp_path / f"in.{kind}"
    frame = pa.table({"custom_id": [17, 18], "prompt": ["a", "b"]})
    if kind == "csv":
        source.write_text("custom_id,prompt\n17,a\n18,b\n")
    else:
        pq.write_table(frame, source)
    table = Table(str(source))
    columns = RowColumns().of(table.names)
    kept = kept_columns(table.names, None, columns)
    journal = tmp_path / "journal.jsonl"
    answers = AnswerColumns.of(
        {"properties": {"n": {"type": ["integer", "null"]}, "why": {"enum": ["a"]}, "of": {"type": "array"}}}
    )
    texts = ['{"n": 2.0, "why": "a", "of": [1]}', '{"n": "x", "why']
    journal.write_bytes(b"".join(_result(number, text) for number, text in enumerate(texts, 1)))
    publish(journal, str(tmp_path / "out.parquet"), table, kept, answers=answers)
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.column("custom_id").to_pylist() == [17, 18] and table.num_rows == 2
    assert out.schema.field("n").type == pa.int64() and out.column("n").to_pylist() == [2, None]
    assert out.column("of").to_pylist() == ["[1]", None] and out.column("why").to_pylist() == ["a", None]
    with pytest.raises(ConfigError, match="property 'prompt' has the name of another column"):
        AnswerColumns.of({"properties": {"prompt": {}}}).check_names(kept)


def _result(number: int, text: str) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage}
    record = {
        "id": f"batch_req_{number}_{number:016x}",
        "custom_id": str(number),
        "response": {"body": body},
        "error": None,
    }
    return dump_line(record)
