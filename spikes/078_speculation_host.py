# Measured at commit 34368aab; runs at HEAD.
"""What does look-up cost the host in a turn, what does a verify step cost the device, and how often is look-up right?

    python -m spikes.078_speculation_host

The embedded model, 8 rows of 256 tokens after short prompts, `suffix`. Takes half a minute.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from xla_engine import LLM, SamplingParams
from xla_engine.engine.speculation.speculator import Speculator
from xla_engine.runner.runner import Runner
from xla_engine.runner.step_costs import StepCosts
from xla_engine.scheduler.scheduler import Scheduler

ROWS, ROUNDS = 8, 13
PROMPTS = [
    f"{first} {second}"
    for first in ("import", "class", "def", "for", "while", "if", "try", "return")
    for second in ("os", "Reader", "parse(", "x in", "True:", "not self.", "open", "None")
]
# Every engine decides by the same costs, those of an idle moment (Zen 4).
COSTS = StepCosts(
    {1: 0.54e-3, 2: 0.49e-3, 4: 0.44e-3, 8: 0.51e-3},
    {(1, 8): 0.67e-3, (4, 8): 1.42e-3, (8, 2): 0.91e-3, (8, 4): 1.46e-3},
)


class HostTime:
    """Processor time of the outermost call of the wrapped functions, in nanoseconds."""

    def __init__(self) -> None:
        self.spent = self.turns = self._depth = 0

    def timed(self, function: Callable[..., Any], *, is_turn: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._depth += 1
            self.turns += is_turn
            began = time.thread_time_ns()
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent += time.thread_time_ns() - began

        return call


def run(llm: LLM, temperature: float, number: int) -> Counter[str]:
    prompts = [f"{PROMPTS[(number * ROWS + row) % len(PROMPTS)]} {number}" for row in range(ROWS)]
    params = SamplingParams(temperature=temperature, max_tokens=256, ignore_eos=True, seed=number)
    found: Counter[str] = Counter()
    for output in llm.generate(prompts, params, use_tqdm=False):
        found["tokens"] += len(output.outputs[0].token_ids)
        found["drafted"] += output.num_drafted_tokens
        found["accepted"] += output.num_accepted_tokens
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    options: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 512}
    with LLM(speculative_config={"method": "suffix", "num_speculative_tokens": 1}, **options) as llm:
        costs = llm.engine.runner.step_costs()
        print({key: f"{1e3 * seconds:.2f} ms" for key, seconds in {**costs.decode, **costs.verify}.items()})
        for temperature in (0.0, 0.8):
            total: Counter[str] = Counter()
            for number in range(8):
                total += run(llm, temperature, number)
            print(f"temperature {temperature}, one draft in every step:", dict(total))

    Runner.step_costs = lambda self: COSTS  # type: ignore[method-assign]
    host = HostTime()
    for name in ("wanted", "drafts", "read", "begin", "end"):
        setattr(Speculator, name, host.timed(getattr(Speculator, name), is_turn=name == "wanted"))
    assert Scheduler.decoding.fget is not None
    Scheduler.decoding = property(host.timed(Scheduler.decoding.fget))  # type: ignore[method-assign]
    with LLM(speculative_config={"method": "suffix"}, **options) as llm:
        for temperature in (0.0, 0.8):
            turns = []
            for number in range(ROUNDS):
                host.spent = host.turns = 0
                run(llm, temperature, number)
                turns.append(host.spent / host.turns / 1e3)
            print(f"temperature {temperature}, auto: {sorted(turns)[ROUNDS // 3]:.1f} us of the host a turn")


if __name__ == "__main__":
    main()
