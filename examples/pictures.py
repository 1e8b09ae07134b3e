"""A folder of pictures becomes a table: how large each is, how many tiles and tokens a model makes of it, or why it
cannot be used. `python examples/pictures.py MODEL FOLDER > pictures.csv`

No weights are loaded and no pixel is decoded, except with --decode, which finds files that are damaged behind their
header, and adds the hash of each picture's tiles: pictures with equal hashes look equal to the model.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xla_engine.errors import InvalidImageError
from xla_engine.images.pictures import PictureReader, tiles_sha256
from xla_engine.images.sources import ImageAccess
from xla_engine.model_loader.model_files import open_model
from xla_engine.prompts import Picture

COLUMNS = ("file", "width", "height", "tiles", "tokens", "tiles_sha256", "error")


def rows(reader: PictureReader, folder: Path, *, decode: bool) -> Iterator[dict[str, Any]]:
    """One row for each file of the folder and its subfolders, in the order of their names."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(folder).as_posix()
        row: dict[str, Any] = {"file": name}
        try:
            (picture,) = reader.prompt(reader.form.mark, [Picture(name, name)]).pictures
            row["width"], row["height"] = picture.grid.picture
            row["tiles"] = picture.grid.tiles
            row["tokens"] = picture.grid.tiles * reader.image_seq_len
            if decode:
                row["tiles_sha256"] = tiles_sha256(reader.tiles(picture))
        except InvalidImageError as error:
            row["error"] = f"{error.code}: {error}"
        yield row


def main(arguments: list[str] | None = None) -> None:
    """Write the table to standard output, and its sums to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory or hub id of Idefics3, SmolVLM or Gemma 3")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decode", action="store_true", help="decode the pixels, too")
    parser.add_argument("--one-tile", action="store_true", help="make one tile of each picture")
    given = parser.parse_args(arguments)
    reader = PictureReader.of_model(
        open_model(given.model),
        access=ImageAccess(allowed_local_media_path=given.folder),
        mm_processor_kwargs={"do_image_splitting": False} if given.one_tile else None,
    )
    if reader is None:
        sys.exit(f"{given.model} reads no pictures; give a checkpoint of Idefics3, SmolVLM or Gemma 3")
    table = csv.DictWriter(sys.stdout, COLUMNS)
    table.writeheader()
    count = tiles = tokens = errors = 0
    for row in rows(reader, given.folder, decode=given.decode):
        table.writerow(row)
        count += 1
        tiles += row.get("tiles", 0)
        tokens += row.get("tokens", 0)
        errors += "error" in row
    reader.close()
    print(f"{count} files: {tiles} tiles, {tokens} tokens, {errors} errors", file=sys.stderr)


if __name__ == "__main__":
    main()
