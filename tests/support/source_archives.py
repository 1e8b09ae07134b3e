"""Pinned source archives of other projects, fetched by pip: their own tests and examples run from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_ARCHIVES = {  # version and SHA-256
    "vllm": ("0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
    "llama-cpp-python": ("0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
}


def unpack_archive(project: str, folder: Path) -> Path:
    """The sources of a project, downloaded and unpacked in `folder` unless they are there.

    pip checks the hash, unpacks the archive and stops where it needs the project's build tools, which are not
    installed; `--no-clean` keeps what it unpacked. Raises LookupError, with pip's last words.
    """
    sources = folder / project
    if sources.exists():
        return sources
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        version, digest = _ARCHIVES[project]
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{project}=={version} --hash=sha256:{digest}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-clean"]
        command += ["--no-build-isolation", "--dest", scratch, "--requirement", str(requirements)]
        environment = {**os.environ, "TMPDIR": scratch}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        unpacked = [each.parent for each in Path(scratch).glob("*/*/PKG-INFO")]
        if not unpacked:
            raise LookupError(f"pip cannot bring the source archive of {project}: {ran.stderr[-500:]}")
        unpacked[0].rename(sources)
    return sources
