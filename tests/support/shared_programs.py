"""Engines of tests share compiled programs, but not while a test replaces what programs are made by.

Engines of a process share them in memory. Other processes of a run, and later runs of the same code, find beside JAX's
cache which of its entries is a program, and neither trace nor lower it again.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from tests.support import traced_programs
from xla_engine.graphs.inventory import GraphReport, Inventory, Program
from xla_engine.runner.code_digest import package_digest
from xla_engine.runner.compile_cache import count_compile
from xla_engine.runner.program_key import NoKeyError, platform_key, program_key

_MOST = 400  # programs
_MAKING = ("xla_engine.graphs", "xla_engine.runner")
_CHECKING = "xla_engine.runner.self_check"  # runs them
_TRACED = ("xla_engine.graphs", "xla_engine.runner.programs", "xla_engine.runner.drafting")
_first_seen: dict[tuple[str, ...], Any] = {}
_programs: OrderedDict[str, tuple[Any, GraphReport]] = OrderedDict()


class SharedPrograms:
    """`runner.program_store.ProgramStore` in memory, and in entries of JAX's cache."""

    token = ""
    has_new = False

    def __init__(self, kind: str) -> None:
        self._keys = package_digest(), platform_key(), kind

    def key(self, program: Program) -> str | None:
        try:
            return program_key(program, *self._keys)
        except NoKeyError:
            return None

    def load(self, key: str, name: str) -> tuple[Any, GraphReport] | None:
        if (found := _programs.get(key) or traced_programs.load(key)) is None:
            return None
        self._keep(key, found)
        count_compile(name)
        return found

    def save(self, key: str, compiled: Any, report: GraphReport) -> None:
        self._keep(key, (compiled, report))
        traced_programs.save(key, compiled, report)

    def _keep(self, key: str, found: tuple[Any, GraphReport]) -> None:
        _programs[key] = found
        _programs.move_to_end(key)
        if len(_programs) > _MOST:
            _programs.popitem(last=False)


def shared_programs(kind: str) -> SharedPrograms | None:
    """Stands for `program_store`; None while something that makes programs is replaced."""
    replaced = [name for name, value in _definitions() if _first_seen.setdefault(name, value) is not value]
    return None if replaced else SharedPrograms(kind)


def shared_inventory() -> Inventory:
    """Stands for the inventory of a vision tower, which no store belongs to."""
    return Inventory(store=shared_programs("tower"))


def _definitions() -> Iterator[tuple[tuple[str, ...], Any]]:
    """What tests may replace: functions, methods and classes of modules that make programs, and their constants."""
    for place, module in list(sys.modules.items()):
        if not place.startswith(_MAKING) or place.startswith(_CHECKING):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == place:
                for attribute, method in vars(value).items():
                    if isinstance(method, (FunctionType, staticmethod, classmethod, property)):
                        yield (place, name, attribute), method
            if callable(value) or (place.startswith(_TRACED) and not name.startswith("__")):
                yield (place, name), value
