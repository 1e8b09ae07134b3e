"""Is our decode step at least 1.5 times as fast as transformers' `generate`, and does it say the same?

Random bf16 weights of SmolLM2-135M's shape, prompts of 128 tokens, 128 new tokens each, greedy. The peer runs as
a worker process of its own interpreter, which needs torch and transformers.

    python -m spikes.007_decode_against_transformers --peer-python PATH_TO_PYTHON
"""

# %%
from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graphs.decode import decode_step
from graphs.layers import rope_table
from graphs.model import ModelSpec
from graphs.rows import make_rows
from spikes.peers.smollm2 import SMOLLM2_135M, decisive_weights, write_checkpoint
from spikes.timing import describe_machine, markdown_table
from xla_engine.checkpoint import Checkpoint, load_checkpoint
from xla_engine.config import SMALLEST_BATCH, EngineConfig
from xla_engine.engine import XlaBatchEngine
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

PROMPT, NEW = 128, 128
CONTEXT = PROMPT + NEW
GOAL = 1.5  # times the peer, at 8 and 32 rows
REST = 0.3  # seconds between turns: the other side's worker threads stop spinning
# A token that float32 would not choose is excused while its logit lies this close to the best one, in deviations
# of its row of logits. Some 30 roundings to bf16 (2^-9 each) that do not help each other leave about 0.05.
NEAR_TIE = 0.2

Ids = list[list[int]]


# %%
@dataclass(frozen=True, slots=True)
class Turn:
    """What one side did in one round: decode tokens/s and, where known, tokens/s of the whole job and tokens."""

    rate: float
    job_rate: float | None = None
    streams: Ids | None = None


class Peer:
    """The worker process; one question, one answer."""

    def __init__(self, python: str, directory: Path, threads: int) -> None:
        worker = Path(__file__).parent / "peers" / "transformers_generate.py"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [python, str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.versions = self.ask("load", directory=str(directory), threads=threads)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **fields}), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._log.seek(0)
            raise SystemExit(f"the peer died:\n{self._log.read()[-2000:]}")
        return dict(json.loads(answer))

    def turn(self, prompts: Ids) -> Turn:
        """Generate all tokens, then one token; the difference is NEW - 1 decode steps."""
        long = self.ask("generate", prompts=prompts, count=NEW)
        short = self.ask("generate", prompts=prompts, count=1)
        steps = (NEW - 1) * len(prompts)
        return Turn(
            rate=steps / (long["seconds"] - short["seconds"]),
            job_rate=len(prompts) * NEW / long["seconds"],
            streams=long["streams"],
        )

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


# %%
def bare_step(checkpoint: Checkpoint, batch: int) -> Callable[[], Turn]:
    """The decode program alone, compiled once: NEW - 1 steps of all rows, from length PROMPT on."""
    spec = ModelSpec(checkpoint.config, jnp.dtype(jnp.bfloat16))
    rows = max(batch, SMALLEST_BATCH)
    weights = jax.device_put(spec.flatten(checkpoint.weights))
    rope = jax.device_put(rope_table(checkpoint.config, CONTEXT))
    live = jax.device_put(np.arange(rows) < batch)
    step = jax.jit(functools.partial(decode_step, spec, CONTEXT), donate_argnums=(2, 3))
    cache = spec.attention.make_cache(checkpoint.config, rows, CONTEXT, jnp.dtype(jnp.bfloat16))
    idle = make_rows(rows, MAX_STOP_TOKEN_IDS)
    compiled = step.lower(weights, rope, cache, idle, live).compile()
    state: dict[str, Any] = {"cache": cache}

    def turn() -> Turn:
        cache = state["cache"]
        rows_state = jax.device_put(
            type(idle)(
                token=np.arange(rows, dtype=np.int32),
                length=np.full(rows, PROMPT, np.int32),
                remaining=np.full(rows, CONTEXT, np.int32),
                stop_ids=np.asarray(idle.stop_ids),
                sampling=jax.tree.map(np.asarray, idle.sampling),
            )
        )
        jax.block_until_ready((cache, rows_state))
        began = time.perf_counter()
        for _ in range(NEW - 1):
            cache, rows_state, samples = compiled(weights, rope, cache, rows_state, live)
        jax.block_until_ready(samples)
        seconds = time.perf_counter() - began
        state["cache"] = cache
        return Turn(rate=(NEW - 1) * batch / seconds)

    return turn


