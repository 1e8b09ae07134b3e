# Frozen: runs at commit 84bfb74.
"""A server under everything at once, for as long as wanted: streams, cancels, killed clients, batches, restarts.

    python spikes/056_server_soak.py [--minutes 30] [--restart-every 60] [--slots 8] [--seed 0] [SERVE OPTIONS ...]

Clients of these kinds run all the time: streams and whole answers of fixed requests, whose text must be the one of the
first time, whatever the schedule and the restart; clients that hang up before the first token, after it or by half;
processes that are killed with a stream open; and batches, of which some are cancelled. Every `--restart-every` seconds
the server gets SIGTERM or kill -9, in turns, and starts again in the same folder.

At the end nothing more is sent, and: every batch is complete or cancelled and has each of its lines exactly once; the
same line has the same text in every batch; an idle server has no live sequence and no request in a slot or in the
queue; its gauges are 0, and as many requests ended as their times were taken. Whatever does not hold is printed, and
the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
LINES = 40  # of a batch
GONE = (httpx.TransportError, httpx.StreamError)  # what a client sees of a server that dies
ENDED = ("completed", "cancelled")


class Server:
    """The process, started again and again in one folder."""

    def __init__(self, folder: Path, slots: int, options: list[str]) -> None:
        self.folder, self.url = folder, ""
        self._command = [sys.executable, "-m", "xla_engine", "serve", "--port", "0", "--no-access-log"]
        self._command += ["--max-num-seqs", str(slots), "--batch-dir", str(folder / "store"), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1
        log = self.folder / f"log-{self.starts}"
        with open(log, "wb") as file:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=file, stderr=file)
        while (found := re.search(r"http://[\d.]+:\d+", log.read_text())) is None:
            if self._process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        self.url = found[0]

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return await asyncio.to_thread(self._process.wait, 120)


class Soak:
    """All clients of one run, and what they saw. problems: what must not be."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.texts: dict[str, str] = {}  # of each request, from its first answer on
        self.batches: set[str] = set()
        self.stopping = False

    def note(self, name: str, text: str) -> None:
        """A whole answer: the same request has the same text each time."""
        if self.texts.setdefault(name, text) != text:
            self.problems.append(f"{name} has another text than before")

    def body(self) -> tuple[str, dict[str, Any]]:
        number = self.rng.randrange(24)
        body = {"prompt": f"def f{number}(", "max_tokens": 8 + 5 * number, "seed": number, "logprobs": 1}
        return f"r{number}", body | ({"temperature": 0} if number % 3 else {})

    async def forever(self, kind: str, client: httpx.AsyncClient) -> None:
        while not self.stopping:
            try:
                await getattr(self, kind)(client)
                self.counts[kind] += 1
            except GONE:
                self.counts["cut off by a restart"] += 1
                await asyncio.sleep(0.2)

    def answered(self, status: int) -> bool:
        """Whether there is an answer to look at; a server that drains may refuse."""
        if status not in (200, 429, 503):
            self.problems.append(f"a request got status {status}")
        return status == 200

    async def whole(self, client: httpx.AsyncClient) -> None:
        name, body = self.body()
        answer = await client.post(f"{self.server.url}/v1/completions", json=body)
        if self.answered(answer.status_code):
            self.note(name, answer.json()["choices"][0]["text"])

    async def stream(self, client: httpx.AsyncClient) -> None:
        name, body = self.body()
        text, end = "", None
        url = f"{self.server.url}/v1/completions"
        async with client.stream("POST", url, json=body | {"stream": True}) as answer:
            if not self.answered(answer.status_code):
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return  # aborted by the end of the server
                    text += event["choices"][0]["text"]
                    end = event["choices"][0]["finish_reason"] or end
        if end is not None:
            self.note(name, text)

    async def hang_up(self, client: httpx.AsyncClient) -> None:
        """A client that goes before the first token or after it, or says that it will send no more."""
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        data = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
            writer.write(head + data)
            await writer.drain()
            if (way := self.rng.randrange(3)) == 1:
                await reader.read(64)
            elif way == 2:
                writer.write_eof()
            await asyncio.sleep(self.rng.random() / 10)
            writer.transport.abort()
        except OSError:
            await asyncio.sleep(0.2)

    async def killed_client(self, _: httpx.AsyncClient) -> None:
        """A process with a stream open is killed."""
        body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True})
        command = ["curl", "-sN", f"{self.server.url}/v1/completions", "-d", body]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        await asyncio.sleep(self.rng.random())
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def batch(self, client: httpx.AsyncClient) -> None:
        """A batch is sent; one of four is cancelled. Its results are looked at in the end."""
        lines = []
        for number in range(LINES):
            body = {"prompt": f"x{number} = ", "max_tokens": 10 + number, "seed": number}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(line) + "\n")
        upload = {"file": ("in.jsonl", "".join(lines).encode())}
        url = f"{self.server.url}/v1"
        answer = await client.post(f"{url}/files", files=upload, data={"purpose": "batch"})
        if self.answered(answer.status_code):
            asked = {"input_file_id": answer.json()["id"], "endpoint": "/v1/completions"}
            answer = await client.post(f"{url}/batches", json=asked | {"completion_window": "24h"})
            if self.answered(answer.status_code):
                name = answer.json()["id"]
                self.batches.add(name)
                if self.rng.randrange(4) == 0:
                    await asyncio.sleep(self.rng.random())
                    await client.post(f"{url}/batches/{name}/cancel")
        await asyncio.sleep(self.rng.uniform(1, 5))

    async def settle(self, client: httpx.AsyncClient) -> None:
        """Wait for every batch, and look at all that can be counted."""
        url = self.server.url
        for name in sorted(self.batches):
            limit = time.monotonic() + 600
            while (record := (await client.get(f"{url}/v1/batches/{name}")).json())["status"] not in ENDED:
                if record["status"] in ("failed", "expired") or time.monotonic() > limit:
                    break
                await asyncio.sleep(0.2)
            await self.check_batch(client, record)
        limit = time.monotonic() + 30
        while (now := (await client.get(f"{url}/v1/requests")).json())["server"]["live"] or busy(now):
            if time.monotonic() > limit:
                break
            await asyncio.sleep(0.1)
        self.hold(now["server"]["live"] == 0, "a live sequence is left in the server")
        self.hold(now["num_waiting"] == 0, "a request is left in the queue")
        self.hold(not busy(now), "a request is left in a slot")
        self.hold(now["server"]["batches"] == 0, "a batch is left running")
        await self.check_metrics(client)

    def hold(self, fact: bool, problem: str) -> None:
        if not fact:
            self.problems.append(problem)

    async def check_batch(self, client: httpx.AsyncClient, record: dict[str, Any]) -> None:
        name, status, counts = record["id"], record["status"], record["request_counts"]
        self.counts[f"batches {status}"] += 1
        if status not in ENDED:
            self.problems.append(f"{name} is {status}: {record['errors']}")
            return
        found: collections.Counter[str] = collections.Counter()
        if record["output_file_id"] is not None:
            content = await client.get(f"{self.server.url}/v1/files/{record['output_file_id']}/content")
            for line in map(json.loads, content.text.splitlines()):
                found[line["custom_id"]] += 1
                self.note(f"line {line['custom_id']}", line["response"]["body"]["choices"][0]["text"])
        self.hold(found.total() == len(found), f"{name} has a line twice")
        self.hold(counts["completed"] == len(found), f"{name} says {counts} and has {len(found)} results")
        if status == "completed":
            self.hold(counts == {"total": LINES, "completed": LINES, "failed": 0}, f"{name}: {counts}")

    async def check_metrics(self, client: httpx.AsyncClient) -> None:
        """Of the last server, while it is idle: gauges are 0, and histograms count all that ended."""
        text = (await client.get(f"{self.server.url}/metrics")).text
        values: collections.Counter[str] = collections.Counter()
        for name, value in re.findall(r"^([a-z0-9:_]+)(?:\{.*\})? ([-+.e\d]+)$", text, re.M):
            values[name] += float(value)  # type: ignore[assignment]
        for gauge in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "xla_engine_interactive_live",
        ):
            self.hold(values[gauge] == 0, f"{gauge} is {values[gauge]} of an idle server")
        ended = values["vllm:request_success_total"]
        timed = values["vllm:e2e_request_latency_seconds_count"]
        self.hold(ended > 0, "no request was counted")
        self.hold(timed == ended, f"{ended} requests ended, and the latency of {timed} was counted")
        first = values["vllm:time_to_first_token_seconds_count"]
        self.hold(first <= ended, f"{first} first tokens of {ended} requests")
        again = (await client.get(f"{self.server.url}/metrics")).text
        counted = re.compile(r"^vllm:(?:generation|prompt)_tokens_total.*$", re.M)
        self.hold(counted.findall(text) == counted.findall(again), "an idle server counts tokens")


