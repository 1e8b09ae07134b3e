"""Checks whether a server or a function gives a request the same answer under any load. Standard library only."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_engine.same_bits.checks import check as check
    from xla_engine.same_bits.report import Report as Report
    from xla_engine.same_bits.server import HttpTarget as HttpTarget
    from xla_engine.same_bits.target import Answer as Answer
    from xla_engine.same_bits.target import Ask as Ask
    from xla_engine.same_bits.target import CallableTarget as CallableTarget
    from xla_engine.same_bits.target import Choice as Choice
    from xla_engine.same_bits.target import Target as Target
    from xla_engine.same_bits.target import TargetError as TargetError

_HOME = {"check": "checks", "Report": "report", "HttpTarget": "server"}
_HOME |= dict.fromkeys(("Answer", "Ask", "CallableTarget", "Choice", "Target", "TargetError"), "target")
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"xla_engine.same_bits.{_HOME[name]}"), name)
