"""Try constraints and tokenizers in a worker process (`worker_main`), each in a child process that may die.

The worker keeps the tokenizers that constraints are compiled for. Children inherit them, so a trial begins at once,
and the worker survives the death of a child.
"""

import contextlib
import json
import os
import resource
import signal
import string
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

MEMORY_LIMIT = 8 << 30  # bytes of address space, including the kept tokenizers
_TRIAL_MEMORY = 1 << 30  # additional bytes of address space for a trial
_STACK = 1 << 20  # bytes; less than the engine's threads have, so a constraint that passes here is safe there
_KEPT = 4  # cached tokenizers
_WALK = 24  # tokens for which a constraint is tried
_LONGEST_ERROR = 2000
_PATIENCE_S = 120  # wall time of a trial, because a process that waits uses no CPU time

_tokenizers: OrderedDict[str, Any] = OrderedDict()


def answer(kind: str, **fields: Any) -> dict[str, Any]:
    """Call the function named `kind` below."""
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "keep_tokenizer": keep_tokenizer,
        "try_constraint": try_constraint,
        "try_tokenizer": try_tokenizer,
    }
    return answers[kind](**fields)


def keep_tokenizer(
    name: str, tokens: list[str], special_token_ids: list[int], eos_token_ids: list[int], slices: bool
) -> dict[str, Any]:
    """Build the llguidance tokenizer of a vocabulary, and keep it under a name. tokens: their bytes as Latin-1."""
    _tokenizers[name] = mask_tokenizer(
        [token.encode("latin-1") for token in tokens], special_token_ids, eos_token_ids, slices=slices
    )
    if len(_tokenizers) > _KEPT:
        _tokenizers.popitem(last=False)
    return {}


def mask_tokenizer(
    tokens: Sequence[bytes],
    special_token_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    encode: Callable[[str], Sequence[int]] | None = None,
    *,
    slices: bool = True,
) -> Any:
    """An llguidance.LLTokenizer: the bytes of all tokens, and those that are no text.

    Its own reader of tokenizer.json takes every added token of the form <...> for a special one. encode: the ids of
    text inside a longer text; without it, the longest tokens. slices: divide the vocabulary by regular expressions
    first, which makes masks of strings faster and takes half of the time here; masks are the same.
    """
    import llguidance

    vocabulary = _Vocabulary(tokens, special_token_ids, eos_token_ids[0])
    wrapped = llguidance.TokenizerWrapper(vocabulary)
    made = llguidance.LLTokenizer(wrapped, eos_token=list(eos_token_ids), slices=None if slices else [])
    wrapped.tokens = vocabulary.tokens = ()  # llguidance has its own copy
    vocabulary.encode = encode or made.greedy_tokenize
    return made


class _Vocabulary:
    """What llguidance.TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id
        self.encode: Callable[[str], Sequence[int]] | None = None

    def __call__(self, text: str) -> Sequence[int]:
        if not isinstance(text, str) or self.encode is None:
            raise TypeError("takes no bytes")
        return self.encode(text)


def try_constraint(tokenizer: str, grammar: str, limits: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Compile a grammar for a kept tokenizer and follow it for some tokens.

    Returns {"kept": false} if the tokenizer is not kept, {"error": ...} for an invalid grammar, {"status": ...} if
    the child died, and {} on success.
    """
    if tokenizer not in _tokenizers:
        return {"kept": False}
    _tokenizers.move_to_end(tokenizer)

    def compile_and_follow() -> str | None:
        import llguidance

        matcher = llguidance.LLMatcher(
            _tokenizers[tokenizer], grammar, log_level=0, limits=llguidance.LLParserLimits(**limits)
        )
        for step in range(_WALK):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() and step == 0:
                return str(matcher.get_error())
            if matcher.is_error() or matcher.is_stopped() or not allowed:
                break  # later errors concern only sequences that get there
            lowest, highest = (allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1
            matcher.consume_token(highest if step % 2 else lowest)
        return None

    return _in_a_child(compile_and_follow, seconds)


def try_tokenizer(path: str, max_growth: int, seconds: float) -> dict[str, Any]:
    """Load a tokenizer.json and use it a little. Returns the same as `try_constraint`.

    {"error": ...} means that it lengthens text by more than `max_growth` times; other errors show when it is loaded.
    """

    def load_and_use() -> str | None:
        import tokenizers

        with contextlib.suppress(Exception):
            backend = tokenizers.Tokenizer.from_file(path)
            ids = backend.encode(string.printable).ids
            texts = [backend.decode(ids)]
            if backend.normalizer is not None:
                texts.append(backend.normalizer.normalize_str(string.printable))
            if (length := max(map(len, texts))) > max_growth * len(string.printable):
                return f"it makes {length} characters of {len(string.printable)}"
        return None

    return _in_a_child(load_and_use, seconds)


def _in_a_child(work: Callable[[], str | None], seconds: float) -> dict[str, Any]:
    """Call `work`, which returns an error or None, in a child process with its own limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _limit(seconds)
        threading.stack_size(_STACK)
        thread = threading.Thread(target=_report, args=(work, writer))
        thread.start()
        thread.join()
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="ascii") as pipe:
        report = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return dict(json.loads(report)) if report.endswith("\n") else {"status": status}


def _limit(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(_PATIENCE_S)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm", encoding="ascii") as sizes:  # Linux only
            limit = int(sizes.read().split()[0]) * resource.getpagesize() + _TRIAL_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _report(work: Callable[[], str | None], writer: int) -> None:
    try:
        error = work()
    except BaseException as failure:  # the library's panics are not Exceptions
        error = f"{type(failure).__name__}: {failure}"
    os.write(writer, (json.dumps({} if error is None else {"error": error[:_LONGEST_ERROR]}) + "\n").encode())
