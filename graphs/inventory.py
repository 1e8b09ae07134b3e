"""The closed list of executables: every program is named, compiled ahead of time and counted.

A program of an earlier start is loaded from a store. The others are lowered one after the other (tracing holds the
interpreter lock anyway) and compiled in threads. A call goes to the compiled executable itself, so a wrong shape is an
error that names the program, never a silent compile.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import jax

from xla_engine.graphs.joined import joined
from xla_engine.graphs.target import platform

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# XLA's rsqrt refines the processor's estimate, once on AMD and twice on Intel. With this option off it divides by a
# square root, and its bits are IEEE's on both (findings/same_bits.md).
_OPTIONS = {"xla_cpu_enable_platform_dependent_math": False}


LOADING, COMPILING = "loading stored programs", "compiling programs"


def _silent(doing: str, ready: int) -> None:
    """Show nothing."""


def compiler_options() -> dict[str, bool] | None:
    """The options that every program is compiled with; None on other devices, and if XLA does not know the option."""
    return _cpu_options() if platform() == "cpu" else None


@cache
def _cpu_options() -> dict[str, bool] | None:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_OPTIONS)
    except (RuntimeError, ValueError):
        return None
    return dict(_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to compile: `function(*arguments)` with abstract arguments; `donate` names argument positions.

    isa: of the C++ kernels whose calls are joined (`graphs.joined`); None: they stay apart.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    isa: str | None = None


@cache
def program_name(kind: str, **sizes: int) -> str:
    """The name of a program of a kind for these sizes, as in `decode[rows=4,keys=512]`."""
    return f"{kind}[{','.join(f'{name}={size}' for name, size in sizes.items())}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """Compile times and memory of one executable. Sizes in bytes, times in seconds.

    name: of the program. digest: of its text as it was lowered.
    shapes: of the argument that varies between programs.
    lower_seconds: tracing and lowering; 0 if an earlier start did it.
    compile_seconds: compiling, or loading what an earlier start compiled.
    temp_bytes: scratch memory of one call.
    alias_bytes: inputs whose buffers the outputs reuse.
    argument_bytes: all inputs.
    """

    name: str
    digest: str
    shapes: str
    lower_seconds: float
    compile_seconds: float
    temp_bytes: int
    alias_bytes: int
    argument_bytes: int


class ProgramCache(Protocol):
    """Keeps compiled programs between processes.

    token: a part of the names under which its programs are compiled.
    """

    token: str

    def key(self, program: Program) -> str | None:
        """Tells the program from all others, without tracing it; None if that cannot be done."""
        ...

    def load(self, key: str, name: str) -> tuple[Any, GraphReport] | None:
        """The compiled program of an earlier process and its report; None if there is none."""
        ...

    def save(self, key: str, compiled: Any, report: GraphReport) -> None: ...


class Inventory:
    """Compiled programs by name."""

    def __init__(
        self, audit: Callable[[str, Jaxpr], None] | None = None, store: ProgramCache | None = None
    ) -> None:
        """audit: called with the name of each program and what was traced; an error keeps it from being compiled.
        store: of programs that passed the same audit; None: every program is compiled."""
        self._audit = audit
        self._store = store
        self._compiled: dict[str, Any] = {}
        self._reports: dict[str, GraphReport] = {}

    def compile(
        self, programs: list[Program], *, threads: int = 2, progress: Callable[[str, int], None] = _silent
    ) -> None:
        """Load, or lower and compile, all programs.

        progress: called with what is being done and the number of programs that are ready.
        """
        progress(LOADING, 0)
        store = self._store
        keys = [None if store is None else store.key(program) for program in programs]
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            found = list(pool.map(self._load, programs, keys))
            missing = [
                job for job, each in zip(zip(programs, keys, strict=True), found, strict=True) if each is None
            ]
            ready = len(programs) - len(missing)
            progress(COMPILING if missing else LOADING, ready)
            options = compiler_options() if missing else None
            made = iter([pool.submit(self._build, *job, options) for job in self._lower(missing)])
            for program, each in zip(programs, found, strict=True):
                if each is None:
                    each, ready = next(made).result(), ready + 1
                    progress(COMPILING, ready)
                self._compiled[program.name], self._reports[program.name] = each

    def _load(self, program: Program, key: str | None) -> tuple[Any, GraphReport] | None:
        began = time.perf_counter()
        if self._store is None or key is None or (found := self._store.load(key, program.name)) is None:
            return None
        compiled, report = found
        return compiled, replace(report, compile_seconds=time.perf_counter() - began)

    def _build(
        self,
        program: Program,
        key: str | None,
        lowered: Any,
        lower_seconds: float,
        options: dict[str, bool] | None,
    ) -> tuple[Any, GraphReport]:
        began, store = time.perf_counter(), self._store
        compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - began
        text, memory = lowered.as_text(), compiled.memory_analysis()
        report = GraphReport(
            name=program.name,
            digest=hashlib.sha256(
                (text if store is None else text.replace(store.token, "")).encode()
            ).hexdigest(),
            shapes=_describe(program.arguments[-1]),
            lower_seconds=lower_seconds,
            compile_seconds=seconds,
            temp_bytes=int(memory.temp_size_in_bytes),
            alias_bytes=int(memory.alias_size_in_bytes),
            argument_bytes=int(memory.argument_size_in_bytes),
        )
        if store is not None and key is not None:
            store.save(key, compiled, report)
        return compiled, report

    def _lower(
        self, jobs: list[tuple[Program, str | None]]
    ) -> Iterator[tuple[Program, str | None, Any, float]]:
        for program, key in jobs:
            began = time.perf_counter()
            function = program.function
            if self._store is not None and key is not None:
                function = _named(function, f"{program.name} {self._store.token}")
            traced = jax.jit(function, donate_argnums=program.donate).trace(*program.arguments)
            if self._audit is not None:
                self._audit(program.name, traced.jaxpr.jaxpr)
            if program.isa is not None:
                whole = _with_joined_calls(traced, function.__name__, program.isa)
                traced = jax.jit(whole, donate_argnums=program.donate).trace(*program.arguments)
            yield program, key, traced.lower(), time.perf_counter() - began

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Run a program; an unknown name or a shape it was not compiled for is an error that says so."""
        try:
            return self._compiled[name](*arguments)
        except KeyError:
            raise RuntimeError(
                f"program {name!r} is not in the inventory ({', '.join(sorted(self._compiled))}); "
                "nothing is compiled after start-up"
            ) from None
        except TypeError as error:
            raise RuntimeError(
                f"program {name!r} was called with shapes it was not compiled for: {error}"
            ) from error

    def __iter__(self) -> Iterator[GraphReport]:
        return iter(self._reports.values())

    def text(self, name: str) -> str:
        """Optimised HLO of a program."""
        return str(self._compiled[name].as_text())

    def clear(self) -> None:
        """Drop the executables."""
        self._compiled.clear()


def _with_joined_calls(traced: Any, name: str, isa: str) -> Callable[..., Any]:
    """The function that was traced, with calls of C++ kernels joined."""
    results = jax.tree.structure(traced.out_info)
    flat = joined(traced.jaxpr.jaxpr, traced.jaxpr.consts, isa)

    def run(*arguments: Any) -> Any:
        return jax.tree.unflatten(results, flat(*jax.tree.leaves(arguments)))

    return _named(run, name)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return function(*arguments)

    run.__name__ = name
    return run


def _describe(argument: Any) -> str:
    """Shapes of the argument that varies between programs (the last one), first leaf only when it is a record."""
    leaves = jax.tree.leaves(argument)
    return f"{leaves[0].dtype}{list(leaves[0].shape)}"
