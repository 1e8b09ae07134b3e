"""A table of pictures, some of them broken, is run, interrupted and resumed: the same bytes, and one row for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import engine
from tests.images.test_features import model, picture
from tests.images.test_pictures import reader
from tests.support.batch_lines import interrupt_at
from tests.support.command_line import invoke
from tests.support.fake_engine import FakeEngine, FakeRequest
from tests.support.tiers import default
from xla_engine.batch.datasets.output import kept_columns
from xla_engine.batch.datasets.rows import RowColumns
from xla_engine.errors import ConfigError
from xla_engine.images.pictures import PictureReader, tiles_sha256
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import prompt_parts

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

__all__ = ["engine", "model", "reader"]


@pytest.mark.parametrize("name", default(["out.parquet", "out.jsonl"]))
def test_a_table_of_pictures_goes_on_to_the_same_bytes(
    tmp_path: Path, engine: FakeEngine, reader: PictureReader, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is a fake; pictures are read and decoded, in threads, and answers are hashes of tiles."""
    decoded: list[str] = []

    def read_pictures(prompt: Any, *, add_special_tokens: bool = True) -> str:
        parts = prompt_parts(prompt)
        placed = reader.prompt(str(parts.content), parts.pictures)
        hashes = [tiles_sha256(reader.tiles(each))[:8] for each in placed.pictures]
        decoded.extend(hashes)
        return "-".join(hashes)

    def output(request: FakeRequest) -> RequestOutput:
        return replace(plain(request), images_sha256=tuple(str(request.prompt).split("-")))

    plain = FakeRequest.output
    monkeypatch.setattr(FakeRequest, "output", output)
    engine.read_pictures, engine.validator.pictures = read_pictures, reader  # type: ignore[attr-defined]
    files = [picture(8 + row % 7, 8 + row % 5) for row in range(40)]
    files[3], files[11], files[17] = files[3][:-30], b"no picture", b""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = pa.array([{"bytes": file, "path": "x.png"} for file in files] + [None], kind)
    pq.write_table(pa.table({"page": range(41), "image": pictures}), tmp_path / "in.parquet")
    whole, target = tmp_path / f"whole-{name}", tmp_path / name
    options = (
        "--prompt-template",
        "<image>{page}",
        "--image-column",
        "image",
        "--id-column",
        "page",
        "--ordered",
    )

    def run(out: Path, *more: str) -> int:
        shared = ("--created", "17", "--no-progress")
        return invoke("run", tmp_path / "in.parquet", "-o", out, *options, *shared, *more).exit_code

    assert run(whole) == 1 and len(decoded) == 37
    engine.on_step, engine.steps = interrupt_at(4), 0
    decoded.clear()
    assert run(target) == 130
    begun = len(decoded)
    engine.on_step = None
    assert run(target, "--resume") == 1
    assert target.read_bytes() == whole.read_bytes() and begun < 30
    if name == "out.parquet":
        found = pq.read_table(target)
        assert found.column_names[:2] == ["page", "custom_id"]  # pictures are not copied
        rows = found.to_pylist()
        errors = {row["page"]: row["error"].partition(":")[0] for row in rows if row["error"]}
        assert errors == {3: "invalid_image", 11: "invalid_image", 17: "invalid_image", 40: "invalid_row"}
        assert rows[35]["generated_text"] == rows[0]["generated_text"] != rows[1]["generated_text"]
        for row in rows:
            hashes = [] if row["error"] else [row["generated_text"].strip("<>")]
            assert row["images_sha256"] == (hashes or None)
        with pytest.raises(ConfigError, match="'images_sha256' of the input has the name of a result column"):
            kept_columns(["images_sha256"], None, RowColumns(image="image"))
        assert kept_columns(["images_sha256"], None, RowColumns()) == [
            "images_sha256"
        ]  # of a run without pictures
