"""Lives of an engine, one after another, until the time is over."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, random_checkpoint
from xla_engine.scheduler.policy import POLICIES
from xla_engine.tools.soak import memory
from xla_engine.tools.soak.faults import STEP_TIMEOUT_S, FaultyTokenizer
from xla_engine.tools.soak.life import ENDS, REQUESTS, Life
from xla_engine.tools.soak.report import SoakReport

if TYPE_CHECKING:
    from xla_engine.tools.soak.http_rounds import HttpRounds

ROUNDS = 40  # of a life
EVERY = 3  # one in this many lives uses `AsyncLLM`
HTTP_ROUNDS = 2  # of clients, after each life
WARM_LIVES = 4  # whose memory is not looked at: one of each kind
_BLOCK = 32
_PATIENCE_S = 30.0  # for threads to end
_SCALE = 0.3  # of the weights of a tiny model: logits are far from flat
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"block_size": _BLOCK},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    {"block_size": _BLOCK, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
)


def soak(
    report: SoakReport,
    checkpoint: Checkpoint,
    tokenizer: FaultyTokenizer | None,
    config: EngineConfig,
    *,
    minutes: float | None = None,
    lives: int | None = None,
    rounds: int = ROUNDS,
    requests: int = REQUESTS,
    http: HttpRounds | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Run engines under requests, faults and ends of all kinds, until the time or the lives are over. Yields after
    each life.

    report: its seed and first life say what happens; what did is added.
    config: what the lives do not choose themselves.
    minutes: no round begins later. lives: engines at most. The first problem ends the soak after its round.
    rounds: of each life. requests: of each round. http: clients of a server, who have rounds after each life.
    progress: called after each round with "round".

    Raises ConfigError where no engine can be.
    """
    others, threads = memory.survivors(), memory.threads()
    began = time.monotonic()

    def is_over() -> bool:
        return bool(report.problems) or (minutes is not None and time.monotonic() - began >= 60 * minutes)

    numbers = itertools.count(report.first_life)
    for number in itertools.islice(numbers, lives):
        try:
            life = _begin(checkpoint, tokenizer, config, number, report, requests)
        except ConfigError as error:
            if "speculative_config" not in _KINDS[number % len(_KINDS)]:
                raise
            report.no_speculation = str(error)
            continue
        for step in range(rounds):
            life.run_round(step, last=step == rounds - 1)
            if progress is not None:
                progress("round")
            if life.engine.closed_because is not None or is_over():
                break
        life.finish()
        del life
        report.problems += [
            f"{report.seed}/{number}, after its end: {what}" for what in _remains(others, threads)
        ]
        if number >= report.first_life + WARM_LIVES:
            report.resident.append((report.counts["requests"], memory.resident_bytes()))
        for again in range(HTTP_ROUNDS):
            if http is not None and not report.problems:
                http.run(f"{number}/{again}")
        report.seconds = time.monotonic() - began
        yield
        if is_over():
            break


def _begin(
    checkpoint: Checkpoint,
    tokenizer: FaultyTokenizer | None,
    config: EngineConfig,
    number: int,
    report: SoakReport,
    requests: int,
) -> Life:
    seed = f"{report.seed}/{number}"
    end = ENDS[(number + number // len(_KINDS)) % len(ENDS)]
    draw = random.Random(f"{seed}/config")
    fields: dict[str, Any] = {
        "scheduling_policy": draw.choice(list(POLICIES)),
        "quantum": draw.choice((1, 8)),
        "priority_aging": draw.choice((1, 64)),
        "swap_space": draw.choice((4.0, 4.0, 0.001, 0.0)),
        "max_waiting": draw.choice((None, None, max(8, config.num_slots))),
        "step_timeout_s": STEP_TIMEOUT_S if end == "hang" or draw.random() < 0.5 else None,
        **_KINDS[number % len(_KINDS)],
    }
    longest = -(-config.context_length(checkpoint.config.max_position_embeddings) // _BLOCK) + 1
    if "block_size" in fields:
        fields["num_blocks"] = max(longest + 1, config.num_slots * longest * 2 // 5)

    def make(**more: Any) -> Life:
        options, has_tasks = replace(config, **fields | more), number % EVERY == EVERY - 1
        return Life(
            checkpoint, tokenizer, options, seed, report, end=end, requests=requests, has_tasks=has_tasks
        )

    try:
        return make()
    except ConfigError:
        if not {"block_size", "speculative_config"} <= fields.keys():
            raise
        # Speculation wants the start-up check, which finds too little room in the pool of a few slots.
        return make(num_blocks=config.num_slots * longest + 1)


def _remains(others: Counter[str], threads: int) -> Iterator[str]:
    """What is left of a closed engine, besides `others` and `threads`, which existed before the soak."""
    until = time.monotonic() + _PATIENCE_S
    while memory.threads() > threads and time.monotonic() < until:
        time.sleep(0.01)  # a step that hung was let go, and still has to end
    if found := memory.survivors() - others:
        yield f"these live on: {dict(found)}"
    if (waiting := memory.threads() - threads) > 0:
        yield f"{waiting} threads wait for steps"


def tiny_model(like: Checkpoint, dtype: str) -> Checkpoint:
    """Two small layers with random weights, the same in every process, and the vocabulary, positions and end tokens of
    another model. Steps are so short that the host does most of the work.

    dtype: as in `load_checkpoint`.
    """
    shape = ModelConfig(
        vocab_size=like.config.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=like.config.max_position_embeddings,
    )
    return random_checkpoint(shape, dtype=dtype, seed=1, scale=_SCALE, eos_token_ids=like.eos_token_ids)
