"""An installed wheel works where no compiler is: every library is there, and the best one serves. No arguments."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

os.environ["CXX"] = "no-compiler-here"
os.environ["XLA_ENGINE_CACHE"] = tempfile.mkdtemp()

import xla_engine
from xla_engine import LLM, EngineConfig, SamplingParams
from xla_engine.engine.inspection import inspect_model
from xla_engine.environment import embedded_model_directory
from xla_engine.runner.native_library import build, bundled
from xla_engine.runner.native_library.instruction_sets import INSTRUCTION_SETS, available

folder = Path(bundled.__file__).parent / bundled.FOLDER
assert Path(xla_engine.__file__).is_relative_to(sys.prefix), (
    f"{xla_engine.__file__} is not what was installed"
)
manifest = bundled.read_manifest(folder)
assert manifest is not None, f"no libraries in {folder}"
here = [each for each in INSTRUCTION_SETS if platform.machine().lower() in each.machines]
wanted = {variant.name for each in here for variant in each.variants()}
assert wanted == set(manifest.libraries), f"missing: {wanted - set(manifest.libraries)}"

for each in available():
    assert build.register(each.name) == each.name and build.origin(each.name) == build.BUNDLED

llm = LLM(max_num_seqs=8, max_model_len=256)
runner = llm.engine.runner
assert runner.isa == build.register() and runner.platform["linear"] == "native", runner.platform
(output,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=8))
assert len(output.outputs[0].token_ids) == 8
found = inspect_model(embedded_model_directory(), EngineConfig()).backends
assert found is not None and found["library"] == build.BUNDLED, found
print(f"{runner.isa}: {output.outputs[0].text!r}; libraries {', '.join(sorted(manifest.libraries))}")
