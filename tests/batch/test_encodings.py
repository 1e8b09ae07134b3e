"""Files of text in any encoding: the same rows and lines as in UTF-8, and a wrong byte is named by its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_engine.batch.datasets.tables import Table
from xla_engine.batch.encodings import as_utf8, check_encoding
from xla_engine.cli import main
from xla_engine.errors import ConfigError

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252", "latin-1"]
LETTERS = st.text(st.sampled_from('ab,"\n é€ß0'), max_size=5)  # in all of them but latin-1, which has no €


class Slowly(io.BytesIO):
    """A file that is read in pieces, which end within characters."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(3)


@given(text=LETTERS, encoding=st.sampled_from(ENCODINGS))
def test_every_encoding_becomes_utf8(text: str, encoding: str) -> None:
    source = Slowly(text.encode(encoding, "replace"))
    found = as_utf8(cast("BinaryIO", source), "f", check_encoding(encoding)).read()
    assert found == text.encode(encoding, "replace").decode(encoding).removeprefix("\ufeff").encode()


@settings(max_examples=40)
@given(before=st.text("aé€\n,", max_size=70_000), rest=st.text("ab", max_size=9))
def test_a_wrong_byte_is_named_by_its_place_wherever_it_is(before: str, rest: str) -> None:
    good = before.encode()
    with pytest.raises(OSError, match=rf"f is not UTF-8 at byte {len(good)} \(0xe9, 'é' in cp1252\)"):
        as_utf8(io.BytesIO(good + b"\xe9" + rest.encode()), "f").read()
    with pytest.raises(OSError, match=rf"f is not cp1252 at byte {len(rest)} \(0x81\)"):
        as_utf8(io.BytesIO(rest.encode() + b"\x81"), "f", "cp1252").read()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tables_and_lines_are_read_in_the_encoding_that_is_named(
    encoding: str, packed: bool, tmp_path: Path
) -> None:
    def written(name: str, text: str) -> str:
        path, data = tmp_path / (name + ".gz" * packed), text.encode(encoding)
        path.write_bytes(gzip.compress(data) if packed else data)
        return str(path)

    text = io.StringIO()
    csv.writer(text).writerows([["größe", "text"], ["7", 'ein "Café",\nzu']])
    table = written("t.csv", text.getvalue())
    assert list(Table(table, encoding).rows()) == [{"größe": "7", "text": 'ein "Café",\nzu'}]
    line = written("t.jsonl", json.dumps({"prompt": "é", "max_tokens": 0}, ensure_ascii=False) + "\n\n")
    result = CliRunner().invoke(main, ["run", line, "--dry-run", "--encoding", encoding])
    assert result.exit_code == 1 and "line 1: invalid_request: max_tokens" in result.output
    if encoding in ("utf-8", "utf-8-sig"):
        return
    for path, options in ((table, ["--prompt-column", "text"]), (line, [])):
        result = CliRunner().invoke(main, ["run", path, "--dry-run", *options])
        if encoding.startswith("utf"):
            assert result.exit_code == 2 and f"is in {encoding}, not UTF-8" in result.output
        elif path == table:  # a line that is not UTF-8 fails alone
            assert result.exit_code == 2 and "is not UTF-8 at byte 2 (0xf6, 'ö' in cp1252)" in result.output


@pytest.mark.parametrize("name", ["utf-9", "base64", "rot13", "", "hex"])
def test_what_is_no_encoding_of_text_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no encoding of text"):
        check_encoding(name)
