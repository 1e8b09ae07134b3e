"""Entries of the record, from turns: medians with least and most, ratios, shares of the machine's limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_engine.graphs.config import ModelConfig
from xla_engine.tools.bench import limits
from xla_engine.tools.bench.figures import Spread, ratios, spread_of
from xla_engine.tools.bench.peers import EIGHT_BITS, OURS, STOPS
from xla_engine.tools.bench.rounds import Turns
from xla_engine.tools.bench.workloads import Workload

_RATIO_OF = {
    "uniform": ("decode_tok_s", "tok_s"),
    "prefill": ("prefill_tok_s",),
    "prefill-heavy": ("tok_s",),
    "ragged": ("tok_s", "requests_s"),
    "pair": (),
}


def results(
    config: ModelConfig,
    dtype: str,
    batch: int,
    workload: Workload,
    turns: Mapping[str, Turns],
    machine: Mapping[str, Any],
    stored: Mapping[str, float | None],
) -> list[dict[str, Any]]:
    """One entry per engine; ratios are ours over theirs, round by round. `machine`: the record's "limits".
    `stored`: bytes of weights, for engines that tell."""
    more = _Shares(config, dtype, batch, workload, machine, stored)
    spreads = {
        name: spread_of([each | more(each, name) for each in mine.figures]) if mine.figures else {}
        for name, mine in turns.items()
    }
    found = []
    for name, mine in turns.items():
        entry: dict[str, Any] = {
            "batch": batch,
            "workload": workload.name,
            "engine": name,
            "void": mine.void,
            "figures": {key: spread.record for key, spread in spreads[name].items()},
        }
        if mine.verdict is not None:
            entry["streams"] = mine.verdict.record()
        void = mine.void or turns[OURS].void
        if name not in (OURS, STOPS) and not void:
            entry["ratio"] = _ratios(workload, spreads[OURS], spreads[name])
        found.append(entry)
    return found


def _ratios(
    workload: Workload, ours: Mapping[str, Spread], theirs: Mapping[str, Spread]
) -> dict[str, list[float]]:
    shared = (key for key in _RATIO_OF[workload.name] if key in ours and key in theirs)
    return {key: ratios(ours[key], theirs[key]).record for key in shared}


@dataclass(frozen=True, slots=True)
class _Shares:
    """Adds the traffic and the operations of the model to a round's figures, as shares of the machine's limits."""

    config: ModelConfig
    dtype: str
    batch: int
    workload: Workload
    machine: Mapping[str, Any]
    stored: Mapping[str, float | None]

    def __call__(self, figures: Mapping[str, float], engine: str) -> dict[str, float]:
        prompt, new = len(self.workload.prompts[0]), self.workload.max_tokens[0]
        more = {}
        if self.workload.name == "uniform" and "decode_tok_s" in figures:
            bandwidth = self.machine["read_gb_s"]
            weight_bytes = self.stored.get(engine)
            if weight_bytes is None and engine in EIGHT_BITS:
                weight_bytes = limits.weight_count(self.config)
            keys = prompt + new / 2
            moved = limits.step_bytes(self.config, self.dtype, self.batch, keys, weight_bytes=weight_bytes)
            more["gb_s"] = 1e-9 * moved * figures["decode_tok_s"] / self.batch
            more["gb_s_share"] = more["gb_s"] / bandwidth
            more["floor_tok_s"] = self.batch * bandwidth * 1e9 / moved
        if "prefill_tok_s" in figures:
            per_token = limits.prompt_flops(self.config, prompt) / prompt
            more["gflop_s"] = 1e-9 * per_token * figures["prefill_tok_s"]
            more["gflop_s_share"] = more["gflop_s"] / max(self.machine["gflops"].values())
        return more
