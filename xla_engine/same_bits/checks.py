"""The checks: one request in two situations, and its two answers compared.

Every comparison is exact. A check that had nothing to compare is "not visible", never "same": answers that
were not proven to be generated together say nothing about batches.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

from xla_engine.same_bits.report import (
    LARGE,
    NOT_REPEATABLE,
    SEED_IGNORED,
    UNCLEAR,
    WORST_FIRST,
    Finding,
    Report,
    ReportRow,
    cause_of,
    compare,
    digits,
)
from xla_engine.same_bits.server import HttpTarget
from xla_engine.same_bits.target import (
    TEXT,
    Answer,
    Ask,
    CallableTarget,
    Choice,
    LimitReached,
    Prompt,
    Target,
    TargetError,
)
from xla_engine.utils.comparison import Difference

AMONG = (8, 48)  # other requests beside one
LONG = (8, 48, 256)
LENGTHS = (63, 64, 65, 255, 256, 257)  # of prompts: around the sizes of blocks
IMPROBABLE = -14.0  # nats: answers this unlikely to be drawn twice are not drawn twice by chance (1e-6)
_NEEDED = {  # features of a target, and what it means if one is missing
    "cut": ("cut", "the target does not take max_tokens"),
    "stream": ("stream", "the target does not stream"),
    "seed": ("seed", "the target does not take a seed"),
    "n": ("n", "the target does not take n"),
    "score": ("score", "the target returns no log-probabilities of prompts of token ids"),
}
DRAWN = "drawn"  # why two answers differ, until all comparisons of a kind are known
_NOTHING = Difference(position=None, expected="", found="")


def check(
    target: Target | Callable[..., Sequence[Any]] | str,
    *,
    requests: int = 30,
    seed: int = 0,
    among: Sequence[int] = AMONG,
    save: str | None = None,
    baseline: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compare answers to the same requests alone, repeated, among others, and after cached prefixes.

    target: a server's address, a function (`CallableTarget`), or any `Target`.
    requests: how many are compared alone and among others. seed: chooses prompts. among: numbers of others beside one.
    save: a file for the answers of this run; baseline: such a file of an earlier run, to compare with.
    Raises TargetError if the target cannot be asked, OSError if a file cannot be read or written.
    """
    earlier = None if baseline is None else load_answers(baseline, requests=requests, seed=seed)
    checks = _Checks(_as_target(target), requests, seed, tuple(among), progress or (lambda name: None))
    report = checks.run(earlier)
    if save is not None:
        Path(save).write_text(
            json.dumps({"version": 1, "seed": seed, "requests": requests, "answers": checks.saved})
        )
    return report


def _as_target(target: Target | Callable[..., Sequence[Any]] | str) -> Target:
    if isinstance(target, str):
        return HttpTarget(target)
    return target if isinstance(target, Target) else CallableTarget(target)


