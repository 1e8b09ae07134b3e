# Frozen: runs at commit 84bfb74.
"""What does a wheel with the C++ operations inside weigh, and what does a first start gain by it?

python -m spikes.043_wheel
"""

# %%
from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spikes.support.timing import describe_machine, markdown_table
from xla_engine import graphs
from xla_engine.runner.native_library.bundled import read_manifest
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.runner.native_library.wheel.backend import compile_libraries

print(describe_machine(), "\n")
START = """
import sys, time
from pathlib import Path
from xla_engine.runner.native_library import build
build._BUNDLE = Path(sys.argv[1])
began = time.perf_counter()
isa = build.register()
print(time.perf_counter() - began, isa, build.origin(isa))
"""


# %%
def start(bundle: Path, cache: str) -> str:
    """Milliseconds of a start's registration in a new process, and where the library came from."""
    words = [sys.executable, "-c", START, str(bundle)]
    done = subprocess.run(
        ["env", f"XLA_ENGINE_CACHE={cache}", *words], capture_output=True, text=True, check=True
    )
    seconds, _, origin = done.stdout.split(maxsplit=2)
    return f"{1e3 * float(seconds):.0f} ({origin.strip()})"


with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
    bundle = Path(folder) / "libraries"
    began = time.perf_counter()
    paths = [Path(path) for path in compile_libraries(Path(graphs.__file__).parent / "native", bundle)]
    seconds = time.perf_counter() - began
    manifest = read_manifest(bundle)
    assert manifest is not None
    print(
        f"{len(paths)} libraries in {seconds:.0f} s by {manifest.compiler}, for {available()[0].name} and below\n"
    )
    print(
        markdown_table(["library", "KB"], [[path.stem, round(path.stat().st_size / 1e3)] for path in paths])
    )
    nowhere = Path(folder) / "nothing"
    rows = [
        ["bundled", start(bundle, cache)],
        ["compiled", start(nowhere, cache)],
        ["compiled before", start(nowhere, cache)],
    ]
    print()
    print(markdown_table(["start", "ms"], rows))
