"""`examples/pictures.py` makes a table of a folder: one row for each file, with an error where it is no picture."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path

import pytest
from PIL import Image

from tests.images.test_features import model, picture

__all__ = ["model"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pictures.py"


def test_a_folder_becomes_a_table(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("pictures", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder, whole = tmp_path / "scans", picture(60, 30)
    (folder / "deep").mkdir(parents=True)
    (folder / "a.png").write_bytes(whole)
    (folder / "deep" / "same.png").write_bytes(whole)
    (folder / "cut.png").write_bytes(whole[:-40])  # its header is whole
    (folder / "notes.txt").write_text("no picture")
    (tmp_path / "secret.png").write_bytes(whole)
    (folder / "out.png").symlink_to("../secret.png")
    turned = Image.new("RGB", (20, 40)).getexif()
    turned[0x0112] = 6
    Image.new("RGB", (20, 40)).save(folder / "turned.jpg", exif=turned)

    def table(*options: str) -> dict[str, dict[str, str]]:
        example.main([str(model), str(folder), *options])
        captured = capsys.readouterr()
        found = {row["file"]: row for row in csv.DictReader(io.StringIO(captured.out))}
        tiles = sum(int(row["tiles"] or 0) for row in found.values())
        errors = sum(bool(row["error"]) for row in found.values())
        assert captured.err == f"6 files: {tiles} tiles, {9 * tiles} tokens, {errors} errors\n"
        return found

    found = table()
    assert list(found) == ["a.png", "cut.png", "deep/same.png", "notes.txt", "out.png", "turned.jpg"]
    assert [found[name]["tiles"] for name in ("a.png", "deep/same.png", "turned.jpg")] == ["7", "7", "7"]
    assert (found["turned.jpg"]["width"], found["turned.jpg"]["height"]) == ("40", "20")
    codes = {name: row["error"].partition(":")[0] for name, row in found.items() if row["error"]}
    assert codes == {"notes.txt": "invalid_image", "out.png": "image_not_allowed"}
    decoded = table("--decode")
    assert decoded["cut.png"]["error"].startswith("invalid_image: cut.png: ")
    assert decoded["a.png"]["tiles_sha256"] == decoded["deep/same.png"]["tiles_sha256"]
    assert len({row["tiles_sha256"] for row in decoded.values()}) == 3  # with none, for errors
    assert table("--one-tile")["a.png"]["tokens"] == "9"
    monkeypatch.setattr(example.PictureReader, "of_model", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="reads no pictures"):
        table()
