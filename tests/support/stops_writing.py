"""`xla-engine` that writes no line beyond so many before a file exists, so that a test can end it in the middle.

`python -m tests.support.stops_writing LINES FILE COMMAND...`
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from xla_engine.batch.output_file import OutputFile
from xla_engine.cli import main


def stop_writing(lines: int, until: Path) -> None:
    """Let each result file wait for `until` once it has so many lines."""
    write = OutputFile.write

    def write_or_wait(sink: OutputFile, data: bytes) -> None:
        if sink._path.read_bytes().count(b"\n") >= lines:
            while not until.exists():
                time.sleep(0.01)
        write(sink, data)

    OutputFile.write = write_or_wait  # type: ignore[method-assign]


if __name__ == "__main__":
    stop_writing(int(sys.argv[1]), Path(sys.argv[2]))
    main(sys.argv[3:], prog_name="xla-engine")