class _Checks:
    """One run of all checks."""

    def __init__(
        self,
        target: Target,
        requests: int,
        seed: int,
        among: tuple[int, ...],
        progress: Callable[[str], None],
    ) -> None:
        self._target, self._among, self._progress = target, among, progress
        self._checked_by = f"xla-engine {_version()}, {requests} requests, seed {seed}"
        self._draw = random.Random(seed)
        self._fresh = random.Random()  # prompts that no cache may contain are new in every run
        self._stream = "stream" in target.features
        self._asks = [self._drawn() for _ in range(requests)]
        self._alone: list[Answer] = []
        self._digits = 0
        self._errors: dict[str, int] = {}
        self.report = Report(target={})
        self.saved: list[dict[str, Any]] = []

    def run(self, earlier: list[Choice] | None) -> Report:
        steps = {
            "repeat": self._repeat,
            "cut": self._cut,
            "stream": self._streamed,
            "seed": self._seed,
            "n": self._several,
            "alone": self._run_alone,
            "restart": lambda: self._restart(earlier),
            **{f"co-batch, {size} others": self._co_batch(size) for size in self._among},
            "prefix": self._prefix,
            "score": self._score,
        }
        stopped: str | None = None
        for name, step in steps.items():
            if name == "restart" and earlier is None:
                continue
            self._progress(name)
            row = self._row = ReportRow(name=name)
            if name != "alone":
                self.report.rows.append(row)
            feature, without = _NEEDED.get(name, (None, None))
            if stopped is not None or (feature is not None and feature not in self._target.features):
                row.hidden = stopped or without
                continue
            try:
                step()
            except LimitReached as limit:
                stopped = row.hidden = str(limit)
        self._conclude()
        return self.report

    # Asking and comparing.

    def _ask(self, *, tokens: int = 40, **options: Any) -> Ask:
        options.setdefault("stream", self._stream)
        return Ask(prompt=_draw_prompt(self._draw, tokens, self._target.corpus), **options)

    def _drawn(self) -> Ask:
        return self._ask(max_tokens=self._draw.randrange(16, 33), tokens=self._draw.randrange(20, 100))

    def _one(self, ask: Ask) -> Answer:
        return self._seen(self._target.run([ask])[0])

    def _seen(self, answer: Answer) -> Answer:
        if answer.error is not None:
            self._errors[answer.error] = self._errors.get(answer.error, 0) + 1
        for choice in answer.choices:
            self._digits = max([self._digits, *(digits(each) for each in choice.logprobs or ())])
        return answer

    def _compare(
        self, label: str, ask: Ask, left: Answer, right: Answer, *, begins: bool = False, cause: str = ""
    ) -> Difference[str] | None:
        """Count one comparison of first choices, and what is found; None if they agree or one failed."""
        if left.error is not None or right.error is not None:
            self._row.failed += 1
            return None
        one, two = left.choices[0], right.choices[0]
        self._row.compared += 1
        self._row.with_logprobs += one.logprobs is not None and two.logprobs is not None
        found = compare(one, two, begins=begins)
        if found is not None:
            self._found(label, ask, found, cause)
        return found

    def _found(self, label: str, ask: Ask, difference: Difference[str], cause: str) -> None:
        command = self._target.reproduce(ask)
        self._row.findings.append(Finding(label=label, difference=difference, command=command, cause=cause))

    def _conclude(self) -> None:
        report = self.report
        report.target = self._target.describe() | {"checked by": self._checked_by}
        report.digits, report.errors = self._digits, self._errors
        for row in report.rows:
            row.largest = max((each.difference.delta or 0.0 for each in row.findings), default=0.0)
            # A draw can follow a small change of probabilities, however far its token was from the likeliest one.
            drawn = f"{SEED_IGNORED}: the draw depends on the batch"
            if row.largest > 0 or any(each.cause != DRAWN for each in row.findings):
                drawn = f"{UNCLEAR}: a draw, where other answers changed too"
            for place, each in enumerate(row.findings):
                cause = drawn if each.cause == DRAWN else each.cause or cause_of(each.difference, row.largest)
                row.findings[place] = replace(each, cause=cause)
            row.findings.sort(key=lambda each: WORST_FIRST.index(each.cause.partition(":")[0]))
        if 0 < self._digits <= 5:
            report.notes.append(
                f"log-probabilities are rounded to {self._digits} digits: smaller differences are not visible"
            )

    # The checks.

    def _repeat(self) -> None:
        ask = self._asks[0] if self._asks else self._ask(max_tokens=32)
        answers = [self._one(ask) for _ in range(5)]
        self._save("repeat", ask, answers[0])
        differing = [
            (one, two)
            for one, two in combinations(range(5), 2)
            if self._compare(
                f"runs {one + 1} and {two + 1}", ask, answers[one], answers[two], cause=NOT_REPEATABLE
            )
        ]
        if len(differing) == 4 and all(0 in pair for pair in differing):
            self._row.note = "run 1 differs from runs 2 to 5, which agree: its computation is another one"

    def _cut(self) -> None:
        for number in range(3):
            ask = self._ask(max_tokens=32)
            short = replace(ask, max_tokens=8)
            label = f"prompt {number + 1}, max_tokens 8 and 32"
            self._compare(label, ask, self._one(short), self._one(ask), begins=True)

    def _streamed(self) -> None:
        for number in range(3):
            ask = self._ask(max_tokens=24)
            self._compare(f"prompt {number + 1}", ask, self._one(replace(ask, stream=False)), self._one(ask))

    def _sampled(self, **options: Any) -> Ask:
        return self._ask(max_tokens=24, temperature=1.0, **options)

    def _seed(self) -> None:
        """Equal seeds agree and others do not, as far as chance allows to tell."""
        told = False
        for number in range(3):
            ask = self._sampled(seed=11 + number)
            answers = [self._one(ask), self._one(ask), self._one(replace(ask, seed=1011 + number))]
            label, (one, again, other) = f"prompt {number + 1}", answers
            found = compare_answers(one, again)
            cause = SEED_IGNORED if found is not None and found.position is not None else ""
            self._compare(f"{label}, one seed twice", ask, one, again, cause=cause)
            if found is None and one.choices and other.choices:
                if compare_answers(one, other) is not None:
                    told = True
                elif _chance(one.choices[0]) < IMPROBABLE:
                    self._found(f"{label}, two seeds give one answer", ask, _NOTHING, SEED_IGNORED)
        ask = self._sampled()
        if compare_answers(self._one(ask), self._one(ask)) is not None:
            self._row.note = "without a seed, answers differ"
        if not told and not self._row.findings:
            self._row.hidden = "no two seeds gave different answers, which may be chance"

    def _several(self) -> None:
        ask = self._sampled(seed=7, n=4, stream=False)
        answer = self._one(ask)
        if len(answer.choices) != 4:
            self._row.hidden = f"{len(answer.choices)} choices came back for n 4"
            return
        first = answer.choices[0]
        alike = all(compare(first, each) is None for each in answer.choices[1:])
        if alike and 3 * _chance(first) >= IMPROBABLE:
            self._row.hidden = "four choices are alike, which may be chance"
            return
        self._row.compared += 1
        if alike:
            self._found("n 4: all choices are alike", ask, _NOTHING, SEED_IGNORED)

    def _run_alone(self) -> None:
        """What all checks after it compare with; some requests sample, where a seed has been seen to work."""
        if any(row.name == "seed" and row.verdict == "same" for row in self.report.rows):
            for place in range(2, len(self._asks), 3):
                self._asks[place] = replace(self._asks[place], temperature=0.8, seed=place)
        for place, ask in enumerate(self._asks):
            self._alone.append(self._one(ask))
            self._save(f"request {place}", ask, self._alone[-1])

    def _co_batch(self, size: int) -> Callable[[], None]:
        def run() -> None:
            spread_s = statistics.fmean([each.seconds for each in self._alone] or [0.0]) / 5
            overlaps: list[int] = []
            for time in range(2):
                for begin in range(0, len(self._asks), size + 1):
                    places = range(begin, min(begin + size + 1, len(self._asks)))
                    own = [self._asks[place] for place in places]
                    group = own + [self._drawn() for _ in range(size + 1 - len(own))]
                    group = [replace(each, delay_s=self._draw.random() * spread_s) for each in group]
                    answers = [self._seen(each) for each in self._target.run(group)]
                    overlaps += [each.peers or 0 for each in answers[: len(own)]]
                    for place, answer in zip(places, answers, strict=False):
                        self._judge_in_batch(f"request {place}, time {time + 1}", place, answer)
            self._row.proven = sum(each > 0 for each in overlaps)
            self._row.overlap = (int(statistics.median(overlaps)), max(overlaps)) if overlaps else (0, 0)
            if 2 * self._row.proven < len(overlaps) or not overlaps:
                self._row.hidden = "no overlap was proven: too few requests were generating at the same time"

        return run

    def _judge_in_batch(self, label: str, place: int, answer: Answer) -> None:
        ask, alone = self._asks[place], self._alone[place]
        found = compare_answers(alone, answer)
        cause = ""
        if found is not None:
            for number, other in enumerate(self._alone):
                if compare_answers(alone, other) and _one_begins_the_other(
                    other.choices[0], answer.choices[0]
                ):
                    cause = f"not rounding: this is the answer to request {number}"
            if not cause and ask.temperature and found.position is not None and (found.delta or 0.0) <= LARGE:
                cause = DRAWN
        self._compare(label, ask, alone, answer, cause=cause)

    def _prefix(self) -> None:
        found: list[int | None] = []  # cached tokens, of requests that should have some
        corpus = self._target.corpus
        lengths = LENGTHS if corpus else (64, 256)
        for length in lengths:
            ask = Ask(prompt=_fresh_prompt(self._fresh, length, corpus), max_tokens=8)
            longer = replace(ask, prompt=_lengthened(ask.prompt, 40, self._draw, corpus), max_tokens=1)
            cold, warm = self._one(ask), self._one(ask)
            self._one(longer)
            again = self._one(ask)
            self._compare(f"{length} tokens, cold and warm", ask, cold, warm)
            self._compare(f"{length} tokens, cold and warmed by a longer prompt", ask, cold, again)
            found += [warm.cached_tokens, again.cached_tokens]
        if not any(each is not None for each in found):
            self._row.hidden = (
                "no cached tokens are reported (vLLM reports them with --enable-prompt-tokens-details)"
            )
        elif not any(found):
            self._row.hidden = "no hit in a prefix cache was seen"
        else:
            self._row.note = f"{sum(map(bool, found))} prefix hits seen"

    def _score(self) -> None:
        for number in range(4):
            ask = self._ask(max_tokens=16)
            sampled = self._one(ask)
            first = sampled.choices[0] if sampled.choices else Choice()
            ids = [each for each in first.tokens if isinstance(each, int)]
            if not first.logprobs or len(ids) < len(first.tokens) or isinstance(ask.prompt, str):
                continue
            scoring = replace(ask, prompt=(*ask.prompt, *ids), max_tokens=1, score=True, stream=False)
            scored = self._one(scoring)
            table = (scored.choices[0].prompt_logprobs if scored.choices else None) or ()
            rows = zip(ids, table[-len(ids) :], strict=False)
            found = [each.get(str(token), math.nan) for token, each in rows]
            right = replace(scored, choices=(replace(first, logprobs=tuple(found)),)) if found else scored
            self._compare(f"prompt {number + 1}, sampled and scored", scoring, sampled, right)

    # Restarts.

    def _save(self, name: str, ask: Ask, answer: Answer) -> None:
        self.saved += [{"name": name, "prompt": ask.prompt, **asdict(each)} for each in answer.choices[:1]]

    def _restart(self, earlier: list[Choice] | None) -> None:
        assert earlier is not None
        now = [Answer(choices=(_loaded(each),)) for each in self.saved]
        if len(now) != len(earlier):
            self._row.hidden = f"the baseline has {len(earlier)} answers, this run has {len(now)}"
            return
        asks = [self._asks[0], *self._asks]
        for ask, record, before, after in zip(asks, self.saved, earlier, now, strict=False):
            self._compare(record["name"], ask, Answer(choices=(before,)), after)


