"""An OpenAI-compatible server as a target, with limits on what is sent and read."""

import http.client
import ipaddress
import json
import shlex
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

from xla_engine.same_bits.target import TEXT, Answer, Ask, Choice, LimitReached, TargetError, Token

ANSWER_S = 120.0  # that a server may be silent
MOST_BYTES = 4 << 20  # of one answer
_FEATURES = {  # that are found by trying, in words of a report
    "stream": "streams",
    "ids": "prompts of token ids",
    "score": "log-probabilities of prompts",
}
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity", "connection": "close"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one check sends and waits; tokens are those of prompts and of answers."""

    requests: int = 400
    tokens: int = 60_000
    seconds: float = 600.0

    def __str__(self) -> str:
        return f"{self.requests:,} requests, {self.tokens:,} tokens, {self.seconds:,.0f} s"


LONG = Limits(requests=1200, tokens=200_000, seconds=1800.0)


@dataclass(slots=True)
class _Spent:
    """What was sent so far. Tokens are reserved before a request is sent, and corrected by its answer."""

    limits: Limits
    began: float = field(default_factory=time.monotonic)
    requests: int = 0
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def left_s(self) -> float:
        left = self.began + self.limits.seconds - time.monotonic()
        if left <= 0:
            raise LimitReached(f"the limit of {self.limits.seconds:,.0f} s was reached")
        return left

    def take(self, tokens: int) -> None:
        self.left_s()
        with self.lock:
            if self.requests >= self.limits.requests:
                raise LimitReached(f"the limit of {self.limits.requests:,} requests was reached")
            if self.tokens + tokens > self.limits.tokens:
                raise LimitReached(f"the limit of {self.limits.tokens:,} tokens was reached")
            self.requests += 1
            self.tokens += tokens

    def correct(self, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens


class _Malformed(Exception):
    """An answer that cannot be parsed; the message says why."""


class _Refused(Exception):
    """A status other than 200: the server refused the request."""


class HttpTarget:
    """`/v1/completions` of a server.

    url: with or without `/v1`. model: its name there; the first that the server lists without it.
    api_key: sent as a bearer token; key_env: the name of its variable, for commands in reports. remote: allow
    addresses that are not this machine's. Redirects are errors, and proxies are not used.
    Raises TargetError if the server cannot be asked.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        key_env: str | None = None,
        remote: bool = False,
        limits: Limits | None = None,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.username:
            raise TargetError(
                f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000"
            )
        self._tls, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._address = _address(parts.hostname, port, remote=remote)
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._key, self._key_env = api_key, key_env
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise TargetError("the API key has characters that are not allowed in a header")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._spent = _Spent(limits or Limits())
        self._tokens_per_byte = 0.5
        self._extras: dict[str, Any] = {}
        self._fingerprints: set[str] = set()
        self._served_by: set[str] = set()
        self._no_stream: str | None = None
        self.corpus: tuple[int, ...] = ()
        self.features: frozenset[str] = frozenset()
        self.model = self._first_model() if model is None else model
        self._probe()

    def run(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        began = time.monotonic()
        if len(asks) == 1:
            return [self._ask(asks[0], began)[0]]
        with ThreadPoolExecutor(len(asks)) as pool:
            found = list(pool.map(lambda ask: self._ask(ask, began), asks))
        spans = [times for _, times in found]
        return [
            replace(answer, peers=_peers(place, spans) if asks[place].stream else None)
            for place, (answer, _) in enumerate(found)
        ]

    def describe(self) -> dict[str, Any]:
        spent = self._spent
        return {
            "target": self.url,
            "model": self.model,
            "server": sorted(self._served_by),
            "system_fingerprint": sorted(self._fingerprints),
            "offers": [words for feature, words in _FEATURES.items() if feature in self.features],
            "sent": f"{spent.requests} requests, {spent.tokens} tokens, {time.monotonic() - spent.began:.1f} s",
            "limits": str(spent.limits),
        } | ({} if self._no_stream is None else {"streams": f"not usable: {self._no_stream}"})

    def reproduce(self, ask: Ask) -> str | None:
        key = f' -H "Authorization: Bearer ${self._key_env}"' if self._key_env else ""
        body = shlex.quote(json.dumps(self._body(ask)))
        return f"curl -s {shlex.quote(self.url + '/completions')} -H 'Content-Type: application/json'{key} -d {body}"

    # What the server can do, by its effect.

    def _first_model(self) -> str:
        try:
            listed = json.loads(b"".join(self._exchange("GET", "/models", None)))
            return str(listed["data"][0]["id"])
        except (_Refused, _Malformed, ValueError, LookupError, TypeError) as error:
            if isinstance(error, TargetError):
                raise
            raise TargetError(f"{self.url}/models lists no model; name one with --model (model=)") from None

    def _probe(self) -> None:
        pieces = [TEXT[begin : begin + 500] for begin in range(0, 2000, 500)]
        answer: dict[str, Any] = {}
        for extras in ({"logprobs": 2, "return_token_ids": True}, {"logprobs": 2}, {}):
            self._extras = extras
            try:
                answer = self._complete(Ask(prompt=pieces[0], max_tokens=4))
                break
            except (_Refused, _Malformed) as refused:
                reason = str(refused)
        else:
            raise TargetError(f"{self.url}/completions refuses a plain request: {reason}")
        usage = _whole(answer.get("usage"), "prompt_tokens")
        if usage:
            self._tokens_per_byte = usage / len(pieces[0])
        ids = _prompt_ids(answer)
        if ids and self._seen(Ask(prompt=ids, max_tokens=1), lambda given: _prompt_ids(given) == ids):
            self.corpus = ids
            for piece in pieces[1:]:
                with suppress(_Refused, _Malformed):
                    self.corpus += _prompt_ids(self._complete(Ask(prompt=piece, max_tokens=1))) or ()
            self.features |= {"ids"}
            if self._seen(
                Ask(prompt=ids, max_tokens=1, score=True),
                lambda given: _choices_of(given)[0].prompt_logprobs is not None,
            ):
                self.features |= {"score"}
        self.features |= {"cut", "seed", "n"}
        streamed, _ = self._ask(Ask(prompt=pieces[0], max_tokens=4, stream=True), time.monotonic())
        self.features |= {"stream"} if streamed.error is None else set()
        self._no_stream = streamed.error

    def _seen(self, ask: Ask, effect: Callable[[dict[str, Any]], bool]) -> bool:
        try:
            return effect(self._complete(ask))
        except (_Refused, _Malformed, IndexError):
            return False

    # One request.

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens}
        body |= {"temperature": ask.temperature, **self._extras}
        body |= {} if ask.seed is None else {"seed": ask.seed}
        body |= {} if ask.n == 1 else {"n": ask.n}
        body |= {"stream": True} if ask.stream else {}
        return body | ({"prompt_logprobs": 1} if ask.score else {})

    def _complete(self, ask: Ask) -> dict[str, Any]:
        reserved = self._reserve(ask)
        answer = _object(b"".join(self._exchange("POST", "/completions", self._body(ask), reserved)))
        if isinstance(fingerprint := answer.get("system_fingerprint"), str):
            self._fingerprints.add(fingerprint[:80])
        usage = answer.get("usage")
        prompt, new = _whole(usage, "prompt_tokens"), _whole(usage, "completion_tokens")
        if prompt is not None and new is not None:
            self._spent.correct(max(prompt + new, 1) - reserved)
        return answer

    def _reserve(self, ask: Ask) -> int:
        rate = 1 if isinstance(ask.prompt, tuple) else self._tokens_per_byte
        return int(len(ask.prompt) * rate) + 1 + ask.max_tokens * ask.n

    def _ask(self, ask: Ask, began: float) -> tuple[Answer, list[float]]:
        """The answer, and when each piece of it came."""
        time.sleep(max(began + ask.delay_s - time.monotonic(), 0))
        sent = time.monotonic()
        times: list[float] = []
        cached: int | None = None
        try:
            if ask.stream:
                reserved = self._reserve(ask)
                with closing(self._exchange("POST", "/completions", self._body(ask), reserved)) as lines:
                    choices, times = _choices_of_stream(lines, ask.max_tokens)
            else:
                answer = self._complete(ask)
                choices = _choices_of(answer, most=ask.max_tokens)
                usage = answer.get("usage")
                details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
                cached = _whole(details, "cached_tokens")
        except (_Refused, _Malformed) as error:
            return Answer(error=str(error), seconds=time.monotonic() - sent), []
        return Answer(choices=choices, cached_tokens=cached, seconds=time.monotonic() - sent), times

    def _exchange(self, method: str, path: str, body: Any, tokens: int = 0) -> Generator[bytes, None, None]:
        """Lines of the answer to one request, sent again for as long as the server says 429."""
        wait_s = 0.5
        while True:
            self._spent.take(tokens)
            with ExitStack() as stack:
                try:
                    response = self._send(method, path, body, stack)
                    if response.status == 200:
                        yield from _lines(response)
                        self._spent.left_s()  # else it was cut off by the end of the time
                        return
                    if response.status != 429:
                        self._fail(response)
                except (OSError, http.client.HTTPException) as error:
                    self._spent.left_s()
                    reason = f"{type(error).__name__}: {self._safe(str(error))}"
                    raise _Malformed(f"the answer ended early: {reason}") from None
            asked = response.headers.get("retry-after", "")
            wait_s = float(asked) if asked.isdigit() else min(2 * wait_s, 30.0)
            self._spent.correct(-tokens)
            if wait_s > self._spent.left_s():
                raise LimitReached(
                    f"the server asks to wait {wait_s:g} s (429), which exceeds the time limit"
                )
            time.sleep(wait_s)

    def _send(self, method: str, path: str, body: Any, stack: ExitStack) -> http.client.HTTPResponse:
        """Send a request to the address that was checked, even if the name resolves to another by now."""
        limit_s = min(ANSWER_S, self._spent.left_s())
        try:
            plain = stack.enter_context(socket.create_connection(self._address, timeout=limit_s))
            if self._tls:
                context = ssl.create_default_context()
                plain = stack.enter_context(context.wrap_socket(plain, server_hostname=self._host))
        except OSError as error:
            reason = f"no server answers at {self.url}: {error.strerror or error}"
            raise (_Malformed if self.features else TargetError)(reason) from None
        # A server that sends a byte now and then would hold a request for ever.
        watch = threading.Timer(limit_s, _shut, (plain,))
        watch.daemon = True
        watch.start()
        stack.callback(watch.cancel)
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.sock = plain
        headers = _HEADERS | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._path + path, data, headers)
        response = stack.enter_context(connection.getresponse())
        if name := response.headers.get("server"):
            self._served_by.add(self._safe(name)[:80])
        return response

    def _fail(self, response: http.client.HTTPResponse) -> NoReturn:
        if 300 <= response.status < 400:
            where = self._safe(str(response.headers.get("location", "")))
            raise TargetError(
                f"{self.url} redirects to {where}; redirects are not followed: use that address"
            )
        text = self._safe(response.read(2000).decode("utf-8", "replace"))
        if response.status in (401, 403):
            raise TargetError(
                f"the server refuses the key (status {response.status}): name the variable of a valid key with "
                f"--api-key-env"
            )
        raise _Refused(f"status {response.status}: {text[:300]}")

    def _safe(self, text: str) -> str:
        """Text of the server, without the key and without control characters."""
        text = text.replace(self._key, "[key]") if self._key else text
        return "".join(each if each.isprintable() else " " for each in text)[:300]


def _address(host: str, port: int, *, remote: bool) -> tuple[str, int]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TargetError(f"{host!r} is not known: {error.strerror or error}") from None
    addresses = [str(each[4][0]) for each in found]
    if not remote and not all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses):
        raise TargetError(
            f"{host!r} is not this machine; use --remote (remote=True) to send requests to other machines"
        )
    return addresses[0], port


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    size = 0
    while line := response.readline(MOST_BYTES + 1):
        size += len(line)
        if size > MOST_BYTES:
            raise _Malformed(f"an answer of more than {MOST_BYTES >> 20} MiB")
        yield line


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _Malformed("an answer that is not JSON") from None
    if not isinstance(value, dict):
        raise _Malformed("an answer that is not a JSON object")
    return value


def _whole(record: Any, name: str) -> int | None:
    value = record.get(name) if isinstance(record, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _prompt_ids(answer: dict[str, Any]) -> tuple[int, ...] | None:
    """The prompt's ids, where the answer tells them."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    ids = first.get("prompt_token_ids") if isinstance(first, dict) else None
    return tuple(ids) if isinstance(ids, list) and all(type(each) is int for each in ids) else None


def _peers(place: int, spans: list[list[float]]) -> int:
    """How many others had begun and not ended when the middle piece of this answer came.

    First pieces prove that a request runs; that it was sent does not. The middle of the answer leaves room for late
    readings of the clock at its ends.
    """
    own = spans[place]
    if len(own) < 3:
        return 0
    middle = own[len(own) // 2]
    return sum(
        1 for number, other in enumerate(spans) if number != place and other and other[0] < middle < other[-1]
    )


# Parsing answers. Anything but the JSON of an OpenAI-compatible server raises `_Malformed`.


class _Choices:
    """The choices of an answer that comes whole or in pieces. most: tokens that one of them may have."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._parts: dict[int, _Parts] = {}

    def add(self, record: dict[str, Any]) -> bool:
        """A whole answer, or a piece of it; whether it has choices."""
        given = record.get("choices")
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise _Malformed("an answer without choices")
        for place, each in enumerate(given):
            index = each.get("index", place)
            if not isinstance(index, int) or not 0 <= index < 1024:
                raise _Malformed("a choice with a wrong index")
            self._parts.setdefault(index, _Parts()).add(each)
        return bool(given)

    def all(self) -> tuple[Choice, ...]:
        """The choices, by index."""
        if not self._parts:
            raise _Malformed("an answer without choices")
        return tuple(self._parts[index].choice(self._most) for index in sorted(self._parts))


def _choices_of(answer: dict[str, Any], *, most: int | None = None) -> tuple[Choice, ...]:
    choices = _Choices(most)
    choices.add(answer)
    return choices.all()


def _choices_of_stream(lines: Iterator[bytes], most: int) -> tuple[tuple[Choice, ...], list[float]]:
    """The choices of server-sent events, and when each piece came, in seconds."""
    choices, times = _Choices(most), list[float]()
    for line in lines:
        data = line[5:].strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return choices.all(), times
        try:
            event = _object(data)
        except _Malformed:
            raise _Malformed(f"a stream with the event {data[:200]!r}") from None
        if choices.add(event):
            times.append(time.monotonic())
        if len(times) > 2 * most + 16:
            raise _Malformed(f"a stream that goes on after {len(times)} pieces for max_tokens {most}")
    raise _Malformed("a stream that breaks off")


class _Parts:
    """One choice, piece by piece."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[Token] = []
        self._names: list[Token] = []
        self._logprobs: list[float] = []
        self._gaps: list[float] = []
        self._prompt: tuple[dict[str, float], ...] | None = None

    def add(self, choice: dict[str, Any]) -> None:
        try:
            self._text += str(choice.get("text") or "")
            self._ids += [int(each) for each in choice.get("token_ids") or ()]
            self._add_logprobs(choice.get("logprobs"))
            if choice.get("prompt_logprobs"):
                self._prompt = tuple(
                    {str(token): _number(found["logprob"]) for token, found in each.items()}
                    for each in choice["prompt_logprobs"][1:]
                )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Malformed(f"a choice of an unknown format ({type(error).__name__})") from None

    def _add_logprobs(self, found: Any) -> None:
        if not found:
            return
        if "content" in found:  # the form of chats, which llama-server has here too
            found = {
                "tokens": [each.get("id", each["token"]) for each in found["content"]],
                "token_logprobs": [each["logprob"] for each in found["content"]],
                "top_logprobs": [
                    {str(place): top["logprob"] for place, top in enumerate(each.get("top_logprobs") or ())}
                    for each in found["content"]
                ],
            }
        self._names += [each if isinstance(each, int) else str(each) for each in found["tokens"]]
        self._logprobs += [_number(each) for each in found["token_logprobs"]]
        for tops in found.get("top_logprobs") or ():
            best = sorted((_number(each) for each in tops.values()), reverse=True)
            if len(best) > 1:
                self._gaps.append(best[0] - best[1])

    def choice(self, most: int | None) -> Choice:
        tokens = tuple(self._ids or self._names)
        if most is not None and len(tokens) > most:
            raise _Malformed(f"{len(tokens)} tokens for max_tokens {most}")
        complete = bool(tokens) and len(self._logprobs) == len(tokens)
        return Choice(
            text=self._text,
            tokens=tokens,
            logprobs=tuple(self._logprobs) if complete else None,
            gaps=tuple(self._gaps) if complete and len(self._gaps) == len(tokens) else None,
            prompt_logprobs=self._prompt,
        )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Malformed("a log-probability that is not a number")
    return float(value)
