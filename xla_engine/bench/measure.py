"""The measurement: every engine at every batch size and workload, in turns."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphs.config import ModelConfig
from xla_engine.bench import limits
from xla_engine.bench.figures import Spread, complaints, figures, ratios, spread_of
from xla_engine.bench.judge import Verdict, verdict, void_reason
from xla_engine.bench.peers import BARE, OURS, PEERS, REFERENCE, STOPS, PeerFailed, Process
from xla_engine.bench.workloads import WORKLOADS, Sizes, Workload, make_workload

_REST = 0.3  # seconds between turns: the threads of the engine before stop spinning
_WARM_UP_TOKENS = 8
_SECOND_ARRIVES = 0.4  # of the time a request takes alone
_STOP_SLACK = 32  # tokens a request could run past its stop id
_OWN = ("host_ms_per_step", "occupancy", "occupancy_queued", "stale_share")  # figures only we can know
_RATIO_OF = {
    "uniform": ("decode_tok_s", "tok_s"),
    "prefill": ("prefill_tok_s",),
    "prefill-heavy": ("tok_s",),
    "ragged": ("tok_s", "requests_s"),
    "pair": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure. `peers` maps peer names to interpreters, the rest runs in `python`;
    `without` names peers to leave out; `judge` requests per workload are judged.
    """

    model: str
    directory: Path
    config: ModelConfig
    dtype: str
    batches: Sequence[int]
    workloads: Sequence[str]
    rounds: int
    threads: int
    peers: Mapping[str, str]
    python: str
    cache: Path
    without: frozenset[str] = frozenset()
    seed: int = 0
    prompt: int = 128
    new: int = 128
    rate: float | None = None
    verify: int = 40
    judge: int = 8
    say: Callable[[str], None] = print


@dataclass(slots=True)
class Side:
    """One engine at one batch size."""

    name: str
    process: Process
    loaded: dict[str, Any]
    load_seconds: float
    failed: str | None = None


@dataclass(slots=True)
class Turns:
    """What one side did in one workload. `first` is its first measured answer."""

    figures: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, Any] | None = None
    void: str | None = None
    verdict: Verdict | None = None


