"""Write the golden file of `EngineConfig(bits="portable")`: `python -m tests.golden.make.make_golden_portable`.

Only with another name of the arithmetic (`graphs.portable.ARITHMETIC`), since results in users' hands name their own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.equivalence.portable import FORMS, PRECISIONS, against_golden, hashes_of, lines
from xla_engine.graphs.portable import ARITHMETIC, ISAS
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.runner.portable import GOLDEN, golden, kernel_hashes


def main() -> None:
    """Write the golden file. Raises RuntimeError if the engine's forms disagree."""
    model = embedded_model_directory() / "model.safetensors"
    isa = next(each.name for each in available() if each.name in ISAS)
    register(isa, {"attention_bf16", "sampler", "linear_bf16", "linear_int8"})
    content: dict[str, Any] = {
        "arithmetic": ARITHMETIC,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "kernels": kernel_hashes(isa, None) | kernel_hashes(isa, "int8"),
        "requests": {},
    }
    for precision, quantization in (("", None), *PRECISIONS.items()):
        if precision:
            found = []
            for config in FORMS.values():
                own = replace(config, isa=isa, quantization=quantization)
                with XlaBatchEngine.from_pretrained(None, own) as engine:
                    found.append(hashes_of(engine))
            if found.count(found[0]) != len(found):
                raise RuntimeError(f"{precision}: {' and '.join(FORMS)} have other bits")
            content["requests"][precision] = found[0]
        GOLDEN.write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8"
        )  # kernels first: a start reads them
        golden.cache_clear()
    print("\n".join(lines(list(against_golden()))))


if __name__ == "__main__":
    main()
