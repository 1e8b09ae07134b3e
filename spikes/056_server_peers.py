# Frozen: runs at commit 84bfb74.
"""Serving beside other servers on one machine: tokens a second at saturation, first token, time between tokens.

    python spikes/056_server_peers.py --model DIR [--peer NAME=COMMAND ...] [--streams 8 32] [--rounds 5]
        [--prompts FILE]

DIR is a checkpoint with a tokenizer. A peer is any server with OpenAI's completions, started with its command, in
which {port} and {model} are filled in, on as many threads as are wanted; for a GGUF write its path into the command:

    --peer 'vllm=ENV/bin/vllm serve {model} --port {port} --dtype bfloat16 --max-num-seqs 32 --max-model-len 512'
    --peer 'llama.cpp=DIR/llama-server -m FILE.gguf --port {port} --parallel 32 --ctx-size 16384 --threads 2'

Each client streams one request after another: token ids as the prompt (64 made up, or in turn those of FILE, a
JSON list of ids in each line), a fixed number of new tokens, temperature 0, and no end before. All servers live side
by side and take turns in each round; those that wait are stopped by SIGSTOP, so that each has the machine and meets
what else it does. Tokens are those that the servers' usage tells. An event may hold several, so that times between
tokens are times between events. Medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
OURS = "{python} -m xla_engine serve --model {model} --port {port} --max-num-seqs 32 --max-model-len 512"


class Server:
    """One server, in a group of processes of its own. `with server.running():` lets it have the machine."""

    def __init__(self, command: str, model: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        filled = command.format(python=sys.executable, model=model, port=port)
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                shlex.split(filled), cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )

    async def ready(self, client: httpx.AsyncClient) -> str:
        """The name of its model, once it has one."""
        for _ in range(6000):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(f"{self.url}/v1/models")
                healthy = await client.get(f"{self.url}/health")
                if answer.status_code == healthy.status_code == 200:
                    return str(answer.json()["data"][0]["id"])
            await asyncio.sleep(0.1)
        raise SystemExit(f"a server did not start:\n{self._log.read_text()[-2000:]}")

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @contextlib.contextmanager
    def running(self):  # type: ignore[no-untyped-def]
        self.signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.signal(signal.SIGSTOP)

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.signal(signal.SIGKILL)


async def one(
    client: httpx.AsyncClient, url: str, model: str, prompt: list[int], new: int
) -> tuple[int, list[float]]:
    """Tokens of one stream, and when its events came, after it was asked for."""
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, tokens, times = time.perf_counter(), 0, []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url} said {answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event.get("choices"):
                    times.append(time.perf_counter() - began)
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    if tokens != new:
        raise SystemExit(f"{url} made {tokens} tokens, not {new}")
    return tokens, times


async def load(
    client: httpx.AsyncClient, url: str, model: str, streams: int, prompts: list[list[int]], new: int
) -> dict[str, float]:
    """Streams at the same time, until all prompts are done."""
    waiting = iter(prompts)
    done: list[tuple[int, list[float]]] = []

    async def stream() -> None:
        for prompt in waiting:
            done.append(await one(client, url, model, prompt, new))

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds = time.perf_counter() - began
    first = sorted(times[0] for _, times in done)
    between = sorted(b - a for _, times in done for a, b in itertools.pairwise(times))
    return {
        "tokens/s": sum(tokens for tokens, _ in done) / seconds,
        "first p50 ms": 1e3 * first[len(first) // 2],
        "between p50 ms": 1e3 * between[len(between) // 2],
        "between p99 ms": 1e3 * between[len(between) * 99 // 100],
    }


def made_up(count: int) -> list[list[int]]:
    """Prompts of 64 token ids."""
    return [[(number * 37 + place * 11) % 4000 + 5 for place in range(64)] for number in range(count)]


async def measure(args: argparse.Namespace, servers: dict[str, Server]) -> None:
    prompts = made_up(args.waves * max(args.streams))
    if args.prompts:
        prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    # A connection is not used again: a server that was stopped for a while would close it at its first chance.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        models: dict[str, str] = {}
        for name, server in servers.items():
            with server.running():
                models[name] = await server.ready(client)
                await load(client, server.url, models[name], 4, made_up(8), 8)
            print(f"{name} is ready", file=sys.stderr, flush=True)
        for streams in args.streams:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for number in range(args.rounds):
                names = list(servers)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    with servers[name].running() as server:
                        count = args.waves * streams
                        mine = list(itertools.islice(itertools.cycle(prompts), count))
                        found[name].append(
                            await load(client, server.url, models[name], streams, mine, args.max_tokens)
                        )
            columns = list(found["xla-engine"][0])
            print(f"\n| {streams} streams | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
            for name, rounds in found.items():
                medians = [statistics.median(each[key] for each in rounds) for key in rounds[0]]
                print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in medians) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--waves", type=int, default=4, help="requests of each stream in a round")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    commands = {"xla-engine": OURS, **dict(peer.split("=", 1) for peer in args.peer)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, command in commands.items():
            servers[name] = Server(command, args.model, Path(folder) / f"{len(servers)}.log")
            stack.callback(servers[name].end)
        asyncio.run(measure(args, servers))


if __name__ == "__main__":
    main()
