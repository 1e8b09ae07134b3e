"""What XLA's compiler for TPUs expects a program to cost, read from the text of what it compiled.

Each operation that it scheduled has an estimate of its cycles. They are summed from the entry on: of a conditional,
one branch runs; the body of a loop runs as often as its trip count or its condition says, and once where neither tells
a number. Copies that run beside the operations have no
cycles; the bytes that a program must read bound its time from below (`runner.roofline`). Kernels in Pallas have no
estimate of the compiler's: they count as the shortest operation and, whichever takes longer, the bytes that they move
or the operations that they state.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERATION = re.compile(r"\s(while|conditional|call|async-start)\(")
_INSIDE = re.compile(r"(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_MOVED = re.compile(r'"bytes_accessed":"(\d+)"')
_STATED = re.compile(r'"flops":"(\d+)"')
_PER_CYCLE = 2048  # operations of the vector unit: two on each of 1,024 lanes
_SHORTEST = 1824  # cycles that the compiler gives an operation of almost no work
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_BELOW = re.compile(r"ROOT .* compare\(.*%([\w.-]+)\), direction=LT")
_CONSTANT = re.compile(r"^\s*%?([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_ENTRY_OF_TABLE = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")
_OURS = re.compile(r"(?:^|/)(?:xla_engine/)?(graphs/[\w/]+\.py)$")


class Cost(NamedTuple):
    """cycles: of one call. lines: cycles by source line, such as `graphs/ops/norms.py:41`."""

    cycles: int
    lines: Counter[str]


class Costs(NamedTuple):
    """least: if every conditional takes its cheapest branch, as when no row needs what it skips. most: its dearest."""

    least: Cost
    most: Cost


def read_costs(text: str, cycles_of_byte: float = 0.0) -> Costs | None:
    """The costs of a compiled program, from its text; None if the compiler estimated none.

    cycles_of_byte: what a byte costs that a kernel moves.
    """
    if _CYCLES.search(text) is None and _KERNEL not in text:
        return None
    source, bodies, entry = _Sources(text), _computations(text), _entry(text)
    return Costs(*(_Summed(bodies, source.line, cycles_of_byte, choose).of(entry) for choose in (min, max)))


class _Summed:
    """Sums the operations of computations. choose: which of the branches' costs counts."""

    def __init__(
        self,
        bodies: dict[str, list[str]],
        line_of: Callable[[str], str],
        cycles_of_byte: float,
        choose: Callable[[Iterable[Cost]], Cost],
    ) -> None:
        self._bodies, self._line_of, self._choose = bodies, line_of, choose
        self._cycles_of_byte = cycles_of_byte
        self._known: dict[str, Cost] = {}

    def of(self, name: str) -> Cost:
        if (known := self._known.get(name)) is not None:
            return known
        total, lines = 0, Counter[str]()
        for operation in self._bodies.get(name, ()):
            cost = self._operation(operation)
            total += cost.cycles
            lines.update(cost.lines)
        self._known[name] = cost = Cost(total, lines)
        return cost

    def _operation(self, text: str) -> Cost:
        head = text.partition("metadata=")[0]
        if (kind := _OPERATION.search(head)) is None:
            if (cycles := self._own(text)) == 0:
                return Cost(0, Counter())
            return Cost(cycles, Counter({self._line_of(text): cycles}))
        inside = [self.of(name) for name in _INSIDE.findall(head)]
        if kind[1] == "conditional":
            names = _BRANCHES.search(head)
            branches = [] if names is None else [each.strip(" %") for each in names[1].split(",")]
            return self._choose([*inside, *map(self.of, branches)])
        trips = self._trips(text)
        lines = Counter[str]()
        for each in inside:
            lines.update({line: trips * cycles for line, cycles in each.lines.items()})
        return Cost(trips * sum(each.cycles for each in inside), lines)

    def _trips(self, text: str) -> int:
        """How often a call or a loop runs. A loop of JAX counts from zero up to a constant of its condition."""
        if (known := _TRIPS.search(text)) is not None:
            return int(known[1])
        condition = _CONDITION.search(text)
        lines = [] if condition is None else self._bodies.get(condition[1], [])
        constants = {found[1]: int(found[2]) for line in lines if (found := _CONSTANT.search(line))}
        below = next((found[1] for line in lines if (found := _BELOW.search(line))), "")
        return constants.get(below, 1)

    def _own(self, text: str) -> int:
        """The cycles of one operation."""
        if (own := _CYCLES.search(text)) is not None:
            return int(own[1])
        if _KERNEL not in text:
            return 0
        moved, stated = (int(found[1]) if (found := each.search(text)) else 0 for each in (_MOVED, _STATED))
        return _SHORTEST + round(max(self._cycles_of_byte * moved, stated / _PER_CYCLE))


def _entry(text: str) -> str:
    found = re.search(r"^ENTRY %?([\w.-]+) ", text, re.M)
    assert found is not None
    return found[1]


def _computations(text: str) -> dict[str, list[str]]:
    """The operations of each computation."""
    found: dict[str, list[str]] = {}
    operations: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _COMPUTATION.match(line)):
            operations = found.setdefault(head[1], [])
        elif line.startswith("  "):
            operations.append(line)
    return found


class _Sources:
    """The tables at the head of a program's text: files, places in them, and frames of a stack."""

    def __init__(self, text: str) -> None:
        self._files = _table(text, "FileNames")
        self._places = _table(text, "FileLocations")
        self._frames = _table(text, "StackFrames")

    def line(self, operation: str) -> str:
        """The innermost line of our code on an operation's stack, or its operation if there is none."""
        found = _FRAME.search(operation)
        frame = None if found is None else found[1]
        while frame is not None and (numbers := _numbers(self._frames.get(frame))):
            place = _numbers(self._places.get(numbers["file_location_id"]))
            if ours := _OURS.search(self._files.get(place.get("file_name_id", ""), "")):
                return f"{ours[1]}:{place['line']}"
            above = numbers.get("parent_frame_id")
            frame = None if above == frame else above
        return "elsewhere"


def _table(text: str, title: str) -> dict[str, str]:
    """The entries of a table by their numbers; empty if there is no such table."""
    begin = text.find(f"\n{title}\n")
    if begin < 0:
        return {}
    found = {}
    for line in text[begin + len(title) + 2 :].splitlines():
        if (entry := _ENTRY_OF_TABLE.match(line)) is None:
            break
        found[entry[1]] = entry[2] if entry[2] is not None else entry[3]
    return found


def _numbers(entry: str | None) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", entry or ""))
