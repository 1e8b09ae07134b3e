# Frozen: runs at commit 590d0eb.
"""Does any way of running more requests than memory change a bit? Each mechanism forced, and all together.

python -m spikes.036_memory_laws --requests 300
"""

# %%
from __future__ import annotations

import argparse
import sys
from typing import Any

from spikes.support.timing import describe_machine, markdown_table
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify

arguments = argparse.ArgumentParser()
arguments.add_argument("--requests", type=int, default=300)
arguments.add_argument("--seed", type=int, default=36)
options = arguments.parse_known_args()[0]

PAGES: dict[str, Any] = {"max_num_seqs": 16, "num_blocks": 12}  # of 64: one request and a half of 512
TURNS: dict[str, Any] = {"scheduling_policy": "round_robin", "quantum": 1}
FORMS: dict[str, dict[str, Any]] = {
    "slots: prefix cache, slots lost at random steps": {"max_num_seqs": 8},
    "no prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": False},
    "no room on the host": {"max_num_seqs": 8, "swap_space": 0.0},
    "turns of one step": {"max_num_seqs": 8, **TURNS},
    "twelve pages for sixteen requests": PAGES,
    "twelve pages, no room on the host": PAGES | {"swap_space": 0.0},
    "twelve pages, no prefix cache": PAGES | {"enable_prefix_caching": False},
    "all: twelve pages, turns of one step": PAGES | TURNS,
    "all, in float32": PAGES | TURNS | {"dtype": "float32"},
    "all, pure JAX": PAGES | TURNS | {"attention_backend": "xla", "linear_backend": "xla"},
}

# %%
rows = []
for name, form in FORMS.items():
    config = EngineConfig(max_model_len=512, **form)
    with XlaBatchEngine.from_pretrained(None, config) as engine:
        report = verify(engine, requests=options.requests, schedules=6, seed=options.seed, lags=(0, 1, 2))
        lost = engine.stats().preemptions
    print("\n".join(report.lines()), file=sys.stderr)
    rows.append(
        [
            name,
            report.requests,
            report.tokens,
            lost,
            report.cached_tokens,
            report.differing_tokens,
            report.differing_bits,
        ]
    )
columns = ["", "requests", "tokens", "slots lost", "prefix tokens found", "tokens differ", "bits differ"]
print(describe_machine())
print(markdown_table(columns, rows))
