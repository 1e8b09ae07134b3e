"""Receipts of answers: write them, check a result file against them, and compute its answers again.

`xla-engine run --receipts` and `xla-engine audit` do the same on the command line; see docs/receipts.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_engine.receipts.api import audit as audit
    from xla_engine.receipts.api import audit_outputs as audit_outputs
    from xla_engine.receipts.api import save as save
    from xla_engine.receipts.api import verify as verify
    from xla_engine.receipts.api import write as write
    from xla_engine.receipts.report import AuditReport as AuditReport
    from xla_engine.receipts.report import Objection as Objection

_HOME = dict.fromkeys(("audit", "audit_outputs", "save", "verify", "write"), "api") | dict.fromkeys(
    ("AuditReport", "Objection"), "report"
)
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, because every run of pytest loads this package for its plugin."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
