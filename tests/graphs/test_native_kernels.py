"""The C++ kernels alone (`native_kernels.cc`), for every instruction set; those of other machines are emulated."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from xla_engine import graphs
from xla_engine.runner.native_library.instruction_sets import (
    INSTRUCTION_SETS,
    InstructionSet,
    available,
    features,
)
from xla_engine.runner.native_library.recipe import FLAGS

HEADERS = Path(graphs.__file__).parent / "native"
WITHOUT_TILES = tuple(each for each in INSTRUCTION_SETS if each.name != "amx")
ARM = ("aarch64", "arm64")
BY_CLANG = ("avx2", "neon")  # in CI


COMPILED = (*FLAGS, "-static")
# Hashes of what kernels make of fixed numbers, on every machine (findings/same_bits.md).
PRODUCTS = "products 547fd87448d2ca9d"
SMALL = "small fdd149d00d991fdc"
REST = [
    "bytes fcff66195beea6cb",
    "rest 62cca53733acb908",
    "sampler abe267bd3842398d",
    "groups d39ed54419ae054a",
    "logs 00c15a232d2d3ee8",
    "coded 3d7f0088ff33aea5",
]


def run(compiler: str, flags: tuple[str, ...], directory: Path, *emulator: str) -> tuple[str, list[str]]:
    """The output of the program, and the hashes of its bits."""
    program = directory / "kernels"
    source = Path(__file__).with_name("native_kernels.cc")
    built = subprocess.run(
        [compiler, *COMPILED, *flags, f"-I{HEADERS}", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[:2000]
    done, bits = (
        subprocess.run([*emulator, str(program), *words], capture_output=True, text=True, check=False)
        for words in ((), ("bits",))
    )
    return done.stdout + done.stderr, bits.stdout.splitlines()


HERE = tuple(each.name for each in available() if each in WITHOUT_TILES)


# With and without what a processor may have beside the set: dot products of bytes. The sets with bf16 have the same
# code for these, and the sets without extras that for everything else, so CI runs all code.
VARIANTS = [
    pytest.param(
        "g++", isa, extras, id=" ".join((isa.name, *extras)), marks=[pytest.mark.release] * len(extras)
    )
    for isa in WITHOUT_TILES
    for extras in dict.fromkeys(((), tuple(feature for feature, _ in isa.extras)))
] + [
    pytest.param(
        "clang++", isa, (), id=f"{isa.name} clang", marks=() if isa.name in BY_CLANG else pytest.mark.release
    )
    for isa in WITHOUT_TILES
]


@pytest.mark.full
@pytest.mark.parametrize(("compiler", "isa", "extras"), VARIANTS)
def test_kernels_are_sums_in_any_instruction_set(
    compiler: str, isa: InstructionSet, extras: tuple[str, ...], tmp_path: Path
) -> None:
    added = tuple(flag for feature, flag in isa.extras if feature in extras)
    flags = (*isa.flags, *added, *(isa.tuning if HERE[:1] == (isa.name,) else ()))
    arm, own = isa.machines == ARM, platform.machine() in isa.machines
    cross = "aarch64-linux-gnu" if arm else "x86_64-linux-gnu"
    tools = [compiler]
    if not own:
        tools = [compiler, f"{cross}-g++"] if compiler == "clang++" else [f"{cross}-g++"]
        flags = (f"--target={cross}", *flags) if compiler == "clang++" else flags
    emulator: tuple[str, ...] = ()
    if not (own and isa.needs | set(extras) <= features()):
        if not arm and (isa.name != "avx2" or extras):
            pytest.skip("needs a processor that has it: qemu-user has no AVX-512 and no VNNI")
        emulator = ("qemu-aarch64" if arm else "qemu-x86_64", "-cpu", "max")
        tools.append(emulator[0])
    if not own and isa.name == "neon" and compiler == "g++" and not extras:
        flags = (*flags, "-O1")  # half the time; the other variants of NEON are compiled as they are shipped
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian: clang, g++-aarch64-linux-gnu, qemu-user)")
    said, bits = run(tools[0], flags, tmp_path, *emulator)
    assert said == "ok\n"
    # bfdot, which multiplies weights and values too, rounds otherwise
    own_bits = isa.name == "neon_bf16"
    assert bits == [PRODUCTS, SMALL, *REST] or (own_bits and bits[3:] == REST[1:])