def busy(snapshot: dict[str, Any]) -> bool:
    return any(slot["request"] for slot in snapshot["slots"])


async def soak(args: argparse.Namespace, options: list[str]) -> Soak:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), args.slots, options)
        run = Soak(server, args.seed)
        await server.start()
        kinds = [
            "whole",
            "whole",
            "stream",
            "stream",
            "stream",
            "hang_up",
            "hang_up",
            "killed_client",
            "batch",
        ]
        until = time.monotonic() + 60 * args.minutes
        signals = [signal.SIGTERM, signal.SIGKILL]
        try:
            async with httpx.AsyncClient(
                timeout=120, limits=httpx.Limits(max_keepalive_connections=4)
            ) as client:
                tasks = [asyncio.create_task(run.forever(kind, client)) for kind in kinds]
                while (left := until - time.monotonic()) > 0:
                    done, _ = await asyncio.wait(tasks, timeout=min(left, args.restart_every))
                    for task in done:
                        task.result()  # a client that failed ends the run
                    if until - time.monotonic() > args.restart_every / 2:
                        number = signals[server.starts % 2]
                        status = await server.end(number)
                        run.counts[f"ended by {number.name}"] += 1
                        expected = 0 if number == signal.SIGTERM else -number
                        run.hold(status == expected, f"the server ended with {status} on {number.name}")
                        await server.start()
                run.stopping = True
                await asyncio.gather(*tasks)
                await run.settle(client)
        finally:
            status = await server.end(signal.SIGTERM)
        run.hold(status == 0, f"the last server ended with {status}")
        return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--restart-every", type=float, default=60, help="seconds")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args, options = parser.parse_known_args()
    run = asyncio.run(soak(args, options))
    for name, count in sorted(run.counts.items()):
        print(f"{count:7d} {name}")
    print(f"{len(run.texts):7d} requests and lines with one text each, {run.server.starts} servers")
    for problem in dict.fromkeys(run.problems):
        print(f"PROBLEM {problem}")
    sys.exit(bool(run.problems))


if __name__ == "__main__":
    main()
