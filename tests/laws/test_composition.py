"""Parts hold parts: our classes inherit from none of ours but for exceptions, protocols, modules and records.

Inherited code has to be read in two files at once, and a base class tends to use what only its descendants
have. The exceptions are listed below, each with its reason; the list may only get shorter.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("xla_engine", "graphs", "scheduler")
RECORDS = {"dataclass", "NamedTuple", "TypedDict", "Protocol", "Immutable", "Struct"}

INHERITS = {
    # records with the fields of another
    "PoolingParams": "takes SamplingParams' place wherever parameters go; callers build both",
    "AsyncEngineArgs": "a public name of vLLM's, with fields of EngineArgs and more",
    # one contract, two forms of the code behind it
    "GivenTensors": "tensors of a mapping behind TensorFiles' lookups",
    "RecordedClock": "a Clock that is told instead of computing",
    "FaultyTokenizer": "plants faults below the methods of the class that it replaces",
    "_Ends": "an OutputCollector that hears of ends",
    # a peer of the benchmark
    "Continuous": "a variant of Static",
}


@functools.cache
def _nodes() -> list[tuple[str, ast.ClassDef | ast.Call]]:
    """All classes and calls in our files, each with its file."""
    return [
        (str(path.relative_to(ROOT)), node)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(part.is_symlink() for part in path.parents)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.ClassDef, ast.Call))
    ]


def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for _, node in _nodes():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    return found


def _name(node: ast.expr) -> str:
    """The last part of the name of a base or decorator, without type arguments or a call."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_free(node: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether other classes may inherit from this one: it is an exception, a protocol, a module, or a record."""
    words = {_name(each) for each in (*node.bases, *node.decorator_list)}
    if words & RECORDS or node.name in RECORDS or "Module" in words:
        return True
    if any(word.endswith(("Error", "Exception", "Warning", "Interrupt")) for word in (node.name, *words)):
        return True
    ours = [classes[word] for word in words if word in classes and word != node.name]
    return any(all(_is_free(each, classes) for each in nodes) for nodes in ours)


def test_our_classes_hold_parts_and_inherit_no_code() -> None:
    classes, found = _classes(), set[str]()
    for name, nodes in classes.items():
        for node in nodes:
            # A base with a dot is another package's.
            plain = [base for base in node.bases if not isinstance(base, ast.Attribute)]
            ours = [base for base in map(_name, plain) if base in classes]
            if "Protocol" in map(_name, plain):
                continue
            if any(not all(_is_free(each, classes) for each in classes[base]) for base in ours):
                found.add(name)
    assert found - INHERITS.keys() == set(), "compose it, or give the reason in INHERITS"
    assert INHERITS.keys() - found == set(), "no longer needed: take it off the list"


def test_no_class_of_ours_is_cast_to_another() -> None:
    """A cast hides from type checkers that two classes differ; a protocol states what they share."""
    classes, found = _classes(), set[str]()
    for place, node in _nodes():
        if isinstance(node, ast.Call) and _name(node.func) == "cast" and node.args:
            target = node.args[0]
            word = target.value if isinstance(target, ast.Constant) else ast.unparse(target)
            if isinstance(word, str) and word in classes:
                found.add(f"{place}: {word}")
    assert found == set()
