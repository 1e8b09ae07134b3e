"""Instruction sets of the C++ kernels: the requirements of each on the machine, and its compiler flags.

The library is built for each one that is used. The names of kernels contain it, so one process can use several.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """machines: as `platform.machine` names them. needs: features of the processor, as Linux names them. flags: of
    the compiler, the same on every machine. extras: flags that are added where the processor has a feature; they
    change no bit. tuning: flags besides these where the machine compiles for itself."""

    name: str
    machines: tuple[str, ...]
    needs: frozenset[str]
    flags: tuple[str, ...]
    extras: tuple[tuple[str, str], ...] = ()
    tuning: tuple[str, ...] = ()

    def is_available(self) -> bool:
        """Whether this machine can execute it."""
        return platform.machine().lower() in self.machines and self.needs <= features()

    def is_permitted(self) -> bool:
        """Whether the operating system lets this process execute it. Linux gives tiles to those who ask for them."""
        if "amx_tile" not in self.needs:
            return True
        arch_prctl, request_permission, tile_data = 158, 0x1023, 18
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)

    def compiler_flags(self) -> tuple[str, ...]:
        """For this machine."""
        return (*self.here().flags, *self.tuning)

    def here(self) -> Variant:
        """The variant with all extras of this processor."""
        return self.variant(tuple(feature for feature, _ in self.extras if feature in features()))

    def variants(self) -> tuple[Variant, ...]:
        """One for every set of extras that a processor may have, for libraries that other machines will run."""
        known = [feature for feature, _ in self.extras]
        chosen = itertools.chain.from_iterable(
            itertools.combinations(known, count) for count in range(len(known) + 1)
        )
        return tuple(self.variant(extras) for extras in chosen)

    def variant(self, extras: tuple[str, ...]) -> Variant:
        """With the flags of these extras."""
        flags = tuple(flag for feature, flag in self.extras if feature in extras)
        return Variant("-".join((self.name, *extras)), (*self.flags, *flags))


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set with some of its extras: a name for a library, and its compiler flags."""

    name: str
    flags: tuple[str, ...]


_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_AVX2 = frozenset({"avx2", "fma", "bmi2", "f16c", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_TUNED = ("-mtune=native",)

INSTRUCTION_SETS = (  # best first
    InstructionSet(
        "amx", _X86, _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}, _AMX_FLAGS, (), ("-march=native",)
    ),
    InstructionSet("avx512_bf16", _X86, _BF16, _BF16_FLAGS, (), _TUNED),
    InstructionSet(
        "avx512", _X86, _AVX512, ("-march=x86-64-v4",), (("avx512_vnni", "-mavx512vnni"),), _TUNED
    ),
    InstructionSet("avx2", _X86, _AVX2, ("-march=x86-64-v3",), (("avx_vnni", "-mavxvnni"),), _TUNED),
    InstructionSet(
        "neon_bf16", _ARM, frozenset({"bf16", "asimddp"}), ("-march=armv8.2-a+fp16+dotprod+bf16",)
    ),
    InstructionSet("neon", _ARM, frozenset(), (), (("asimddp", "-march=armv8.2-a+dotprod"),)),
)

_DARWIN = {"hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_BF16": "bf16"}


def available() -> tuple[InstructionSet, ...]:
    """What this machine can execute, best first."""
    return tuple(each for each in INSTRUCTION_SETS if each.is_available())


@functools.cache
def features() -> frozenset[str]:
    """The features of the processor, as Linux names them."""
    if not (text := _cpuinfo()):
        return frozenset(feature for name, feature in _DARWIN.items() if _sysctl(name) == "1")
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(
        word for key, _, words in lines if key.strip() in ("flags", "Features") for word in words.split()
    )


def processor_name() -> str:
    """The model for people, with the numbers that tell generations apart where a hypervisor hides its name."""
    fields: dict[str, str] = {}
    for line in _cpuinfo().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.processor()
    numbers = ", ".join(
        f"{key.split()[-1]} {fields[key]}" for key in ("cpu family", "model") if key in fields
    )
    return (name or platform.machine()) + (f" ({numbers})" if numbers else "")


def processor() -> str:
    """The model, for caches that must not travel."""
    if not (text := _cpuinfo()):
        return f"{platform.machine()} {platform.processor()}"
    kept = {line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(kept))


def _cpuinfo() -> str:
    """Linux' description of the processor; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    """macOS' description of the processor; empty elsewhere."""
    try:
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""
