# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What would happen?
#
# A recorded run sets the clock of a simulation, which runs the engine's own scheduler. It shows what other
# slots, policies and loads would do, without running the model.

# %%
import random
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import logging_steps

path = Path(mkdtemp()) / "steps.jsonl"
draw = random.Random(1)
with (
    XlaBatchEngine.from_pretrained(None, EngineConfig(max_num_seqs=8)) as engine,
    logging_steps(engine, path),
):
    for number in range(60):
        prompt = "import os\n" * draw.randint(1, 25)
        engine.submit(prompt, SamplingParams(seed=number, max_tokens=draw.randint(4, 64), ignore_eos=True))
    engine.drain()
log = read_step_log(path)
log

# %% [markdown]
# ## Does the simulation say what happened?
# The cost model is fitted by least squares. The recorded run is simulated first and compared with its own times.

# %%
from xla_engine.tools.simulator.compare import compare
from xla_engine.tools.simulator.fit import fit

cost = fit(log)
print("\n".join(compare(log, cost).lines()))

# %% [markdown]
# ## Other policies, other widths
# 2,000 heavy-tailed requests that come faster than eight slots can serve them.

# %%
from xla_engine.scheduler import SchedulerConfig
from xla_engine.tools.simulator.clock import SimulatedClock
from xla_engine.tools.simulator.cost import machine_of
from xla_engine.tools.simulator.report import table
from xla_engine.tools.simulator.simulate import Simulation
from xla_engine.tools.simulator.trace import heavy_tailed

recorded = replace(SchedulerConfig(**log.scheduler), enable_prefix_caching=False, preemption=False)
reports = {}
for policy in ("fcfs", "shortest_prompt", "round_robin"):
    for width in (8, 16):
        spare = recorded.max_num_batched_tokens - recorded.max_num_seqs
        config = replace(
            recorded, scheduling_policy=policy, max_num_seqs=width, max_num_batched_tokens=width + spare
        )
        simulation = Simulation(config, replace(machine_of(log), rows=width), SimulatedClock(cost))
        reports[f"{policy}, {width} slots"] = simulation.run(heavy_tailed(2000, rate=40, seed=0))
print("\n".join(table(reports)))
