"""Generated pictures, and what transformers makes of them (`tests/golden/images`)."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra `images`: pip install -e '.[images]'")

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="package")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(GOLDEN / "make" / "make_golden_images.py")))


@pytest.fixture(scope="package")
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "images" / "golden.json").read_text())
