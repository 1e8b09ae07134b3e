"""Which products in bf16 take pairs at once and which widen, on processors with vdpbf16ps (`native/widening.h`).

Both have the same bits. The instruction has twice the rate of fused multiply-adds on AMD and half of it on Intel, so
the first start times both, for each number of rows of a group, and the result is cached with the compiled kernels. The
variable `XLA_ENGINE_BF16_PRODUCTS` ("pairs" or "widened") decides instead.
"""

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from xla_engine.environment import bf16_products, native_cache_directory
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own
from xla_engine.runner.native_library.instruction_sets import processor

ISA = "avx512_bf16"  # the instruction set that has the choice
BLOCK_ROWS = 12  # rows of the largest group (`kBlockRows`)
ALL_ROWS = range(1, BLOCK_ROWS + 1)
_GAIN = 1.1  # products widen where the instruction takes longer by this factor
_PARTS = {  # the parts with a kind of products; the first one times it
    "bf16": ("linear_bf16", "lora_bf16", "experts_bf16"),
    "coded": ("linear_coded", "lora_coded"),
}
_libraries: dict[str, ctypes.CDLL] = {}  # by part, as far as they are loaded
_widened: dict[str, tuple[int, ...]] = {}  # the numbers of rows that widen in this process, by kind


def choose(libraries: Mapping[str, ctypes.CDLL], digest: str) -> None:
    """Tell newly loaded libraries of `ISA` for which numbers of rows their products widen.

    libraries: by part. digest: of what they were made from. Raises ConfigError for an unknown value of the variable.
    """
    _libraries.update(libraries)
    for kind, parts in _PARTS.items():
        if kind not in _widened and parts[0] in libraries:
            _widened[kind] = _decide(kind, libraries[parts[0]], digest)
        if kind in _widened and not libraries.keys().isdisjoint(parts):
            widen(kind, _widened[kind])


def widen(kind: str, rows: Sequence[int]) -> tuple[int, ...]:
    """Let groups of these numbers of rows widen, in all products of a kind; returns those that did. No product may be
    running while this changes them."""
    before, _widened[kind] = _widened.get(kind, ()), tuple(rows)
    for part in _PARTS[kind]:
        if part in _libraries:
            _function(_libraries[part], "Widen", part)(sum(1 << each for each in rows))
    return before


def words() -> dict[str, str]:
    """For people: how the kinds of products that are loaded multiply."""
    return {kind: _words(rows) for kind, rows in _widened.items()}


def faster_widened(seconds: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The numbers of rows for which products should widen. seconds: of pairs and widened, for each of `ALL_ROWS`."""
    return tuple(rows for rows, (pairs, wide) in zip(ALL_ROWS, seconds, strict=True) if pairs > _GAIN * wide)


def timed(part: str, library: ctypes.CDLL) -> list[tuple[float, float]]:
    """The seconds of a product by pairs and widened, for each of `ALL_ROWS`; takes milliseconds."""
    seconds = (ctypes.c_double * (2 * BLOCK_ROWS))()
    _function(library, "Time", part)(seconds)
    return list(zip(seconds[::2], seconds[1::2], strict=True))


def _decide(kind: str, library: ctypes.CDLL, digest: str) -> tuple[int, ...]:
    asked = bf16_products()
    if asked != "auto":
        return tuple(ALL_ROWS) if asked == "widened" else ()
    key = hashlib.sha256(f"{digest}\0{processor()}".encode()).hexdigest()[:16]
    path = private_directory(native_cache_directory()) / f"widening-{kind}-{key}.json"
    if (kept := _read(path)) is not None:
        return kept
    found = faster_widened(seconds := timed(_PARTS[kind][0], library))
    with contextlib.suppress(OSError):  # the next start times again
        write_own(path, json.dumps({"widened": found, "seconds": seconds}).encode())
    return found


def _read(path: Path) -> tuple[int, ...] | None:
    try:
        found = json.loads(read_own(path))["widened"]
        return tuple(rows for rows in ALL_ROWS if rows in found)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _function(library: ctypes.CDLL, what: str, part: str) -> "ctypes._NamedFuncPointer":
    return getattr(library, f"XlaEngine{what}{''.join(word.capitalize() for word in part.split('_'))}")


def _words(rows: Sequence[int]) -> str:
    if not rows:
        return "vdpbf16ps"
    if len(rows) == BLOCK_ROWS:
        return "widened"
    return f"vdpbf16ps, but widened in groups of {', '.join(map(str, rows))} rows"
