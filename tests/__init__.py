"""Tests, which keep bytecode even if PYTHONDONTWRITEBYTECODE is set, as it is in many containers.

Otherwise each worker, and each process that a test starts, would compile every source again.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
