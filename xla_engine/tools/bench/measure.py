"""The measurement: every engine at every batch size and workload, in turns."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.graphs.config import ModelConfig
from xla_engine.tools.bench import limits
from xla_engine.tools.bench.figures import Spread, ratios, spread_of
from xla_engine.tools.bench.models import BenchModel
from xla_engine.tools.bench.peers import (
    BARE,
    EIGHT_BITS,
    OURS,
    PEERS,
    REFERENCE,
    STOPS,
    Peer,
    PeerFailed,
    Process,
)
from xla_engine.tools.bench.rounds import STOP_SLACK, Side, SideRounds, judge_turns, say, take_turns
from xla_engine.tools.bench.workloads import WORKLOADS, Workload, WorkloadSizes, make_workload
from xla_engine.utils.bandwidth import read_bandwidth

# Figures of which the card shows the ratio of this engine's to the peer's.
_RATIO_OF = {
    "uniform": ("decode_tok_s", "tok_s"),
    "prefill": ("prefill_tok_s",),
    "prefill-heavy": ("tok_s",),
    "ragged": ("tok_s", "requests_s"),
    "pair": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    model: its name on the card. files, config: its forms and shape.
    dtype: of weights and activations.
    batches: numbers of slots, each measured with separate engines.
    workloads: names in `WORKLOADS`.
    rounds: measured turns of every engine.
    threads: cores for every engine.
    peers: interpreters by peer name; all others run in this one.
    cache: directory for what engines write.
    without: peers to leave out.
    seed, prompt_tokens, new_tokens, arrival_rate: of the workloads, see `WorkloadSizes`.
    verify: requests to verify at each batch size; 0 leaves it out.
    judge: requests to judge in each workload; 0 leaves it out.
    """

    model: str
    files: BenchModel
    config: ModelConfig
    dtype: str
    batches: Sequence[int]
    workloads: Sequence[str]
    rounds: int
    threads: int
    peers: Mapping[str, str]
    cache: Path
    without: frozenset[str] = frozenset()
    seed: int = 0
    prompt_tokens: int = 128
    new_tokens: int = 128
    arrival_rate: float | None = None
    verify: int = 40
    judge: int = 8


def measure(options: Options) -> dict[str, Any]:
    """Run all engines and workloads; returns the record: the JSON line, and the data of the card."""
    record: dict[str, Any] = {
        "bench": 1,
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "rounds": options.rounds,
        "seed": options.seed,
        "machine": limits.describe_machine(),
        "processor": limits.processor(),
        "load": round(os.getloadavg()[0], 1),
        "judge": None,
        "limits": {"read_gb_s": round(read_bandwidth(options.threads), 2), "gflops": {}},
        "engines": {},
        "skipped": {},
        "verify": [],
        "workloads": {},
        "results": [],
    }
    judge = _open_judge(options, record) if options.judge else None
    try:
        for batch in options.batches:
            _measure_batch(options, batch, judge, record)
    finally:
        if judge is not None:
            judge.close()
    return record


def _open_judge(options: Options, record: dict[str, Any]) -> Process:
    """A judge: transformers in float32 if it is installed, else this engine's plain forward pass."""
    candidates = ((options.peers.get(REFERENCE, sys.executable), "hf:judge"), (sys.executable, "xla:judge"))
    for python, kind in candidates:
        judge = None
        try:
            judge = Process(python, kind, options.threads)
            record["judge"] = judge.ask("load", model=str(options.files.directory))["about"]
            return judge
        except PeerFailed as error:
            if judge is not None:
                judge.close()
            reason = error
    raise reason


def _measure_batch(options: Options, batch: int, judge: Process | None, record: dict[str, Any]) -> None:
    sizes = WorkloadSizes(
        batch=batch,
        vocab_size=options.config.vocab_size,
        positions=options.config.max_position_embeddings,
        seed=options.seed,
        prompt=options.prompt_tokens,
        new=options.new_tokens,
        rate=options.arrival_rate,
        text=options.files.text,
    )
    limit = options.config.max_position_embeddings
    known = {name: make_workload(name, sizes) for name in WORKLOADS}
    workloads = []
    for name in options.workloads:
        if known[name].longest > limit:
            record["skipped"][name] = f"needs {known[name].longest} positions, the model has {limit}"
            continue
        record["workloads"].setdefault(str(batch), {})[name] = known[name].about
        workloads.append(known[name])
    # Long enough for every workload, so that the engines are the same in every run.
    longest = max(each.longest for each in known.values() if each.longest <= limit)
    longest = min(longest + STOP_SLACK, limit)
    sides: list[Side] = []
    try:
        for name in (OURS, *(name for name in PEERS if name not in options.without)):
            _start(options, name, batch, longest, sides, record)
        _gather_limits(options, sides, record)
        for workload in workloads:
            turns = take_turns(workload, sides, batch=batch, rounds=options.rounds, positions=limit)
            if judge is not None:
                judge_turns(workload, turns, judge, requests=options.judge, dtype=options.dtype)
            stored = {side.name: side.loaded.get("weight_bytes") for side in sides}
            record["results"] += _results(options, batch, workload, turns, record["limits"], stored)
        _finish_batch(options, batch, sides, record)
    finally:
        for side in sides:
            side.process.close()