def whole_engine(
    checkpoint: Checkpoint, batch: int, prompts: Ids
) -> tuple[XlaBatchEngine, Callable[[], Turn]]:
    """Everything a user gets. The decode rate counts tokens at the host while every row is decoding."""
    engine = XlaBatchEngine(
        checkpoint,
        config=EngineConfig(
            max_num_seqs=batch, max_model_len=CONTEXT, key_buckets=(CONTEXT,), compile_cache=False
        ),
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)

    def turn() -> Turn:
        began = time.perf_counter()
        names = [engine.submit(prompt, params) for prompt in prompts]
        streams: dict[str, list[int]] = {}
        while len(streams) < batch:  # until each has its first token
            for output in engine.step():
                streams[output.request_id] = list(output.outputs[0].token_ids)
        before, all_decode = engine.stats().generation_tokens, time.perf_counter()
        rate = 0.0
        finished: dict[str, list[int]] = {}
        while len(finished) < batch:
            outputs = engine.step(only_finished=True)
            if outputs and not finished:
                rate = (engine.stats().generation_tokens - before) / (time.perf_counter() - all_decode)
            finished |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        job_rate = batch * NEW / (time.perf_counter() - began)
        return Turn(rate=rate, job_rate=job_rate, streams=[finished[name] for name in names])

    return engine, turn


# %%
@dataclass(frozen=True, slots=True)
class Agreement:
    """How two sets of greedy streams compare, and how both fare before float32.

    same: share of tokens that are equal up to each stream's first difference and beyond.
    whole: streams that are equal to the end.
    worst: largest regret of ours and of the peer's, in deviations of the logits.
    off: share of tokens float32 would not choose, ours and the peer's.
    """

    same: float
    whole: int
    worst: tuple[float, float]
    off: tuple[float, float]
    distinct: int

    @property
    def holds(self) -> bool:
        return self.worst[0] <= max(NEAR_TIE, self.worst[1])


def agreement(peer: Peer, prompts: Ids, ours: Ids, theirs: Ids) -> Agreement:
    judged = [
        np.array(peer.ask("regrets", prompts=prompts, streams=streams)["regrets"])
        for streams in (ours, theirs)
    ]
    return Agreement(
        same=float(np.mean(np.array(ours) == np.array(theirs))),
        whole=sum(a == b for a, b in zip(ours, theirs, strict=True)),
        worst=(float(judged[0].max()), float(judged[1].max())),
        off=(float(np.mean(judged[0] > 0)), float(np.mean(judged[1] > 0))),
        distinct=len({token for stream in ours for token in stream}),
    )


# %%
def run(checkpoint: Checkpoint, batch: int, rounds: int, peer: Peer | None) -> dict[str, Any]:
    """All sides at one batch size, in turns."""
    generator = np.random.default_rng(batch)
    prompts = generator.integers(0, checkpoint.config.vocab_size, (batch, PROMPT)).tolist()
    engine, engine_turn = whole_engine(checkpoint, batch, prompts)
    sides: dict[str, Callable[[], Turn]] = {"step": bare_step(checkpoint, batch), "engine": engine_turn}
    if peer is not None:
        sides["transformers"] = functools.partial(peer.turn, prompts)
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            time.sleep(REST)
            result = side()
            if turn:  # the first round warms up
                turns[name].append(result)
    engine.close()
    result: dict[str, Any] = {"batch": batch, "rates": {n: [t.rate for t in ts] for n, ts in turns.items()}}
    result["job_rates"] = {n: [t.job_rate for t in ts] for n, ts in turns.items() if n != "step"}
    if peer is not None:
        ours, theirs = turns["engine"][0].streams, turns["transformers"][0].streams
        assert ours is not None and theirs is not None
        result["agreement"] = agreement(peer, prompts, ours, theirs)
    return result


