# Frozen: runs at commit 7f66182.
"""What HTTP costs: the same requests by `AsyncLLM` in a process, over HTTP in streams and whole, and as a batch.

    python spikes/039_server.py [--shape smollm2] [--slots 32] [--requests 128] [--max-tokens 128] [--rounds 5]

Server, client and the process without HTTP live side by side and take turns in each round, so that what else the
machine does meets all of them. The client reads raw pieces of the stream, so that what is measured is the server.
Tokens a second are of all requests at once; the first token is the median of 16 requests one after another; the
processor time is that of the engine's process, which the machine's other work changes least. Prefixes are not cached:
all ways have the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

URL = "http://127.0.0.1:8139"


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = [(number * 37 + place * 11) % 4000 + 5 for place in range(64)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def worker(args: argparse.Namespace) -> None:
    """In process: a round for each line of standard input, a task for each request, as the server has them."""
    from xla_engine import AsyncLLM, SamplingParams

    async def main() -> None:
        options = {"max_num_seqs": args.slots, "max_model_len": 512, "enable_prefix_caching": False}
        async with AsyncLLM(args.model, **options) as llm:
            params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)

            async def one(number: int) -> float:
                began, first, tokens = time.perf_counter(), 0.0, 0
                async for output in llm.generate(body_of(number, 1)["prompt"], params):
                    first = first or time.perf_counter() - began
                    tokens = len(output.outputs[0].token_ids)
                assert tokens == args.max_tokens
                return first

            print("ready", flush=True)
            for line in sys.stdin:
                print(json.dumps(await measure(args, line.strip(), os.getpid(), one)), flush=True)

    asyncio.run(main())


async def measure(
    args: argparse.Namespace, way: str, pid: int, one: Callable[[int], Awaitable[float]]
) -> dict[str, Any]:
    """One round of a way. pid: of the process whose time is counted."""
    before, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(args.requests)))
    tokens, seconds = args.requests * args.max_tokens, time.perf_counter() - began
    cpu = cpu_seconds(pid) - before
    firsts = [await one(1000 + number) for number in range(16)]
    return {
        "way": way,
        "tok_s": round(tokens / seconds),
        "cpu_us_per_token": round(1e6 * cpu / tokens, 1),
        "first_token_ms": round(1e3 * statistics.median(firsts), 2),
    }


def cpu_seconds(pid: int) -> float:
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, status[11:13])) / os.sysconf("SC_CLK_TCK")


async def rounds(
    args: argparse.Namespace, without: subprocess.Popen[str], server: int
) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=args.requests, max_keepalive_connections=args.requests)
    async with httpx.AsyncClient(base_url=URL, timeout=600, limits=limits) as http:

        async def streamed(number: int) -> float:
            began, first, last = time.perf_counter(), 0.0, b""
            body = {**body_of(number, args.max_tokens), "stream": True, "return_token_ids": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_raw():
                    first = first or time.perf_counter() - began
                    last = part
            assert b"[DONE]" in last
            return first

        async def whole(number: int) -> float:
            answer = await http.post("/v1/completions", json=body_of(number, args.max_tokens))
            assert answer.json()["usage"]["completion_tokens"] == args.max_tokens
            return float("nan")

        found = []
        for number in range(args.rounds + 1):
            assert without.stdin is not None and without.stdout is not None
            without.stdin.write("in process\n")
            without.stdin.flush()
            answer = await asyncio.to_thread(without.stdout.readline)
            rows = [
                json.loads(answer),
                await measure(args, "streamed", server, streamed),
                await measure(args, "whole", server, whole),
                await batch(http, args, server),
            ]
            if number:  # the first round warms
                print(*map(json.dumps, rows), sep="\n", flush=True)
                found += rows
        return found


async def batch(http: httpx.AsyncClient, args: argparse.Namespace, server: int) -> dict[str, Any]:
    url = "/v1/completions"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body_of(number, args.max_tokens)}
        for number in range(args.requests)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = (await http.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"})).json()
    made = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    before, began = cpu_seconds(server), time.perf_counter()
    state = (await http.post("/v1/batches", json=made)).json()
    while state["status"] in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(0.01)
        state = (await http.get(f"/v1/batches/{state['id']}")).json()
    assert state["request_counts"]["completed"] == args.requests, state
    tokens, seconds = args.requests * args.max_tokens, time.perf_counter() - began
    cpu = cpu_seconds(server) - before
    return {
        "way": "batch",
        "tok_s": round(tokens / seconds),
        "cpu_us_per_token": round(1e6 * cpu / tokens, 1),
        "first_token_ms": float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("slots", 32), ("requests", 128), ("max-tokens", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shape", choices=["embedded", "smollm2"], default="embedded")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--port",
            URL.rpartition(":")[2],
            "--max-num-seqs",
            str(args.slots),
            "--max-model-len",
            "512",
        ]
        options += ["--batch-dir", folder, "--no-access-log", "--no-enable-prefix-caching"]
        model = [] if args.shape == "embedded" else ["--model", random_model(Path(folder) / "model")]
        server = subprocess.Popen([sys.executable, "-m", "xla_engine", "serve", *options, *model])
        without = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], *model, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert without.stdout is not None and without.stdout.readline() == "ready\n"
            while not ready():
                time.sleep(0.1)
            rows = asyncio.run(rounds(args, without, server.pid))
        finally:
            for process in (server, without):
                process.terminate()
                process.wait()
    base = {
        way: [row for row in rows if row["way"] == way] for way in dict.fromkeys(row["way"] for row in rows)
    }
    for way, mine in base.items():
        shares = [a["tok_s"] / b["tok_s"] for a, b in zip(mine, base["in process"], strict=True)]
        medians = [
            statistics.median(row[name] for row in mine)
            for name in ("tok_s", "cpu_us_per_token", "first_token_ms")
        ]
        print(
            f"{way:<12}{medians[0]:>8.0f} tok/s ({statistics.median(shares):.2f}) {medians[1]:>7.1f} us cpu a token "
            f"{medians[2]:>7.2f} ms"
        )


def random_model(folder: Path) -> str:
    """A checkpoint of SmolLM2-135M's shape; it has no tokenizer, and prompts are token ids."""
    from xla_engine.bench.models import SMOLLM2_135M, write_checkpoint
    from xla_engine.model_loader.checkpoint import random_weights

    folder.mkdir()
    write_checkpoint(SMOLLM2_135M, random_weights(SMOLLM2_135M, dtype="bfloat16", seed=1), folder)
    return str(folder)


def ready() -> bool:
    try:
        return httpx.get(f"{URL}/ready").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
