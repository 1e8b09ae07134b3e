"""Consecutive calls of C++ kernels in a program become one call (`native/joined.h`).

XLA:CPU takes 3 us of processor time for each call, and each call wakes threads of its pool. A decode step of one row
has five calls in a layer, of 20 to 80 us each in a small model. Joined, they run the same kernels on the same numbers
in the same order, and the threads that help with one call stay for the next.

Results that only joined calls read get no buffers from XLA. They share one, in which those that are not needed at the
same time may overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, Literal

JOINED = "xla_engine_joined"
_PREFIX, _CALL, _LINE = "xla_engine_", "ffi_call", 64
# As XLA's foreign-function interface numbers them.
_TYPES = {"bool": 1, "int8": 2, "int32": 4, "int64": 5, "uint8": 6, "uint32": 8}
_TYPES |= {"float32": 11, "bfloat16": 16}


def is_literal(value: Any) -> TypeGuard[Literal]:
    """Whether an operand in a jaxpr is a constant, and not a variable."""
    return hasattr(value, "val")


def number(target: str) -> int:
    """The number by which joined calls name a target, and C++ its handler: the hash of Fowler, Noll and Vo (1a)."""
    found = 0xCBF29CE484222325
    for byte in target.encode():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return found - 2**64 if found >= 2**63 else found


def joined(program: Jaxpr, constants: Sequence[Any], isa: str) -> Callable[..., list[jax.Array]]:
    """The program as a function of flat inputs with flat outputs. Its calls of the kernels for `isa` are joined.

    A call waits until another operation reads its result.
    """
    last = {each: at for at, equation in enumerate(program.eqns) for each in _variables(equation.invars)}
    last |= dict.fromkeys(_variables(program.outvars), len(program.eqns))

    def run(*arguments: jax.Array) -> list[jax.Array]:
        known = dict(zip((*program.constvars, *program.invars), (*constants, *arguments), strict=True))
        waiting: dict[int, Any] = {}
        made: set[Any] = set()
        for at, equation in enumerate(program.eqns):
            if _can_join(equation, isa, at, last):
                waiting[at] = equation
                made.update(equation.outvars)
                continue
            if not made.isdisjoint(_variables(equation.invars)):
                known.update(_run(waiting, isa, last, known))
                waiting, made = {}, set()
            known.update(_run_alone(equation, known))
        known.update(_run(waiting, isa, last, known))
        return [_value(each, known) for each in program.outvars]

    return run


def _can_join(equation: Any, isa: str, at: int, last: Mapping[Any, int]) -> bool:
    """Whether an equation is a call of a kernel, which overwrites nothing that is read later."""
    if equation.primitive.name != _CALL or equation.params["has_side_effect"]:
        return False
    target = equation.params["target_name"]
    taken = [equation.invars[given] for given, _ in equation.params["input_output_aliases"]]
    return (
        target.startswith(_PREFIX)
        and target.endswith(f"_{isa}")
        and all(each.aval.dtype.name in _TYPES for each in (*equation.invars, *equation.outvars))
        and all(last.get(_key(each)) == at and equation.invars.count(each) == 1 for each in taken)
    )


def _run(
    calls: Mapping[int, Any], isa: str, last: Mapping[Any, int], known: Mapping[Any, Any]
) -> dict[Any, jax.Array]:
    """Run calls as one, and return their results that are read later. calls: by place in the program."""
    if len(calls) < 2:
        return {made: value for each in calls.values() for made, value in _run_alone(each, known).items()}
    owner: dict[Any, Any] = {}  # of a result: whose memory it takes, its own or that of an argument
    uses: dict[Any, list[int]] = {}  # of an owner: the calls that write or read its memory
    for at, call in calls.items():
        for each in call.invars:
            uses.setdefault(owner.get(_key(each), _key(each)), []).append(at)
        aliases = {made: _key(call.invars[given]) for given, made in call.params["input_output_aliases"]}
        for index, made in enumerate(call.outvars):
            own = aliases.get(index, made)
            owner[made] = owner.get(own, own)
            uses.setdefault(owner[made], []).append(at)
    read = {_key(each): each for call in calls.values() for each in call.invars}
    empty = {key: each for key, each in read.items() if not each.aval.size}
    given = {key: each for key, each in read.items() if key not in owner and key not in empty}
    lasting = {made: own for made, own in owner.items() if last.get(made, 0) > max(calls)}
    owners = dict.fromkeys(owner.values())
    results = [own for own in owners if own in given or own in lasting.values()]
    inside = [own for own in owners if own not in results]
    offsets, size = laid_out([(min(uses[own]), max(uses[own]), own.aval) for own in inside])

    # In the order of `RunCalls`. Memory that an argument shares with a result has two places: kernels compare them.
    read_at: dict[Any, int] = {}
    written_at: dict[Any, int] = {}
    for place, key in enumerate((*given, *results, None, *inside, *empty)):
        read_at.setdefault(key, place)
        written_at[key] = place
    stored = [*zip(inside, offsets, strict=True), *((each, 0) for each in empty.values())]
    words = _program(
        calls.values(),
        stored,
        lambda value: read_at[owner.get(_key(value), _key(value))],
        lambda value: written_at[owner[value]],
    )
    found = jax.ffi.ffi_call(
        f"{JOINED}_{isa}",
        (
            *(jax.ShapeDtypeStruct(own.aval.shape, own.aval.dtype) for own in results),
            jax.ShapeDtypeStruct((size,), jnp.uint8),
        ),
        input_output_aliases={place: results.index(key) for place, key in enumerate(given) if key in results},
    )(*(_value(each, known) for each in given.values()), program=np.array(words, np.int64))
    return {made: found[results.index(own)] for made, own in lasting.items()}


def _program(
    calls: Collection[Any],
    stored: Sequence[tuple[Any, int]],
    read_at: Callable[[Any], int],
    written_at: Callable[[Any], int],
) -> list[int]:
    """Calls as `RunCalls` reads them. stored: values in the shared buffer, and their offsets."""
    targets = list(dict.fromkeys(call.params["target_name"] for call in calls))
    words = [len(targets), *map(number, targets), len(stored)]
    for each, offset in stored:
        words += [offset, _TYPES[each.aval.dtype.name], each.aval.ndim, *each.aval.shape]
    words.append(len(calls))
    for call in calls:
        target, attributes = call.params["target_name"], call.params["attributes"]
        words += [targets.index(target), len(call.invars), len(call.outvars), len(attributes)]
        words += [*map(read_at, call.invars), *map(written_at, call.outvars)]
        words += [word for name, value in attributes for word in _words(name, value)]
    return words


def laid_out(spans: Sequence[tuple[int, int, Any]]) -> tuple[list[int], int]:
    """Offsets of values in one buffer, and its size. Values that are in use at the same time do not overlap.

    spans: the first and the last call that use each value, ascending by the first; its shape and dtype.
    """
    held: list[tuple[int, int, int]] = []  # begin, end, last call
    offsets = []
    for first, end, value in spans:
        held = sorted(each for each in held if each[2] >= first)
        size, at = -(-value.size * value.dtype.itemsize // _LINE) * _LINE, 0
        for begin, behind, _ in held:
            if at + size <= begin:
                break
            at = max(at, behind)
        held.append((at, at + size, end))
        offsets.append(at)
    sizes = (
        offset + value.size * value.dtype.itemsize for offset, (*_, value) in zip(offsets, spans, strict=True)
    )
    return offsets, max(sizes, default=0)


def _words(name: str, value: Any) -> list[int]:
    """An attribute as `RunCalls` reads it."""
    array = np.asarray(getattr(value, "val", value))  # JAX wraps arrays to hash them
    array = array.astype(np.int64) if array.dtype.kind == "i" else array
    letters = np.frombuffer(name.encode().ljust(16, b"\0"), np.int64).tolist()
    held = [int(np.frombuffer(each.tobytes().ljust(8, b"\0"), np.int64)[0]) for each in array.reshape(-1)]
    return [*letters, _TYPES[array.dtype.name], len(held) if array.ndim else -1, *held]


def _run_alone(equation: Any, known: Mapping[Any, Any]) -> dict[Any, Any]:
    """The results of an equation."""
    parameters = equation.primitive.get_bind_params(equation.params)
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
    found = equation.primitive.bind(
        *functions, *(_value(each, known) for each in equation.invars), **parameters
    )
    return dict(zip(equation.outvars, found if equation.primitive.multiple_results else [found], strict=True))


def _variables(values: Iterable[Any]) -> Iterator[Any]:
    return (each for each in values if not is_literal(each))


def _key(value: Any) -> Any:
    """What tells an input from others: empty arrays, and constants, are the same if they are equal."""
    aval = value.aval
    if not aval.size:
        return aval.dtype.name, aval.shape
    if is_literal(value):
        return aval.dtype.name, aval.shape, np.asarray(value.val).tobytes()
    return value


def _value(value: Any, known: Mapping[Any, Any]) -> Any:
    return value.val if is_literal(value) else known[value]