def rate_cell(values: list[float], digits: int = 0) -> str:
    """`median (least-most)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratio(
    result: dict[str, Any], ours: str, theirs: str = "transformers", kind: str = "rates"
) -> list[float]:
    """Round by round, so that a noisy minute harms both alike."""
    return [a / b for a, b in zip(result[kind][ours], result[kind][theirs], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--peer-python", help="interpreter with torch and transformers; without it only we run"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_checkpoint(SMOLLM2_135M, decisive_weights(SMOLLM2_135M), directory)
        checkpoint = load_checkpoint(directory)
        peer = Peer(arguments.peer_python, directory, threads) if arguments.peer_python else None
        results = [run(checkpoint, batch, arguments.rounds, peer) for batch in arguments.batches]
        versions = {} if peer is None else peer.versions
        if peer is not None:
            peer.close()
    print(describe_machine(), f"{threads} threads", *(f"{n} {v}" for n, v in versions.items()), sep=", ")
    report(results, with_peer=peer is not None)
    summary = [
        {
            "batch": result["batch"],
            **{
                f"{name}_tok_s": round(statistics.median(rates), 1) for name, rates in result["rates"].items()
            },
            **({"ratio": round(statistics.median(ratio(result, "step")), 3)} if peer else {}),
            **({"streams_agree": result["agreement"].holds} if peer else {}),
        }
        for result in results
    ]
    met = (
        all(line["ratio"] >= GOAL and line["streams_agree"] for line in summary if line["batch"] >= 8)
        if peer
        else None
    )
    print(json.dumps({"spike": "007", "goal": GOAL, "goal_met": met, "results": summary}))


def report(results: list[dict[str, Any]], *, with_peer: bool) -> None:
    if not with_peer:
        print("The peer was left out: give --peer-python to compare.")
    header = ["batch", "decode step", "whole engine"]
    header += ["transformers", "step / transformers", "engine / transformers"] if with_peer else []
    table = []
    for result in results:
        row = [str(result["batch"]), *(rate_cell(rates) for rates in result["rates"].values())]
        if with_peer:
            void = not result["agreement"].holds
            row += ["void" if void else rate_cell(ratio(result, side), 2) for side in ("step", "engine")]
        table.append(row)
    print("\nDecode tokens/s, median (least-most):\n")
    print(markdown_table(header, table))
    print(f"\nThe whole job, {PROMPT} tokens in and {NEW} out per request, new tokens/s:\n")
    header = ["batch", "whole engine", *(["transformers", "ratio"] if with_peer else [])]
    table = []
    for result in results:
        row = [str(result["batch"]), *(rate_cell(rates) for rates in result["job_rates"].values())]
        if with_peer:
            row.append(rate_cell(ratio(result, "engine", kind="job_rates"), 2))
        table.append(row)
    print(markdown_table(header, table))
    if with_peer:
        print("\nGreedy streams, ours against the peer's, and both judged in float32:\n")
        header = ["batch", "same tokens", "same streams", "distinct", "not float32's choice", "worst regret"]
        print(markdown_table(header, [stream_row(result) for result in results]))


def stream_row(result: dict[str, Any]) -> list[str]:
    found: Agreement = result["agreement"]
    return [
        str(result["batch"]),
        f"{found.same:.1%}",
        f"{found.whole} of {result['batch']}",
        str(found.distinct),
        f"{found.off[0]:.2%} | {found.off[1]:.2%}".replace("|", "/"),
        f"{found.worst[0]:.3f} / {found.worst[1]:.3f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