def measure(options: Options) -> dict[str, Any]:
    """Run everything; the record that the card prints and the JSON line is."""
    record: dict[str, Any] = {
        "bench": 1,
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "rounds": options.rounds,
        "seed": options.seed,
        "machine": describe_machine(),
        "judge": None,
        "limits": {"read_gb_s": round(limits.read_bandwidth(options.threads), 2), "gflops": {}},
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
    """transformers in float32 where it is installed, else our own plain forward pass."""
    candidates = ((options.peers.get(REFERENCE, options.python), "hf:Judge"), (options.python, "xla:Judge"))
    for python, kind in candidates:
        judge = None
        try:
            judge = Process(python, kind, options.threads)
            record["judge"] = judge.ask("load", model=str(options.directory))["about"]
            return judge
        except PeerFailed as error:
            if judge is not None:
                judge.close()
            reason = error
    raise reason


def describe_machine() -> str:
    """Cores and the vector units that matter here, in words."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_bf16": "AMX bf16"}
    features = ", ".join(word for flag, word in known.items() if flag in flags) or platform.machine()
    return f"{core_count()} cores ({features}), Python {platform.python_version()}"


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure_batch(options: Options, batch: int, judge: Process | None, record: dict[str, Any]) -> None:
    sizes = Sizes(
        batch=batch,
        vocab_size=options.config.vocab_size,
        positions=options.config.max_position_embeddings,
        seed=options.seed,
        prompt=options.prompt,
        new=options.new,
        rate=options.rate,
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
    # Long enough for every workload, asked for or not: the engines are the same in every run.
    longest = max(each.longest for each in known.values() if each.longest <= limit)
    longest = min(longest + _STOP_SLACK, limit)
    sides: list[Side] = []
    try:
        for name in (OURS, *(name for name in PEERS if name not in options.without)):
            _start(options, name, batch, longest, sides, record)
        _gather_limits(options, sides, record)
        for workload in workloads:
            turns = _measure_workload(options, batch, workload, sides)
            if judge is not None:
                _judge(options, workload, judge, turns)
            record["results"] += _results(options, batch, workload, turns, record)
        _finish_batch(options, batch, sides, record)
    finally:
        for side in sides:
            side.process.close()


def _start(
    options: Options, name: str, batch: int, longest: int, sides: list[Side], record: dict[str, Any]
) -> None:
    """Start and load one engine; one that is not there is skipped with a word, our own must be there."""
    if name in record["skipped"]:
        return
    options.say(f"B = {batch}: loading {name}")
    kind = "xla:Engine" if name == OURS else PEERS[name].kind
    began = time.monotonic()
    process = None
    try:
        process = Process(options.peers.get(name, options.python), kind, options.threads)
        loaded = process.ask(
            "load",
            model=str(options.directory),
            dtype=options.dtype,
            max_num_seqs=batch,
            max_model_len=longest,
            cache=str(options.cache),
        )
    except PeerFailed as error:
        if process is not None:
            process.close()
        if name == OURS:
            raise
        record["skipped"][name] = str(error)
        return
    side = Side(name, process, loaded, time.monotonic() - began)
    sides.append(side)
    about = "this engine" if name == OURS else PEERS[name].about
    entry = record["engines"].setdefault(
        name, {"about": about, "versions": loaded["versions"], "notes": loaded["notes"]}
    )
    entry.setdefault("load_seconds", {})[str(batch)] = round(side.load_seconds, 2)
    for key in ("compile_seconds", "programs"):
        if key in loaded:
            entry.setdefault(key, {})[str(batch)] = round(loaded[key], 2)


def _gather_limits(options: Options, sides: list[Side], record: dict[str, Any]) -> None:
    """GFLOP/s of a large product in each engine that can tell; the best is the machine's."""
    for side in sides:
        if side.name in (OURS, REFERENCE) and side.name not in record["limits"]["gflops"]:
            found = side.process.ask("limits", dtype=options.dtype)
            record["limits"]["gflops"][side.name] = round(found["gflops"], 1)
            if "gbps" in found:
                record["limits"]["read_gb_s"] = round(found["gbps"], 1)


def _measure_workload(
    options: Options, batch: int, workload: Workload, sides: list[Side]
) -> dict[str, Turns]:
    timed = [side for side in sides if _can(side, workload)]
    turns = {side.name: Turns() for side in timed}
    if workload.name == "uniform":
        turns[BARE] = Turns()
    for side in timed:
        _guard(side, turns, lambda side=side: _run(side, workload.head(batch, _WARM_UP_TOKENS)))  # type: ignore[misc]
    for turn in range(options.rounds):
        options.say(f"B = {batch}: {workload.name}, round {turn + 1} of {options.rounds}")
        for side in timed if turn % 2 == 0 else reversed(timed):
            if side.failed is None:
                time.sleep(_REST)
                _guard(side, turns, lambda side=side: _turn(side, workload, turns))  # type: ignore[misc]
    ours = sides[0]
    if workload.name == "ragged":
        turns[STOPS] = Turns()
        _guard(ours, turns, lambda: _run_with_stops(options, ours, workload, turns))
    return turns


def _can(side: Side, workload: Workload) -> bool:
    needs_arrivals = workload.name == "pair" or any(workload.arrivals)
    return side.failed is None and (not needs_arrivals or side.loaded["arrivals"])


def _guard(side: Side, turns: dict[str, Turns], work: Callable[[], object]) -> None:
    """A side that fails is out; what it measured until then is void. Our own failure ends the benchmark."""
    try:
        work()
    except PeerFailed as error:
        if side.name == OURS:
            raise
        side.failed = turns[side.name].void = str(error)


def _run(side: Side, workload: Workload, **more: Any) -> dict[str, Any]:
    return side.process.ask(
        "run",
        prompts=workload.prompts,
        max_tokens=workload.max_tokens,
        arrivals=workload.arrivals,
        **more,
    )


def _turn(side: Side, workload: Workload, turns: dict[str, Turns]) -> None:
    """One side's share of one round."""
    mine = turns[side.name]
    extra: dict[str, float] = {}
    if workload.name == "pair":
        alone = _run(side, workload.head(1, workload.max_tokens[0]))["seconds"]
        arrival = _SECOND_ARRIVES * alone
        workload = replace(workload, arrivals=(0.0, arrival))
    answer = _run(side, workload)
    if workload.name == "pair":
        extra["pair_ratio"] = answer["seconds"] / (arrival + alone)
        extra["first_slowdown"] = answer["times"][0][-1] / alone
    mine.void = mine.void or complaints(workload, answer)
    if mine.void:
        return
    if mine.first is None:
        mine.first = answer
    elif side.name == OURS and answer["streams"] != mine.first["streams"]:
        mine.void = "streams differ from round to round"
    extra |= {name: answer[name] for name in _OWN if answer.get(name) is not None}
    mine.figures.append(figures(workload, answer) | extra)
    if BARE in turns and side.name == OURS:
        time.sleep(_REST)
        found = side.process.ask("bare", prompts=workload.prompts, max_tokens=workload.max_tokens)
        turns[BARE].figures.append(found)


def _run_with_stops(options: Options, side: Side, workload: Workload, turns: dict[str, Turns]) -> None:
    """The same requests ended by stop ids, as texts end: the host learns of each end a step late.

    The stop id is the request's own last token, where that comes only once in its stream. Our streams do not
    depend on the schedule, so they must be the same again.
    """
    mine, before = turns[STOPS], turns[side.name].first
    if before is None:
        mine.void = "nothing to compare with"
        return
    stops, caps = [], []
    for prompt, stream in zip(workload.prompts, before["streams"], strict=True):
        room = options.config.max_position_embeddings - len(prompt) - len(stream)
        slack = min(_STOP_SLACK, room) if stream.count(stream[-1]) == 1 else 0
        stops.append([stream[-1]] if slack else [])
        caps.append(len(stream) + slack)
    answer = _run(side, replace(workload, max_tokens=tuple(caps)), stop_token_ids=stops)
    if answer["streams"] != before["streams"]:
        mine.void = "streams differ when stop ids end them"
    ended = sum(map(bool, stops)) / len(stops)
    extra = {name: answer[name] for name in _OWN if answer.get(name) is not None}
    mine.figures.append(figures(workload, answer) | extra | {"ended_by_stop_id": ended})


def _judge(options: Options, workload: Workload, judge: Process, turns: dict[str, Turns]) -> None:
    """Void what is wrong."""
    reference = turns[REFERENCE].first if REFERENCE in turns else None
    expected = None if reference is None else reference["streams"]
    prompts = workload.prompts[: options.judge]
    for mine in turns.values():
        if mine.first is not None:
            streams = mine.first["streams"]
            found = judge.ask("regrets", prompts=prompts, streams=streams[: options.judge])
            mine.verdict = verdict(found["regrets"], streams, expected)
    standard = turns[REFERENCE].verdict if REFERENCE in turns else None
    for name, mine in turns.items():
        if mine.verdict is not None:
            against = None if name == REFERENCE else standard
            mine.void = mine.void or void_reason(mine.verdict, options.dtype, against)


def _results(
    options: Options, batch: int, workload: Workload, turns: dict[str, Turns], record: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record per engine; ratios are ours over theirs, round by round."""
    spreads = {
        name: spread_of(_with_shares(options, batch, workload, mine.figures, record)) if mine.figures else {}
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


def _with_shares(
    options: Options,
    batch: int,
    workload: Workload,
    rounds: list[dict[str, float]],
    record: dict[str, Any],
) -> list[dict[str, float]]:
    """Add the traffic and the operations of the model, and their shares of the machine's limits."""
    bandwidth = record["limits"]["read_gb_s"]
    gflops = max(record["limits"]["gflops"].values())
    prompt = len(workload.prompts[0])
    found = []
    for each in rounds:
        more = {}
        if workload.name == "uniform" and "decode_tok_s" in each:
            moved = limits.step_bytes(options.config, options.dtype, batch, prompt + options.new / 2)
            more["gb_s"] = 1e-9 * moved * each["decode_tok_s"] / batch
            more["gb_s_share"] = more["gb_s"] / bandwidth
            more["floor_tok_s"] = batch * bandwidth * 1e9 / moved
        if "prefill_tok_s" in each:
            more["gflop_s"] = (
                1e-9 * limits.prompt_flops(options.config, prompt) / prompt * each["prefill_tok_s"]
            )
            more["gflop_s_share"] = more["gflop_s"] / gflops
        found.append(each | more)
    return found


def _finish_batch(options: Options, batch: int, sides: list[Side], record: dict[str, Any]) -> None:
    """Peak memory before anything else runs in our process, then law 1 on this very engine."""
    for side in sides:
        if side.failed is None:
            peak = side.process.ask("memory")["peak_mib"]
            record["engines"][side.name].setdefault("peak_mib", {})[str(batch)] = round(peak)
    if options.verify:
        options.say(f"B = {batch}: verify, {options.verify} requests")
        found = sides[0].process.ask("verify", requests=options.verify)
        record["verify"].append({"batch": batch} | found)
        if not found["ok"]:
            for entry in record["results"]:
                if entry["batch"] == batch and entry["engine"] in (OURS, BARE, STOPS):
                    entry["void"] = entry["void"] or "verify found differences between alone and batched"
