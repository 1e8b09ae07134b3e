"""No bit follows a maths library: exponentials, logarithms, angles and powers are the engine's own.

Results of libm and of NumPy's loops depend on the machine. What XLA computes is audited program by program
(`graphs.portable`), so these laws read the rest: the C++ kernels, and what the host computes for a model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from xla_engine.runner.native_library.recipe import FLAGS

PACKAGE = Path(__file__).parents[2] / "xla_engine"
KERNELS = PACKAGE / "graphs" / "native"
HOST = ("graphs", "model_loader", "runner")

_CURVES = (
    r"a?(?:sin|cos|tan)h?|arc\w+|a?tan2|exp[21]?|expm1|log(?:2|10|1p)?|logaddexp2?|(?:float_)?pow(?:er)?|cbrt|hypot"
    r"|[lt]gamma|erfc?"
)
CALL_IN_CPP = re.compile(rf"(?<![\w.:])(?:(?:std)?::)?((?:{_CURVES})[fl]?)\(")
CALL_IN_PYTHON = re.compile(rf"(?:{_CURVES})\Z")
ALLOWED = {
    "graphs/native/logprobs.h": ["log"],  # of 0, infinities and NaN, which are exact
    "model_loader/gguf/file.py": ["**"],  # compared with a tolerance
    "model_loader/families/dense.py": ["**", "**"],  # a family that bits "portable" refuses
}


def in_cpp(text: str) -> list[str]:
    """Functions of a maths library that C++ calls."""
    return CALL_IN_CPP.findall(re.sub(r"//.*", "", text))


def in_python(text: str) -> list[str]:
    """Functions of NumPy's or of `math` that Python calls, and powers other than those of 2 and of whole numbers."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("np", "numpy", "math") and CALL_IN_PYTHON.match(node.attr):
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _exact(node):
            found.append("**")
    return found


def _exact(node: ast.BinOp) -> bool:
    base, exponent = node.left, node.right
    if isinstance(base, ast.Constant) and base.value == 2:
        return True
    return all(isinstance(each, ast.Constant) and isinstance(each.value, int) for each in (base, exponent))


def sources() -> Iterator[tuple[str, list[str]]]:
    for path in sorted(KERNELS.iterdir()):
        if path.suffix in (".h", ".cc"):
            yield str(path.relative_to(PACKAGE)), in_cpp(path.read_text())
    for folder in HOST:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            yield str(path.relative_to(PACKAGE)), in_python(path.read_text())


def test_no_source_calls_a_maths_library() -> None:
    found = dict(sources())
    assert {"graphs/native/sampling.h", "graphs/ops/rope.py", "model_loader/weights.py"} <= found.keys()
    assert {name: calls for name, calls in found.items() if calls} == ALLOWED


def test_products_and_sums_are_fused_only_where_the_source_says_so() -> None:
    assert "-ffp-contract=off" in FLAGS
    assert not {each for each in FLAGS if "fast" in each}
    for path in KERNELS.iterdir():
        assert path.suffix not in (".h", ".cc") or "fp_contract" not in path.read_text().lower(), path.name


@pytest.mark.parametrize(
    "line",
    ["std::exp(x)", "a = expf(x);", "std::pow(2, x)", "return tanh(x);", "std::log1p(x)", "x + ::cosf(y)"],
)
def test_a_call_in_cpp_is_seen(line: str) -> None:
    assert in_cpp(line)


@pytest.mark.parametrize("line", ["Exp(x)", "// std::exp(x)", "std::sqrt(x)", "turn.exp(x)", "my_log(x)"])
def test_what_is_no_such_call_in_cpp_passes(line: str) -> None:
    assert not in_cpp(line)


@pytest.mark.parametrize(
    "line", ["np.power(a, b)", "np.cos(a)", "math.log(a)", "a**-0.5", "a ** b", "f = np.exp2"]
)
def test_a_call_in_python_is_seen(line: str) -> None:
    assert in_python(line)


@pytest.mark.parametrize(
    "line", ["jnp.exp(a)", "2**20", "2.0**-9", "math.sqrt(a)", "f(**a)", "np.expand_dims(a, 0)"]
)
def test_what_is_no_such_call_in_python_passes(line: str) -> None:
    assert not in_python(line)
