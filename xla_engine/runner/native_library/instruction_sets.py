"""Instruction sets that the C++ operations are built for: what a machine needs for each, and what a compiler is told.

The library is built once for each that is asked for. Operations bear its name: several can serve in one process.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """machines: as `platform.machine` names them. needs: features of the processor, in the words of Linux. flags: of
    the compiler. extras: flags that are added where the processor has a feature; they change no bit."""

    name: str
    machines: tuple[str, ...]
    needs: frozenset[str]
    flags: tuple[str, ...]
    extras: tuple[tuple[str, str], ...] = ()

    def is_available(self) -> bool:
        """Whether this machine can execute it."""
        return platform.machine().lower() in self.machines and self.needs <= features()

    def compiler_flags(self) -> tuple[str, ...]:
        """For this machine."""
        return (*self.flags, *(flag for feature, flag in self.extras if feature in features()))


_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_AVX2 = frozenset({"avx2", "fma", "bmi2", "f16c", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_X86_FLAGS = ("-mtune=native",)

INSTRUCTION_SETS = (  # best first
    InstructionSet("amx", _X86, _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}, ("-march=native",)),
    InstructionSet(
        "avx512_bf16", _X86, _BF16, (*_X86_FLAGS, "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
    ),
    InstructionSet(
        "avx512", _X86, _AVX512, (*_X86_FLAGS, "-march=x86-64-v4"), (("avx512_vnni", "-mavx512vnni"),)
    ),
    InstructionSet("avx2", _X86, _AVX2, (*_X86_FLAGS, "-march=x86-64-v3"), (("avx_vnni", "-mavxvnni"),)),
    InstructionSet(
        "neon_bf16", _ARM, frozenset({"bf16", "asimddp"}), ("-march=armv8.2-a+fp16+dotprod+bf16",)
    ),
    InstructionSet("neon", _ARM, frozenset(), (), (("asimddp", "-march=armv8.2-a+dotprod"),)),
)


def available() -> tuple[InstructionSet, ...]:
    """What this machine can execute, best first."""
    return tuple(each for each in INSTRUCTION_SETS if each.is_available())


@functools.cache
def features() -> frozenset[str]:
    """What the processor can do, in the words of Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return _features_of_darwin()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(
        word for key, _, words in lines if key.strip() in ("flags", "Features") for word in words.split()
    )


def processor() -> str:
    """The model, for caches that must not travel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _features_of_darwin() -> frozenset[str]:
    names = {"hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_BF16": "bf16"}
    found = set()
    for name, feature in names.items():
        try:
            asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        except OSError:
            break
        if asked.stdout.strip() == "1":
            found.add(feature)
    return frozenset(found)