def _start(
    options: Options, name: str, batch: int, longest: int, sides: list[Side], record: dict[str, Any]
) -> None:
    """Start and load one engine. A peer that cannot start is skipped with the reason; this engine must start."""
    if name in record["skipped"]:
        return
    say(f"B = {batch}: loading {name}")
    peer = Peer("xla:OwnEngine", "this engine") if name == OURS else PEERS[name]
    if not options.files.directory.is_dir() and not peer.reads_files:
        record["skipped"][name] = (
            "only GGUF files of Llamas, Qwen2 and Qwen3 are written for engines that need bfloat16"
        )
        return
    began = time.monotonic()
    process = None
    try:
        process = Process(options.peers.get(name, sys.executable), peer.kind, options.threads)
        wanted = {
            "model": str(options.files.directory),
            "file": None if options.files.file is None else str(options.files.file),
            "dtype": options.dtype,
            "max_num_seqs": batch,
            "max_model_len": longest,
            "cache": str(options.cache),
        }
        loaded = process.ask("load", wanted=wanted, **peer.options)
    except PeerFailed as error:
        if process is not None:
            process.close()
        if name == OURS:
            raise
        record["skipped"][name] = str(error)
        return
    side = Side(name, process, loaded, time.monotonic() - began)
    sides.append(side)
    entry = record["engines"].setdefault(
        name, {"about": peer.about, "versions": loaded["versions"], "notes": loaded["notes"]}
    )
    entry |= {key: loaded[key] for key in ("isa", "weight_bytes") if loaded.get(key) is not None}
    entry.setdefault("load_seconds", {})[str(batch)] = round(side.load_seconds, 2)
    for key in ("compile_seconds", "programs"):
        if key in loaded:
            entry.setdefault(key, {})[str(batch)] = round(loaded[key], 2)


def _gather_limits(options: Options, sides: list[Side], record: dict[str, Any]) -> None:
    """Ask engines for the GFLOP/s of a large product; the best is the machine's."""
    for side in sides:
        if side.name in (OURS, REFERENCE) and side.name not in record["limits"]["gflops"]:
            found = side.process.ask("limits", dtype=options.dtype)
            record["limits"]["gflops"][side.name] = round(found["gflops"], 1)
            if "gbps" in found:
                record["limits"]["read_gb_s"] = round(found["gbps"], 1)


def _finish_batch(options: Options, batch: int, sides: list[Side], record: dict[str, Any]) -> None:
    """Ask for peak memory, before anything else runs in this engine's process; then verify that batching changes no
    bit."""
    for side in sides:
        if side.failed is None:
            peak = side.process.ask("memory")["peak_mib"]
            record["engines"][side.name].setdefault("peak_mib", {})[str(batch)] = round(peak)
    if options.verify:
        say(f"B = {batch}: verify, {options.verify} requests")
        found = sides[0].process.ask("verify", requests=options.verify)
        record["verify"].append({"batch": batch} | found)
        if not found["ok"]:
            for entry in record["results"]:
                if entry["batch"] == batch and entry["engine"] in (OURS, BARE, STOPS):
                    entry["void"] = entry["void"] or "verify found differences between alone and batched"


def _results(
    options: Options,
    batch: int,
    workload: Workload,
    turns: Mapping[str, SideRounds],
    machine: Mapping[str, Any],
    stored: Mapping[str, float | None],
) -> list[dict[str, Any]]:
    """One entry per engine: medians with least and most, and ratios of ours over theirs, round by round.

    machine: the record's "limits". stored: bytes of weights, for engines that tell.
    """
    spreads: dict[str, dict[str, Spread]] = {}
    for name, mine in turns.items():
        weight_bytes = stored.get(name)
        if weight_bytes is None and name in EIGHT_BITS:
            weight_bytes = limits.weight_count(options.config)
        shares = [_shares(options, batch, workload, machine, each, weight_bytes) for each in mine.figures]
        rounds = [each | more for each, more in zip(mine.figures, shares, strict=True)]
        spreads[name] = spread_of(rounds) if rounds else {}
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
            ours, theirs = spreads[OURS], spreads[name]
            shared = (key for key in _RATIO_OF[workload.name] if key in ours and key in theirs)
            entry["ratio"] = {key: ratios(ours[key], theirs[key]).record for key in shared}
        found.append(entry)
    return found


def _shares(
    options: Options,
    batch: int,
    workload: Workload,
    machine: Mapping[str, Any],
    figures: Mapping[str, float],
    weight_bytes: float | None,
) -> dict[str, float]:
    """The traffic and the operations of the model in a round, as shares of the machine's limits."""
    prompt, new = len(workload.prompts[0]), workload.max_tokens[0]
    more = {}
    if workload.name == "uniform" and "decode_tok_s" in figures:
        bandwidth, keys = machine["read_gb_s"], prompt + new / 2
        moved = limits.step_bytes(options.config, options.dtype, batch, keys, weight_bytes=weight_bytes)
        more["gb_s"] = 1e-9 * moved * figures["decode_tok_s"] / batch
        more["gb_s_share"] = more["gb_s"] / bandwidth
        more["floor_tok_s"] = batch * bandwidth * 1e9 / moved
    if "prefill_tok_s" in figures:
        per_token = limits.prompt_flops(options.config, prompt) / prompt
        more["gflop_s"] = 1e-9 * per_token * figures["prefill_tok_s"]
        more["gflop_s_share"] = more["gflop_s"] / max(machine["gflops"].values())
    return more
