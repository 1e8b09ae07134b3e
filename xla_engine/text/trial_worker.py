"""Tries constraints and tokenizers in a worker process (`worker_main`), each in a child that may die of it.

The worker keeps the tokenizers that constraints are compiled for, so that a child, which inherits them, begins at
once, and what kills a child costs no new start.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import string
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MEMORY_LIMIT = 8 << 30  # bytes of address space, the kept tokenizers among them
_TRIAL_MEMORY = 1 << 30  # bytes of address space that a trial may add
_STACK = 1 << 20  # bytes; the engine's threads have more, so what passes here does not end them
_KEPT = 4  # tokenizers
_WALK = 24  # tokens a constraint is followed for
_LONGEST_ERROR = 2000
_PATIENCE_S = 120  # of any trial, by the clock: one that waits uses no processor time

_tokenizers: OrderedDict[str, Any] = OrderedDict()


def answer(kind: str, **fields: Any) -> dict[str, Any]:
    """What the function of this name below says."""
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "keep_tokenizer": keep_tokenizer,
        "try_constraint": try_constraint,
        "try_tokenizer": try_tokenizer,
    }
    return answers[kind](**fields)


def keep_tokenizer(name: str, text: str, vocab_size: int, eos_token_ids: list[int]) -> dict[str, Any]:
    """Make the tokenizer of a tokenizer.json for llguidance and keep it under a name."""
    import llguidance

    _tokenizers[name] = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
    if len(_tokenizers) > _KEPT:
        _tokenizers.popitem(last=False)
    return {}


def try_constraint(tokenizer: str, grammar: str, limits: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Compile a grammar for a kept tokenizer and follow it for some tokens.

    {"kept": false} where the tokenizer is not kept, {"error": what is wrong with the grammar}, {"status": how its
    child ended}, or {} where all is well.
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
                break  # later errors belong to the row that walks there
            lowest, highest = (allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1
            matcher.consume_token(highest if step % 2 else lowest)
        return None

    return _in_a_child(compile_and_follow, seconds)


def try_tokenizer(path: str, max_growth: int, seconds: float) -> dict[str, Any]:
    """Load a tokenizer.json and use it a little; answers as `try_constraint` does.

    {"error": ...} only where it lengthens a text more than `max_growth` times: whoever loads it sees other failures.
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
    """Call `work` in a child with limits of its own; it returns an error or None."""
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
        with open("/proc/self/statm", encoding="ascii") as sizes:  # where there is one
            limit = int(sizes.read().split()[0]) * resource.getpagesize() + _TRIAL_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _report(work: Callable[[], str | None], writer: int) -> None:
    try:
        error = work()
    except BaseException as failure:  # the library's panics are no Exceptions
        error = f"{type(failure).__name__}: {failure}"
    os.write(writer, (json.dumps({} if error is None else {"error": error[:_LONGEST_ERROR]}) + "\n").encode())
