"""A completions server over a model of hashes, honest or with one planted fault, and the same model as a target.

A token of the model depends on all tokens before it; candidates are nearly as often close as far apart.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp, log
from typing import Any

from xla_engine.same_bits import Answer, Ask, Choice

VOCABULARY, CANDIDATES = 1000, 6
Made = tuple[list[int], list[float], list[float]]  # ids, log-probabilities, gaps (<= 0)


@dataclass
class Liar:
    """fault: "" is honest. fired: how often it changed an answer. beside: requests live at the same time. chance: of
    noise, the same in every run."""

    fault: str = ""
    fired: int = 0
    live: int = 0
    restarts: int = 0
    seen: list[tuple[int, ...]] = field(default_factory=list)
    last: dict[str, Made] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def has(self, fault: str, when: bool = True) -> bool:
        """Whether this fault is planted and happens now, which is counted."""
        if self.fault != fault or not when:
            return False
        self.fired += 1
        return True

    def generate(self, prompt: tuple[int, ...], body: dict[str, Any], index: int, live: int) -> Made:
        """One choice. live: requests that run with it."""
        count, temperature, seed = body["max_tokens"], body["temperature"], body.get("seed")
        draw = random.Random() if seed is None else random.Random(f"{seed} {index} {prompt}")
        if self.has("seed ignored", temperature > 0 and seed is not None):
            draw = random.Random()
        if self.has("seed by batch", temperature > 0 and live > 1):
            draw = random.Random(f"{seed} {live}")
        if self.has("n alike", index > 0):
            draw = random.Random(f"{seed} 0 {prompt}")
        if self.has("one seed", temperature > 0):
            draw = random.Random(0)
        known = any(len(each) > len(prompt) and each[:48] == prompt[:48] for each in self.seen)
        greedy = temperature == 0
        noises = {
            "noise in batches": greedy and live > 1,
            "noise above 44": greedy and live > 44,
            "noise in all batches": live > 1,
            "noise alone": greedy and self.chance.random() < 0.5,
            "noise at first": greedy and not self.seen,
            "other bits after a restart": self.restarts > 0,
            "other bits unstreamed": not body.get("stream"),
        }
        noisy = any(self.has(name, when) for name, when in noises.items())
        context = list(prompt)
        context[0] += self.has("stale prefix", known and greedy) or self.has("cut changes", count == 8)
        self.seen.append(prompt)
        made: Made = ([], [], [])
        for place in range(count):
            ids, scores = _candidates(context)
            if noisy:
                size = 0.1 if self.fault == "noise in all batches" else 0.01
                scores = [each + self.chance.uniform(-size, size) for each in scores]
            norm = log(sum(exp(each) for each in scores))
            order = sorted(range(CANDIDATES), key=scores.__getitem__, reverse=True)
            chosen = order[0]
            if not greedy:
                chosen = draw.choices(range(CANDIDATES), [exp(each / temperature) for each in scores])[0]
            if self.has("swapped tokens", live > 1 and place == 5 and greedy and self.chance.random() < 0.3):
                chosen = order[-1]
            context.append(ids[chosen])
            value = scores[chosen] - norm
            value = round(value, 2) if self.has("rounded logprobs") else value
            made[0].append(ids[chosen]), made[1].append(value)
            made[2].append(scores[order[1]] - scores[order[0]])
        with self.lock:
            other = next((each for key, each in self.last.items() if key != str(prompt)), None)
            self.last = {str(prompt): made}
        if other is not None and self.has("swapped answers", live > 1 and len(other[0]) >= count):
            return other[0][:count], other[1][:count], other[2][:count]
        return made

    def score(self, prompt: tuple[int, ...]) -> list[dict[int, float]]:
        """Log-probabilities of the prompt's tokens but the first."""
        moved = 1e-3 if self.has("scores differ") else 0.0
        found = []
        for place in range(1, len(prompt)):
            ids, scores = _candidates(list(prompt[:place]))
            norm = log(sum(exp(each) for each in scores))
            found.append({token: each - norm + moved for token, each in zip(ids, scores, strict=True)})
        return found


def _candidates(context: list[int]) -> tuple[list[int], list[float]]:
    state = blake2b(str(context).encode(), digest_size=3 * CANDIDATES).digest()
    ids = [100 * place + state[place] % 100 for place in range(CANDIDATES)]
    scores = range(CANDIDATES, 3 * CANDIDATES, 2)
    return ids, [int.from_bytes(state[at : at + 2], "big") / 12000 for at in scores]


