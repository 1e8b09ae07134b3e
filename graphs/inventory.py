"""The closed list of executables: every program is named, compiled ahead of time and counted.

Lowering is serial (tracing holds the interpreter lock anyway), compiling runs in threads. A call goes to the
compiled executable itself, so a wrong shape is an error that names the program, never a silent compile.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.extend.core import Jaxpr

# XLA's rsqrt refines the processor's estimate, once on AMD and twice on Intel. With this option off it divides by a
# square root, and its bits are IEEE's on both (findings/same_bits.md).
_OPTIONS = {"xla_cpu_enable_platform_dependent_math": False}


@cache
def compiler_options() -> dict[str, bool] | None:
    """The options that every program is compiled with; None on other devices, and if XLA does not know the option."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_OPTIONS)
    except (RuntimeError, ValueError):
        return None
    return dict(_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to compile: `function(*arguments)` with abstract arguments; `donate` names argument positions."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """Compile times and memory of one executable. Sizes in bytes, times in seconds.

    name: of the program. digest: of its text as it was lowered.
    shapes: of the argument that varies between programs.
    lower_seconds: tracing and lowering.
    compile_seconds: compiling.
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


class Inventory:
    """Compiled programs by name."""

    def __init__(self, audit: Callable[[str, Jaxpr], None] | None = None) -> None:
        """audit: called with the name of each program and what was traced; an error keeps it from being compiled."""
        self._audit = audit
        self._compiled: dict[str, Any] = {}
        self._reports: dict[str, GraphReport] = {}

    def compile(
        self, programs: list[Program], *, threads: int = 2, progress: Callable[[str], None] | None = None
    ) -> None:
        """Lower and compile all programs; `progress` is called with each finished program's name."""

        options = compiler_options()

        def build(job: tuple[Program, Any, float]) -> tuple[Program, Any, str, float, float]:
            program, lowered, lower_seconds = job
            began = time.perf_counter()
            compiled = lowered.compile(compiler_options=options)
            seconds = time.perf_counter() - began
            digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            return program, compiled, digest, lower_seconds, seconds

        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            futures = [pool.submit(build, job) for job in self._lower(programs)]
            for future in futures:
                program, compiled, digest, lower_seconds, compile_seconds = future.result()
                memory = compiled.memory_analysis()
                self._compiled[program.name] = compiled
                self._reports[program.name] = GraphReport(
                    name=program.name,
                    digest=digest,
                    shapes=_describe(program.arguments[-1]),
                    lower_seconds=lower_seconds,
                    compile_seconds=compile_seconds,
                    temp_bytes=int(memory.temp_size_in_bytes),
                    alias_bytes=int(memory.alias_size_in_bytes),
                    argument_bytes=int(memory.argument_size_in_bytes),
                )
                if progress is not None:
                    progress(program.name)

    def _lower(self, programs: list[Program]) -> Iterator[tuple[Program, Any, float]]:
        for program in programs:
            began = time.perf_counter()
            traced = jax.jit(program.function, donate_argnums=program.donate).trace(*program.arguments)
            if self._audit is not None:
                self._audit(program.name, traced.jaxpr.jaxpr)
            yield program, traced.lower(), time.perf_counter() - began

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


def _describe(argument: Any) -> str:
    """Shapes of the argument that varies between programs (the last one), first leaf only when it is a record."""
    leaves = jax.tree.leaves(argument)
    return f"{leaves[0].dtype}{list(leaves[0].shape)}"
