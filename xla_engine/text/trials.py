"""Try constraints and tokenizers in a process that may die, before this process uses them.

A few bytes can make the libraries overflow the stack or never return. Whatever passes a trial within its limits is
safe here. Verdicts on constraints are kept in an LRU cache by hash.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xla_engine.model_loader.tokenizer_json import MAX_GROWTH
from xla_engine.text.worker_process import WorkerEndedError, WorkerProcess, why_ended

CONSTRAINT_CPU_S = 1.0  # CPU time to compile a constraint and follow it for some tokens
TOKENIZER_CPU_S = 10.0  # CPU time to load a tokenizer
MOST_VERDICTS = 4096  # of a vocabulary
TRIAL_ENDED = ("trying it", "compiling it")  # how a verdict begins when a process ended

PROCESS = WorkerProcess("trial_worker.py")


class ConstraintTrials:
    """Tries constraints for one vocabulary, which is sent to the process once."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        limits: dict[str, Any],
        *,
        process: WorkerProcess = PROCESS,
        most_verdicts: int = MOST_VERDICTS,
    ) -> None:
        """tokens, ...: see `mask_tokenizer`. limits: the fields of `llguidance.LLParserLimits`.
        most_verdicts: how many are kept."""
        self._process, self._most_verdicts = process, most_verdicts
        kept = {
            "tokens": [token.decode("latin-1") for token in tokens],
            "special_token_ids": list(special_token_ids),
            "eos_token_ids": list(eos_token_ids),
        }
        self._vocabulary = json.dumps(kept)  # some MB, so it is written once
        self._name = hashlib.sha256(self._vocabulary.encode()).hexdigest()
        self._limits = limits
        # what is wrong, or None; by hash and slices
        self._verdicts: OrderedDict[tuple[bytes, bool], str | None] = OrderedDict()
        self._lock = threading.Lock()

    def why_not(self, grammar: str, *, slices: bool = True) -> str | None:
        """Why a grammar in llguidance's format must not be compiled here; None if it may be.

        slices: as in `mask_tokenizer`. Without them the first verdict takes half the time, and tells whether the
        grammar is valid, but does not permit compiling it with them.
        """
        key = (_key(grammar), slices)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        try:
            verdict = _verdict(self._ask(grammar, slices), CONSTRAINT_CPU_S)
        except WorkerEndedError as error:  # perhaps for another reason, so not cached
            return f"compiling it {error}; send it again"
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > self._most_verdicts:
                self._verdicts.popitem(last=False)
        return verdict

    def _ask(self, grammar: str, slices: bool) -> dict[str, Any]:
        name = self._name if slices else f"{self._name} without slices"
        fields = {"tokenizer": name, "grammar": grammar, "limits": self._limits}
        request = json.dumps({"kind": "try_constraint", "seconds": CONSTRAINT_CPU_S, **fields})
        answer = self._process.ask(CONSTRAINT_CPU_S, request)
        if answer.get("kept") is False:
            set_up = json.dumps({"kind": "keep_tokenizer", "name": name, "slices": slices})
            self._process.ask(TOKENIZER_CPU_S, f"{set_up[:-1]}, {self._vocabulary[1:]}")
            answer = self._process.ask(CONSTRAINT_CPU_S, request)
        return answer


def why_not_load(tokenizer: Path) -> str | None:
    """Why a tokenizer.json must not be loaded here; None if it may be."""
    fields = {"path": str(tokenizer.absolute()), "max_growth": MAX_GROWTH, "seconds": TOKENIZER_CPU_S}
    request = {"kind": "try_tokenizer", **fields}
    try:
        return _verdict(PROCESS.ask(TOKENIZER_CPU_S, json.dumps(request)), TOKENIZER_CPU_S)
    except WorkerEndedError as error:
        return f"trying it {error}"


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _verdict(answer: dict[str, Any], seconds: float) -> str | None:
    if "status" in answer:
        return f"trying it {why_ended(answer['status'], seconds)}; make it simpler"
    return answer.get("error")
