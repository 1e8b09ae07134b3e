"""Certificates that sign themselves, made by the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(own: Path, key: Path, name: str, *extensions: str) -> subprocess.CompletedProcess[str]:
    """Write a certificate of a subject, valid for two days, and its key; the caller looks at the exit status."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(own)]
    for extension in extensions:
        command += ["-addext", extension]
    return subprocess.run(command, capture_output=True, text=True, check=False)