class LiarTarget:
    """The model in this process: requests given together run together."""

    features = frozenset({"ids", "score", "cut", "seed", "n"})
    corpus = tuple(random.Random(0).choices(range(VOCABULARY), k=500))

    def __init__(self, liar: Liar) -> None:
        self.liar, self.asked = liar, 0

    def run(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        self.asked += len(asks)
        return [self._answer(ask, len(asks)) for ask in asks]

    def _answer(self, ask: Ask, live: int) -> Answer:
        assert isinstance(ask.prompt, tuple)
        body = {"max_tokens": ask.max_tokens, "temperature": ask.temperature, "seed": ask.seed}
        cached = sum(each == ask.prompt for each in self.liar.seen[-8:])
        scored = self.liar.score(ask.prompt) if ask.score else None
        scores = scored and tuple({str(k): v for k, v in each.items()} for each in scored)
        made = [self.liar.generate(ask.prompt, body, index, live) for index in range(ask.n)]
        choices = tuple(
            Choice(
                tokens=tuple(ids),
                logprobs=tuple(logprobs),
                gaps=tuple(-each for each in gaps),
                prompt_logprobs=scores,
            )
            for ids, logprobs, gaps in made
        )
        return Answer(choices=choices, peers=live - 1, cached_tokens=cached)

    def describe(self) -> dict[str, Any]:
        return {"target": "liar"}

    def reproduce(self, ask: Ask) -> str | None:
        return None


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "liar"}]}).encode())

    def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        liar, server = self.server.liar, self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if liar.has("redirect"):
            return self._send(b"", 307, Location="http://127.0.0.2:1/v1/completions")
        if liar.has("not json"):
            return self._send(b"hello")
        if liar.has("dies", len(server.requests) > 20):
            self.close_connection = True
            return self.connection.close()
        if liar.has("too many", random.random() < 0.1):
            return self._send(b"{}", 429, Retry_After="0")
        if liar.has("tells the key"):
            return self._send(f"bad key {self.headers['Authorization']}\x1b[31m".encode(), 500)
        if liar.has("nested", bool(body.get("stream"))):
            return self._send(b"data: " + b"[" * 100_000 + b"\n\n")
        with liar.lock:
            liar.live += 1
        try:
            if liar.has("serial"):
                with server.one_at_a_time:
                    self._complete(body)
            else:
                self._complete(body)
        finally:
            with liar.lock:
                liar.live -= 1

    def _complete(self, body: dict[str, Any]) -> None:
        liar = self.server.liar
        given = body["prompt"]
        prompt = tuple(given) if isinstance(given, list) else tuple(given.encode())
        cached = sum(each == prompt for each in list(liar.seen)[-8:])
        time.sleep(0.004)  # as long as others take to arrive
        made = [liar.generate(prompt, body, index, liar.live) for index in range(body.get("n", 1))]
        more = 5 if liar.has("too long", not body.get("stream")) else 0
        choices: list[dict[str, Any]] = [
            {"index": index, "text": " ".join(map(str, ids)), "logprobs": _block(ids, logprobs, gaps)}
            for index, (ids, logprobs, gaps) in enumerate(made)
        ]
        if body.get("return_token_ids"):
            for each, (ids, *_) in zip(choices, made, strict=True):
                each.update(prompt_token_ids=prompt, token_ids=ids + [1] * more)
        if body.get("prompt_logprobs") and isinstance(given, list):
            found = [{k: {"logprob": v} for k, v in each.items()} for each in liar.score(prompt)]
            choices[0]["prompt_logprobs"] = [None, *found]
        new = sum(len(ids) for ids, _, _ in made)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": new}
        usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
        if body.get("stream"):
            return self._stream(made[0])
        self._send(json.dumps({"choices": choices, "usage": usage, "system_fingerprint": "liar-1"}).encode())

    def _stream(self, made: Made) -> None:
        liar = self.server.liar
        self.send_response(200)
        self.end_headers()
        endless = liar.has("endless stream")
        drop = liar.has("drops a token")
        try:
            for place, (token, logprob, gap) in enumerate(zip(*made, strict=True)):
                if drop and place == 2:
                    continue
                time.sleep(0.001)
                choice = {"index": 0, "text": f"{' ' if place else ''}{token}", "token_ids": [token]}
                self._event({"choices": [choice | {"logprobs": _block([token], [logprob], [gap])}]})
            while liar.has("trickle"):
                self.wfile.write(b"x")
                time.sleep(0.02)
            while endless:
                self._event({"choices": [{"index": 0, "text": "more"}]})
            if not liar.has("breaks off"):
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


def _block(ids: list[int], logprobs: list[float], gaps: list[float]) -> dict[str, Any]:
    tops = [{"first": 0.0, "second": gap} for gap in gaps]
    return {"tokens": [str(each) for each in ids], "token_logprobs": logprobs, "top_logprobs": tops}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, liar: Liar) -> None:
        self.liar = liar
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.one_at_a_time = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(fault: str = "") -> Iterator[_Server]:
    server = _Server(Liar(fault))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