def _draw_prompt(draw: random.Random, tokens: int, corpus: tuple[int, ...]) -> Prompt:
    """A piece of about this many tokens; exactly as many if there are ids."""
    if corpus:
        begin = draw.randrange(len(corpus))
        return tuple(corpus[(begin + place) % len(corpus)] for place in range(tokens))
    size = 3 * tokens
    begin = draw.randrange(len(TEXT) - size)
    return TEXT[begin : begin + size]


def _fresh_prompt(draw: random.Random, tokens: int, corpus: tuple[int, ...]) -> Prompt:
    """The same with a new beginning, so that no cache contains it."""
    begin: Any = f"{draw.getrandbits(64):016x} "
    length = 8
    if corpus:
        length = 12
        begin = tuple(draw.choice(corpus) for _ in range(length))
    return begin + _draw_prompt(draw, tokens - length, corpus)


def _lengthened(prompt: Any, tokens: int, draw: random.Random, corpus: tuple[int, ...]) -> Prompt:
    """The prompt and about as many tokens more."""
    return prompt + _draw_prompt(draw, tokens, corpus)


def _one_begins_the_other(one: Choice, two: Choice) -> bool:
    short, long = sorted((one, two), key=lambda each: (len(each.tokens), len(each.text)))
    return max(len(short.tokens), len(short.text)) > 8 and compare(short, long, begins=True) is None


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("xla-engine")
    return "(not installed)"


def compare_answers(left: Answer, right: Answer) -> Difference[str] | None:
    """The first difference of their first choices; None if one has none."""
    return compare(left.choices[0], right.choices[0]) if left.choices and right.choices else None


def _chance(choice: Choice) -> float:
    """Log of the probability that it is drawn; 0 if that is not visible."""
    return sum(choice.logprobs) if choice.logprobs else 0.0


def load_answers(path: str, *, requests: int, seed: int) -> list[Choice]:
    """The answers that an earlier run with the same requests saved. Raises TargetError for another file."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if (record["version"], record["seed"], record["requests"]) != (1, seed, requests):
            raise TargetError(
                f"{path} was saved with seed {record['seed']} and {record['requests']} requests; use the same"
            )
        return [_loaded(each) for each in record["answers"]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, TargetError):
            raise
        raise TargetError(f"{path} is not a file that --save (save=) wrote") from None


def _loaded(record: dict[str, Any]) -> Choice:
    lists = {name: record[name] and tuple(record[name]) for name in ("logprobs", "gaps")}
    return Choice(text=str(record["text"]), tokens=tuple(record["tokens"]), **lists)
